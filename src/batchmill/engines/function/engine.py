"""The function engine: rows and live calls of one Python function, which runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from msgspec.structs import replace

from batchmill.engines.function import live
from batchmill.engines.function.batching import RowBatcher
from batchmill.engines.function.live import FunctionLive
from batchmill.engines.function.process import Counts, Process, hung, memory_exceeded, silent
from batchmill.engines.function.row_reader import READ_ERRORS
from batchmill.errors import ModelFailed
from batchmill.models.function_progress import Call
from batchmill.models.runtime_process import PreparedRuntime
from batchmill.ports.engines import AnswerSink, Feed, Sink
from batchmill.types import CallStats, EngineStats, FunctionRequest, FunctionSpec, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.calls import CALL_FORMS
from batchmill.wire.error_statuses import Raised
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.messages import FunctionReply

log = logging.getLogger("batchmill.functions")

TICK_S = 0.05
LOG_TICKS = 20  # between two looks at the size of the log
SILENT_S = 60.0  # a process that has calls, runs none and sends nothing for so long is stopped, or blocked for good
GRACE_S = 0.5  # an async call whose time is up is cancelled, and may end by itself


class Watch:
    """
    Args:
        is_async: calls can be given up without killing the process.
    """

    def __init__(self, model: ModelSpec, process: Process, *, is_async: bool) -> None:
        self._process = process
        self._reads = self._silent_ticks = 0
        self._limit_s, self._memory_bytes = model.limits.attempt_timeout_s, model.limits.memory_bytes
        self._grace_s = GRACE_S if is_async else 0.0
        self._since: dict[Call, float] = {}  # calls that are running -> when they were first seen to
        self._leaving: dict[int, float] = {}  # calls whose time is up -> how long a call of theirs may take

    async def run(self) -> None:
        """Until cancelled."""
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            self.check(time.monotonic())
            ticks += 1
            if ticks % LOG_TICKS == 0:
                try:
                    await self._bound_log()
                except OSError as error:  # limits of calls are kept all the same
                    log.warning("a log of a function cannot be bounded: %s", error)

    async def _bound_log(self) -> None:
        child = self._process.child
        if child is not None and child.is_alive and child.log.is_full():
            await asyncio.to_thread(child.log.rotate)
        if (calls := self._process.calls) is not None and calls.is_full():
            await asyncio.to_thread(calls.rotate)

    def check(self, now: float) -> None:
        """Time out calls; replace the process if a call does not end or uses too much memory."""
        child = self._process.child
        running = child.blamed() if child is not None and self._process.is_up else []
        self._expire(now)
        if child is None or not self._process.is_up:
            self._since.clear()
            self._leaving.clear()
            return
        if not running:
            self._since.clear()
            self._leaving.clear()
        else:
            self._end_hung(running, now)
        self._end_silent(is_running=bool(running))
        if self._memory_bytes is not None and (held := child.resident_bytes()) > self._memory_bytes:
            self._process.replace(memory_exceeded(self._memory_bytes, held))

    def _expire(self, now: float) -> None:
        """Time out calls; their unstarted work is dropped."""
        for work in [work for work in self._process.works.values() if work.deadline <= now]:
            if work.is_sent:
                self._leaving[work.id] = work.limit_s + self._grace_s
            was_called = self._process.has_begun(work)
            self._process.drop(work)
            work.expire(was_called=was_called)

    def _end_hung(self, running: list[Call], now: float) -> None:
        """Replace the process if one call alone takes too long; time in the queue does not count.

        To replace the process for less would cost the next callers its setup, and make them late too.
        """
        self._since = {call: self._since.get(call, now) for call in running}
        ids = {call[0] for call in running}
        self._leaving = {id_: limit_s for id_, limit_s in self._leaving.items() if id_ in ids}
        late = [call for call, since in self._since.items() if now - since > self._limit_of(call[0])]
        if late:
            self._process.replace(hung(min(self._limit_of(call[0]) for call in late)), frozenset(late))

    def _end_silent(self, *, is_running: bool) -> None:
        """Replace a process that does not work. Ticks are counted: while this process is stopped, nothing is read."""
        process = self._process
        is_silent = process.has_calls and not is_running and process.reads == self._reads
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        self._reads = process.reads
        if self._silent_ticks * TICK_S > SILENT_S:
            process.replace(silent(SILENT_S))

    def _limit_of(self, id_: int) -> float:
        """The time limit of a call: a job's row may have a shorter one than the model."""
        work = self._process.works.get(id_)
        asked_s = work.parsed.timeout_s if work is not None and work.from_job else None
        own_s = self._limit_s if asked_s is None else min(asked_s, self._limit_s)
        return self._leaving.get(id_, own_s)


