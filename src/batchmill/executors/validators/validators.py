"""Validates answers with users' classes, each in a process that may be killed. One class costs no other anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from batchmill.children.process_end import VARIABLE, kill_marked
from batchmill.errors import JobPaused, ModelFailed
from batchmill.executors.validators.launch import command_of
from batchmill.executors.validators.messages import (
    LOAD_S,
    REFUSAL_CHARS_MAX,
    REPLY_BYTES_MAX,
    SILENT_S,
    Checked,
    Loaded,
    LoadOrder,
    Refused,
    check_frame,
    load_frame,
    read_checked,
)
from batchmill.executors.validators.waiting_answers import WaitingAnswers
from batchmill.function_runtime.answers import CHECKED_FRAME, FRAME, LOADED_FRAME, REFUSED_FRAME
from batchmill.models import redaction, secrets
from batchmill.models.runtime_process import new_mark
from batchmill.states import PauseReason
from batchmill.types import Isolation, OutputSchema

BATCH_MAX, BATCH_BYTES = 256, 1024 * 1024  # answers that cross together
PROCESSES_MAX = 16  # of the classes of a worker that check answers; others wait for a turn
IDLE_MAX = 4  # processes that have nothing to check
TURN_S = 5.0  # if others wait
CLASSES_MAX = 256  # that are kept although nothing waits for them
READ_BYTES = 64 * 1024  # of replies, that are read ahead
END_S = 1.0  # for a process to end that has closed its pipes
KILLED_S = 10.0  # for one that was killed: the kernel may hold it for longer, on a disk that does not answer
FINISH_S = 30.0  # for what waits when an engine has ended


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

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.SubprocessTransport, mark: str) -> None:
        """Args: mark: of it and what it starts, see `children.process_end`."""
        self._process, self._transport, self._mark = process, transport, mark

    @classmethod
    async def start(cls, order: LoadOrder, isolation: Isolation | None = None) -> tuple[ValidatorProcess, Loaded]:
        """Args: isolation: the sandbox of deployed code; None: none.

        Raises: ValidatorFailed, with the words of the code where that is what failed.
        """
        try:
            command = await asyncio.to_thread(command_of, order, isolation)
        except ModelFailed as error:
            raise ValidatorFailed(error.message) from None
        loop, mark = asyncio.get_running_loop(), new_mark()
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=READ_BYTES, loop=loop), *command.words,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={**command.environ, VARIABLE: mark}, cwd=command.folder, process_group=0,
            )  # fmt: skip
        except OSError as error:
            raise ValidatorFailed(f"the process of {order.source} cannot be started: {error}") from None
        self = cls(asyncio.subprocess.Process(transport, protocol, loop), transport, mark)
        try:
            kind, payload = await self._ask(load_frame(order), LOAD_S)
            if kind == REFUSED_FRAME:
                raise ValidatorFailed(msgspec.json.decode(payload, type=Refused).message[:REFUSAL_CHARS_MAX])
            if kind != LOADED_FRAME:
                raise _Died("sent what nobody asked for")
            return self, msgspec.json.decode(payload, type=Loaded)
        except (_Died, msgspec.MsgspecError, UnicodeDecodeError) as error:
            await self.close()
            raise ValidatorFailed(f"loading {order.source}: its process {error}") from None
        except BaseException:
            await self.close()
            raise

    async def check(self, texts: Sequence[bytes], tell: Callable[[Checked], None]) -> None:
        """Check answers in order, and report each. Raises: _Died, once those before were reported."""
        told = 0
        message = check_frame(texts)
        while told < len(texts):
            kind, payload = await self._ask(message, SILENT_S)
            message = b""
            try:
                found = read_checked(payload)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                found = []
            if kind != CHECKED_FRAME or not 0 < len(found) <= len(texts) - told:
                raise _Died("sent what nobody asked for")
            for each in found:
                told += 1
                tell(each)

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

    def kill(self) -> None:
        """Kill it with its group. What has left the group may hold its pipes: their ends here are closed, or the
        process would count as running.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._transport.close()

    async def close(self) -> None:
        """Kill it with all that it has started, which is known by its mark."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                await self._process.wait()
        await asyncio.to_thread(kill_marked, self._mark)


class _Slots:
    """Which classes of a worker have a process: they take turns if there are many."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PROCESSES_MAX)
        self._waiting = 0
        self._idle: dict[_Class, None] = {}  # without a turn, perhaps with a process; the oldest first

    @property
    def are_wanted(self) -> bool:
        return self._waiting > 0

    async def take(self, taker: _Class) -> None:
        """Return when the class may have a process."""
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self._idle.pop(taker, None)

    def give(self, giver: _Class) -> list[ValidatorProcess]:
        """End a turn. Returns the processes that are to be ended: no class has them any more."""
        self._idle[giver] = None
        over = max(0, len(self._idle) - (0 if self.are_wanted else IDLE_MAX))
        ended = list(self._idle)[:over]
        for each in ended:
            del self._idle[each]
        self._free.release()
        return [process for each in ended if (process := each.detach()) is not None]


