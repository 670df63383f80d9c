"""Asks of a deployed function on their way through a worker: all answers of one turn of the loop in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from msgspec import Struct

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.executors.answering import without_secrets
from batchmill.ports import CallEngine, Engine
from batchmill.types import Ask
from batchmill.wire.messages import LIVE_ASKS_BYTES, MESSAGE_BYTES_MAX, Answer, Answers
from batchmill.wire.raised import Raised

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
        self._ready: list[Answer] = []
        self._open: set[int] = set()
        self._ended = asyncio.Event()  # an Ask has its answer, or nobody waits for it

    def begin(self, asks: Iterable[Ask]) -> None:
        engine, opened = self._engine, self._open
        for ask in asks:
            opened.add(ask.id)
            if engine is not None:
                engine.ask(ask, self)
            else:
                text = "this model is no deployed function: it takes no such calls"
                self.put(Answer(ask.id, raised=Raised.of(InvalidInput(text, code="not_a_function"))))

    def abandon(self, id_: int) -> None:
        if id_ in self._open and self._engine is not None:
            self._open.discard(id_)
            self._engine.abandon(id_)
            self._ended.set()

    def put(self, answer: Answer) -> None:
        """See `ports.Answering`."""
        if answer.id not in self._open:
            return
        self._open.discard(answer.id)
        if answer.raised is not None:
            answer = Answer(answer.id, answer.body, answer.head, without_secrets(answer.raised))
        if not self._ready:
            asyncio.get_running_loop().call_soon(self.flush)
        self._ready.append(answer)

    def flush(self) -> None:
        """Send the answers that are there, with what has been counted."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        stats = None if self._engine is None else self._engine.taken_stats()
        some: list[Answer] = []
        size = 0
        for answer in ready:
            bytes_ = len(answer.body) + len(answer.head)
            if bytes_ > REPLY_BYTES_MAX:
                answer, bytes_ = _too_large(answer.id, bytes_), 0
            if some and size + bytes_ > LIVE_ASKS_BYTES:
                self._send(Answers(some))
                some, size = [], 0
            some.append(answer)
            size += bytes_
        self._send(Answers(some, stats))
        self._ended.set()

    def beat(self) -> None:
        """Tell what has been counted since; rows of jobs come without answers."""
        stats = None if self._engine is None else self._engine.taken_stats()
        if stats is not None:
            self._send(Answers([], stats))

    async def finish(self) -> None:
        """Return when every Ask that was begun has its answer."""
        while self._open:
            self._ended.clear()
            await self._ended.wait()
        self.flush()
        self.beat()


def _too_large(id_: int, size: int) -> Answer:
    text = f"the function returned {size:,} bytes for one call, and {REPLY_BYTES_MAX:,} can be sent"
    return Answer(id_, raised=Raised.of(ModelFailed(text, code="bad_return")))
