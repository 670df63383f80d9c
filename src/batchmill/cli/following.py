"""A job from its start to its end as the person at the terminal sees it, Ctrl-C included."""

from __future__ import annotations

import asyncio
import contextlib

from msgspec import Struct

from batchmill.cli.displays import Display
from batchmill.cli.interrupts import Interrupts
from batchmill.errors import InvalidTransition
from batchmill.ports import Jobs
from batchmill.types import JobView


class Followed(Struct, frozen=True):
    """The last view of a job, and whether somebody at this terminal interrupted it."""

    view: JobView
    was_interrupted: bool = False


async def follow(
    jobs: Jobs, job_id: str, display: Display, *, interrupts: Interrupts, is_shared: bool = False
) -> Followed:
    """Show a job until it is paused or has ended.

    The first Ctrl-C (SIGTERM, SIGHUP) pauses it and waits; the second cancels this task, which stops at once.

    Args: is_shared: another process runs the job, and the person has to know whom a pause concerns.
    """
    pause = _Pause(jobs, job_id, display, is_shared=is_shared)
    view = None
    with interrupts.first_does(pause.begin, lambda: display.say("stopping at once")):
        try:
            async for view in jobs.watch(job_id):
                display.update(view)
            await pause.settle()
        finally:
            await pause.abandon()
    assert view is not None, "watch() yields at least one view"
    return Followed(view, interrupts.count > 0)


class _Pause:
    """The pause that Ctrl-C asks for, while the job is still being watched."""

    def __init__(self, jobs: Jobs, job_id: str, display: Display, *, is_shared: bool) -> None:
        self._jobs, self._job_id, self._display = jobs, job_id, display
        self._is_shared = is_shared
        self._asking: asyncio.Task[JobView] | None = None

    def begin(self) -> None:
        whose = " the job for everybody who runs or follows it" if self._is_shared else ""
        self._display.say(f"pausing{whose}: what is finished is being stored; Ctrl-C again stops at once")
        self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> JobView:
        return await self._jobs.pause(self._job_id)

    async def settle(self) -> None:
        """Let the pause that was asked for end; a job that ended first needs none."""
        if self._asking is not None:
            with contextlib.suppress(InvalidTransition):
                await self._asking

    async def abandon(self) -> None:
        """Leave nothing running and nothing unheard; why the watching ended is what will be told."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
