"""Looks every few seconds whether a disk that was full has room again, and lets the jobs go on that wait for it.

Jobs that are to end while a provider does not answer are tried again in the same way, less often each time. Now and
then it has what is out of date forgotten.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.ports import Clock
from batchmill.store.ballast import Ballast

LOOK_S = 5.0
ROOM_BYTES = 16 * 1024 * 1024  # that must be free, the ballast apart, before a job is tried again
TIDY_S = 3600.0
AGAIN_MAX_S = 300.0  # between two tries of a job that stops each time


class Waiting(Struct, frozen=True):
    """A job that is paused until it can go on, and the folders it writes to."""

    job: str
    folders: list[Path]


class Caretaker:
    """Args:
    waiting: the jobs that are to be tried again where there is room.
    resume: let one go on.
    tidy: forget what is out of date.
    """

    def __init__(
        self,
        clock: Clock,
        ballast: Ballast,
        waiting: Callable[[], Awaitable[Sequence[Waiting]]],
        resume: Callable[[str], Awaitable[None]],
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock, self._ballast, self._waiting, self._resume = clock, ballast, waiting, resume
        self._tidy, self._tidied = tidy, -math.inf
        self._tries: dict[str, tuple[float, float]] = {}  # job -> (not before, and after that not for so long)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self.look()
                if self._clock.monotonic() - self._tidied >= TIDY_S:
                    await self._tidy()
                    self._tidied = self._clock.monotonic()
            except (BatchmillError, OSError):
                continue  # the disk or the database is in trouble still: whoever needs them says so

    async def look(self) -> None:
        """Let every job go on whose folders have room."""
        waiting = await self._waiting()
        now = self._clock.monotonic()
        self._tries = {job: tried for job, tried in self._tries.items() if tried[0] + 2 * AGAIN_MAX_S > now}
        for each in waiting:
            not_before, pause_s = self._tries.get(each.job, (now, LOOK_S))
            if now < not_before or not await asyncio.to_thread(_has_room, each.folders):
                continue
            self._tries[each.job] = now + pause_s, min(2 * pause_s, AGAIN_MAX_S)
            await asyncio.to_thread(self._ballast.reserve)
            await self._resume(each.job)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _has_room(folders: Sequence[Path]) -> bool:
    return all(shutil.disk_usage(folder).free >= ROOM_BYTES for folder in folders)
