"""A semaphore shared by projects: none can hold all slots or block another with its queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from batchmill.errors import Unavailable


class FairSemaphore:
    """
    Args:
        slots: how many may work at once.
        waiting_max: how many of one project may wait; None: the queue is limited elsewhere.
        what: what uses the slots, for messages: "previews".
    """

    def __init__(self, slots: int, *, waiting_max: int | None = None, what: str = "") -> None:
        self._slots, self._waiting_max, self._what = slots, waiting_max, what
        self._each_max = max(1, slots // 2)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the project that has waited longest is first

    @contextlib.asynccontextmanager
    async def slot(self, project: str) -> AsyncIterator[None]:
        """Hold a slot. Raises: Unavailable (`busy`) if too many of the project are waiting."""
        await self._acquire(project)
        try:
            yield
        finally:
            self._release(project)

    def is_free(self, project: str) -> bool:
        """Whether `slot` would not wait."""
        return project not in self._waiting and self._may_run(project)

    async def _acquire(self, project: str) -> None:
        if self.is_free(project):
            self._running[project] += 1
            return
        queue = self._waiting.get(project, deque())
        if self._waiting_max is not None and len(queue) >= self._waiting_max:
            raise Unavailable(f"{len(queue)} {self._what} of this project already wait; try again", code="busy")
        waiter = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        self._waiting[project] = queue
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():  # it has just got a slot
                self._release(project)
            else:
                self._forget(project, waiter)
            raise

    def _may_run(self, project: str) -> bool:
        return self._running.total() < self._slots and self._running[project] < self._each_max

    def _release(self, project: str) -> None:
        self._running -= Counter([project])
        self._grant_slots()

    def _grant_slots(self) -> None:
        """Give a free slot to the project that holds the fewest; of several, to the longest waiting."""
        while candidates := [project for project in self._waiting if self._may_run(project)]:
            project = min(candidates, key=self._running.__getitem__)
            waiter = self._waiting[project][0]
            self._forget(project, waiter)
            if not waiter.done():
                self._running[project] += 1
                waiter.set_result(None)

    def _forget(self, project: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.pop(project)
        queue.remove(waiter)
        if queue:
            self._waiting[project] = queue
