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
        places: how many may work at once.
        waiting_max: how many of one project may wait; None: what waits is bounded elsewhere.
        what: what they do, in a message: "previews".
    """

    def __init__(self, places: int, *, waiting_max: int | None = None, what: str = "") -> None:
        self._places, self._waiting_max, self._what = places, waiting_max, what
        self._each_max = max(1, places // 2)
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the project that has waited longest is first

    @contextlib.asynccontextmanager
    async def place(self, project: str) -> AsyncIterator[None]:
        """Hold a slot. Raises: Unavailable (`busy`) if too many of the project are waiting."""
        await self._acquire(project)
        try:
            yield
        finally:
            self._release(project)

    async def _acquire(self, project: str) -> None:
        if project not in self._waiting and self._may_run(project):
            self._running[project] += 1
            return
        queue = self._waiting.get(project, deque())
        if self._waiting_max is not None and len(queue) >= self._waiting_max:
            raise Unavailable(f"{len(queue)} {self._what} of this project wait already: try again", code="busy")
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._waiting[project] = queue
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it had just been given a place
                self._release(project)
            else:
                self._forget(project, turn)
            raise

    def _may_run(self, project: str) -> bool:
        return self._running.total() < self._places and self._running[project] < self._each_max

    def _release(self, project: str) -> None:
        self._running -= Counter([project])
        self._hand_on()

    def _hand_on(self) -> None:
        """Give a free slot to the project that holds the fewest; of several, to the longest waiting."""
        while able := [project for project in self._waiting if self._may_run(project)]:
            project = min(able, key=self._running.__getitem__)
            turn = self._waiting[project][0]
            self._forget(project, turn)
            if not turn.done():
                self._running[project] += 1
                turn.set_result(None)

    def _forget(self, project: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.pop(project)
        queue.remove(turn)
        if queue:
            self._waiting[project] = queue
