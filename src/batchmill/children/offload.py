"""Offload: runs work that would block an event loop in child processes, see `children.child`.

The function takes (order: bytes, progress: Callable[[float], None]) and returns bytes. Starting a child costs more than
most work of small jobs: `Children` keeps a few of them for what comes next. `Programs` does so for work of callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from batchmill.children.bounds import ResourceLimits, said_too_much, took_too_long, took_too_much
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.process_end import end_reading, kill_group
from batchmill.children.serving import ANSWER, BEGUN, ERROR, FULL, LENGTH_BYTES, PROGRESS
from batchmill.errors import BatchmillError
from batchmill.models.worker_environment import of_helpers
from batchmill.object_store.credentials import variables_of
from batchmill.wire.error_statuses import Raised

DOWNLOADS_MAX = 8  # besides, half of them for one project
CHILDREN_MAX = 16  # that work at once, half of them for one project: its long work holds up no other's
IDLE_MAX = 2  # kept for what comes next
IDLE_S = 60.0  # and for so long
GROWN_BYTES = 256 * 1024 * 1024  # a child that holds more memory after its work is not kept
END_S = 2.0  # a child that has closed its socket may take so long to be gone
LAST_WORDS = 2000  # bytes of what a child that died had said
PIECE_BYTES = 256 * 1024  # sent or read at once; the loop runs other tasks in between
START_S = 60.0  # for a child to start, to find its work and to read its order

CHILD_DIED = "child_died"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Offload(Protocol):
    """`Children.offload`."""

    def __call__(
        self, target: str, order: bytes, progress: Callable[[float], None], *, project: str = "", stores: bool = False,
        downloads: bool = False,
    ) -> Awaitable[bytes]: ...  # fmt: skip


async def offload(target: str, order: bytes, progress: Callable[[float], None], *, stores: bool = False) -> bytes:
    """Run `target` in a child process of its own. Raises what it raised, or a BatchmillError when the child died.

    Cancelling kills the child.

    Args: stores: it gets the variables that object stores are reached with.
    """
    child = await Child.start()
    try:
        return await child.run(target, order, progress, stores=stores)
    finally:
        await child.end()


async def _opened(ours: contextlib.ExitStack, its: contextlib.ExitStack) -> tuple[Stream, socket.socket]:
    """Both ends of a socket pair, each closed by its stack."""
    own, other = socket.socketpair()
    its.enter_context(other)
    with contextlib.ExitStack() as unless_opened:
        unless_opened.enter_context(own)
        stream = await asyncio.open_unix_connection(sock=own)
        unless_opened.pop_all()
    ours.callback(stream[1].transport.abort)
    return stream, other


class Child:
    """A child process that does one piece of work after another."""

    def __init__(self, process: asyncio.subprocess.Process, speech: Stream, errors: Stream) -> None:
        self._process = process
        self._reader, self._writer = speech
        self._words = b""
        self._listening = asyncio.create_task(self._listen(errors))
        self._gone = asyncio.create_task(self._until_gone([speech[1], errors[1]]))
        self.kept: asyncio.TimerHandle | None = None  # until when it waits for work

    @classmethod
    async def start(cls, environ: Mapping[str, str] | None = None, expected: str = "") -> Child:
        """
        Args:
            environ: instead of what any child gets of this process's own: `models.worker_environment`.
            expected: MODULE:FUNCTION that it imports while it waits for work; empty: none.
        """
        variables = of_helpers(os.environ) if environ is None else dict(environ)
        with contextlib.ExitStack() as its, contextlib.ExitStack() as unless_started:
            speech, its_speech = await _opened(unless_started, its)
            errors, its_errors = await _opened(unless_started, its)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "batchmill.children.child", str(os.getpid()), expected,
                stdin=its_speech, stdout=its_speech, stderr=its_errors, start_new_session=True, env=variables,
            )  # fmt: skip
            unless_started.pop_all()  # nothing is awaited after this: a cancelled caller leaves no child
        return cls(process, speech, errors)

    async def _listen(self, errors: Stream) -> None:
        reader, writer = errors
        try:
            while data := await reader.read(LAST_WORDS):
                self._words = (self._words + data)[-LAST_WORDS:]
        except ConnectionError:
            pass  # it has said all that it had to say
        finally:
            writer.transport.abort()

    async def _until_gone(self, writers: Sequence[asyncio.StreamWriter]) -> int:
        code = await self._process.wait()
        kill_group(self._process.pid)  # what it had started holds its sockets too
        for writer in writers:
            if writer.transport.get_write_buffer_size():  # the child does not read the rest of its order
                writer.transport.abort()
            elif not writer.transport.is_closing():
                end_reading(writer.get_extra_info("socket"))
        return code

    async def _exit_code(self) -> int:
        """The exit code of a child that has closed its socket; it is killed if it does not end."""
        await asyncio.wait([self._gone], timeout=END_S)
        if not self._gone.done():
            kill_group(self._process.pid)
        return await asyncio.shield(self._gone)

    async def run(self, target: str, order: bytes, progress: Callable[[float], None], *, stores: bool = False) -> bytes:
        """As `offload`; the child can be used again, unless this was cancelled or the child died."""
        await self._ask(target, b"", order, variables_of(os.environ) if stores else {})
        while (message := await self._read()) is not None:
            kind, length = message
            data = await self._read_data(length)
            if data is None:
                break
            if kind == PROGRESS:
                progress(msgspec.json.decode(data, type=float))
            elif kind == ERROR:
                raise msgspec.json.decode(data, type=Raised).error()
            elif kind == ANSWER:
                return data
        raise await self._died(target)

    async def run_within(self, target: str, order: bytes, bounds: ResourceLimits, work: str) -> bytes:
        """As `run`, for a caller's program with limits. The time counts from when the child has the order.

        Args:
            work: its name in messages.

        Raises: TooComplex at a bound; end the child then.
        """
        begun = False
        try:
            async with asyncio.timeout(START_S) as limit:
                await self._ask(target, msgspec.json.encode(bounds), order)
                while (message := await self._read()) is not None:
                    kind, length = message
                    if kind == BEGUN:
                        begun = True
                        limit.reschedule(asyncio.get_running_loop().time() + bounds.wall_s)
                    if length > bounds.answer_bytes:
                        raise said_too_much(work, bounds.answer_bytes)
                    data = await self._read_data(length)
                    if data is None:
                        break
                    if kind == FULL:
                        raise took_too_much(work, bounds.memory_bytes)
                    if kind == ERROR:
                        raise msgspec.json.decode(data, type=Raised).error()
                    if kind == ANSWER:
                        return data
        except TimeoutError:
            if begun:
                raise took_too_long(work, bounds.wall_s) from None
            raise BatchmillError(f"a child process did not begin {target} in {START_S:g} s", code=CHILD_DIED) from None
        code = await self._exit_code()
        if code == -signal.SIGPROF:
            raise took_too_long(work, bounds.cpu_s)
        if begun and code in (-signal.SIGABRT, -signal.SIGSEGV):  # of libraries that have no memory left
            raise took_too_much(work, bounds.memory_bytes)
        raise await self._died(target)

    async def _ask(self, target: str, bounds: bytes, order: bytes, variables: Mapping[str, str] | None = None) -> None:
        with contextlib.suppress(ConnectionError):  # it has died: what it said tells why
            for part in (target.encode(), bounds, msgspec.json.encode(variables or {}), order):
                self._writer.write(len(part).to_bytes(LENGTH_BYTES, "little"))
                view = memoryview(part)
                for at in range(0, len(part), PIECE_BYTES):
                    self._writer.write(view[at : at + PIECE_BYTES])
                    await self._writer.drain()
            await self._writer.drain()

    async def _read(self) -> tuple[bytes, int] | None:
        """The kind and length of a message; None if the child has ended."""
        try:
            head = await self._reader.readexactly(1 + LENGTH_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return head[:1], int.from_bytes(head[1:], "little")

    async def _read_data(self, length: int) -> bytes | None:
        """The data of a message; None if the child ended in the middle of it."""
        pieces = []
        while length > 0:
            try:
                piece = await self._reader.read(min(length, PIECE_BYTES))
            except ConnectionError:
                return None
            if not piece:
                return None
            pieces.append(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _died(self, target: str) -> BatchmillError:
        code = await self._exit_code()
        await asyncio.shield(self._listening)
        last = self._words.decode(errors="replace").strip()
        return BatchmillError(f"{target} ended with exit code {code} and no answer: {last}", code=CHILD_DIED)

    def holds_at_most(self, size_bytes: int) -> bool:
        """Whether the child can be used again and holds no more memory than this."""
        if self._process.returncode is not None:
            return False
        try:
            with open(f"/proc/{self._process.pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
        except OSError:
            return False
        return pages * os.sysconf("SC_PAGESIZE") <= size_bytes

    async def end(self) -> None:
        """Kill the child with its own children. Returns when they have ended."""
        if not self._gone.done():
            kill_group(self._process.pid)
        self._writer.transport.abort()
        await asyncio.shield(self._gone)
        await asyncio.shield(self._listening)


class Warm:
    """Idle children that wait for work. Its owner closes it."""

    def __init__(
        self,
        *,
        idle_s: float = IDLE_S,
        idle_max: int = IDLE_MAX,
        environ: Callable[[], Mapping[str, str]] = lambda: of_helpers(os.environ),
    ) -> None:
        """Args: environ: of a child that is started now."""
        self._idle_s, self._idle_max, self._environ = idle_s, idle_max, environ
        self._idle: list[Child] = []  # the last one used comes last, and is used next
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def take(self, grown_bytes: int) -> Child:
        """An idle child that holds no more memory than this, or a new one."""
        while self._idle:
            child = self._idle.pop()
            assert child.kept is not None
            child.kept.cancel()
            if child.holds_at_most(grown_bytes):
                return child
            self.end(child)
        return await self.start()

    async def start(self, expected: str = "") -> Child:
        return await Child.start(self._environ(), expected)

    def keep(self, child: Child, grown_bytes: int) -> None:
        """Keep a child for more work, unless it holds more memory than this."""
        if self._is_closed or not child.holds_at_most(grown_bytes):
            self.end(child)
            return
        child.kept = asyncio.get_running_loop().call_later(self._idle_s, self._drop, child)
        self._idle.append(child)
        if len(self._idle) > self._idle_max:
            self._drop(self._idle[0])

    def _drop(self, child: Child) -> None:
        """End a child that has been idle for too long."""
        self._idle.remove(child)
        if child.kept is not None:
            child.kept.cancel()
        self.end(child)

    def end(self, child: Child) -> None:
        task = asyncio.create_task(child.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End idle children; return when they have ended. Busy ones end with their work."""
        self._is_closed = True
        for child in list(self._idle):
            self._drop(child)
        while self._ending:
            await asyncio.wait(self._ending)


