"""Retention: removes files of ended jobs that are no longer needed, and whole jobs.

The order is the promise: written down, then removed from the disk. What a kill leaves is written down as pending, and
the next owner finishes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.config import RetentionEntry
from batchmill.datasets import spooled_inputs
from batchmill.datasets.layout import SEAL
from batchmill.errors import BatchmillError, Conflict, InvalidTransition, TermOver
from batchmill.jobs.active_jobs import ActiveJobs
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.files import RESULTS, JobFiles, result_exists
from batchmill.jobs.ledger.plan import PLAN
from batchmill.jobs.results.results import STORED, errors_path, stored_name
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import sync_folder
from batchmill.ports.clock import Clock
from batchmill.states import ENDED, JobState
from batchmill.store import removals
from batchmill.store.disk_room import bytes_in
from batchmill.store.media_copies import FOLDER as MEDIA
from batchmill.store.media_copies import remove_copies, shared_home, sweep_shared
from batchmill.store.removals import Removal
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import (
    commits,
    error_counts,
    job_models,
    jobs,
    notes,
    outcome_blocks,
    packed_jobs,
    shards,
    submissions,
)
from batchmill.store.sql.tables import files as file_table
from batchmill.store.sql.tables import removals as removal_table
from batchmill.store.sql.transactions import Record, note_change
from batchmill.store.stored_files import StoredFiles, using

PARTS = "/parts"  # behind a job's id: what is pending is what it needs no more
BY_AGE = "the server, because retention.jobs_s had passed,"
SWEPT_MAX = 100  # jobs that one sweep takes in hand
INDEXED_MAX = 32  # jobs that are indexed together, before what a retry of them needs is removed
log = logging.getLogger("batchmill.owner")

LEAVING = ".leaving-"  # before the name of a folder that is being removed


class Reusable(Protocol):
    """`jobs.intake.reuse_jobs.EarlierJobs`: what later jobs may take over of ended ones."""

    async def index_small(self, job_ids: Sequence[str]) -> None:
        """Do together what `keep` would do for each small one of these jobs, as far as that is possible."""

    async def keep(self, record: Record) -> None:
        """Called before the segments of a job are removed."""

    async def forget(self) -> None:
        """Remove what is kept of results that are too old, or were deleted."""


class Retention:
    """The ended jobs of a data directory that this process owns."""

    def __init__(
        self, data_dir: Path, database: Database, active: ActiveJobs, clock: Clock, entry: RetentionEntry,
        stored: StoredFiles, reusable: Reusable,
    ) -> None:  # fmt: skip
        self._data_dir, self._database, self._active, self._clock = data_dir, database, active, clock
        self.entry, self._stored, self._reusable = entry, stored, reusable
        self._owned = OwnedFiles(database.term)  # a successor finishes what is written down, and retries other jobs

    async def finish(self) -> None:
        """Finish removals that were recorded and not completed."""
        for leaving in (self._data_dir / "jobs").glob(f"{LEAVING}*"):
            await asyncio.to_thread(self._owned.remove_tree, leaving)
        for removal in await self._database.read(_pending):
            async with self._active.lock(removal.job):
                await self._clear(removal)

    async def remove(self, job_id: str, by: str) -> None:
        """Remove an ended job and its files; a result at a path that the caller chose stays.

        Raises: InvalidTransition for one that has not ended; Conflict while another job reads its results.
        """
        async with self._active.lock(job_id):
            await self._active.wait_settled(job_id)
            removal = await self._database.write(_remove, self._data_dir, job_id, by, self._clock.now())
            faults.point("after_remove")
            await self._clear(removal)

    async def sweep(self) -> None:
        """Remove jobs that are old enough, and unneeded files of others. An error in one job does not stop it.

        Raises: TermOver where another process may be the owner, which sweeps then.
        """
        now, entry = self._clock.now(), self.entry
        for removal in await self._database.read(_pending):
            with _logged(removal.job):
                async with self._active.lock(removal.job):
                    await self._clear(removal)
        await asyncio.to_thread(spooled_inputs.sweep, self._data_dir, self._owned)
        await asyncio.to_thread(sweep_shared, self._data_dir, self._owned)
        if entry.jobs_s is not None:
            for job_id in await self._database.read(_ended_before, now - entry.jobs_s):
                with _logged(job_id):
                    await self.remove(job_id, BY_AGE)
        due: list[str] = []
        for record in await self._database.read(_whole, now - entry.intermediate_s, now - entry.retry_s):
            with _logged(record["id"]):
                is_there = await self._has_results(record)
                if record["finished"] <= now - self._kept_s(record, is_there=is_there):
                    due.append(record["id"])
            if len(due) == INDEXED_MAX:
                await self._compact_all(due, now)
                due = []
        await self._compact_all(due, now)
        await self._reusable.forget()

    async def _compact_all(self, job_ids: Sequence[str], now: float) -> None:
        await self._reusable.index_small(job_ids)
        for job_id in job_ids:
            with _logged(job_id):
                await self._compact(job_id, now)

    async def _has_results(self, record: Record) -> bool:
        """Whether the results of a job are where they were written."""
        if record["output"] is None:
            return False
        is_there = await asyncio.to_thread(result_exists, record["output"])
        return is_there or await self._stored.holds(Path(record["output"]))

    def _kept_s(self, record: Record, *, is_there: bool) -> float:
        """How long the segments of a job stay: a retry needs them, and a user who has lost its results. Of a job whose
        results were never written they are all that there is."""
        may_retry = record["state"] != JobState.COMPLETED or record["rows_failed"] > record["rows_rejected"]
        if not is_there and record["state"] != JobState.COMPLETED:
            return math.inf
        return self.entry.retry_s if may_retry or not is_there else self.entry.intermediate_s

    async def _compact(self, job_id: str, now: float) -> None:
        async with self._active.lock(job_id):
            if await self._active.wait_settled(job_id) is not None:
                return  # a retry was faster
            record = await self._database.read(records.find, job_id)
            if record["state"] not in ENDED or record["compacted"] is not None:
                return
            await self._reusable.keep(record)
            files = JobFiles(self._data_dir, job_id)
            if files.spec.exists():
                await asyncio.to_thread(_write_ending, files, record, now, self._owned)
            faults.point("after_ending")
            kept_bytes = await asyncio.to_thread(bytes_in, files.reuse)
            removal = await self._database.write(_drop_parts, record, now, kept_bytes)
            faults.point("after_parts_dropped")
            await self._clear(removal)

    async def _clear(self, removal: Removal) -> None:
        if removal.id.endswith(PARTS):
            await self._clear_parts(JobFiles(self._data_dir, removal.job), removal.project)
        else:
            results = await self._database.read(_results_of, removal.job)
            copies = [self._data_dir / "files" / name for name in results]
            files = [*small_results(self._data_dir, removal.job), *copies]
            if (log := self._stored.log) is not None:
                await self._database.write(log.forget, files)
            await asyncio.to_thread(self._clear_job, removal, files)
            await self._stored.remove(self._data_dir / "jobs" / removal.job, *files)
            await asyncio.to_thread(spooled_inputs.release, self._data_dir, removal.job, self._owned)
        faults.point("after_clear")
        await self._database.write(_cleared, removal)

    async def _clear_parts(self, files: JobFiles, project: str) -> None:
        is_stored = await self._stored.holds(files.dataset)
        async with using(self._stored, files.home, files.dataset):
            await asyncio.to_thread(_clear_parts, files, project, self._owned)
            if is_stored:
                await self._stored.publish(files.dataset)  # what is left of it
        plans = [name for name in await self._stored.names_in(files.home) if name.startswith("plan-")]
        await self._stored.remove(files.segments, files.media, *(files.home / name for name in plans))

    def _clear_job(self, removal: Removal, files: Sequence[Path]) -> None:
        home = self._data_dir / "jobs" / removal.job
        leaving = home.with_name(LEAVING + removal.job)
        if home.exists():
            self._owned.move(home, leaving)
            sync_folder(home.parent)
        self._owned.remove(*files)
        remove_copies(leaving / MEDIA, shared_home(self._data_dir, removal.project), self._owned)
        self._owned.remove_tree(leaving)


def small_results(data_dir: Path, job_id: str) -> list[Path]:
    """Where the results of a small job are, whatever their format."""
    outputs = [data_dir / RESULTS / f"{job_id}.{stored_name(each)}" for each in STORED]
    return list(dict.fromkeys(path for output in outputs for path in (output, errors_path(output))))


@contextlib.contextmanager
def _logged(job_id: str) -> Iterator[None]:
    """Log an error of one job; the next sweep tries it again. Raises: TermOver, which is not of one job."""
    try:
        yield
    except TermOver:
        raise
    except (BatchmillError, OSError) as error:
        log.warning("the job %s keeps what it has for now: %s", job_id, error)


def refuse_compacted(record: Record, what: str) -> None:
    """Raises: InvalidTransition for a job that keeps only its results."""
    if record["compacted"] is not None:
        raise InvalidTransition(
            f"the job {record['id']} keeps only its results: what {what} needs was removed a while after its end (see "
            "retention in the configuration); submit it again",
            code="compacted",
        )


def read_ending(files: JobFiles) -> dict[str, Any]:
    """The database columns of a compacted job, from the file in its folder."""
    return msgspec.json.decode(files.ending.read_bytes())


def _write_ending(files: JobFiles, record: Record, now: float, owned: OwnedFiles) -> None:
    """Write the job's record beside its results, so that a lost database can be rebuilt from it."""
    values = {name: value for name, value in record.items() if not isinstance(value, bytes)}
    with owned.part(files.ending) as file:
        file.write(msgspec.json.encode(values | {"compacted": now}))
        file.publish()


