"""Answers in pieces: a generator in the process, asked for one event more when one has been handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from batchmill.engines.function_process.live import EXACT
from batchmill.engines.function_process.process import Process
from batchmill.engines.function_process.work import CRASHED, Blame, Work
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.function_side.frames import pack
from batchmill.models.function_socket import Buffer
from batchmill.types import Ask, LiveHead
from batchmill.wire.call_errors import failure
from batchmill.wire.call_forms import ARGUMENTS, CallForm
from batchmill.wire.calls import Asked, CallError

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
AHEAD = 4  # events asked for that nobody has taken yet

Piece = tuple[bytes, list[Buffer]] | BatchmillError | None  # None: there are no more


class Stream(Work):
    """One stream: its pieces as they come."""

    __slots__ = ("_has_begun", "_process", "_wanted", "pieces")
    holds_up = False

    def __init__(self, ask: Ask, asked: Asked, process: Process) -> None:
        super().__init__(ask.id, asked, is_exact=ask.form in EXACT)
        self.origin = ask.project, ask.request
        self._process = process
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._wanted = AHEAD
        self._has_begun = False

    def frame(self) -> list[Buffer]:
        asked = self.asked
        meta = {"kind": "open", "id": self.id, "layout": asked.layout, "exact": self.is_exact, "of": self.origin}
        return pack(meta, [asked.calls, *asked.buffers]) + self._next() * self._wanted

    def _next(self) -> list[Buffer]:
        return pack({"kind": "next", "id": self.id})

    def more(self) -> None:
        """One event has been taken."""
        self._wanted += 1
        if self.is_sent and self._process.child is not None:
            self._process.child.write(self._next())

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        self._has_begun = True
        self._wanted -= 1
        if meta.get("error") is not None:
            error = CallError(*meta["error"])
            if error.trace:
                self.note(self._process.calls, error.trace)
            self.pieces.put_nowait(failure(error))
            return True
        if buffers:
            self.pieces.put_nowait((bytes(buffers[0]), buffers[1:]))
        if meta["ended"]:
            self.pieces.put_nowait(None)
        return bool(meta["ended"])

    def again(self) -> Work | None:
        if not self._has_begun:
            return self
        self.fail(ModelFailed("the function's process was replaced in the midst of this stream", code=CRASHED))
        return None

    def blame(self, blame: Blame) -> tuple[Work | None, list[Work]]:
        self.fail(blame.fault.error())
        return None, []

    def fail(self, error: BatchmillError) -> None:
        self.pieces.put_nowait(error)


async def events(process: Process, ask: Ask, asked: Asked, form: CallForm) -> AsyncGenerator[LiveHead | bytes]:
    """The head and the events of a stream. Raises: ModelFailed, InvalidInput where the function does."""
    stream = Stream(ask, asked, process)
    process.begin(stream)
    has_begun = False
    try:
        while (piece := await stream.pieces.get()) is not None:
            if isinstance(piece, BatchmillError):
                raise piece
            event = b"data: " + form.event(asked, *piece) + b"\n\n"
            if not has_begun:
                has_begun = True
                yield LiveHead(200, EVENT_STREAM)
            yield event
            stream.more()
        if not has_begun:
            yield LiveHead(200, EVENT_STREAM)
        if ask.form == ARGUMENTS:
            yield DONE
    finally:
        process.drop(stream)


def no_stream(source: str) -> InvalidInput:
    return InvalidInput(
        f"`stream` is true, and {source} returns its answer in one piece: leave `stream` out, "
        "or write the function with `yield`",
        code="streaming_not_supported",
    )
