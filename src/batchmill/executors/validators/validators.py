"""Validates answers with users' classes, each in a process that may be killed. One class costs no other anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from batchmill.children.frames import FRAME, frame
from batchmill.errors import JobPaused
from batchmill.executors.validators.messages import (
    CHECK_FRAME,
    CHECKED_FRAME,
    LOAD_FRAME,
    LOAD_S,
    LOADED_FRAME,
    PROBLEM_CHARS_MAX,
    PROBLEMS_MAX,
    REFUSED_FRAME,
    REPLY_BYTES_MAX,
    SILENT_S,
    Checked,
    Loaded,
    LoadOrder,
    Refused,
)
from batchmill.models import redaction
from batchmill.models.worker_environment import USER_CODE, inherited
from batchmill.states import PauseReason
from batchmill.types import OutputSchema

PROGRAM = "batchmill.executors.validators.process"
BATCH_MAX, BATCH_BYTES = 256, 1024 * 1024  # answers that cross together
WAITING_MAX, WAITING_BYTES = 4096, 64 * 1024 * 1024  # answers that wait; beyond it a worker begins no row
READ_BYTES = 64 * 1024  # of replies, that are read ahead
END_S = 1.0  # for a process to end that has closed its pipes
FINISH_S = 30.0  # for what waits when an engine has ended
PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ValidatorFailed(JobPaused):
    """A class cannot validate answers: their job pauses."""

    def __init__(self, message: str) -> None:
        super().__init__(redaction.mask(message), code="validator_failed", reason=PauseReason.ENGINE_FAILED)


class _Died(Exception):
    """The process has ended or was killed; `why` in words."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


Verdict = Callable[[Checked | ValidatorFailed | None], None]  # None: it was withdrawn


class _Waiting(Struct, frozen=True, eq=False):
    text: bytes
    tell: Verdict
    job: str


class ValidatorProcess:
    """One process with one class."""

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.SubprocessTransport) -> None:
        self._process, self._transport = process, transport

    @classmethod
    async def start(cls, order: LoadOrder) -> tuple[ValidatorProcess, Loaded]:
        """Raises: ValidatorFailed, with the words of the code where that is what failed."""
        names = (*USER_CODE, *PYTHON)
        environ = {name: value for name, value in inherited().items() if name in names or name.startswith("LC_")}
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=READ_BYTES, loop=loop),
            sys.executable, "-P", "-m", PROGRAM, str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=environ, process_group=0,
        )  # fmt: skip
        self = cls(asyncio.subprocess.Process(transport, protocol, loop), transport)
        try:
            kind, payload = await self._ask(frame(LOAD_FRAME, order), LOAD_S)
            if kind == REFUSED_FRAME:
                raise ValidatorFailed(msgspec.msgpack.decode(payload, type=Refused).message)
            if kind != LOADED_FRAME:
                raise _Died("sent what nobody asked for")
            return self, msgspec.msgpack.decode(payload, type=Loaded)
        except (_Died, msgspec.MsgspecError) as error:
            await self.close()
            raise ValidatorFailed(f"loading {order.source}: its process {error}") from None
        except BaseException:
            await self.close()
            raise

    async def check(self, texts: Sequence[bytes], tell: Callable[[Checked], None]) -> None:
        """Check answers in order, and tell of each. Raises: _Died, once those before were told."""
        told = 0
        message = frame(CHECK_FRAME, texts)
        while told < len(texts):
            kind, payload = await self._ask(message, SILENT_S)
            message = b""
            try:
                found = msgspec.msgpack.decode(payload, type=list[Checked])
            except msgspec.MsgspecError:
                found = []
            if kind != CHECKED_FRAME or not 0 < len(found) <= len(texts) - told:
                raise _Died("sent what nobody asked for")
            for each in found:
                told += 1
                problems = [text[:PROBLEM_CHARS_MAX] for text in each.problems[:PROBLEMS_MAX]]
                tell(Checked(problems, each.is_final))

    async def _ask(self, message: bytes, patience_s: float) -> tuple[int, bytes]:
        """Send a message, and return the next frame. Raises: _Died."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            async with asyncio.timeout(patience_s):
                if message:
                    process.stdin.write(message)
                    await process.stdin.drain()
                size, kind = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
                if size > REPLY_BYTES_MAX:
                    raise _Died("sent too much")
                return kind, await process.stdout.readexactly(size)
        except TimeoutError:
            raise _Died(f"said nothing for {patience_s:g} s and was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _Died(await self._end()) from None

    async def _end(self) -> str:
        """How it has ended, in words. Its pipes say that it has, which they also do if its code has closed them."""
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:
            return "closed its pipes and was killed"
        return f"ended by {signal.Signals(-code).name if code < 0 else f'exit {code}'}"

    async def close(self) -> None:
        """End it with all that it has started. What has left its group may hold its pipes: their ends here are closed,
        or the process would count as running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._transport.close()
        await self._process.wait()


