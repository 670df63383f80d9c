"""The face of the engine: rows, live requests and Asks of one deployed function, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from batchmill.engines.function_process import streams
from batchmill.engines.function_process.counting import Counts
from batchmill.engines.function_process.live import LiveCalls
from batchmill.engines.function_process.process import Process
from batchmill.engines.function_process.trains import Trains
from batchmill.engines.function_process.watch import Watch
from batchmill.errors import ModelFailed
from batchmill.ports import Answering, Feed, Sink
from batchmill.types import Ask, CallStats, EngineStats, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.call_forms import CALL_FORMS
from batchmill.wire.messages import Answer
from batchmill.wire.raised import Raised

FINALIZE_S = 5.0  # what stop() gives an idle function
BUSY_S = 0.5  # and one that is in the midst of a call nobody waits for


class FunctionProcessEngine:
    """A `ports.CallEngine`. Live requests go ahead of rows; both meet in the process' batches.

    Args:
        model: has a `function`. `limits.attempt_timeout_s` bounds each call, `limits.memory_bytes` what the process
            holds, `limits.in_flight_max` the rows it was given and has not answered.
        home: a folder of this worker's own, for `function.log`.
    """

    def __init__(self, model: ModelSpec, home: Path) -> None:
        if model.function is None:
            raise ModelFailed(f"{model.name} was never deployed: it has no version", code="not_deployed")
        self._source = model.source
        self._counts = Counts()
        self._process = Process(model, home, self._counts.called)
        self._live = LiveCalls(model, model.function, self._process, self._counts)
        self._trains = Trains(model, model.function, self._process, self._counts)
        self._model = model
        self._streams = 0
        self._watching: asyncio.Task[None] | None = None
        self._interface = model.function.interface

    async def start(self) -> None:
        self._interface = await self._process.start()
        self._live.interface = self._trains.interface = self._interface
        watch = Watch(self._model, self._process, is_async=self._interface.is_async)
        self._watching = asyncio.create_task(watch.run())

    async def run(self, feed: Feed, sink: Sink) -> None:
        await self._trains.run(feed, sink)

    def ask(self, ask: Ask, answering: Answering) -> None:
        self._live.ask(ask, answering)

    def abandon(self, ask_id: int) -> None:
        self._live.abandon(ask_id)

    def taken_stats(self) -> CallStats | None:
        return self._counts.take()

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        if not request.stream:
            answer = await self._answer(request)
            yield LiveHead(200)
            yield answer.body
            return
        ask = self._ask(request)
        asked = self._live.read(ask)
        if isinstance(asked, Raised):
            raise asked.error()
        if not self._interface.streams:
            raise streams.no_stream(self._source)
        self._streams += 1
        try:
            pieces = streams.events(self._process, ask, asked, CALL_FORMS[ask.form])
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            self._streams -= 1

    def _ask(self, request: LiveRequest) -> Ask:
        return Ask(
            self._trains.next_id(), request.form, request.body, request.head, None, request.project, request.request
        )

    async def _answer(self, request: LiveRequest) -> Answer:
        """The answer to a request in one piece. Raises: what the call raised."""
        waiting = _Waiting()
        ask = self._ask(request)
        self._live.ask(ask, waiting)
        try:
            answer = await waiting.answer
        finally:
            self._live.abandon(ask.id)
        if answer.raised is not None:
            raise answer.raised.error()
        return answer

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None
        child = self._process.child
        is_busy = child is not None and bool(child.blamed())
        await self._process.stop(BUSY_S if is_busy else FINALIZE_S)

    def stats(self) -> EngineStats:
        return EngineStats(
            in_flight=self._trains.held,
            in_flight_limit=self._trains.most,
            note=self._process.note,
            live=self._live.in_flight + self._streams,
        )


class _Waiting:
    """`ports.Answering` for one answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def put(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)
