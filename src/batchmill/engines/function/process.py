"""The one living process of a function. It is replaced when it dies, and what it had not answered is asked again.

Rows whose call was running are to blame. Where several were, they are asked again in smaller groups with nothing beside
them, until the one that kills is alone; each Work says itself what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchmill.engines.function.work import CRASHED, Blame, Fault, Work
from batchmill.errors import ModelFailed
from batchmill.models import provisions
from batchmill.models.call_log import CallLog
from batchmill.models.function_child import MEMORY, Call, FunctionChild
from batchmill.models.function_socket import Frame
from batchmill.types import Interface, ModelSpec

STARTS_MAX = 4  # in a row that fail, then the model is given up
IDLE_DEATHS_MAX = 5  # in a row while nothing was called, and nothing was answered between
STRIKES_MAX = 2  # unexplained deaths that a work may have been in, then it is asked alone
BLAMED_DEATHS_MAX = 30  # in a row by rows of jobs, and nothing was answered between: it is not the rows
BACKOFF_S = 0.1  # doubled with each
BACKOFF_MAX_S = 10.0


class Process:
    """
    Args:
        counted: is told of what every `results` frame counts: its meta.
    Concurrency: one event loop.
    """

    def __init__(self, model: ModelSpec, home: Path, counted: Callable[[dict[str, Any]], None]) -> None:
        assert model.function is not None, "a deployed function has a FunctionSpec"
        self._model, self._home, self._counted = model, home, counted
        self.calls = CallLog(Path(model.function.folder).parent)
        self.works: dict[int, Work] = {}
        self.child: FunctionChild | None = None
        self.note = ""
        self.failure: ModelFailed | None = None
        self.broken = asyncio.Event()  # `failure` says why
        self._waiting: deque[Work] = deque()  # until there is a process, or suspects have been
        self._suspects: deque[Work] = deque()
        self._running = 0  # works that the process has and that hold suspects up
        self._is_open = False  # a process is there, and works may go to it at once
        self.is_up = False
        self._fault: Fault | None = None  # why we killed it
        self._hung: frozenset[Call] | None = None
        self._idle_deaths = self._blamed_deaths = 0
        self._replacing: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def start(self) -> Interface:
        """Raises: ModelFailed, with the traceback."""
        self.note = f"setting up {self._model.source}"
        self.child = self._child()
        interface = await self.child.start()
        self._up(self.child)
        return interface

    def _child(self) -> FunctionChild:
        return FunctionChild(self._model, self._home, isolation=provisions.isolation(), calls=self.calls)

    def _up(self, child: FunctionChild) -> None:
        child.heard, child.ended = self._hear, self._ended
        self.is_up = True
        self.note = ""
        self._pump()

    async def stop(self, grace_s: float) -> None:
        self._is_stopped = True
        self._is_open = self.is_up = False
        if self._replacing is not None:
            self._replacing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replacing
        if self.child is not None:
            await self.child.stop(grace_s)
            self.child = None
        self.calls.close()

    # -- works --------------------------------------------------------------------------------------------------------

    def begin(self, work: Work) -> None:
        """Ask it, at once or when that is possible again."""
        if self.failure is not None:
            work.fail(self.failure)
            return
        self.works[work.id] = work
        if self._is_open:
            self._send(work)
        else:
            self._waiting.append(work)

    def drop(self, work: Work) -> None:
        """Nobody wants it answered any more."""
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

    def _send(self, work: Work) -> None:
        assert self.child is not None
        work.is_sent = True
        self._running += work.holds_up
        self.child.write(work.frame())

    def _left(self, work: Work) -> None:
        work.is_sent = False
        self._running -= work.holds_up
        if not self._is_open:
            self._pump()

    def _pump(self) -> None:
        """Send what waits: suspects one at a time with nothing beside them, then everything else."""
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

    def _hear(self, frames: list[Frame]) -> None:
        works = self.works
        for meta, buffers in frames:
            if meta["kind"] == "results":
                self._counted(meta)
                self._idle_deaths = self._blamed_deaths = 0
            work = works.get(meta["id"])
            if work is not None and work.take(meta, buffers):
                works.pop(work.id, None)
                self._left(work)

    def replace(self, fault: Fault, hung: frozenset[Call] | None = None) -> None:
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
        fault = self._fault or Fault(CRASHED, f"the function's process died: {self.child.ending()}")
        blamed = [each for each in self.child.blamed() if self._hung is None or each in self._hung]
        had = [work for work in self.works.values() if work.is_sent]
        is_ours = self._fault is not None or self.child.exit_code == MEMORY
        self._fault = self._hung = None
        if not is_ours and not had and not blamed:
            self._idle_deaths += 1
        called = [work for work in had if work.holds_up]
        are_suspects = False
        if called and not is_ours and not blamed:
            blamed, are_suspects = self._unexplained(called)
        for id_ in {id_ for id_, _, _ in blamed if id_ in self.works}:
            self.works[id_].note(self.calls, fault.message)
        self._settle(had, fault, blamed, are_suspects=are_suspects)
        if self._idle_deaths >= IDLE_DEATHS_MAX or self._blamed_deaths >= BLAMED_DEATHS_MAX:
            count = max(self._idle_deaths, self._blamed_deaths)
            text = f"{count} processes of {self._model.source} died in a row, the last with {self.child.ending()}"
            self._give_up(ModelFailed(f"{text}: see function.log"))
        self._replacing = asyncio.create_task(self._replace(self.child))
        self._replacing.add_done_callback(self._replaced)

    def _unexplained(self, called: list[Work]) -> tuple[list[Call], bool]:
        """(who is to blame for a death while nothing was called, whether all are to be asked alone)."""
        assert self.child is not None
        last = self.works.get(self.child.last_called())
        if last is not None and last.is_sent:  # its result was lost
            return [(last.id, 0, last.asked.rows)], False
        for work in called:
            work.strikes += 1
        if max(work.strikes for work in called) <= STRIKES_MAX:
            return [], False
        return [(work.id, 0, work.asked.rows) for work in called if len(called) == 1], True

    def _settle(self, had: list[Work], fault: Fault, blamed: list[Call], *, are_suspects: bool) -> None:
        """Say of every work that the process had what becomes of it. `are_suspects`: also of those not blamed."""
        rows: dict[int, list[int]] = {}
        for id_, first, count in blamed:
            if id_ in self.works:
                rows.setdefault(id_, []).extend(range(first, first + count))
        if any(self.works[id_].is_train for id_ in rows):
            self._blamed_deaths += 1
        is_alone = len({id_ for id_, _, _ in blamed}) == 1
        again: list[Work] = []
        suspects: list[Work] = []
        for work in had:
            work.is_sent = False
            del self.works[work.id]
            if work.id in rows:
                more, alone = work.blame(Blame(fault, rows[work.id], is_alone))
                suspects += alone
            else:
                more = work.again()
            if more is not None:
                (suspects if are_suspects and more.holds_up else again).append(more)
        self._running = 0
        # Suspects of this death go before older ones: they are halves of what went first.
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
        """A bug of ours must not leave everybody waiting."""
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