class _Class:
    """The answers that wait for one class, and its process."""

    def __init__(self, order: LoadOrder, slots: _Slots, moved: Callable[[str, int, int], None]) -> None:
        self._order, self._slots, self._moved = order, slots, moved
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
        self._moved(job, -len(mine), -sum(len(each.text) for each in mine))

    async def _run(self, before: asyncio.Task[None] | None = None) -> None:
        """Args: before: was cancelled, and its process is to be ended."""
        try:
            if before is not None:
                await asyncio.wait((before,))
                await self._end_process()
            while self._waiting:
                await self._slots.take(self)
                try:
                    await self._take_turn(asyncio.get_running_loop().time() + TURN_S)
                finally:
                    ended = self._slots.give(self)
                    for each in ended:  # all of them, also if this is cancelled while it waits for one
                        each.kill()
                    for each in ended:
                        await each.close()
        except Exception as error:  # what waits would wait for ever
            failure = ValidatorFailed(f"{self._order.source} cannot validate: {type(error).__name__}: {error}")
            while self._waiting:
                self._tell(failure)
            raise

    @property
    def is_needed(self) -> bool:
        return bool(self._waiting) or self._process is not None or (self.work is not None and not self.work.done())

    def detach(self) -> ValidatorProcess | None:
        """Its process, which it has no longer."""
        process, self._process = self._process, None
        return process

    async def _end_process(self) -> None:
        if (process := self.detach()) is not None:
            await process.close()

    async def _take_turn(self, until: float) -> None:
        """Check answers until none waits, or the turn is over and other classes wait for one."""
        clock, has_begun = asyncio.get_running_loop().time, False
        while self._waiting and not (has_begun and self._slots.are_wanted and clock() >= until):
            has_begun = True
            try:
                if self._process is None:
                    self._process, _ = await ValidatorProcess.start(self._order, secrets.isolation())
            except (ValidatorFailed, OSError) as error:
                failure = error if isinstance(error, ValidatorFailed) else ValidatorFailed(str(error))
                while self._waiting:
                    self._tell(failure)
                return
            texts, told = self._next_texts(), self._told
            try:
                await self._process.check(texts, self._tell)
            except _Died as died:
                await self._end_process()
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
        self._moved(waiting.job, -1, -len(waiting.text))

    async def close(self) -> None:
        if self.work is not None:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
        await self._end_process()


def order_of(schema: OutputSchema) -> LoadOrder:
    version = schema.version
    if version is None:
        return LoadOrder(schema.validator, schema.code)
    return LoadOrder(schema.validator, schema.code, version.folder, version.python)


class Validators:
    """The classes of a worker. Args: hold: called with the jobs that begin no row, because their classes are slow."""

    def __init__(self, hold: Callable[[frozenset[str]], None]) -> None:
        self._answers = WaitingAnswers(hold)
        self._classes: dict[LoadOrder, _Class] = {}
        self._slots = _Slots()

    def check(self, schema: OutputSchema, text: bytes, tell: Verdict, job: str = "") -> None:
        """Check an answer with the class of a schema; `tell` is called later, on this event loop. Args: job: its id."""
        order = order_of(schema)
        found = self._classes.get(order)
        if found is None:
            if len(self._classes) >= CLASSES_MAX:
                self._classes = {key: each for key, each in self._classes.items() if each.is_needed}
            found = self._classes[order] = _Class(order, self._slots, self._answers.move)
        self._answers.move(job, 1, len(text))
        found.add(_Waiting(text, tell, job))

    def waits_for(self, job: str) -> bool:
        """Whether answers of a job wait."""
        return any(each.waits_for(job) for each in self._classes.values())

    def withdraw(self, job: str) -> None:
        """Check no more answers of a job: each gets None."""
        for each in list(self._classes.values()):
            each.withdraw(job)

    async def checked(self, schema: OutputSchema, text: bytes, job: str = "") -> Checked | None:
        """As `check`; None if it was withdrawn. Raises: ValidatorFailed."""
        future: asyncio.Future[Checked | ValidatorFailed | None] = asyncio.get_running_loop().create_future()
        self.check(schema, text, lambda verdict: future.done() or future.set_result(verdict), job)
        verdict = await future
        if isinstance(verdict, ValidatorFailed):
            raise verdict
        return verdict

    async def finish(self) -> None:
        """Return when no answer waits, or time is up."""
        if works := [each.work for each in self._classes.values() if each.work is not None]:
            await asyncio.wait(works, timeout=FINISH_S)

    async def close(self) -> None:
        """End all processes. What waits gets no verdict."""
        for each in self._classes.values():
            await each.close()
        self._classes.clear()
