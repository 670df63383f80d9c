"""The live process of a function. A dead one is replaced, and open requests are repeated.

Rows whose call was running are to blame. Where several were, they are asked again in smaller parts with nothing beside
them, until the one that kills is alone; each ProcessWork decides itself what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.engines import clock
from batchmill.errors import ModelFailed
from batchmill.function_runtime.frames import pack_text
from batchmill.function_runtime.shared_memory import MemoryWriter
from batchmill.models import secrets
from batchmill.models.call_log import CallLog
from batchmill.models.function_child import MEMORY, FunctionChild
from batchmill.models.function_progress import NO_SLOT, Call
from batchmill.models.function_socket import Buffer, Frame
from batchmill.models.runtime_process import PreparedRuntime
from batchmill.types import BatchTimes, CallStats, Interface, ModelSpec
from batchmill.wire.calls import CallError, FunctionResults, ParsedCalls

# Why a process was to be replaced.
CRASHED, HUNG, MEMORY_LIMIT, GPU_LOST = "worker_crashed", "timeout", "memory_limit", "gpu_lost"
DEATHS_MAX = 3  # of processes that a row may cause
GPU_DEATHS_MAX = 2  # the process has said why it ends, so fewer are needed to be sure
MESSAGE_CHARS_MAX = 2048  # of a process's last words
# What reading one may raise.
INVALID_FRAME = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
OWN_IDS = 1 << 48  # ids from here on are ours; below are those of live calls
NOBODY = -1

ASK = b'{"kind":"ask","id":%d,"rows":%d,"layout":"%b","from_job":%b,"staged":%b,"exact":%b,"slot":%d,"of":%b}'
WORDS = {True: b"true", False: b"false"}


Origin = tuple[str, str] | tuple[str, str, int] | tuple[()]  # project, request or job, number of the first row
_json = msgspec.json.encode


class ProcessFault(Struct, frozen=True):
    """The reason for the end of a process."""

    code: str  # CRASHED, HUNG, MEMORY_LIMIT, GPU_LOST
    message: str
    caused_by: int = NOBODY  # the request whose exception the message ends with: no other caller may read it
    exception: str = ""

    def told_to(self, id_: int) -> ProcessFault:
        """The fault as one request may know it."""
        return ProcessFault(self.code, f"{self.message}: {self.exception}" if id_ == self.caused_by else self.message)

    @property
    def deaths_max(self) -> int:
        """So many of these deaths, with nothing beside it, are the end of a row."""
        return {HUNG: 1, GPU_LOST: GPU_DEATHS_MAX}.get(self.code, DEATHS_MAX)

    def error(self) -> ModelFailed:
        return ModelFailed(self.message, code=self.code)


def hung(seconds: float) -> ProcessFault:
    return ProcessFault(HUNG, f"the function took longer than {seconds:g} s")


def no_answer(seconds: float) -> ProcessFault:
    return ProcessFault(HUNG, f"there was no answer in {seconds:g} s: the function was busy, or being started")


def memory_exceeded(limit: int, held: int) -> ProcessFault:
    text = f"the function's process held {held / 2**20:.0f} MiB, more than its limit of {limit / 2**20:.0f} MiB"
    return ProcessFault(MEMORY_LIMIT, text)


def silent(seconds: float) -> ProcessFault:
    return ProcessFault(CRASHED, f"the function's process ran none of its calls and sent nothing for {seconds:g} s")


def gpu_lost(id_: object, exception: object) -> ProcessFault:
    """Args: from the process; None if several requests shared the call."""
    fault = ProcessFault(GPU_LOST, "the function's process cannot use its GPU any more after this call")
    if isinstance(id_, int) and isinstance(exception, str):
        return msgspec.structs.replace(fault, caused_by=id_, exception=exception[:MESSAGE_CHARS_MAX])
    return fault


class Blame(Struct, frozen=True):
    """How a piece of work was involved in the end of a process."""

    fault: ProcessFault
    rows: list[int]  # whose call had begun
    is_alone: bool  # nothing else was called with it


class ProcessWork:
    """Base of LiveCall, RowBatch, FormRow and Stream."""

    __slots__ = ("parsed", "deadline", "id", "is_exact", "is_sent", "is_suspect", "origin", "slot", "strikes")
    limit_s = math.inf  # what its deadline was made of
    from_job = False
    is_staged = False  # its results come in several frames, as its rows end
    holds_up = True  # counts as running while the process has it

    def __init__(self, id_: int, parsed: ParsedCalls, *, is_exact: bool = False) -> None:
        self.id, self.parsed, self.is_exact = id_, parsed, is_exact
        self.origin: Origin = ()  # (): unknown
        self.deadline = math.inf  # monotonic: a caller waits so long
        self.is_sent = False
        self.slot = NO_SLOT  # where the process that has it notes that it has begun, if it has a deadline
        self.strikes = 0  # unexplained deaths of processes that had it
        self.is_suspect = False  # of too many of them: what is left of it runs alone

    def frame(self, memory: MemoryWriter | None) -> list[Buffer]:
        """The pieces of its frame, the large buffers in `memory`."""
        parsed = self.parsed
        words = WORDS[self.from_job], WORDS[self.is_staged], WORDS[self.is_exact]
        text = ASK % (self.id, parsed.rows, parsed.layout.encode(), *words, self.slot, _json(self.origin))
        return pack_text(text, [parsed.calls, *parsed.buffers] if parsed.buffers else (parsed.calls,), memory)

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        """Handle a `results` or `piece` frame. True: it was the last."""
        raise NotImplementedError

    def again(self) -> ProcessWork | None:
        """What to send to the next process after a death that was not this work's fault; None: nothing is left."""
        return self

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        """(what to send again, what to send again to run alone)."""
        raise NotImplementedError

    def note(self, calls: CallLog | None, text: str, row: int | None = None) -> None:
        """Log the result of the work, or of one of its rows, with its version."""
        if calls is None:
            return
        match self.origin:
            case (project, request):
                calls.write(text, project, request)
            case (project, job, first):
                calls.write(text, project, job if row is None else f"{job} row {first + row}")

    def expire(self, *, was_called: bool) -> None:
        """Report that its deadline has passed. `was_called`: the function has been called with rows of it."""

    def fail(self, error: ModelFailed) -> None:
        """Fail the work: no process will run it."""
        raise NotImplementedError