def _clear_parts(files: JobFiles, project: str, owned: OwnedFiles) -> None:
    plan = files.plan(0) / PLAN
    if plan.exists():  # the first: without it the job is known to keep only its results, whatever a kill leaves
        owned.remove(plan)
        sync_folder(plan.parent)
        faults.point("after_plan_dropped")
    remove_copies(files.media, files.shared_media(project), owned)
    for folder in (files.segments, *files.home.glob("plan-*")):
        owned.remove_tree(folder)
    for path in files.dataset.glob("*"):
        if path.name != SEAL:  # the same command again is known by it
            owned.remove(path)


def _remove(db: sa.Connection, data_dir: Path, job_id: str, by: str, now: float) -> Removal:
    record = records.find(db, job_id)
    if record["state"] not in ENDED:
        raise InvalidTransition(f"the job {job_id} is {record['state']}: cancel it before it is removed")
    results = db.execute(sa.select(file_table.c.id).where(file_table.c.job == job_id)).scalars().all()
    if used := records.in_use(db, [str(data_dir / "files" / result) for result in results]):
        raise Conflict(
            f"{os.path.basename(min(used))} is in use: a job that has not ended reads this result of the job {job_id}; "
            "cancel it, or wait for its end",
            code="file_in_use",
        )
    for result in results:
        removals.insert(db, Removal(result, record["project"], job_id, by, now))
    db.execute(file_table.delete().where(file_table.c.job == job_id))
    for table in (shards, commits, notes, error_counts, submissions, job_models, outcome_blocks, packed_jobs):
        db.execute(table.delete().where(table.c.job == job_id))
    db.execute(jobs.delete().where(jobs.c.id == job_id))
    note_change(db, job_id)
    db.execute(removal_table.delete().where(removal_table.c.id == job_id + PARTS))
    removal = Removal(job_id, record["project"], job_id, by, now, True)
    removals.insert(db, removal)
    return removal


