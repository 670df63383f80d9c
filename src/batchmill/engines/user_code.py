"""Where user code lives inside a worker: a thread of its own, and a bounded log for what it prints and raises."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from batchmill.models.functions import user_traceback

LOG_BYTES_MAX = 32 * 1024 * 1024  # of one log file; one older file is kept
TRACEBACKS_MAX = 3  # of one distinct error
DISTINCT_ERRORS_MAX = 1000


class UserThread:
    """One daemon thread that runs calls in order: it keeps the loop free, and a stuck call never holds the exit up."""

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
    except BaseException as error:  # whoever awaits the future gets it
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
        """Send what is printed from now on to the log: a worker's own standard output is not user code's to use."""
        self._stdout, sys.stdout = sys.stdout, self._file

    def traceback(self, error: BaseException, about: str) -> None:
        """Write the traceback down, if this error has not been seen often enough."""
        key = _place(error)
        times = self._seen.get(key, 0)
        if times >= TRACEBACKS_MAX or (times == 0 and len(self._seen) >= DISTINCT_ERRORS_MAX):
            return
        self._seen[key] = times + 1
        self._file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {about}:\n{user_traceback(error)}\n")

    def rotate(self) -> None:
        """Begin a new file when this one is full. Holders of the file object go on with the new one."""
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
    """What tells errors apart: the class, and the line that raised it."""
    frame = error.__traceback__
    if frame is None:
        return type(error).__name__, "", 0
    while frame.tb_next is not None:
        frame = frame.tb_next
    return type(error).__name__, frame.tb_frame.f_code.co_filename, frame.tb_lineno