class Children:
    """Runs work in children that are reused. Its owner closes it.

    Args: more: names of variables that their work needs besides those that any child gets: `models.worker_environment`.
    """

    def __init__(self, *, idle_s: float = IDLE_S, more: Iterable[str] = ()) -> None:
        names = tuple(more)
        self._warm = Warm(idle_s=idle_s, environ=lambda: of_helpers(os.environ, names))
        self._slots, self._downloads = FairSemaphore(CHILDREN_MAX), FairSemaphore(DOWNLOADS_MAX)

    async def prepare(self, target: str) -> None:
        """Start a child that waits for work, and imports `target` meanwhile. Raises: OSError."""
        self._warm.keep(await self._warm.start(target), GROWN_BYTES)

    async def offload(
        self, target: str, order: bytes, progress: Callable[[float], None], *, project: str = "", stores: bool = False,
        downloads: bool = False,
    ) -> bytes:  # fmt: skip
        """As the function `offload`, in a child that may be reused.

        Args: project: whose work it is. downloads: it may wait for a stranger's server for hours: it has a slot of its
        own kind, and keeps nobody's results waiting.

        Where it dies the work is begun anew, once, in a fresh one: it was killed from outside, perhaps.
        """
        async with (self._downloads if downloads else self._slots).slot(project):
            try:
                return await self._run_in(await self._warm.take(GROWN_BYTES), target, order, progress, stores)
            except BatchmillError as error:
                if error.code != CHILD_DIED:
                    raise
            return await self._run_in(await self._warm.start(), target, order, progress, stores)

    async def _run_in(
        self, child: Child, target: str, order: bytes, progress: Callable[[float], None], stores: bool
    ) -> bytes:
        """Run work in a child, and keep the child if it is intact."""
        is_sound = False
        try:
            answer = await child.run(target, order, progress, stores=stores)
            is_sound = True
            return answer
        except BatchmillError as error:
            is_sound = error.code != CHILD_DIED
            raise
        finally:
            if is_sound:
                self._warm.keep(child, GROWN_BYTES)
            else:
                await child.end()

    async def close(self) -> None:
        """End those that wait for work; returns when they have gone. Those at work end with it."""
        await self._warm.close()
