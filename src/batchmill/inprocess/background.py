"""The thread with an event loop in which a Python program is the owner of data directories.

A program may have an event loop of its own, as a notebook has, or none. The thread stays until the process ends: the
kernel ends worker processes with the thread that started them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from batchmill.cli.clients import OwnerJobs
from batchmill.cli.local import LocalApp
from batchmill.config import Config
from batchmill.imports import leave_collector_alone

T = TypeVar("T")


class OpenDirectory:
    """A data directory that this process uses, as long as any of its jobs runs."""

    def __init__(self, config: Config) -> None:
        loop = asyncio.get_running_loop()
        self.app = LocalApp()
        self.users = 0
        self._jobs: asyncio.Future[OwnerJobs] = loop.create_future()
        self._released = asyncio.Event()
        self._holding = loop.create_task(self._hold(config))

    async def _hold(self, config: Config) -> None:
        """Open and close in one task, whichever caller comes first and leaves last."""
        async with self.app.open_jobs(config) as jobs:
            self._jobs.set_result(jobs)
            await self._released.wait()

    async def jobs(self) -> OwnerJobs:
        return await asyncio.shield(self._jobs)

    async def close(self, *, at_once: bool) -> None:
        """Pause the jobs that others run here. Returns when all is closed, also if it is cancelled meanwhile."""
        self._released.set()
        if at_once:
            self._holding.cancel()
        while not self._holding.done():
            try:
                await asyncio.wait({self._holding})
            except asyncio.CancelledError:
                self._holding.cancel()
        if not self._holding.cancelled() and (error := self._holding.exception()) is not None:
            raise error


class Background:
    """Runs coroutines beside the program. One for each process."""

    def __init__(self) -> None:
        leave_collector_alone()
        self._loop = asyncio.new_event_loop()
        self._opened: dict[Path, OpenDirectory] = {}  # used in the loop alone
        threading.Thread(target=self._loop.run_forever, name="batchmill", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        _callers.add(threading.current_thread())
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextlib.asynccontextmanager
    async def use(self, config: Config) -> AsyncIterator[tuple[LocalApp, OwnerJobs]]:
        """Use a data directory. The last user closes it; a cancelled one at once. Runs in this loop."""
        opened = self._opened.get(config.data_dir)
        if opened is None:
            opened = self._opened[config.data_dir] = OpenDirectory(config)
        opened.users += 1
        at_once = True
        try:
            yield opened.app, await opened.jobs()
            at_once = False
        except Exception:
            at_once = False
            raise
        finally:
            opened.users -= 1
            if not opened.users:
                del self._opened[config.data_dir]
                await opened.close(at_once=at_once)


_callers: WeakSet[threading.Thread] = WeakSet()


def _wait_for_callers() -> None:
    """Let threads of the program end that use jobs, before the interpreter ends the pools of threads that jobs need.

    It waits for these threads anyway, but later. A thread of a pool waits for work until its pool is told to end.
    """
    in_pools = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in list(_callers):
        if not (thread.daemon or thread is threading.main_thread() or thread in in_pools):
            thread.join()


# The pools' own function is registered by their import, and called after this one.
if (register := getattr(threading, "_register_atexit", None)) is not None:
    register(_wait_for_callers)

_backgrounds: dict[int, Background] = {}  # by process: a fork has no threads
_starting = threading.Lock()


def background() -> Background:
    """That of this process."""
    with _starting:
        if (found := _backgrounds.get(os.getpid())) is None:
            found = _backgrounds[os.getpid()] = Background()
        return found
