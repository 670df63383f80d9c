"""An answer on its way to somebody who waits for it, and who may leave before it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.dialects.openai.errors import envelope
from batchmill.errors import BatchmillError
from batchmill.server.operations import Call
from batchmill.types import LiveHead
from batchmill.wire.json_bytes import encode

EVENTS = "text/event-stream"
T = TypeVar("T")


async def unless_gone(call: Call, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None when the client left before: the work has then been cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(call.until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end(working, leaving)


class EventReply(Response):
    """Server-sent events, handed on piece by piece as they come."""

    def __init__(self, head: LiveHead, pieces: AsyncGenerator[bytes]) -> None:
        super().__init__(None, head.status, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers["content-type"] = head.content_type
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, leaving = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _end(writing, leaving)
            await self._pieces.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BatchmillError as error:  # too late for a status: the openai package raises what such an event says
            event = b"data: " + encode(envelope(error)) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
