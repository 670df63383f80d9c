"""What the stories with the openai package share: models that are functions, rows for them, and waiting for an end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from openai import OpenAI
from openai.types import Batch

TIMEOUT_S = 60.0
LOOK_S = 0.02
ENDED = ("completed", "failed", "expired", "cancelled")
T = TypeVar("T")

CODE = '''
import asyncio
from pathlib import Path

HERE = Path(__file__).parent


def chat(messages, model=None):
    """The last message in capitals."""
    text = messages[-1]["content"]
    if text == "fail":
        raise ValueError("told to fail")
    usage = {"prompt_tokens": len(text), "completion_tokens": 1, "total_tokens": len(text) + 1}
    message = {"role": "assistant", "content": text.upper()}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "usage": usage,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }


async def gated(messages, model=None):
    """Answers only once the file named by the message is there."""
    while not (HERE / messages[-1]["content"]).exists():
        await asyncio.sleep(0.01)
    return chat(messages, model)


async def words(messages, stream=False):
    """One event a word; remembers that it was ended early."""
    try:
        for word in messages[-1]["content"].split():
            if word == "wait":
                await asyncio.sleep(3600)
            if word == "fail":
                raise ValueError("told to fail")
            yield {
                "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "words",
                "choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}],
            }
    finally:
        (HERE / "words-ended").touch()


def embed(input, model=None):
    texts = [input] if isinstance(input, str) else input
    data = [{"object": "embedding", "index": i, "embedding": [len(t) / 3, -0.1, 1e-30]} for i, t in enumerate(texts)]
    return {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}


def complete(prompt, model=None):
    choice = {"index": 0, "text": prompt[::-1], "finish_reason": "stop", "logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model, "choices": [choice]}


def respond(input, model=None):
    part = {"type": "output_text", "text": input.upper(), "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": "completed",
        "output": [message], "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }


def rerank(query, documents):
    scores = sorted(((doc.count(query), i) for i, doc in enumerate(documents)), reverse=True)
    return {"results": [{"index": i, "relevance_score": float(n)} for n, i in scores]}


def classify(text):
    return {"label": "long" if len(text) > 5 else "short"}
'''
BROKEN = (
    'print("loading the weights")\nraise RuntimeError("no such weights: w.bin")\n\n\ndef predict(x):\n    return x\n'
)
FUNCTIONS = ("chat", "gated", "words", "embed", "complete", "respond", "rerank", "classify")


def write_project(folder: Path, more: str = "") -> Path:
    """The functions and the configuration of a server; the configuration's path."""
    (folder / "app.py").write_text(CODE)
    (folder / "broken.py").write_text(BROKEN)
    tables = [f'[models.{name}]\nengine = "function"\nsource = "app.py:{name}"\n' for name in FUNCTIONS]
    tables.append('[models."org/named"]\nengine = "function"\nsource = "app.py:chat"\n')
    tables.append('[models.broken]\nengine = "function"\nsource = "broken.py:predict"\n')
    config = folder / "batchmill.toml"
    config.write_text("\n".join([*tables, more]))
    return config


def row(custom_id: str, text: str, model: str = "chat", url: str = "/v1/chat/completions") -> dict:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def submit(client: OpenAI, rows: list[dict] | bytes, **fields) -> Batch:
    """Upload rows and make a batch of them."""
    data = rows if isinstance(rows, bytes) else lines(rows)
    file = client.files.create(file=("rows.jsonl", data), purpose="batch")
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **body)


def ended(client: OpenAI, batch: Batch, within_s: float = TIMEOUT_S) -> Batch:
    """The batch once it has ended."""
    return until(lambda: client.batches.retrieve(batch.id), lambda found: found.status in ENDED, within_s)


def until(look: Callable[[], T], is_so: Callable[[T], bool] = bool, within_s: float = TIMEOUT_S) -> T:
    """What `look` sees once it is so."""
    deadline = time.monotonic() + within_s
    while not is_so(found := look()):
        assert time.monotonic() < deadline, f"after {within_s:.0f} s still {found!r}"
        time.sleep(LOOK_S)
    return found


def result_lines(client: OpenAI, file_id: str | None) -> list[dict]:
    """The lines of a result file, in order."""
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def texts(results: list[dict]) -> dict[str, str]:
    """custom_id -> the text that was answered."""
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in results}
