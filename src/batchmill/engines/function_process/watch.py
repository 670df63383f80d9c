"""Limits that a function's process cannot keep by itself: how long a call may take, how much memory it may hold."""

from __future__ import annotations

import asyncio
import logging
import time

from batchmill.engines.function_process.process import Process
from batchmill.engines.function_process.work import hung, stuffed
from batchmill.models.function_child import Call
from batchmill.types import ModelSpec

log = logging.getLogger("batchmill.functions")

TICK_S = 0.05
LOG_TICKS = 20  # between two looks at the size of the log
GRACE_S = 0.5  # an async call whose time is up is told so, and may end by itself


class Watch:
    """
    Args:
        is_async: calls can be given up without killing the process.
    """

    def __init__(self, model: ModelSpec, process: Process, *, is_async: bool) -> None:
        self._process = process
        self._limit_s, self._memory_bytes = model.limits.attempt_timeout_s, model.limits.memory_bytes
        self._grace_s = GRACE_S if is_async else 0.0
        self._since: dict[Call, float] = {}  # calls that are running -> when they were first seen to
        self._leaving: dict[int, float] = {}  # Asks whose time is up -> how long a call of theirs may take

    async def run(self) -> None:
        """Until cancelled."""
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            self.look(time.monotonic())
            ticks += 1
            if ticks % LOG_TICKS == 0:
                try:
                    await self._bound_log()
                except OSError as error:  # limits of calls are kept all the same
                    log.warning("a log of a function cannot be bounded: %s", error)

    async def _bound_log(self) -> None:
        child = self._process.child
        if child is not None and child.is_alive and child.log.is_full():
            await asyncio.to_thread(child.log.rotate)
        if child is not None and self._process.calls.is_full():
            await asyncio.to_thread(self._process.calls.rotate)

    def look(self, now: float) -> None:
        """Tell those whose time is up; replace the process where a call does not end, or holds too much."""
        child = self._process.child
        running = child.blamed() if child is not None and self._process.is_up else []
        self._expire(now, {call[0] for call in running})
        if child is None or not self._process.is_up:
            self._since.clear()
            self._leaving.clear()
            return
        if not running:
            self._since.clear()
            self._leaving.clear()
        else:
            self._end_hung(running, now)
        if self._memory_bytes is not None and (held := child.resident_bytes()) > self._memory_bytes:
            self._process.replace(stuffed(self._memory_bytes, held))

    def _expire(self, now: float, running: set[int]) -> None:
        """Tell those whose time is up. What of theirs has not begun never does."""
        for work in [work for work in self._process.works.values() if work.deadline <= now]:
            if work.is_sent:
                self._leaving[work.id] = work.limit_s + self._grace_s
            self._process.drop(work)
            work.expire(was_called=work.id in running)

    def _end_hung(self, running: list[Call], now: float) -> None:
        """Whoever asked may have waited in line: only what one call itself takes says that it hangs.

        To replace the process for less would cost the next callers its setup, and make them late too.
        """
        self._since = {call: self._since.get(call, now) for call in running}
        ids = {call[0] for call in running}
        self._leaving = {id_: limit_s for id_, limit_s in self._leaving.items() if id_ in ids}
        late = [call for call, since in self._since.items() if now - since > self._limit_of(call[0])]
        if late:
            self._process.replace(hung(min(self._limit_of(call[0]) for call in late)), frozenset(late))

    def _limit_of(self, id_: int) -> float:
        """How long a call of this work may take: a row of a job may ask for less than the model allows."""
        work = self._process.works.get(id_)
        asked_s = work.asked.timeout_s if work is not None and work.is_train else None
        own_s = self._limit_s if asked_s is None else min(asked_s, self._limit_s)
        return self._leaving.get(id_, own_s)