class _Class:
    """The answers that wait for one class, and its process."""

    def __init__(self, order: LoadOrder, moved: Callable[[int, int], None]) -> None:
        self._order, self._moved = order, moved
        self._waiting: deque[_Waiting] = deque()
        self._process: ValidatorProcess | None = None
        self._told = 0  # answers
        self._suspects = 0  # the first ones, of which one has ended a process: each is checked alone
        self.work: asyncio.Task[None] | None = None

    def add(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        if self.work is None or self.work.done():
            self.work = asyncio.create_task(self._run())

    def waits_for(self, job: str) -> bool:
        return any(each.job == job for each in self._waiting)

    def withdraw(self, job: str) -> None:
        """Check no more answers of a job; the process, which may have some of them, is replaced."""
        mine = [each for each in self._waiting if each.job == job]
        if not mine:
            return
        self._waiting = deque(each for each in self._waiting if each.job != job)
        if self.work is not None:
            self.work.cancel()
        self._suspects = 0
        self.work = asyncio.create_task(self._run(self.work))
        for each in mine:
            each.tell(None)
        self._moved(-len(mine), -sum(len(each.text) for each in mine))

    async def _run(self, before: asyncio.Task[None] | None = None) -> None:
        """Args: before: was cancelled, and its process is to be ended."""
        if before is not None:
            await asyncio.wait((before,))
            if self._process is not None:
                await self._process.close()
                self._process = None
        while self._waiting:
            try:
                if self._process is None:
                    self._process, _ = await ValidatorProcess.start(self._order)
            except (ValidatorFailed, OSError) as error:
                failure = error if isinstance(error, ValidatorFailed) else ValidatorFailed(str(error))
                while self._waiting:
                    self._tell(failure)
                return
            texts, told = self._next_texts(), self._told
            try:
                await self._process.check(texts, self._tell)
            except _Died as died:
                await self._process.close()
                self._process = None
                if len(texts) == 1:
                    why = f"the validator was stopped: with this answer its process {died.why}"
                    self._tell(Checked([why], is_final=True))
                else:
                    self._suspects = len(texts)
            self._suspects = max(0, self._suspects - (self._told - told))

    def _next_texts(self) -> list[bytes]:
        texts: list[bytes] = []
        size = 0
        if self._suspects:
            return [self._waiting[0].text]
        for each in self._waiting:
            size += len(each.text)
            if texts and (len(texts) == BATCH_MAX or size > BATCH_BYTES):
                break
            texts.append(each.text)
        return texts

    def _tell(self, verdict: Checked | ValidatorFailed) -> None:
        self._told += 1
        waiting = self._waiting.popleft()
        waiting.tell(verdict)
        self._moved(-1, -len(waiting.text))

    async def close(self) -> None:
        if self.work is not None:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
        if self._process is not None:
            await self._process.close()


class Validators:
    """The classes of a worker. Args: has_room: called when answers may come again."""

    def __init__(self, has_room: Callable[[], None]) -> None:
        self._has_room = has_room
        self._classes: dict[LoadOrder, _Class] = {}
        self._waiting = self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._waiting >= WAITING_MAX or self._bytes >= WAITING_BYTES

    def check(self, schema: OutputSchema, text: bytes, tell: Verdict, job: str = "") -> None:
        """Check an answer with the class of a schema; `tell` is called later, on this event loop. Args: job: its id."""
        order = LoadOrder(schema.validator, schema.code)
        found = self._classes.get(order)
        if found is None:
            found = self._classes[order] = _Class(order, self._moved)
        self._moved(1, len(text))
        found.add(_Waiting(text, tell, job))

    def waits_for(self, job: str) -> bool:
        """Whether answers of a job wait."""
        return any(each.waits_for(job) for each in self._classes.values())

    def withdraw(self, job: str) -> None:
        """Check no more answers of a job: each is told None."""
        for each in list(self._classes.values()):
            each.withdraw(job)

    async def checked(self, schema: OutputSchema, text: bytes) -> Checked:
        """As `check`. Raises: ValidatorFailed."""
        future: asyncio.Future[Checked | ValidatorFailed | None] = asyncio.get_running_loop().create_future()
        self.check(schema, text, lambda verdict: future.done() or future.set_result(verdict))
        verdict = await future
        if isinstance(verdict, ValidatorFailed):
            raise verdict
        assert verdict is not None, "only answers with a job are withdrawn"
        return verdict

    def _moved(self, answers: int, size: int) -> None:
        was_full = self.is_full
        self._waiting += answers
        self._bytes += size
        if was_full and not self.is_full:
            self._has_room()

    async def finish(self) -> None:
        """Return when no answer waits, or time is up."""
        if works := [each.work for each in self._classes.values() if each.work is not None]:
            await asyncio.wait(works, timeout=FINISH_S)

    async def close(self) -> None:
        """End all processes. What waits is told nothing."""
        for each in self._classes.values():
            await each.close()
        self._classes.clear()
