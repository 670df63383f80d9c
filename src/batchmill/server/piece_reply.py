"""An answer on its way to somebody who may leave before it is there: work that ends with its client, and replies whose
length nobody knows yet, handed on piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.errors import BatchmillError
from batchmill.server.operations import Call

EVENTS = "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # so that no proxy waits for a whole reply
ANSWER_BYTES_MAX = 256 * 1024 * 1024  # of one that is no stream: it is in memory whole
T = TypeVar("T")


async def unless_gone(call: Call, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None when the client left before: the work has then been cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(call.until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end(working, leaving)


async def whole_answer(pieces: AsyncGenerator[bytes]) -> bytes:
    """An answer that is no stream, in one piece. Raises: BatchmillError for one that no memory should hold."""
    whole = bytearray()
    try:
        async for piece in pieces:
            whole += piece
            if len(whole) > ANSWER_BYTES_MAX:
                raise BatchmillError(f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes", code="answer_too_large")
    finally:
        await pieces.aclose()
    return bytes(whole)


class PieceReply(Response):
    """`pieces` is closed in any case, also where the client left before the first one."""

    def __init__(self, pieces: AsyncGenerator[bytes], *, media: str, status: int = 200) -> None:
        super().__init__(None, status, UNBUFFERED)
        del self.headers["content-length"]
        self.headers["content-type"] = media
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
        except BatchmillError as error:
            await send({"type": "http.response.body", "body": self.late(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def late(self, error: BatchmillError) -> bytes:
        """What is said of an error for which no status can be sent any more. Raising it breaks the connection off."""
        raise error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
