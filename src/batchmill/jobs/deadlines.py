"""One task ends the jobs whose deadline has passed; it sleeps until the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from batchmill.errors import BatchmillError
from batchmill.ports import Clock

log = logging.getLogger("batchmill.jobs")

LONGEST_S = 60.0  # of one sleep: the clock on the wall may be set, and a machine may be suspended
AGAIN_S = 5.0  # before a job is tried again that could not be ended
BATCH_MAX = 100  # jobs that are ended at once


class Deadlines:
    """Args:
    upcoming: so many (job, deadline) as asked for, the next one first, of those that have not ended.
    expire: end a job early; it returns once that is written down, or too late.
    """

    def __init__(
        self,
        clock: Clock,
        upcoming: Callable[[int], Awaitable[Sequence[tuple[str, float]]]],
        expire: Callable[[str], Awaitable[None]],
    ) -> None:
        self._clock, self._upcoming, self._expire = clock, upcoming, expire
        self._changed = asyncio.Event()
        self._ending: dict[str, asyncio.Task[None]] = {}  # jobs on their way to their end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """A job came, or a deadline moved: look again."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                next_s = await self._end_due()
            except BatchmillError as error:
                log.warning("deadlines could not be read: %s", error.message)
                next_s = AGAIN_S
            if next_s is None:
                await self._changed.wait()
                continue
            sleep = asyncio.create_task(self._clock.sleep(min(next_s, LONGEST_S)))
            news = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({sleep, news}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleep.cancel()
                news.cancel()

    async def _end_due(self) -> float | None:
        """Begin to end what is due; seconds until there is more to do, None when there is no deadline."""
        known = await self._upcoming(BATCH_MAX + len(self._ending))
        now = self._clock.now()
        for job_id, deadline in known:
            if job_id in self._ending:
                continue
            if deadline > now:
                return deadline - now
            task = asyncio.create_task(self._end(job_id))
            self._ending[job_id] = task
        return None

    async def _end(self, job_id: str) -> None:
        try:
            await self._expire(job_id)
        except Exception as error:  # a full disk, a change of its state, or a bug of ours: told, and looked at again
            log.warning("the job %s could not be ended at its deadline: %s: %s", job_id, type(error).__name__, error)
            await self._clock.sleep(AGAIN_S)
        finally:
            del self._ending[job_id]
            self._changed.set()

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._ending.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
