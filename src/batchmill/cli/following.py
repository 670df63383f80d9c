"""A job from its start to its end as the person at the terminal sees it, Ctrl-C included."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from msgspec import Struct

from batchmill.cli.displays import Display
from batchmill.errors import InvalidTransition
from batchmill.ports import Jobs
from batchmill.types import JobView

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Followed(Struct, frozen=True):
    """The last view of a job, and whether somebody at this terminal interrupted it."""

    view: JobView
    was_interrupted: bool = False


async def follow(jobs: Jobs, job_id: str, display: Display) -> Followed:
    """Show a job until it is paused or has ended.

    The first Ctrl-C (SIGTERM, SIGHUP) pauses it and waits; the second cancels this task, which stops at once.
    """
    interrupts = _Interrupts(jobs, job_id, display)
    view = None
    with interrupts.caught():
        async for view in jobs.watch(job_id):
            display.update(view)
        await interrupts.settle()
    assert view is not None, "watch() yields at least one view"
    return Followed(view, interrupts.count > 0)


class _Interrupts:
    def __init__(self, jobs: Jobs, job_id: str, display: Display) -> None:
        self._jobs, self._job_id, self._display = jobs, job_id, display
        self._task = asyncio.current_task()
        self._pausing: asyncio.Task[JobView] | None = None
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, self._interrupt)
        try:
            yield
        finally:
            for each in SIGNALS:
                loop.remove_signal_handler(each)

    def _interrupt(self) -> None:
        self.count += 1
        if self.count == 1:
            self._display.say("pausing: what is finished is being stored; Ctrl-C again stops at once")
            self._pausing = asyncio.get_running_loop().create_task(self._jobs.pause(self._job_id))
        elif self.count == 2 and self._task is not None:
            self._display.say("stopping at once")
            self._task.cancel()

    async def settle(self) -> None:
        """Let the pause that was asked for end; a job that ended first needs none."""
        if self._pausing is not None:
            with contextlib.suppress(InvalidTransition):
                await self._pausing