FINALIZE_S = 5.0  # what stop() gives an idle function
BUSY_S = 0.5  # and one that runs an abandoned call


class FunctionEngine:
    """The engine of a deployed function; a `ports.engines.CallEngine`.

    Live requests go ahead of rows; both meet in the process' batches.

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
        self._live = FunctionLive(model, model.function, self._process, self._counts)
        self._batcher = RowBatcher(model, model.function, self._process, self._counts)
        self._model = model
        self._streams = 0
        self._watching: asyncio.Task[None] | None = None
        self._interface = model.function.interface

    async def start(self) -> None:
        self._interface = await self._process.start()
        self._live.interface = self._batcher.interface = self._interface
        watch = Watch(self._model, self._process, is_async=self._interface.is_async)
        self._watching = asyncio.create_task(watch.run())

    async def run(self, feed: Feed, sink: Sink) -> None:
        await self._batcher.run(feed, sink)

    def call(self, request: FunctionRequest, answering: AnswerSink) -> None:
        self._live.call(request, answering)

    def abandon(self, request_id: int) -> None:
        self._live.abandon(request_id)

    def take_stats(self) -> CallStats | None:
        return self._counts.take()

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        if not request.stream:
            answer = await self._answer(request)
            yield LiveHead(200)
            yield answer.joined()
            return
        function_request = self._function_request(request)
        parsed = self._live.read(function_request)
        if isinstance(parsed, Raised):
            raise parsed.error()
        if not self._interface.streams:
            raise live.no_stream(self._source)
        self._streams += 1
        try:
            pieces = live.events(self._process, function_request, parsed, CALL_FORMS[function_request.form])
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            self._streams -= 1

    def _function_request(self, request: LiveRequest) -> FunctionRequest:
        return FunctionRequest(
            self._batcher.next_id(), request.form, request.body, request.head, None, request.project, request.request
        )

    async def _answer(self, request: LiveRequest) -> FunctionReply:
        """The complete reply to a request. Raises: the error of the call."""
        waiting = _Waiting()
        function_request = self._function_request(request)
        self._live.call(function_request, waiting)
        try:
            answer = await waiting.answer
        finally:
            self._live.abandon(function_request.id)
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
            in_flight=self._batcher.held,
            in_flight_limit=self._batcher.most,
            note=self._process.note,
            live=self._live.in_flight + self._streams,
        )


IN_PLACE = FunctionSpec(version="", folder="", digest="")


class LocalFunctionEngine(FunctionEngine):
    """The engine of `function:FILE.py:NAME`: code where it lies, in the folder and environment of its worker."""

    def __init__(self, model: ModelSpec, home: Path) -> None:
        super().__init__(replace(model, function=IN_PLACE), home)

    @staticmethod
    async def prepare() -> PreparedRuntime:
        """Start a function's process before the function is known. Raises: OSError."""
        return await PreparedRuntime.start()

    def adopt(self, prepared: PreparedRuntime) -> None:
        """Use the process from `prepare`. It is ended if it is not used."""
        self._process.adopt(prepared)

    def _function_request(self, request: LiveRequest) -> FunctionRequest:
        """The call without the fields that the function does not take: clients of OpenAI's API send many."""
        body, names = request.body, {each.name for each in self._interface.inputs}
        if not self._interface.takes_more and self._interface.takes == "arguments":
            with contextlib.suppress(*READ_ERRORS):  # the call's form says what is wrong
                body = join_object({name: value for name, value in split_object(body).items() if name in names})
        return super()._function_request(replace(request, body=body))


class _Waiting:
    """The sink of one reply."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[FunctionReply] = asyncio.get_running_loop().create_future()

    def put(self, answer: FunctionReply) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)
