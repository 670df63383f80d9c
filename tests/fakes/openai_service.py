"""A small OpenAI-compatible service in this process, whose faults are scripted by the text of a request."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

RESET = "reset"  # the connection is aborted without a byte
HANG = "hang"  # no byte ever comes
CUT = "cut"  # the connection ends before the promised length
STALL = "stall"  # the reply begins and never goes on


@dataclass(frozen=True)
class Answer:
    """What the service does with one call instead of answering it."""

    status: int = 200
    body: Any = None  # bytes go out as they are, all else as JSON
    headers: dict[str, str] = field(default_factory=dict)
    act: str = ""


@dataclass(frozen=True)
class Received:
    """One call as it came in."""

    path: str
    text: str
    headers: dict[str, str]
    data: bytes


def refusal(status: int, code: str | None = None, message: str = "refused", **headers: str) -> Answer:
    """An error in OpenAI's envelope. Header names are written with `_` for `-`."""
    body = {"error": {"message": message, "type": "some_error", "param": None, "code": code}}
    return Answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


class OpenAIService:
    """Use it as an async context manager. `script[text]` is used up call by call; after it the service answers.

    With `stream` the words of a text come back one by one, and one that begins with `trickles` never ends; `left`
    counts the streams whose caller went. `held` texts wait until `release` is set. `every` replaces the answer to all
    calls that no script covers.
    """

    def __init__(self) -> None:
        self.script: dict[str, list[Answer]] = {}
        self.every: Answer | None = None
        self.held: set[str] = set()
        self.release = asyncio.Event()
        self.calls: list[Received] = []
        self.left = 0
        self.waiting = 0
        self.most_waiting = 0
        self._closing = asyncio.Event()

    async def __aenter__(self) -> OpenAIService:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self.release.set()
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def count(self) -> Counter[str]:
        """Calls by text."""
        return Counter(call.text for call in self.calls)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data)
        text = text_of(body)
        self.calls.append(Received(request.path_qs, text, dict(request.headers), data))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            if text in self.held:
                await self.release.wait()
            scripted = self.script.get(text)
            answer = scripted.pop(0) if scripted else self.every
            if answer is None and body.get("stream"):
                return await self._stream(request, text)
            return await self._act(request, answer or reply_to(body, text))
        finally:
            self.waiting -= 1

    async def _act(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        if answer.act == RESET:
            assert request.transport is not None
            request.transport.abort()
        if answer.act == HANG:
            await self._closing.wait()
        if answer.act in (CUT, STALL):
            return await self._half(request, answer, data)
        headers = {"Content-Type": "application/json", **answer.headers}
        return web.Response(status=answer.status, body=data, headers=headers)

    async def _stream(self, request: web.Request, text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = text.split()
        try:
            while words and not self._closing.is_set():
                chunk = {"choices": [{"index": 0, "delta": {"content": words[0]}}]}
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                if text.startswith("trickles"):
                    await asyncio.sleep(0.01)
                else:
                    words.pop(0)
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _half(self, request: web.Request, answer: Answer, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        if answer.act == STALL:
            await self._closing.wait()
        assert request.transport is not None
        request.transport.close()
        return response


def text_of(body: dict[str, Any]) -> str:
    """The text that names a request: its last message, prompt or input."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt") or body.get("input") or "")


def reply_to(body: dict[str, Any], text: str) -> Answer:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    message = {"role": "assistant", "content": f"echo {text}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    reply = {"id": "c-1", "object": "chat.completion", "model": body.get("model"), "choices": [choice], "usage": usage}
    return Answer(200, reply, {"x-request-id": f"id-{text[:20]}"})
