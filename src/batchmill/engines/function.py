"""The function engine: calls user code for each row, in one thread of its own or, where it is async, on the loop.

It owns how a row's fields become arguments and how a result or an exception becomes an outcome.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchmill.datasets.text_rules import is_too_deep
from batchmill.engines.user_code import UserLog, UserThread
from batchmill.errors import BatchmillError, ModelFailed
from batchmill.models import functions
from batchmill.ports import Feed, Sink
from batchmill.types import EngineStats, Limits, ModelSpec, Outcome, Row, RowError
from batchmill.wire.forms import usage_of
from batchmill.wire.json_bytes import DEPTH_MAX

ROWS_MAX = 1024  # taken from the feed at once
TAKE_S = 0.25  # so many rows are taken at once as this lasts: they are what a pause has to wait for
GROWTH_MAX = 8  # from one take to the next
IN_FLIGHT_DEFAULT = 64  # rows of an async function awaited at once
PUT_EVERY_S = 0.02  # how long a finished row waits while the thread works on the next
MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep: the call that finds out is saved

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


STAGE_ROWS = 32  # rows read ahead of their calls: more of them no longer fit in the processor's cache


class FunctionEngine:
    """Runs rows through a Python function, a list-taking one, an async one, or a class's `predict`.

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
        self._calls: Calls | None = None
        self._in_flight = 0
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
        self._calls = Calls(loaded, self._log)
        self._note = ""

    async def _set_up(self, loaded: functions.Loaded) -> None:
        """Call `setup` where the rows will be called: what it makes may belong to a thread or to a loop."""
        assert self._thread is not None and loaded.setup is not None
        self._note = f"setting up {self._model.source}"
        try:
            if inspect.iscoroutinefunction(loaded.setup):
                await loaded.setup()
            else:
                await self._thread.submit(loaded.setup)
        except (Exception, SystemExit) as error:
            told = functions.user_traceback(error)
            raise ModelFailed(f"setup() of {self._model.source} failed:\n{told}") from None

    async def run(self, feed: Feed, sink: Sink) -> None:
        assert self._calls is not None, "start() comes first"
        if self._calls.loaded.is_async:
            await self._run_on_loop(self._calls, feed, sink)
        else:
            await self._run_in_thread(self._calls, feed, sink)

    async def _run_in_thread(self, calls: Calls, feed: Feed, sink: Sink) -> None:
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

    async def _answer_in_thread(self, calls: Calls, rows: list[Row], sink: Sink) -> None:
        """Put each row's outcome soon after it is there, while the thread is at the next ones."""
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

    async def _run_on_loop(self, calls: Calls, feed: Feed, sink: Sink) -> None:
        assert self._log is not None
        unit = calls.loaded.list_rows or 1
        limit = max(self.stats().in_flight_limit, unit)
        room = asyncio.Event()

        async def answer(rows: list[Row]) -> None:
            sink.put(await calls.answer_async(rows, self._model.limits.attempt_timeout_s))
            self._in_flight -= len(rows)
            room.set()

        async with asyncio.TaskGroup() as group:
            while rows := await feed.take(limit - self._in_flight):
                self._log.rotate()
                self._in_flight += len(rows)
                for some in _cut(rows, unit):
                    group.create_task(answer(some))
                while limit - self._in_flight < unit:
                    room.clear()
                    await room.wait()

    async def stop(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def stats(self) -> EngineStats:
        is_async = self._calls is not None and self._calls.loaded.is_async
        asked = self._model.limits.in_flight_max
        limit = (asked or IN_FLIGHT_DEFAULT) if is_async else min(asked or ROWS_MAX, ROWS_MAX)
        return EngineStats(in_flight=self._in_flight, in_flight_limit=limit, note=self._note)


class Calls:
    """Turns rows into outcomes by calling user code. Whatever that code does, each row gets exactly one."""

    def __init__(self, loaded: functions.Loaded, log: UserLog) -> None:
        self.loaded = loaded
        self._log = log
        self._call = loaded.call
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        names = None if loaded.takes_kwargs or loaded.takes_rows else frozenset(loaded.parameters)
        self._names = names  # None: every field is an argument
        self._required = frozenset() if loaded.takes_rows else loaded.required

    def answer_all(self, rows: list[Row], done: list[Outcome], halt: list[bool]) -> None:
        """Append the outcome of every row to `done`, until `halt` is not empty."""
        if self.loaded.list_rows is not None:
            for some in _cut(rows, self.loaded.list_rows):
                if halt:
                    return
                done.extend(self._answer_list(some))
            return
        for some in _cut(rows, STAGE_ROWS):
            self._answer_some(some, done, halt)

    def _answer_some(self, rows: list[Row], done: list[Outcome], halt: list[bool]) -> None:
        call, ok = self._call, self._ok
        for row, arguments in zip(rows, self._arguments_of(rows), strict=True):
            if halt:
                return
            if type(arguments) is RowError:
                done.append(Outcome(row, error=arguments, status=0))
                continue
            try:
                result = call(**arguments)
            except BaseException as error:  # SystemExit and the like too: one row must not end the worker
                done += self._raised([row], error)
            else:
                done.append(ok(row, result))

    async def answer_async(self, rows: list[Row], timeout_s: float) -> list[Outcome]:
        """The outcomes of one awaited call: of one row, or of a list of them."""
        refused, called, arguments = self._bind(rows)
        if not called:
            return refused
        timer = asyncio.timeout(timeout_s)
        try:
            async with timer:
                result = await self._call(**arguments)
        except (Exception, SystemExit) as error:
            if timer.expired():
                late = RowError("timeout", f"the function took longer than {timeout_s:g} s")
                return refused + [Outcome(row, error=late, status=0) for row in called]
            return refused + self._raised(called, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return refused + self._raised(called, error)  # user code cancelled itself
        return refused + (self._share_out(called, result) if self.loaded.list_rows else [self._ok(called[0], result)])

    def _answer_list(self, rows: list[Row]) -> list[Outcome]:
        refused, called, arguments = self._bind(rows)
        if not called:
            return refused
        try:
            result = self._call(**arguments)
        except BaseException as error:  # as in answer_all
            return refused + self._raised(called, error)
        return refused + self._share_out(called, result)

    def _bind(self, rows: list[Row]) -> tuple[list[Outcome], list[Row], dict[str, Any]]:
        """The rows that cannot be called, those that can, and the arguments of their one call."""
        bound = list(zip(rows, self._arguments_of(rows), strict=True))
        refused = [Outcome(row, error=each, status=0) for row, each in bound if isinstance(each, RowError)]
        called = [row for row, each in bound if not isinstance(each, RowError)]
        fields = [each for _, each in bound if not isinstance(each, RowError)]
        if self.loaded.list_rows is None:
            return refused, called, fields[0] if fields else {}
        if self.loaded.takes_rows:
            return refused, called, {functions.ROWS_PARAMETER: fields}
        columns = self.loaded.parameters.items()
        return refused, called, {name: [each.get(name, default) for each in fields] for name, default in columns}

    def _arguments_of(self, rows: list[Row]) -> Sequence[dict[str, Any] | RowError]:
        """`_arguments` of every row, decoded together where they are of one job and all can be read."""
        form = rows[0].form
        if all(row.form is form for row in rows):
            try:
                fields = form.arguments_of(rows)
            except READ_ERRORS:
                return [self._arguments(row) for row in rows]  # says which cannot be read, and why
            return fields if self._names is None and not self._required else list(map(self._fit, fields))
        return [self._arguments(row) for row in rows]

    def _arguments(self, row: Row) -> dict[str, Any] | RowError:
        """The row's fields that the function takes, or why it cannot be called."""
        try:
            return self._fit(row.form.arguments(row))
        except BatchmillError as error:
            return RowError(error.code, error.message)
        except READ_ERRORS as error:
            return RowError("invalid_json", f"the row cannot be read: {error}")

    def _fit(self, fields: dict[str, Any]) -> dict[str, Any] | RowError:
        """The fields that the function takes."""
        if self._required and not fields.keys() >= self._required:
            missing = ", ".join(sorted(self._required - fields.keys()))
            return RowError("missing_argument", f"the function needs {missing}, and the row has: {', '.join(fields)}")
        if self._names is None or self._names.issuperset(fields):
            return fields
        names = self._names
        return {name: value for name, value in fields.items() if name in names}

    def _ok(self, row: Row, result: Any) -> Outcome:
        try:
            body = self._encode(result)
        except Exception as error:  # the result's own code may run here
            message = f"the function returned {_article(result)} that JSON cannot hold: {_text(error)}"
            return Outcome(row, error=RowError("bad_return", message), status=0)
        if len(body) > SHALLOW_BYTES_MAX and is_too_deep(body, DEPTH_MAX):
            message = f"the function returned {_article(result)} nested deeper than {DEPTH_MAX} levels"
            return Outcome(row, error=RowError("bad_return", message), status=0)
        if type(result) is dict and "usage" in result:
            return Outcome(row, body, None, 200, usage_of(result))
        return Outcome(row, body)

    def _share_out(self, rows: list[Row], results: Any) -> list[Outcome]:
        """One result for each row of a list-taking call; an exception in the list is that row's error."""
        if hasattr(results, "tolist"):
            results = results.tolist()
        wrong = ""
        if not isinstance(results, Sequence) or isinstance(results, str | bytes):
            wrong = f"the function returned {_article(results)} for a list of {len(rows)} rows, not a list"
        elif len(results) != len(rows):
            wrong = f"the function returned {len(results)} results for {len(rows)} rows"
        if wrong:
            return [Outcome(row, error=RowError("bad_return", wrong), status=0) for row in rows]
        return [
            self._raised([row], result)[0] if isinstance(result, Exception) else self._ok(row, result)
            for row, result in zip(rows, results, strict=True)
        ]

    def _raised(self, rows: list[Row], error: BaseException) -> list[Outcome]:
        self._log.traceback(error, f"row {rows[0].number}")
        told = RowError(type(error).__name__, _text(error))
        return [Outcome(row, error=told, status=0) for row in rows]


def _cut(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _plain(value: Any) -> Any:
    """What JSON can hold of a value that is none of its own: numpy and torch values, models of pydantic."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if inspect.iscoroutine(value):
        value.close()  # or Python would warn that nobody awaited it
        raise TypeError("it must be awaited: write the function as `async def`")
    raise TypeError(f"{_article(value)} has no JSON form")


def _article(value: Any) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _text(error: BaseException) -> str:
    """An exception's message, capped and fit for UTF-8."""
    try:
        text = str(error)
    except Exception as broken:  # user code: its __str__
        text = f"(its message cannot be read: {type(broken).__name__})"
    return text[:MESSAGE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