def results_of(meta: dict[str, Any], buffers: list[Buffer]) -> FunctionResults:
    """A `results` frame as the forms read it."""
    errors = {int(row): CallError(*error) for row, error in meta["errors"].items()} if meta.get("errors") else {}
    if meta["layout"] == "columns":
        return FunctionResults(columns=bytes(buffers[0]), buffers=buffers[1:], errors=errors)
    return FunctionResults(bytes(buffers[0]), b"", buffers[1:], errors)


class Counts:
    """Counters of one engine. Durations are in nanoseconds."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.succeeded = self.succeeded_ns = self.failed = self.failed_ns = 0
        self._rows = self._executions = self._queue_ns = 0
        self._sizes: dict[int, list[int]] = {}  # batch size -> executions and what they took
        self._is_new = False

    def called(self, meta: dict[str, Any]) -> None:
        """Count the calls that a `results` frame reports."""
        self._is_new = True
        self._queue_ns += meta["queue_ns"]
        for size, executions, input_ns, infer_ns, output_ns in meta["ran"]:
            self._rows += size * executions
            self._executions += executions
            had = self._sizes.get(size)
            if had is None:
                self._sizes[size] = [executions, input_ns, infer_ns, output_ns]
            else:
                had[0] += executions
                had[1] += input_ns
                had[2] += infer_ns
                had[3] += output_ns

    def answered(self, is_ok: bool, took_ns: int, requests: int = 1) -> None:
        """Count answered requests, or rows of jobs; `took_ns` for each."""
        self._is_new = True
        if is_ok:
            self.succeeded += requests
            self.succeeded_ns += took_ns * requests
        else:
            self.failed += requests
            self.failed_ns += took_ns * requests

    def take(self) -> CallStats | None:
        """The counters since the last call; None: nothing new."""
        if not self._is_new:
            return None
        batches = [BatchTimes(size, *self._sizes[size]) for size in sorted(self._sizes)]
        taken = CallStats(
            rows=self._rows, executions=self._executions, succeeded=self.succeeded, succeeded_ns=self.succeeded_ns,
            failed=self.failed, failed_ns=self.failed_ns, queue_ns=self._queue_ns, batches=batches, last_at=clock.now(),
        )  # fmt: skip
        self._clear()
        return taken


SETUP_KILLS_MAX = 3  # first starts that a signal ends, then the model is given up
STARTS_MAX = 4  # in a row that fail, then the model is given up
IDLE_DEATHS_MAX = 5  # in a row while nothing was called, and nothing was answered between
STRIKES_MAX = 2  # unexplained deaths that a work may have been in, then it is asked alone
BLAMED_DEATHS_MAX = 30  # in a row by rows of jobs, and nothing was answered between: it is not the rows
BACKOFF_S = 0.1  # doubled with each
BACKOFF_MAX_S = 10.0


class Process:
    """
    Args:
        counted: is called with the meta of every `results` frame.
    Concurrency: one event loop.
    """

    def __init__(self, model: ModelSpec, home: Path, counted: Callable[[dict[str, Any]], None]) -> None:
        assert model.function is not None, "a deployed function has a FunctionSpec"
        self._model, self._home, self._counted = model, home, counted
        folder = model.function.folder
        self.calls = CallLog(Path(folder).parent) if folder else None  # of a deployed version
        self.works: dict[int, ProcessWork] = {}
        self.child: FunctionChild | None = None
        self.note = ""
        self.failure: ModelFailed | None = None
        self.broken = asyncio.Event()  # `failure` says why
        self._waiting: deque[ProcessWork] = deque()  # until there is a process, or suspects have been
        self._suspects: deque[ProcessWork] = deque()
        self._running = 0  # works that the process has and that hold suspects up
        self._is_open = False  # a process is there, and works may go to it at once
        self.is_up = False
        self.reads = 0  # of its socket that brought frames
        self._fault: ProcessFault | None = None  # why we killed it
        self._hung: frozenset[Call] | None = None
        self._idle_deaths = self._blamed_deaths = 0
        self._replacing: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._prepared: PreparedRuntime | None = None

    def adopt(self, prepared: PreparedRuntime) -> None:
        """Use a process that was started ahead for the first start, if it fits."""
        self._prepared = prepared

    async def start(self) -> Interface:
        """Raises: ModelFailed, with the traceback."""
        self.note = f"setting up {self._model.source}"
        try:
            return await self._start_child()
        finally:
            await self._end_prepared()

    async def _start_child(self) -> Interface:
        """As `start`; a process that is killed while it sets up is started again."""
        for kills_left in reversed(range(SETUP_KILLS_MAX)):
            self.child = self._child()
            try:
                interface = await self.child.start()
            except ModelFailed:
                if not kills_left or not self.child.was_killed:
                    raise
                await self.child.stop(0)
            else:
                self._up(self.child)
                return interface
        raise AssertionError("the last start returns or raises")

    async def _end_prepared(self) -> None:
        """End the process that was started ahead, unless it was taken."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            await prepared.close()

    def _child(self) -> FunctionChild:
        isolation = secrets.isolation() if self._model.traits.isolates else None
        return FunctionChild(
            self._model, self._home, isolation=isolation, calls=self.calls, prepared=self._prepared
        )  # fmt: skip

    def _up(self, child: FunctionChild) -> None:
        child.on_frames, child.ended = self._receive, self._ended
        self.is_up = True
        self.note = ""
        self._pump()

    async def stop(self, grace_s: float) -> None:
        self._is_stopped = True
        self._is_open = self.is_up = False
        await self._end_prepared()
        if self._replacing is not None:
            self._replacing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replacing
        if self.child is not None:
            await self.child.stop(grace_s)
            self.child = None
        if self.calls is not None:
            self.calls.close()

    # -- works --------------------------------------------------------------------------------------------------------

    def begin(self, work: ProcessWork) -> None:
        """Send work, now or as soon as that is possible again."""
        if self.failure is not None:
            work.fail(self.failure)
            return
        self.works[work.id] = work
        if self._is_open:
            self._send(work)
        else:
            self._waiting.append(work)

    def repeat(self, again: ProcessWork | None, suspects: list[ProcessWork]) -> None:
        """Send work of a process that died; `suspects` one at a time and alone."""
        if again is not None:
            self.begin(again)
        if self.failure is None and suspects:
            self.works |= {work.id: work for work in suspects}
            self._suspects.extend(suspects)
            self._pump()

    def drop(self, work: ProcessWork) -> None:
        """Drop work whose caller has gone."""
        if self.works.pop(work.id, None) is None:
            return
        if work.is_sent:
            assert self.child is not None
            self.child.send({"kind": "abandon" if work.holds_up else "close", "id": work.id})
            self._left(work)
        else:
            for queue in (self._waiting, self._suspects):
                with contextlib.suppress(ValueError):
                    queue.remove(work)

    def _send(self, work: ProcessWork) -> None:
        assert self.child is not None and self.child.progress is not None
        work.is_sent = True
        work.slot = NO_SLOT if work.deadline == math.inf else self.child.progress.take_slot()
        self._running += work.holds_up
        self.child.write(work.frame(self.child.memory))

    def has_begun(self, work: ProcessWork) -> bool:
        """Whether the function has been called with rows of this work, by the process that has it."""
        if not work.is_sent or self.child is None or self.child.progress is None:
            return False
        return self.child.progress.has_begun(work.id, work.slot)

    def _left(self, work: ProcessWork) -> None:
        assert self.child is not None and self.child.progress is not None
        self.child.progress.return_slot(work.slot)
        work.is_sent = False
        self._running -= work.holds_up
        if not self._is_open:
            self._pump()

    def _pump(self) -> None:
        """Send waiting work: suspects one at a time and alone, then everything else."""
        if not self.is_up:
            return
        if self._suspects:
            self._is_open = False
            if not self._running:
                self._send(self._suspects.popleft())
            return
        if self._is_open or self._running:
            return  # open already, or a suspect is being run
        self._is_open = True
        while self._waiting:
            self._send(self._waiting.popleft())

    # -- what it says -------------------------------------------------------------------------------------------------

    @property
    def has_calls(self) -> bool:
        """Whether the process has calls that it has not answered."""
        return self._running > 0

    def _receive(self, frames: list[Frame]) -> None:
        self.reads += 1
        works = self.works
        for meta, buffers in frames:
            try:
                if meta["kind"] == "lost":
                    self.replace(gpu_lost(meta.get("id"), meta.get("message")))
                    return
                if meta["kind"] == "results":
                    self._counted(meta)
                    self._idle_deaths = self._blamed_deaths = 0
                work = works.get(meta["id"])
                is_last = work is not None and work.take(meta, buffers)
            except INVALID_FRAME as error:  # user code can write to the socket
                text = f"the function's process sent an invalid frame: {type(error).__name__}: {error}"
                self.replace(ProcessFault(CRASHED, text))
                return
            if work is not None and is_last:
                works.pop(work.id, None)
                self._left(work)

    def replace(self, fault: ProcessFault, hung: frozenset[Call] | None = None) -> None:
        """Kill the process. `hung`: the calls that are to blame; None: all that were running."""
        if self.is_up and self.child is not None and self._fault is None:
            self._fault, self._hung = fault, hung
            self.child.kill()

    # -- its end ------------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        if self._is_stopped:
            return
        assert self.child is not None
        self._is_open = self.is_up = False
        fault = self._fault or ProcessFault(CRASHED, f"the function's process died: {self.child.ending()}")
        blamed = [each for each in self.child.blamed() if self._hung is None or each in self._hung]
        had = [work for work in self.works.values() if work.is_sent]
        is_ours = fault.code in (HUNG, MEMORY_LIMIT) or self.child.exit_code == MEMORY
        self._fault = self._hung = None
        if not is_ours and not had and not blamed:
            self._idle_deaths += 1
        called = [work for work in had if work.holds_up]
        are_suspects = False
        if called and not is_ours and not blamed:
            blamed, are_suspects = self._unexplained(called)
        for id_ in {id_ for id_, _, _ in blamed if id_ in self.works}:
            self.works[id_].note(self.calls, fault.told_to(id_).message)
        self._settle(had, fault, blamed, are_suspects=are_suspects)
        if self._idle_deaths >= IDLE_DEATHS_MAX or self._blamed_deaths >= BLAMED_DEATHS_MAX:
            count = max(self._idle_deaths, self._blamed_deaths)
            text = f"{count} processes of {self._model.source} died in a row, the last with {self.child.ending()}"
            self._give_up(ModelFailed(f"{text}: see function.log"))
        self._replacing = asyncio.create_task(self._replace(self.child))
        self._replacing.add_done_callback(self._replaced)

    def _unexplained(self, called: list[ProcessWork]) -> tuple[list[Call], bool]:
        """(the work to blame for a death while nothing ran, whether all must be repeated alone)."""
        assert self.child is not None and self.child.progress is not None
        last = self.works.get(self.child.progress.last_called())
        if last is not None and last.is_sent:  # its result was lost
            return [(last.id, 0, last.parsed.rows)], False
        for work in called:
            work.strikes += 1
        if max(work.strikes for work in called) <= STRIKES_MAX:
            return [], False
        return [(work.id, 0, work.parsed.rows) for work in called if len(called) == 1], True

    def _settle(self, had: list[ProcessWork], fault: ProcessFault, blamed: list[Call], *, are_suspects: bool) -> None:
        """Decide what becomes of all work of the process. `are_suspects`: also of work without blame."""
        rows: dict[int, list[int]] = {}
        for id_, first, count in blamed:
            if id_ in self.works:
                rows.setdefault(id_, []).extend(range(first, first + count))
        if any(self.works[id_].from_job for id_ in rows):
            self._blamed_deaths += 1
        is_alone = len({id_ for id_, _, _ in blamed}) == 1
        again: list[ProcessWork] = []
        suspects: list[ProcessWork] = []
        for work in had:
            work.is_sent = False
            work.is_suspect = are_suspects and work.holds_up
            del self.works[work.id]
            if work.id in rows:
                more, alone = work.blame(Blame(fault.told_to(work.id), rows[work.id], is_alone))
                suspects += alone
            else:
                more = work.again()
            if more is not None:
                (suspects if are_suspects and more.holds_up else again).append(more)
        self._running = 0
        # Suspects of this death go before older ones: they are parts of what went first.
        self._suspects.extendleft(reversed(suspects))
        self._waiting.extendleft(reversed(again))
        self.works = {work.id: work for work in (*again, *suspects)} | self.works

    async def _replace(self, dead: FunctionChild) -> None:
        await dead.stop(0)
        failures = 0
        while self.failure is None:
            setbacks = max(self._idle_deaths - 1, failures)
            if setbacks:
                await asyncio.sleep(min(BACKOFF_S * 2**setbacks, BACKOFF_MAX_S))
            self.note = "starting the function again"
            self.child = self._child()
            try:
                await self.child.start()
            except ModelFailed as error:
                failures += 1
                await self.child.stop(0)
                if failures >= STARTS_MAX:
                    text = f"{self._model.source} was replaced and cannot be started again: {error.message}"
                    self._give_up(ModelFailed(text, code=error.code))
            else:
                self._up(self.child)
                return

    def _replaced(self, task: asyncio.Task[None]) -> None:
        """Fail all work if replacing the process has raised, so that no caller waits forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(ModelFailed(f"{self._model.source} cannot be replaced: {type(error).__name__}: {error}"))

    def _give_up(self, error: ModelFailed) -> None:
        self.failure = error
        works, self.works = self.works, {}
        self._waiting.clear()
        self._suspects.clear()
        for work in works.values():
            work.fail(error)
        self.broken.set()
