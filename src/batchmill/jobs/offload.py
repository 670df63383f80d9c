"""Work that would hold up the owner's loop runs in children, see `jobs.offload_child`.

The function takes (order: bytes, progress: Callable[[float], None]) and returns bytes. Starting a child costs more than
most work of small jobs: `Children` keeps a few of them for what comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import BinaryIO

import msgspec

from batchmill.errors import BatchmillError
from batchmill.wire.raised import Raised

PROGRESS_S = 0.2
CHILDREN_MAX = 16  # that work at once: long work of some jobs does not hold up the short work of another
IDLE_MAX = 2  # kept for what comes next
IDLE_S = 60.0  # and for so long
GROWN_BYTES = 256 * 1024 * 1024  # a child that holds more memory after its work is not kept
LENGTH_BYTES = 8  # before what is sent
LAST_WORDS = 2000  # bytes of what a child that died had said
_ANSWER, _PROGRESS, _ERROR = b"A", b"P", b"E"

CHILD_DIED = "child_died"

Work = Callable[[bytes, Callable[[float], None]], bytes]
Offload = Callable[[str, bytes, Callable[[float], None]], Awaitable[bytes]]


async def offload(target: str, order: bytes, progress: Callable[[float], None]) -> bytes:
    """Run `target` in a child process of its own. Raises what it raised, or a BatchmillError when the child died.

    Cancelling kills the child.
    """
    child = await Child.start()
    try:
        return await child.run(target, order, progress)
    finally:
        await child.end()


class Child:
    """A child process that does one piece of work after another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._words = b""
        self._listening = asyncio.create_task(self._listen(process.stderr))
        self.kept: asyncio.TimerHandle | None = None  # until when it waits for work

    @classmethod
    async def start(cls) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "batchmill.jobs.offload_child", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        return cls(process)

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(LAST_WORDS):
            self._words = (self._words + data)[-LAST_WORDS:]

    async def run(self, target: str, order: bytes, progress: Callable[[float], None]) -> bytes:
        """As `offload`; the child can do more after it, unless this was cancelled or the child died."""
        with contextlib.suppress(ConnectionError):  # it has died: what it said tells why
            for part in (target.encode(), order):
                self._stdin.write(len(part).to_bytes(LENGTH_BYTES, "little") + part)
            await self._stdin.drain()
        while (message := await _read_message(self._stdout)) is not None:
            kind, data = message
            if kind == _PROGRESS:
                progress(msgspec.json.decode(data, type=float))
            elif kind == _ERROR:
                raise msgspec.json.decode(data, type=Raised).error()
            else:
                return data
        code = await self._process.wait()
        await self._listening
        last = self._words.decode(errors="replace").strip()
        raise BatchmillError(f"{target} ended with exit code {code} and no answer: {last}", code=CHILD_DIED)

    @property
    def is_fit(self) -> bool:
        """It can do more work, and does not hold on to too much memory."""
        if self._process.returncode is not None:
            return False
        try:
            with open(f"/proc/{self._process.pid}/statm", "rb") as file:
                pages = int(file.read().split()[1])
        except OSError:
            return False
        return pages * os.sysconf("SC_PAGESIZE") <= GROWN_BYTES

    async def end(self) -> None:
        """End it, whatever it does; its own children too. Returns when it has gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        await self._process.wait()
        await self._listening


class Children:
    """Children that are kept for the next piece of work. Owned by who closes it."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._idle: list[Child] = []  # the last one used comes last, and is used next
        self._ending: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(CHILDREN_MAX)
        self._is_closed = False

    async def offload(self, target: str, order: bytes, progress: Callable[[float], None]) -> bytes:
        """As the function `offload`, in a child that may have worked before.

        Where it dies the work is begun anew, once, in a fresh one: it was killed from outside, perhaps.
        """
        async with self._room:
            try:
                return await self._run_in(await self._take(), target, order, progress)
            except BatchmillError as error:
                if error.code != CHILD_DIED:
                    raise
            return await self._run_in(await Child.start(), target, order, progress)

    async def _run_in(self, child: Child, target: str, order: bytes, progress: Callable[[float], None]) -> bytes:
        """The answer of a child, which is kept afterwards if it is sound."""
        is_sound = False
        try:
            answer = await child.run(target, order, progress)
            is_sound = True
            return answer
        except BatchmillError as error:
            is_sound = error.code != CHILD_DIED
            raise
        finally:
            if is_sound:
                self._keep(child)
            else:
                await child.end()

    async def _take(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            assert child.kept is not None
            child.kept.cancel()
            if child.is_fit:
                return child
            self._end(child)
        return await Child.start()

    def _keep(self, child: Child) -> None:
        if self._is_closed or not child.is_fit:
            self._end(child)
            return
        child.kept = asyncio.get_running_loop().call_later(self._idle_s, self._drop, child)
        self._idle.append(child)
        if len(self._idle) > IDLE_MAX:
            self._drop(self._idle[0])

    def _drop(self, child: Child) -> None:
        """It has waited long enough."""
        self._idle.remove(child)
        if child.kept is not None:
            child.kept.cancel()
        self._end(child)

    def _end(self, child: Child) -> None:
        task = asyncio.create_task(child.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End those that wait for work; returns when they have gone. Those at work end with it."""
        self._is_closed = True
        for child in list(self._idle):
            self._drop(child)
        while self._ending:
            await asyncio.wait(self._ending)


async def _read_message(stream: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """(kind, data); None when the child has gone, be it in the midst of a message."""
    try:
        head = await stream.readexactly(1 + LENGTH_BYTES)
        return head[:1], await stream.readexactly(int.from_bytes(head[1:], "little"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# -- in the child -----------------------------------------------------------------------------------------------------


def serve(load: Callable[[str], Work]) -> None:
    """Do what is asked for on stdin, with what `load` finds under its name, until there is no more."""
    while (target := _read_part(sys.stdin.buffer)) is not None:
        order = _read_part(sys.stdin.buffer)
        if order is None:
            return
        _answer(target.decode(), order, load)


def _read_part(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    data = stream.read(length)
    return data if len(data) == length else None


def _answer(target: str, order: bytes, load: Callable[[str], Work]) -> None:
    """Tell the parent what became of one piece of work."""
    sent = 0.0

    def progress(share: float) -> None:
        nonlocal sent
        if time.monotonic() - sent >= PROGRESS_S:
            sent = time.monotonic()
            _send(_PROGRESS, msgspec.json.encode(share))

    try:
        data = load(target)(order, progress)
    except BatchmillError as error:
        _send(_ERROR, msgspec.json.encode(Raised.of(error)))
    except Exception as error:  # our own bug in a child: the parent must be told what it was
        traceback.print_exc()
        message = f"{target}: {type(error).__name__}: {error}"
        _send(_ERROR, msgspec.json.encode(Raised.of(BatchmillError(message))))
    else:
        _send(_ANSWER, data)


def _send(kind: bytes, data: bytes) -> None:
    sys.stdout.buffer.write(kind + len(data).to_bytes(LENGTH_BYTES, "little") + data)
    sys.stdout.buffer.flush()
