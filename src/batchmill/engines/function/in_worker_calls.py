"""Turns rows into calls of user code, and its results or exceptions into outcomes."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from batchmill.errors import BatchmillError
from batchmill.function_runtime.marks import ROWS_PARAMETER
from batchmill.models import functions
from batchmill.models.functions import user_traceback
from batchmill.types import Outcome, Row, RowError
from batchmill.wire.forms import usage_of
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep
from batchmill.wire.text_cells import CellReader

LOG_BYTES_MAX = 32 * 1024 * 1024  # of one log file; one older file is kept
TRACEBACKS_MAX = 3  # of one distinct error
DISTINCT_ERRORS_MAX = 1000


class UserThread:
    """One daemon thread that runs calls in order, so that a stuck call blocks neither the loop nor the exit."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.ahead: deque[Callable[[], object]] = deque()  # what a long call looks at now and then, and runs
        threading.Thread(target=self._serve, name="user-code", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `call` after those submitted before it. Cancelling the future drops a call that has not begun."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return asyncio.wrap_future(future)

    def submit_ahead(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `call` before those submitted, and inside a running one that looks at `ahead`."""
        future: Future[Any] = Future()
        self.ahead.append(lambda: _run(future, call))
        self._calls.put((Future(), _nothing))  # wakes the thread, which looks before each call
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread once its present call returns."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            while self.ahead:
                self.ahead.popleft()()
            _run(*item)


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # the awaiter of the future gets it
        future.set_exception(error)


def _nothing() -> None: ...


class UserLog:
    """`function.log`: what user code prints, and the first tracebacks of each distinct error."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = _open(path)
        self._stdout: TextIO | None = None
        self._seen: dict[tuple[str, str, int], int] = {}

    def capture_stdout(self) -> None:
        """Redirect prints to the log: a worker's own standard output is not for user code."""
        self._stdout, sys.stdout = sys.stdout, self._file

    def traceback(self, error: BaseException, about: str) -> None:
        """Log a traceback, unless the same error was logged often enough."""
        key = _place(error)
        times = self._seen.get(key, 0)
        if times >= TRACEBACKS_MAX or (times == 0 and len(self._seen) >= DISTINCT_ERRORS_MAX):
            return
        self._seen[key] = times + 1
        self._file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {about}:\n{user_traceback(error)}\n")

    def rotate(self) -> None:
        """Start a new file when this one is full. Users of the file object write to the new one."""
        self._file.flush()
        if os.fstat(self._file.fileno()).st_size < LOG_BYTES_MAX:
            return
        os.replace(self._path, self._path.with_suffix(".log.1"))
        with _open(self._path) as fresh:
            os.dup2(fresh.fileno(), self._file.fileno(), inheritable=False)

    def close(self) -> None:
        if sys.stdout is self._file and self._stdout is not None:
            sys.stdout = self._stdout
        self._file.close()


def _open(path: Path) -> TextIO:
    return open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)


def _place(error: BaseException) -> tuple[str, str, int]:
    """The identity of an error: its class, and the line that raised it."""
    frame = error.__traceback__
    if frame is None:
        return type(error).__name__, "", 0
    while frame.tb_next is not None:
        frame = frame.tb_next
    return type(error).__name__, frame.tb_frame.f_code.co_filename, frame.tb_lineno


MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep: the call that finds out is saved
STAGE_ROWS = 32  # rows read ahead of their calls: more of them no longer fit in the processor's cache

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FunctionCaller:
    """Turns rows into outcomes by calling user code. Whatever that code does, each row gets exactly one."""

    def __init__(self, loaded: functions.Loaded, log: UserLog, ahead: deque[Callable[[], object]]) -> None:
        """`ahead` holds calls that run between two rows; `UserThread` runs them if no row is running."""
        self.loaded = loaded
        self._log = log
        self._ahead = ahead
        self._call = loaded.call
        self._cells = CellReader(loaded.inputs)
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        names = None if loaded.takes_kwargs or loaded.takes_rows else frozenset(loaded.parameters)
        self._names = names  # None: every field is an argument
        self._required = frozenset() if loaded.takes_rows else loaded.required

    def answer_all(self, rows: list[Row], done: list[Outcome], halt: list[bool]) -> None:
        """Append the outcome of every row to `done`, until `halt` is not empty."""
        if self.loaded.list_rows is not None:
            for some in cut(rows, self.loaded.list_rows):
                if halt:
                    return
                if self._ahead:
                    run_ahead(self._ahead)
                done.extend(self._answer_list(some))
            return
        for some in cut(rows, STAGE_ROWS):
            self._answer_some(some, done, halt)

    def answer_one(self, row: Row) -> Outcome:
        """The outcome of a row that runs ahead of those of `answer_all`, perhaps in the middle of them."""
        [outcome] = self._answer_list([row])
        return outcome

    def _answer_some(self, rows: list[Row], done: list[Outcome], halt: list[bool]) -> None:
        call, ok, ahead = self._call, self.outcome, self._ahead
        for row, arguments in zip(rows, self._arguments_of(rows), strict=True):
            if halt:
                return
            if ahead:
                run_ahead(ahead)
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
        return refused + (
            self._share_out(called, result) if self.loaded.list_rows else [self.outcome(called[0], result)]
        )

    def _answer_list(self, rows: list[Row]) -> list[Outcome]:
        refused, called, arguments = self._bind(rows)
        if not called:
            return refused
        try:
            result = self._call(**arguments)
        except BaseException as error:  # as in answer_all
            return refused + self._raised(called, error)
        if self.loaded.list_rows is None:
            return [*refused, self.outcome(called[0], result)]
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
            return refused, called, {ROWS_PARAMETER: fields}
        columns = self.loaded.parameters.items()
        return refused, called, {name: [each.get(name, default) for each in fields] for name, default in columns}

    def _arguments_of(self, rows: list[Row]) -> Sequence[dict[str, Any] | RowError]:
        """`arguments` of every row, decoded together where they are of one job and all can be read."""
        form = rows[0].form
        if all(row.form is form for row in rows) and not (form.is_text and self._cells.is_needed):
            try:
                fields = form.arguments_of(rows)
            except READ_ERRORS:
                return [self.arguments(row) for row in rows]  # says which cannot be read, and why
            return fields if self._names is None and not self._required else list(map(self._fit, fields))
        return [self.arguments(row) for row in rows]

    def arguments(self, row: Row) -> dict[str, Any] | RowError:
        """The row's fields that the function takes, or why it cannot be called."""
        try:
            fields = row.form.arguments(row)
            return self._fit(self._cells.read(fields) if row.form.is_text else fields)
        except BatchmillError as error:
            return RowError(error.code, error.message)
        except READ_ERRORS as error:
            return RowError("invalid_json", f"the row cannot be read: {error}")

    def _fit(self, fields: dict[str, Any]) -> dict[str, Any] | RowError:
        """Keep the fields that the function takes."""
        if self._required and not fields.keys() >= self._required:
            missing = ", ".join(sorted(self._required - fields.keys()))
            return RowError("missing_argument", f"the function needs {missing}, and the row has: {', '.join(fields)}")
        if self._names is None or self._names.issuperset(fields):
            return fields
        names = self._names
        return {name: value for name, value in fields.items() if name in names}

    def outcome(self, row: Row, result: Any) -> Outcome:
        """The outcome of a row whose call returned `result`."""
        try:
            body = self._encode(result)
        except Exception as error:  # the result's own code may run here
            message = f"the function returned {_article(result)} that JSON cannot hold: {_text_of(error)}"
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
            self._raised([row], result)[0] if isinstance(result, Exception) else self.outcome(row, result)
            for row, result in zip(rows, results, strict=True)
        ]

    def _raised(self, rows: list[Row], error: BaseException) -> list[Outcome]:
        failure = self.row_error(error, f"row {rows[0].number}" if rows[0].number >= 0 else "a live request")
        return [Outcome(row, error=failure, status=0) for row in rows]

    def row_error(self, error: BaseException, about: str = "a live request") -> RowError:
        """The error of a row from an exception; its traceback goes to the log."""
        self._log.traceback(error, about)
        return RowError(type(error).__name__, _text_of(error))


def run_ahead(ahead: deque[Callable[[], object]]) -> None:
    """Run every call that goes first. They handle their own errors."""
    while ahead:
        ahead.popleft()()


def cut(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _plain(value: Any) -> Any:
    """A JSON value for a value of numpy, torch or pydantic."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if inspect.iscoroutine(value):
        value.close()  # or Python would warn that it was never awaited
        raise TypeError("it must be awaited: write the function as `async def`")
    raise TypeError(f"{_article(value)} has no JSON form")


def _article(value: Any) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _text_of(error: BaseException) -> str:
    """An exception's message, capped and valid UTF-8."""
    try:
        text = str(error)
    except Exception as broken:  # user code: its __str__
        text = f"(its message cannot be read: {type(broken).__name__})"
    return text[:MESSAGE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
