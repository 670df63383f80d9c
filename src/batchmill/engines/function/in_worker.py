"""The in-worker function engine: calls user code in a thread, or on the loop if it is async.

It decides when user code is called; `in_worker_calls` turns rows into calls and results into outcomes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchmill.engines.function.in_worker_calls import FunctionCaller, UserLog, UserThread, cut
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.models import functions
from batchmill.ports import Feed, Sink
from batchmill.types import EngineStats, Limits, LiveHead, LiveRequest, ModelSpec, Outcome, Row, RowError
from batchmill.wire.forms import TableForm

EVENT_STREAM = "text/event-stream"
LIVE_ROW = -1  # the number of a row that is none
CALLER_CODES = frozenset({"invalid_json", "missing_argument"})  # of row errors: the body does not fit the function
MODEL_CODES = frozenset({"bad_return", "timeout"})
DONE = b"data: [DONE]\n\n"

_form = TableForm()  # a body's fields are the arguments, as a table's columns are


class _Ended(Struct, frozen=True):
    """The end of a generator."""


class InWorkerLive:
    """Answers live requests with the function that rows are run through."""

    def __init__(self, calls: FunctionCaller, thread: UserThread, timeout_s: float) -> None:
        self._calls = calls
        self._thread = thread
        self._timeout_s = timeout_s
        self.in_flight = 0

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """As `ports.Engine.predict`."""
        row = Row(LIVE_ROW, LIVE_ROW, request.body, _form)
        self.in_flight += 1
        try:
            if request.stream:
                events = self._stream(row)
                try:
                    async for piece in events:
                        yield piece
                finally:
                    await events.aclose()
            else:
                body = await self._answer(row)
                yield LiveHead(200)
                yield body
        finally:
            self.in_flight -= 1

    async def _answer(self, row: Row) -> bytes:
        if self._calls.loaded.is_async:
            [outcome] = await self._calls.answer_async([row], self._timeout_s)
        else:
            outcome = await self._thread.submit_ahead(lambda: self._calls.answer_one(row))
        if outcome.error is not None:
            raise _raised(outcome.error)
        assert outcome.body is not None
        return outcome.body

    # -- streams ------------------------------------------------------------------------------------------------------

    async def _stream(self, row: Row) -> AsyncGenerator[LiveHead | bytes]:
        loaded = self._calls.loaded
        if not loaded.yields:
            raise InvalidInput(
                f"`stream` is true, and {loaded.name} returns its answer in one piece: leave `stream` "
                "out, or write the function with `yield`",
                code="streaming_not_supported",
            )
        arguments = self._calls.arguments(row)
        if isinstance(arguments, RowError):
            raise _raised(arguments)
        made = loaded.call(**arguments)  # runs nothing of a generator yet
        try:
            has_begun = False
            while not isinstance(value := await self._next(made), _Ended):
                event = b"data: " + self._encoded(row, value) + b"\n\n"
                if not has_begun:
                    has_begun = True
                    yield LiveHead(200, EVENT_STREAM)
                yield event
            if not has_begun:
                yield LiveHead(200, EVENT_STREAM)
            yield DONE
        finally:
            await self._close(made)

    async def _next(self, made: Generator[Any] | AsyncGenerator[Any]) -> Any:
        """The next value, or `_Ended`. Raises: ModelFailed where the function does."""
        timer = asyncio.timeout(self._timeout_s)
        try:
            if isinstance(made, Generator):
                return await self._thread.submit_ahead(lambda: next(made, _Ended()))
            async with timer:
                return await anext(made, _Ended())
        except (Exception, SystemExit) as error:  # user code, as where rows are called
            if timer.expired():
                raise _raised(RowError("timeout", f"the function took longer than {self._timeout_s:g} s")) from None
            raise _raised(self._calls.row_error(error)) from None

    async def _close(self, made: Generator[Any] | AsyncGenerator[Any]) -> None:
        """Run the function's own `finally` in its thread; do not wait for a busy thread."""
        if isinstance(made, Generator):
            self._thread.submit_ahead(lambda: self._close_here(made))
            return
        try:
            await made.aclose()
        except Exception as error:  # user code once more; the answer is over
            self._calls.row_error(error)

    def _close_here(self, made: Generator[Any]) -> None:
        try:
            made.close()
        except Exception as error:  # as above
            self._calls.row_error(error)

    def _encoded(self, row: Row, value: Any) -> bytes:
        outcome = self._calls.outcome(row, value)
        if outcome.error is not None:
            raise _raised(outcome.error)
        assert outcome.body is not None
        return outcome.body


def _raised(error: RowError) -> BatchmillError:
    """The error that a row would have, for a live call."""
    if error.code in CALLER_CODES:
        return InvalidInput(error.message, code=error.code)
    if error.code in MODEL_CODES:
        return ModelFailed(error.message, code=error.code)
    return ModelFailed(f"{error.code}: {error.message}", code="function_error")


ROWS_MAX = 1024  # taken from the feed at once
TAKE_S = 0.25  # so many rows are taken at once as this lasts: they are what a pause has to wait for
GROWTH_MAX = 8  # from one take to the next
IN_FLIGHT_DEFAULT = 64  # rows of an async function awaited at once
PUT_EVERY_S = 0.02  # how long a finished row waits while the thread works on the next


