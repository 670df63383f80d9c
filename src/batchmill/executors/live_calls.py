"""Live requests in a worker: each in its own task, replies sent together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.models import redaction
from batchmill.models.redaction import Scrubber
from batchmill.ports.engines import CallEngine, Engine
from batchmill.types import FunctionRequest, LiveHead
from batchmill.wire.error_statuses import Raised
from batchmill.wire.messages import (
    LIVE_AHEAD_BYTES,
    LIVE_REQUESTS_BYTES,
    MESSAGE_BYTES_MAX,
    Answered,
    AnswerLive,
    Answers,
    FunctionReply,
    Head,
    ReplyChunk,
)

CHUNK_BYTES = 256 * 1024  # the longest piece of a body in one message


class _Reply(Struct, eq=False):
    task: asyncio.Task[None]
    has_credit: asyncio.Event
    ahead: int = 0  # bytes that were sent and not yet acknowledged


class AnswerSink:
    """
    Args:
        engine: a started engine.
        send: queues a message to the owner.
        drained: returns once the owner's socket has accepted the queued data.
    """

    def __init__(self, engine: Engine, send: Callable[[Struct], None], drained: Callable[[], object]) -> None:
        self._engine, self._send, self._drained = engine, send, drained
        self._replies: dict[int, _Reply] = {}

    def begin(self, message: AnswerLive) -> None:
        task = asyncio.create_task(self._answer(message))
        self._replies[message.id] = _Reply(task, asyncio.Event())
        task.add_done_callback(lambda _: self._replies.pop(message.id, None))

    def abandon(self, id_: int) -> None:
        """Abandon a request: its caller no longer waits."""
        reply = self._replies.get(id_)
        if reply is not None:
            reply.task.cancel()

    def add_credit(self, id_: int, size: int) -> None:
        """Note that the owner has passed on this many bytes of a reply."""
        reply = self._replies.get(id_)
        if reply is not None:
            reply.ahead -= size
            reply.has_credit.set()

    async def finish(self) -> None:
        """Wait until every started reply has ended."""
        while tasks := [reply.task for reply in self._replies.values()]:
            await asyncio.wait(tasks)

    def end(self) -> None:
        """Stop replying."""
        for reply in list(self._replies.values()):
            reply.task.cancel()

    async def _answer(self, message: AnswerLive) -> None:
        raised = None
        try:
            async with contextlib.aclosing(self._engine.predict(message.request)) as pieces:
                await self._send_pieces(message.id, pieces)
        except BatchmillError as error:
            raised = Raised.of(error)
        except ConnectionError:
            return  # the owner has ended: so will this worker
        except Exception as error:  # a bug of the engine: the caller must get an error
            redaction.print_exception(error)
            text = f"the engine failed: {type(error).__name__}: {error}"
            raised = Raised.of(BatchmillError(text, code="engine_bug"))
        self._send(Answered(message.id, raised and without_secrets(raised)))

    async def _send_pieces(self, id_: int, pieces: AsyncIterator[LiveHead | bytes]) -> None:
        """Send a reply with known secrets masked: a service or a function may repeat them."""
        scrubber = Scrubber(redaction.known())
        async for piece in pieces:
            if isinstance(piece, LiveHead):
                self._send(Head(id_, LiveHead(piece.status, redaction.mask_known(piece.content_type))))
            else:
                await self._send_piece(id_, scrubber.feed(piece))
        await self._send_piece(id_, scrubber.rest())

    async def _send_piece(self, id_: int, piece: bytes) -> None:
        reply = self._replies[id_]
        for at in range(0, len(piece), CHUNK_BYTES):
            while reply.ahead >= LIVE_AHEAD_BYTES:
                reply.has_credit.clear()
                await reply.has_credit.wait()
            data = piece[at : at + CHUNK_BYTES]
            reply.ahead += len(data)
            self._send(ReplyChunk(id_, data))
            await self._drained()


def without_secrets(raised: Raised) -> Raised:
    """An error without secrets."""
    message = redaction.mask_known(raised.message)
    return raised if message == raised.message else msgspec.structs.replace(raised, message=message)


REPLY_BYTES_MAX = MESSAGE_BYTES_MAX - 64 * 1024  # leaves space for the rest of the message


class Calling:
    """A `ports.engines.AnswerSink` that sends replies to the owner.

    Args:
        engine: a started engine. Calls of an engine without `call` are refused.
        send: queues a message to the owner.
    """

    def __init__(self, engine: Engine, send: Callable[[Struct], None]) -> None:
        self._engine = cast(CallEngine, engine) if hasattr(engine, "call") else None
        self._source = type(engine).__name__
        self._send = send
        self._ready: list[FunctionReply] = []
        self._open: set[int] = set()
        self._ended = asyncio.Event()  # a call has its reply, or was abandoned

    def begin(self, requests: Iterable[FunctionRequest]) -> None:
        engine, opened = self._engine, self._open
        for request in requests:
            opened.add(request.id)
            if engine is not None:
                engine.call(request, self)
            else:
                text = "this model is not a deployed function: it cannot be called as one"
                self.put(FunctionReply(request.id, raised=Raised.of(InvalidInput(text, code="not_a_function"))))

    def abandon(self, id_: int) -> None:
        if id_ in self._open and self._engine is not None:
            self._open.discard(id_)
            self._engine.abandon(id_)
            self._ended.set()

    def put(self, reply: FunctionReply) -> None:
        """See `ports.engines.AnswerSink`."""
        if reply.id not in self._open:
            return
        self._open.discard(reply.id)
        if reply.raised is not None:
            reply = FunctionReply(reply.id, raised=without_secrets(reply.raised))
        self._ready.append(reply)
        if len(self._ready) > 1:
            return
        if self._open:
            asyncio.get_running_loop().call_soon(self.flush)  # with the replies of the same turn
        else:
            self.flush()

    def flush(self) -> None:
        """Send the available replies and counters."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        stats = None if self._engine is None else self._engine.take_stats()
        batch: list[FunctionReply] = []
        size = 0
        for reply in ready:
            size_bytes = reply.size_bytes
            if size_bytes > REPLY_BYTES_MAX:
                reply, size_bytes = _too_large(reply.id, size_bytes), 0
            if batch and size + size_bytes > LIVE_REQUESTS_BYTES:
                self._send(Answers(batch))
                batch, size = [], 0
            batch.append(reply)
            size += size_bytes
        self._send(Answers(batch, stats))
        self._ended.set()

    def beat(self) -> None:
        """Send the counters of rows of jobs, which have no replies."""
        stats = None if self._engine is None else self._engine.take_stats()
        if stats is not None:
            self._send(Answers([], stats))

    async def finish(self) -> None:
        """Return when every started call has its reply."""
        while self._open:
            self._ended.clear()
            await self._ended.wait()
        self.flush()
        self.beat()


def _too_large(id_: int, size: int) -> FunctionReply:
    text = f"the function returned {size:,} bytes for one call, and {REPLY_BYTES_MAX:,} can be sent"
    return FunctionReply(id_, raised=Raised.of(ModelFailed(text, code="bad_return")))
