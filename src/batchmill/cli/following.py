"""A job from its start to its end as the person at the terminal sees it, Ctrl-C included."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from msgspec import Struct

from batchmill.cli.displays import Display
from batchmill.cli.session import Session
from batchmill.errors import InvalidTransition
from batchmill.types import JobView

if TYPE_CHECKING:
    from batchmill.cli.clients import Jobs


class Followed(Struct, frozen=True):
    """The last view of a job, and whether somebody at this terminal interrupted it."""

    view: JobView
    was_interrupted: bool = False


async def follow(jobs: Jobs, job_id: str, display: Display, *, session: Session, is_shared: bool = False) -> Followed:
    """Show a job until it is paused or has ended.

    The first Ctrl-C (SIGTERM, SIGHUP) pauses it and waits; the second cancels this task, which stops at once. A job at
    a server is only left: it goes on there.

    Args: is_shared: another process runs the job, and the person has to know whom a pause concerns.
    """
    interrupts = session.interrupts
    first = _Pause(jobs, job_id, display, is_shared=is_shared) if session.server_url is None else _Leave(display)
    view = None
    with interrupts.first_does(first.begin, lambda: display.say("stopping at once")):
        try:
            async with contextlib.aclosing(first.watched(jobs.watch(job_id))) as views:
                async for view in views:
                    display.update(view)
            await first.settle()
        finally:
            await first.abandon()
    assert view is not None, "watch() yields at least one view"
    return Followed(view, interrupts.count > 0)


class _Leave:
    """Ctrl-C where the job runs at a server: nobody looks any more, and nothing else changes."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._left = asyncio.Event()

    def begin(self) -> None:
        self._display.say("leaving: the job goes on at the server")
        self._left.set()

    async def watched(self, views: AsyncIterator[JobView]) -> AsyncGenerator[JobView]:
        """The views until somebody leaves; the first one in any case."""
        leaving = asyncio.ensure_future(self._left.wait())
        following: asyncio.Future[JobView | None] | None = None
        is_first = True
        try:
            while is_first or not leaving.done():
                following = asyncio.ensure_future(anext(views, None))
                await asyncio.wait({following} if is_first else {following, leaving}, return_when=FIRST_COMPLETED)
                if not following.done() or (view := following.result()) is None:
                    return
                is_first = False
                yield view
        finally:
            for task in filter(None, (leaving, following)):
                task.cancel()
            await asyncio.gather(*filter(None, (leaving, following)), return_exceptions=True)

    async def settle(self) -> None:
        """There is nothing to wait for."""

    async def abandon(self) -> None:
        """There is nothing to end."""


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
        return await self._jobs.steer(self._job_id, "pause")

    async def watched(self, views: AsyncIterator[JobView]) -> AsyncGenerator[JobView]:
        """All of them: the pause shows in the last."""
        async for view in views:
            yield view

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