class FunctionEngine:
    """Runs rows through a Python function: plain, list-taking, async, or a class's `predict`.

    A live request is called ahead of rows: between two of them, or between two lists, in the thread; at once on the
    loop. A generator function answers those that ask for a stream.

    Args:
        model: `source` names the function; `limits.in_flight_max` bounds the rows it is given and has not answered,
            `limits.attempt_timeout_s` the calls of an async one.
        home: a folder of this worker's own, for `function.log`.
    """

    def __init__(self, model: ModelSpec, home: Path) -> None:
        self._model = model
        self._home = home
        self._log: UserLog | None = None
        self._thread: UserThread | None = None
        self._calls: FunctionCaller | None = None
        self._live: InWorkerLive | None = None
        self._in_flight = 0
        self._room = asyncio.Event()  # rows of an async function have ended, or a live request has
        self._note = ""

    async def start(self) -> None:
        self._log = UserLog(self._home / "function.log")
        self._log.capture_stdout()
        self._thread = UserThread()
        self._note = f"loading {self._model.source}"
        loaded = await self._thread.submit(lambda: functions.load(self._model.source))
        if not loaded.is_async and self._model.limits.attempt_timeout_s != Limits().attempt_timeout_s:
            raise ModelFailed(
                f"attempt_timeout_s cannot end a call of {self._model.source}: write it as `async def`, or leave it out"
            )
        if loaded.setup is not None:
            await self._set_up(loaded)
        self._calls = FunctionCaller(loaded, self._log, self._thread.ahead)
        self._live = InWorkerLive(self._calls, self._thread, self._model.limits.attempt_timeout_s)
        self._note = ""

    async def _set_up(self, loaded: functions.Loaded) -> None:
        """Call `setup` where the rows will be called: it may create thread-local or loop-bound objects."""
        assert self._thread is not None and loaded.setup is not None
        self._note = f"setting up {self._model.source}"
        try:
            if inspect.iscoroutinefunction(loaded.setup):
                await loaded.setup()
            else:
                await self._thread.submit(loaded.setup)
        except (Exception, SystemExit) as error:
            message = functions.user_traceback(error)
            raise ModelFailed(f"setup() of {self._model.source} failed:\n{message}") from None

    async def run(self, feed: Feed, sink: Sink) -> None:
        assert self._calls is not None, "start() comes first"
        if self._calls.loaded.is_async:
            await self._run_on_loop(self._calls, feed, sink)
        else:
            await self._run_in_thread(self._calls, feed, sink)

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        assert self._live is not None, "start() comes first"
        pieces = self._live.predict(request)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
            self._room.set()

    async def _run_in_thread(self, calls: FunctionCaller, feed: Feed, sink: Sink) -> None:
        assert self._log is not None
        clock = asyncio.get_running_loop().time
        least, most = calls.loaded.list_rows or 1, self.stats().in_flight_limit
        size = least
        while rows := await feed.take(min(size, most)):
            self._log.rotate()
            began = clock()
            await self._answer_in_thread(calls, rows, sink)
            fitting = len(rows) * TAKE_S / max(clock() - began, 1e-6)
            size = max(least, min(int(fitting), len(rows) * GROWTH_MAX, ROWS_MAX))

    async def _answer_in_thread(self, calls: FunctionCaller, rows: list[Row], sink: Sink) -> None:
        """Put outcomes soon after they exist, while the thread runs the next rows."""
        assert self._thread is not None
        self._in_flight = len(rows)
        done: list[Outcome] = []  # the thread appends, the loop reads: no lock, no wake-up for each row
        halt: list[bool] = []  # not empty: stop; cheaper to look at for each row than an Event
        working = self._thread.submit(lambda: calls.answer_all(rows, done, halt))
        put = 0
        try:
            while put < len(rows):
                await asyncio.wait({working}, timeout=PUT_EVERY_S)
                if working.done():
                    working.result()  # raises where our own code failed
                fresh = done[put:]
                put += len(fresh)
                self._in_flight -= len(fresh)
                sink.put(fresh)
        finally:
            halt.append(True)

    async def _run_on_loop(self, calls: FunctionCaller, feed: Feed, sink: Sink) -> None:
        assert self._log is not None and self._live is not None
        unit = calls.loaded.list_rows or 1
        limit = max(self.stats().in_flight_limit, unit)
        live = self._live

        async def answer(rows: list[Row]) -> None:
            sink.put(await calls.answer_async(rows, self._model.limits.attempt_timeout_s))
            self._in_flight -= len(rows)
            self._room.set()

        async with asyncio.TaskGroup() as group:
            while rows := await feed.take(max(unit, limit - self._in_flight - live.in_flight)):
                self._log.rotate()
                self._in_flight += len(rows)
                for some in cut(rows, unit):
                    group.create_task(answer(some))
                # Live requests take places from rows, and the last place of none.
                while self._in_flight and limit - self._in_flight - live.in_flight < unit:
                    self._room.clear()
                    await self._room.wait()

    async def stop(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def stats(self) -> EngineStats:
        is_async = self._calls is not None and self._calls.loaded.is_async
        configured = self._model.limits.in_flight_max
        limit = (configured or IN_FLIGHT_DEFAULT) if is_async else min(configured or ROWS_MAX, ROWS_MAX)
        live = 0 if self._live is None else self._live.in_flight
        return EngineStats(in_flight=self._in_flight, in_flight_limit=limit, note=self._note, live=live)
