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
from batchmill.ports import CallEngine, Engine
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


class _Answer(Struct, eq=False):
    task: asyncio.Task[None]
    room: asyncio.Event
    ahead: int = 0  # bytes sent that were not read yet


class AnswerSink:
    """
    Args:
        engine: answers; it has started.
        send: queues a message to the owner.
        drained: returns once the owner's socket has taken what was queued.
    """

    def __init__(self, engine: Engine, send: Callable[[Struct], None], drained: Callable[[], object]) -> None:
        self._engine, self._send, self._drained = engine, send, drained
        self._answers: dict[int, _Answer] = {}

    def begin(self, message: AnswerLive) -> None:
        task = asyncio.create_task(self._answer(message))
        self._answers[message.id] = _Answer(task, asyncio.Event())
        task.add_done_callback(lambda _: self._answers.pop(message.id, None))

    def abandon(self, id_: int) -> None:
        """Abandon a request: its caller no longer waits."""
        answer = self._answers.get(id_)
        if answer is not None:
            answer.task.cancel()

    def taken(self, id_: int, size: int) -> None:
        """Note that the owner has passed on this many bytes of a reply."""
        answer = self._answers.get(id_)
        if answer is not None:
            answer.ahead -= size
            answer.room.set()

    async def finish(self) -> None:
        """Wait until every started reply has ended."""
        while tasks := [answer.task for answer in self._answers.values()]:
            await asyncio.wait(tasks)

    def end(self) -> None:
        """Stop replying."""
        for answer in list(self._answers.values()):
            answer.task.cancel()

    async def _answer(self, message: AnswerLive) -> None:
        raised = None
        try:
            async with contextlib.aclosing(self._engine.predict(message.request)) as pieces:
                await self._hand_on(message.id, pieces)
        except BatchmillError as error:
            raised = Raised.of(error)
        except ConnectionError:
            return  # the owner has gone: the worker is about to end
        except Exception as error:  # an engine's own bug: who waits must hear of it
            redaction.print_exception(error)
            text = f"the engine failed: {type(error).__name__}: {error}"
            raised = Raised.of(BatchmillError(text, code="engine_bug"))
        self._send(Answered(message.id, raised and without_secrets(raised)))

    async def _hand_on(self, id_: int, pieces: AsyncIterator[LiveHead | bytes]) -> None:
        """Send a reply without the secrets that a service or a function may have repeated."""
        scrubber = Scrubber(redaction.known())
        async for piece in pieces:
            if isinstance(piece, LiveHead):
                self._send(Head(id_, LiveHead(piece.status, redaction.mask_known(piece.content_type))))
            else:
                await self._send_piece(id_, scrubber.feed(piece))
        await self._send_piece(id_, scrubber.rest())

    async def _send_piece(self, id_: int, piece: bytes) -> None:
        answer = self._answers[id_]
        for at in range(0, len(piece), CHUNK_BYTES):
            while answer.ahead >= LIVE_AHEAD_BYTES:
                answer.room.clear()
                await answer.room.wait()
            data = piece[at : at + CHUNK_BYTES]
            answer.ahead += len(data)
            self._send(ReplyChunk(id_, data))
            await self._drained()


def without_secrets(raised: Raised) -> Raised:
    """An error without secrets."""
    message = redaction.mask_known(raised.message)
    return raised if message == raised.message else msgspec.structs.replace(raised, message=message)


REPLY_BYTES_MAX = MESSAGE_BYTES_MAX - 64 * 1024  # so that the message around it fits too


class Calling:
    """A `ports.Answering` that tells the owner.

    Args:
        engine: has started. One that takes no Asks refuses them.
        send: queues a message to the owner.
    """

    def __init__(self, engine: Engine, send: Callable[[Struct], None]) -> None:
        self._engine = cast(CallEngine, engine) if hasattr(engine, "ask") else None
        self._source = type(engine).__name__
        self._send = send
        self._ready: list[FunctionReply] = []
        self._open: set[int] = set()
        self._ended = asyncio.Event()  # a call has its reply, or was abandoned

    def begin(self, asks: Iterable[FunctionRequest]) -> None:
        engine, opened = self._engine, self._open
        for ask in asks:
            opened.add(ask.id)
            if engine is not None:
                engine.ask(ask, self)
            else:
                text = "this model is not a deployed function: it takes no such calls"
                self.put(FunctionReply(ask.id, raised=Raised.of(InvalidInput(text, code="not_a_function"))))

    def abandon(self, id_: int) -> None:
        if id_ in self._open and self._engine is not None:
            self._open.discard(id_)
            self._engine.abandon(id_)
            self._ended.set()

    def put(self, answer: FunctionReply) -> None:
        """See `ports.Answering`."""
        if answer.id not in self._open:
            return
        self._open.discard(answer.id)
        if answer.raised is not None:
            answer = FunctionReply(answer.id, answer.body, answer.head, without_secrets(answer.raised))
        if not self._ready:
            asyncio.get_running_loop().call_soon(self.flush)
        self._ready.append(answer)

    def flush(self) -> None:
        """Send the available replies and counters."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        stats = None if self._engine is None else self._engine.take_stats()
        some: list[FunctionReply] = []
        size = 0
        for answer in ready:
            bytes_ = len(answer.body) + len(answer.head)
            if bytes_ > REPLY_BYTES_MAX:
                answer, bytes_ = _too_large(answer.id, bytes_), 0
            if some and size + bytes_ > LIVE_REQUESTS_BYTES:
                self._send(Answers(some))
                some, size = [], 0
            some.append(answer)
            size += bytes_
        self._send(Answers(some, stats))
        self._ended.set()

    def beat(self) -> None:
        """Send the counters of rows of jobs, which have no replies."""
        stats = None if self._engine is None else self._engine.take_stats()
        if stats is not None:
            self._send(Answers([], stats))

    async def finish(self) -> None:
        """Return when every Ask that was begun has its answer."""
        while self._open:
            self._ended.clear()
            await self._ended.wait()
        self.flush()
        self.beat()


def _too_large(id_: int, size: int) -> FunctionReply:
    text = f"the function returned {size:,} bytes for one call, and {REPLY_BYTES_MAX:,} can be sent"
    return FunctionReply(id_, raised=Raised.of(ModelFailed(text, code="bad_return")))
