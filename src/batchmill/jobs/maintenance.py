"""Background tasks of an owner: resume stalled jobs, end jobs at their deadlines, delete old records.

Jobs that paused because the disk was full resume once space is free. Jobs that are ending while a provider does not
reply are retried in the same way, with longer and longer pauses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from msgspec import Struct

from batchmill.errors import BatchmillError, StorageFailed, UnknownName
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.files import read_spec
from batchmill.object_store.urls import is_object_url
from batchmill.owner_term import PrefixTerm
from batchmill.ports.clock import Clock
from batchmill.states import PauseReason
from batchmill.store.disk_room import DiskQuota, DiskReserve
from batchmill.store.sql.database import Database
from batchmill.wire.job_spec import JobSpec

log = logging.getLogger("batchmill.jobs")

POLL_S = 5.0
FREE_BYTES = 16 * 1024 * 1024  # that must be free, besides the disk reserve, before a job is resumed
TIDY_S = 3600.0
RETRY_MAX_S = 300.0  # between two attempts to resume a job that pauses again each time
DEADLINE_SLEEP_MAX_S = 60.0  # the wall clock may be set, and the machine may be suspended
DEADLINE_RETRY_S = 5.0  # before another attempt to end a job
RESUMED_AT_ONCE_MAX = 16
DEADLINES_MAX = 100  # jobs that end at the same time


class Stalled(Struct, frozen=True):
    """A paused job that can be resumed later, and the folders it writes to."""

    job: str
    folders: list[Path]


class Maintenance:
    """Args:
    stalled: returns the jobs to resume once space is free.
    resume: resumes one of them.
    tidy: deletes expired records.
    """

    def __init__(
        self,
        clock: Clock,
        disk_reserve: DiskReserve,
        stalled: Callable[[], Awaitable[Sequence[Stalled]]],
        resume: Callable[[str], Awaitable[None]],
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock, self._disk_reserve, self._stalled, self._resume = clock, disk_reserve, stalled, resume
        self._tidy, self._tidy_at, self._tidy_pause_s = tidy, -math.inf, POLL_S
        self._retries: dict[
            str, tuple[float, float]
        ] = {}  # job -> (time of the next attempt, pause after it in seconds)
        self._resuming: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(POLL_S)
            try:
                await self.poll()
            except (BatchmillError, OSError):
                continue  # the disk or the database still fails: its users report that
            if self._clock.monotonic() >= self._tidy_at:
                await self._try_to_tidy()

    async def _try_to_tidy(self) -> None:
        """Delete expired records; after a failure, again with longer and longer pauses."""
        try:
            await self._tidy()
            pause_s, self._tidy_pause_s = TIDY_S, POLL_S
        except (BatchmillError, OSError) as error:
            log.warning("old records are not deleted yet: %s", error)
            pause_s, self._tidy_pause_s = self._tidy_pause_s, min(2 * self._tidy_pause_s, TIDY_S)
        self._tidy_at = self._clock.monotonic() + pause_s

    async def poll(self) -> list[asyncio.Task[None]]:
        """Begin to resume every stalled job whose folders have enough space. Returns: the attempts."""
        begun: list[asyncio.Task[None]] = []
        stalled = await self._stalled()
        now = self._clock.monotonic()
        self._retries = {job: retry for job, retry in self._retries.items() if retry[0] + 2 * RETRY_MAX_S > now}
        for each in stalled:
            not_before, pause_s = self._retries.get(each.job, (now, POLL_S))
            if now < not_before or each.job in self._resuming or len(self._resuming) >= RESUMED_AT_ONCE_MAX:
                continue
            if not await asyncio.to_thread(_has_room, each.folders):
                continue
            self._retries[each.job] = now + pause_s, min(2 * pause_s, RETRY_MAX_S)
            await asyncio.to_thread(self._disk_reserve.reserve)
            self._resuming[each.job] = asyncio.create_task(self._resume_one(each.job))
            begun.append(self._resuming[each.job])
        return begun

    async def _resume_one(self, job: str) -> None:
        """Resume a job. It may wait for a store that does not answer: others do not wait with it."""
        try:
            await self._resume(job)
        except (BatchmillError, OSError) as error:
            log.warning("the job %s is not resumed yet: %s", job, error)
        finally:
            del self._resuming[job]

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._resuming.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _has_room(folders: Sequence[Path]) -> bool:
    return all(shutil.disk_usage(folder).free >= FREE_BYTES for folder in folders)


class StalledJobs:
    """Jobs that a server resumes by itself: out of disk space, or ending while a provider does not respond."""

    def __init__(
        self, data_dir: Path, database: Database, active: ActiveJobs, disk_quota: DiskQuota, storage: PrefixTerm
    ) -> None:
        """Args: disk_quota: counts the bytes of projects. storage: of what is stored."""
        self._data_dir, self._database, self._active, self._disk_quota = data_dir, database, active, disk_quota
        self._storage = storage
        self.stranded: set[str] = set()  # a server's jobs whose stored state is wrong: it could not be written

    async def poll(self) -> Sequence[Stalled]:
        """The jobs to resume. Pauses running jobs of projects that have no disk quota left; all, if nothing can be
        stored.
        """
        if refusal := self._storage.refusal:
            for runner in self._active.all_running():  # those that were begun since
                runner.refuse_storage(StorageFailed(refusal))
            return []
        await self._pause_over_quota()
        read, disk_quota = self._database.read, self._disk_quota
        self.stranded |= self._active.unstored
        self._active.unstored.clear()
        reasons = PauseReason.STORAGE_FULL, PauseReason.STORAGE_FAILED, PauseReason.DATABASE_UNAVAILABLE
        stalled = [record for reason in reasons for record in await read(records.paused_for, reason)]
        over_quota = await read(records.paused_for, PauseReason.DISK_QUOTA)
        has_room = {project: await disk_quota.has_room(project) for project in {each["project"] for each in over_quota}}
        stalled += [record for record in over_quota if has_room[record["project"]]]
        unreachable = await read(records.paused_for, PauseReason.ROUTE_FAILED)
        stalled += [record for record in unreachable if record["cancelling"] is not None]
        paused = {record["id"] for record in stalled}
        for job_id in self.stranded - paused:
            try:
                stalled.append(await read(records.find, job_id))
            except UnknownName:
                self.stranded.discard(job_id)  # a new job that was not stored
        specs = [read_spec(record["spec"]) for record in stalled]
        return [Stalled(spec.id, [self._data_dir, *_folders_of(spec)]) for spec in specs]

    async def _pause_over_quota(self) -> None:
        disk_quota = self._disk_quota
        running = [runner for runner in self._active.all_running() if runner.spec.origin is not None]
        for project in {runner.spec.project for runner in running}:
            used, limit = await disk_quota.usage(project)
            if used > limit:
                for runner in running:
                    if runner.spec.project == project:
                        runner.refuse_more(disk_quota.refusal(project))


class JobDeadlines:
    """One task that ends the jobs whose deadline has passed; it sleeps until the next one.

    Args:
    upcoming: returns up to a number of (job, deadline) of unfinished jobs, the next deadline first.
    expire: ends a job early; returns once that is stored, or if it is too late.
    """

    def __init__(
        self,
        clock: Clock,
        upcoming: Callable[[int], Awaitable[Sequence[tuple[str, float]]]],
        expire: Callable[[str], Awaitable[None]],
    ) -> None:
        self._clock, self._upcoming, self._expire = clock, upcoming, expire
        self._changed = asyncio.Event()
        self._ending: dict[str, asyncio.Task[None]] = {}  # jobs that are being ended
        self._looks_at: float | None = None  # when it reads the deadlines again; None: it reads them, or waits for one
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """Wake up: a deadline changed."""
        self._changed.set()

    def added(self, deadline: float) -> None:
        """A job with a deadline was added. Wake up, unless the deadlines are read before this one passes."""
        if self._looks_at is None or deadline < self._looks_at:
            self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                next_s = await self._end_due()
            except BatchmillError as error:
                log.warning("deadlines could not be read: %s", error.message)
                next_s = DEADLINE_RETRY_S
            if next_s is None:
                await self._changed.wait()
                continue
            sleep_s = min(next_s, DEADLINE_SLEEP_MAX_S)
            self._looks_at = self._clock.now() + sleep_s
            sleep = asyncio.create_task(self._clock.sleep(sleep_s))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({sleep, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._looks_at = None
                sleep.cancel()
                changed.cancel()

    async def _end_due(self) -> float | None:
        """Begin to end the jobs that are due; return the seconds until the next, None if there is no deadline."""
        upcoming = await self._upcoming(DEADLINES_MAX + len(self._ending))
        now = self._clock.now()
        for job_id, deadline in upcoming:
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
        except Exception as error:  # a full disk, a change of its state, or a bug: logged and retried
            log.warning("the job %s could not be ended at its deadline: %s: %s", job_id, type(error).__name__, error)
            await self._clock.sleep(DEADLINE_RETRY_S)
        finally:
            del self._ending[job_id]
            self._changed.set()

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._ending.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _folders_of(spec: JobSpec) -> list[Path]:
    """The folders on this machine that a job's results need room in, besides its own."""
    return [] if spec.output is None or is_object_url(spec.output) else [Path(spec.output).parent]