def _drop_parts(db: sa.Connection, record: Record, now: float, kept_bytes: int) -> Removal:
    job_id = record["id"]
    for table in (shards, commits, notes, outcome_blocks, packed_jobs):
        db.execute(table.delete().where(table.c.job == job_id))
    size_bytes = 2 * len(record["spec"]) + kept_bytes
    db.execute(jobs.update().where(jobs.c.id == job_id).values(compacted=now, bytes=size_bytes))
    note_change(db, job_id)
    removal = Removal(job_id + PARTS, record["project"], job_id, "", now, True)
    removals.insert(db, removal)
    return removal


def _cleared(db: sa.Connection, removal: Removal) -> None:
    own = removal_table.c.id == removal.id
    db.execute(
        removal_table.delete().where(own)
        if removal.id.endswith(PARTS)
        else removal_table.update().where(own).values(pending=False)
    )


def _pending(db: sa.Connection) -> list[Removal]:
    ids = db.execute(sa.select(removal_table.c.id).where(removal_table.c.pending)).scalars().all()
    return list(removals.find_all(db, ids).values())


def _results_of(db: sa.Connection, job_id: str) -> list[str]:
    query = sa.select(removal_table.c.id).where(removal_table.c.job == job_id, removal_table.c.id != job_id)
    return [name for name in db.execute(query).scalars() if not name.endswith(PARTS)]


def _ended_before(db: sa.Connection, finished: float) -> list[str]:
    query = sa.select(jobs.c.id).where(jobs.c.state.in_(ENDED), jobs.c.finished <= finished)
    return list(db.execute(query.order_by(jobs.c.finished).limit(SWEPT_MAX)).scalars())


def _whole(db: sa.Connection, done_by: float, ended_by: float) -> Sequence[Record]:
    """Jobs that still have everything, the first to end first: those without a failed row that ended by `done_by`, and
    all that ended by `ended_by`; but for those whose results were never written."""
    columns = [jobs.c[name] for name in ("id", "state", "finished", "output", "rows_failed", "rows_rejected")]
    is_done = (jobs.c.state == JobState.COMPLETED) & (jobs.c.rows_failed <= jobs.c.rows_rejected)
    query = sa.select(*columns).where(
        jobs.c.state.in_(ENDED),
        jobs.c.compacted.is_(None),
        jobs.c.finished.is_not(None),
        jobs.c.output.is_not(None),
        sa.or_(is_done & (jobs.c.finished <= done_by), jobs.c.finished <= ended_by),
    )
    return db.execute(query.order_by(jobs.c.finished)).mappings().all()
