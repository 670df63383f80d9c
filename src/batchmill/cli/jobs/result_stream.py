"""The rows of `-o -` while their job runs: what its result file holds so far goes to standard output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

PIECE_BYTES = 256 * 1024  # that are read and written at once: memory does not grow with the rows
POLL_S = 0.1


class ResultTail:
    """Copies the whole lines of a result file that another task or process writes.

    The file has a temporary name until it is complete, and is written anew, with the same bytes, by the process that
    takes its job over. A reader that is slow slows nothing but this copy.

    Args: write: takes some lines; it may block.
    """

    def __init__(self, path: Path, write: Callable[[bytes], None]) -> None:
        self._paths = (path.with_name(path.name + ".part"), path)
        self._write = write
        self.written = 0  # bytes

    def read(self) -> bytes:
        """The next whole lines; empty: there are none yet."""
        for path in self._paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                return self._lines(fd)
            finally:
                os.close(fd)
        return b""

    def _lines(self, fd: int) -> bytes:
        data = os.pread(fd, PIECE_BYTES, self.written)
        while (
            len(data) >= PIECE_BYTES
            and b"\n" not in data
            and (more := os.pread(fd, len(data), self.written + len(data)))
        ):
            data += more  # one line is longer
        return data[: data.rfind(b"\n") + 1]

    async def copy(self) -> bool:
        """Copy what is there, and return whether that was something. Raises: OSError of the writer."""
        is_some = False
        while lines := self.read():
            await _in_thread(self._write, lines)
            self.written += len(lines)
            is_some = True
        return is_some


@contextlib.asynccontextmanager
async def followed(tail: ResultTail, stop: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Copy rows as they come until the context ends, and then what is left of them.

    Args: stop: is called once if nobody reads the rows any more, before that is raised at the end.
    Raises: BrokenPipeError.
    """
    ended = asyncio.Event()
    copying = asyncio.create_task(_follow(tail, stop, ended))
    try:
        yield
        ended.set()
        await copying
    finally:
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)


async def _follow(tail: ResultTail, stop: Callable[[], Awaitable[object]], ended: asyncio.Event) -> None:
    try:
        while not ended.is_set():
            await tail.copy()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), POLL_S)
    except BrokenPipeError:
        if not ended.is_set():
            await stop()
        raise


def writer_to_stdout() -> Callable[[bytes], None] | None:
    """What writes to standard output without its buffer, whose lock a blocked write would hold; None: it is no file."""
    try:
        sys.stdout.flush()
        fd = sys.stdout.fileno()
    except OSError:
        return None

    def write(lines: bytes) -> None:
        view = memoryview(lines)
        while view:
            view = view[os.write(fd, view) :]

    return write


async def _in_thread(write: Callable[[bytes], None], lines: bytes) -> None:
    """Call a function that may block for ever. The end of this program does not wait for its thread."""
    loop = asyncio.get_running_loop()
    written: asyncio.Future[None] = loop.create_future()

    def call() -> None:
        try:
            write(lines)
        except OSError as error:
            failure: OSError | None = error
        else:
            failure = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, written, failure)

    threading.Thread(target=call, name="standard output", daemon=True).start()
    await written


def _settle(written: asyncio.Future[None], failure: OSError | None) -> None:
    if written.done():
        return
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
