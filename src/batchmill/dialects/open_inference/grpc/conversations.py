"""A stream of calls: many requests on their way at once, and of a function that yields many answers to one.

Functions with one answer are answered in the order of their requests, the others as their answers come.
Source: Triton's gRPC streaming and its decoupled responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from batchmill.dialects.open_inference.grpc.bodies import (
    STREAMS_LAST,
    WANTS_LAST,
    InferResponse,
    body_of,
    is_raw,
    response_of,
    varint,
)
from batchmill.dialects.open_inference.grpc.messages import message
from batchmill.errors import BatchmillError
from batchmill.services.functions.calls import FunctionCalls, Target
from batchmill.services.functions.paths import locate
from batchmill.types import Caller

AHEAD_MAX = 64  # requests of one stream that are read and not yet answered
INFER_RESPONSE = b"\x12"  # of ModelStreamInferResponse: field 2, its length first
EVENT_END, DATA = b"\n\n", b"data: "
_Streamed = message("ModelStreamInferResponse")

Write = Callable[[bytes], Awaitable[None]]


class Conversation:
    """One stream of one caller. `spend` counts a request; `told` is an error's message, fit for the client."""

    def __init__(
        self,
        functions: FunctionCalls,
        caller: Caller,
        write: Write,
        *,
        form: str,
        bytes_max: int,
        spend: Callable[[Caller], None],
        told: Callable[[BatchmillError], str],
    ) -> None:
        self._functions, self._caller, self._write = functions, caller, write
        self._form, self._bytes_max, self._spend, self._told = form, bytes_max, spend, told
        self._writing = asyncio.Lock()

    async def hold(self, requests: AsyncIterator[tuple[Any, Callable[[], None]]]) -> None:
        """Returns when the client has ended its side and everything is answered. Each request comes with what is called
        once it is.

        Raises: InvalidInput for what is no request.
        """
        try:
            async with asyncio.TaskGroup() as group:
                await self._read(requests, group)
        except BaseExceptionGroup as failed:  # it is told as what it is
            raise failed.exceptions[0] from None

    async def _read(self, requests: AsyncIterator[tuple[Any, Callable[[], None]]], group: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(AHEAD_MAX)
        before: asyncio.Task[None] | None = None
        async for request, done in requests:
            await room.acquire()
            target, refused = self._find(request)
            if target is not None and target.interface.streams:
                task = group.create_task(self._many(request, target))
            else:
                task = before = group.create_task(self._one(request, target, refused, before))
            task.add_done_callback(partial(_over, room, done))

    def _find(self, request: Any) -> tuple[Target | None, BatchmillError | None]:
        try:
            self._spend(self._caller)
            return locate(self._functions, self._caller, request.model_name, request.model_version or None), None
        except BatchmillError as error:
            return None, error

    async def _one(
        self, request: Any, target: Target | None, refused: BatchmillError | None, before: asyncio.Task[None] | None
    ) -> None:
        """One answer, sent once that of the request before it has been."""
        if target is None:
            assert refused is not None, "a request has a target, or was refused"
            written = self._error(request, refused)
        else:
            written = await self._answered(request, target)
        if before is not None:
            await asyncio.wait({before})
        await self._send(written)

    async def _answered(self, request: Any, target: Target) -> bytes:
        try:
            body, head = body_of(request, self._bytes_max)
            answer = await self._functions.ask(self._caller, target, self._form, body, head=head)
            return _streamed(response_of(answer.body, answer.head, raw=is_raw(request), is_last=True))
        except BatchmillError as error:
            return self._error(request, error)

    async def _many(self, request: Any, target: Target) -> None:
        """An answer for each value that the function yields; behind them an empty one, where the client wants it."""
        try:
            body, head = body_of(request, self._bytes_max)
            _, pieces = await self._functions.stream(self._caller, target, self._form, body, head)
            try:
                async for event in _events(pieces):
                    await self._send(_streamed(response_of(event, b"", raw=is_raw(request), is_last=False)))
            finally:
                await pieces.aclose()
        except BatchmillError as error:
            await self._send(self._error(request, error))
            return
        if request.parameters[WANTS_LAST].bool_param if WANTS_LAST in request.parameters else False:
            last = InferResponse(model_name=target.name, model_version=target.version, id=request.id)
            last.parameters[STREAMS_LAST].bool_param = True
            await self._send(_streamed(last.SerializeToString()))

    def _error(self, request: Any, error: BatchmillError) -> bytes:
        """An error ends its own request; the stream goes on."""
        reply = _Streamed(error_message=self._told(error) or error.code)
        reply.infer_response.id = request.id
        reply.infer_response.model_name = request.model_name
        reply.infer_response.parameters[STREAMS_LAST].bool_param = True
        return reply.SerializeToString()

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            await self._write(data)


def _over(room: asyncio.Semaphore, done: Callable[[], None], _: asyncio.Task[None]) -> None:
    room.release()
    done()


def _streamed(response: bytes) -> bytes:
    return b"".join([INFER_RESPONSE, varint(len(response)), response])


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(EVENT_END)
        for event in whole:
            yield event.removeprefix(DATA)
