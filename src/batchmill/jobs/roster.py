"""The jobs that this process has in hand: one drive each, and one command at a time that decides what becomes of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import sqlalchemy as sa

from batchmill.errors import BatchmillError
from batchmill.jobs.drive import Drive, Tools
from batchmill.jobs.job_files import JobFiles
from batchmill.jobs.reopening import open_retry
from batchmill.jobs.specs import columns_of
from batchmill.types import Policy
from batchmill.wire.job_spec import JobSpec

CLOSE_S = 5.0  # drives that are to end at once have so long to write down that they paused


class Roster:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._drives: dict[str, Drive] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: defaultdict[str, int] = defaultdict(int)  # lock -> those that hold it or wait for it
        self.outputs = asyncio.Lock()  # held, before any other, by whoever decides which job writes to a named file

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """One at a time for each job, or whatever else `name` stands for."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._waiting[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._locks[name]

    @asynccontextmanager
    async def steering(self, record: sa.RowMapping) -> AsyncIterator[None]:
        """Decide, alone, what becomes of a job; and of its output, where its caller named one."""
        async with AsyncExitStack() as held:
            if record["door"] is None:
                await held.enter_async_context(self.outputs)
            await held.enter_async_context(self.alone(record["id"]))
            yield

    def get(self, job_id: str) -> Drive | None:
        """The drive of a job, which may be resting already."""
        return self._drives.get(job_id)

    def drives(self) -> list[Drive]:
        """Those of all jobs that are on their way."""
        return [drive for drive in self._drives.values() if not drive.is_resting]

    def active(self, job_id: str) -> Drive | None:
        """The drive of a job that is on its way."""
        drive = self._drives.get(job_id)
        return None if drive is None or drive.is_resting else drive

    def start(self, spec: JobSpec) -> Drive:
        """Let a job go on from where the ledger says it is."""
        drive = Drive(spec, self._tools)
        drive.task = asyncio.create_task(drive.run())
        self._drives[spec.id] = drive
        drive.task.add_done_callback(lambda _: self.forget(drive))
        return drive

    def forget(self, drive: Drive) -> None:
        if self._drives.get(drive.spec.id) is drive:
            del self._drives[drive.spec.id]

    async def let_rest(self, job_id: str) -> Drive | None:
        """Wait for a drive that has paused its job already and is only tidying up; the drive of one that goes on."""
        drive = self._drives.get(job_id)
        if drive is not None and drive.is_resting:
            await drive.rest()
            self.forget(drive)
        return self._drives.get(job_id)

    async def reopen(self, spec: JobSpec) -> Drive:
        """A paused job goes on under this description."""
        await self.save(spec)
        await Drive(spec, self._tools).reopen()
        return self.start(spec)

    async def open_retry(self, spec: JobSpec) -> Drive:
        """The rows of an ended job that failed run again. Raises: InvalidTransition when none may."""
        await open_retry(spec, self._tools)
        await asyncio.to_thread(JobFiles(self._tools.data_dir, spec.id).write_spec, spec)
        return self.start(spec)

    async def amend(self, spec: JobSpec, policy: Policy) -> None:
        """A job that has not ended goes on, or will, under another policy."""
        drive = self.active(spec.id)
        if drive is not None:
            drive.amend(policy)
        try:
            await self.save(msgspec.structs.replace(spec, policy=policy))
        except BatchmillError:
            if drive is not None:
                drive.amend(spec.policy)
            raise

    async def save(self, spec: JobSpec) -> None:
        """Workers, limits, prices and the policy may differ each time a job goes on."""
        await asyncio.to_thread(JobFiles(self._tools.data_dir, spec.id).write_spec, spec)
        drive = self.active(spec.id)  # it may have learned which models its rows use meanwhile
        known = spec if drive is None else drive.spec
        await self._tools.books.call(self._tools.books.ledger.note, spec.id, **columns_of(known))

    async def close(self, *, at_once: bool) -> None:
        """Interrupt every job; `at_once`: without waiting for rows in flight longer than it takes to say so."""
        drives = list(self._drives.values())
        for drive in drives:
            drive.at_once = at_once
            drive.interrupt()
        if at_once:
            await self._tools.dispatcher.close(at_once=True)
        tasks = [drive.task for drive in drives if drive.task is not None]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S if at_once else None)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
