"""EarlierJobs: the jobs whose results rows may take over, and whether a project's rows do.

Only ended jobs of the same project are looked at, from the newest on: those that have their segments, or an index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from batchmill import faults
from batchmill.children.offload import Offload
from batchmill.config.entries import ProjectEntry
from batchmill.datasets.layout import REQUESTS
from batchmill.datasets.request_digests import DIGEST_BYTES
from batchmill.errors import BatchmillError
from batchmill.jobs.intake.preparation import stays_reusable
from batchmill.jobs.intake.reuse_orders import (
    INDEX,
    KEEP,
    KEEP_SMALL,
    LOOK_UP,
    RESULTS,
    EarlierJob,
    LookupOrder,
    Reused,
    read_head,
    read_keys,
    target_keys,
)
from batchmill.jobs.ledger.files import REUSE, JobFiles, read_spec
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.jobs.ledger.storage import JobStorage
from batchmill.jobs.results.parts.part_writers import each
from batchmill.object_store.urls import is_object_url
from batchmill.owned_files import OwnedFiles
from batchmill.ports.clock import Clock
from batchmill.states import ENDED
from batchmill.store.removals import ELSEWHERE
from batchmill.store.sql.tables import jobs, removals
from batchmill.store.sql.transactions import Record, note_change
from batchmill.store.stored_files import StoredFiles, using
from batchmill.types import ReuseCount, SegmentRef
from batchmill.wire.job_spec import JobSpec

FILE_PREFIX = "file-"  # of the ids of files, among what was removed
ROWS_A_RUN = 64  # that follow each other, on average: results are copied while the other rows run
COPIED_ROWS_MAX = 4 * 1024 * 1024
CHILD_ROWS = 256 * 1024  # of a job with fewer rows for each, fewer children look them up
CHILDREN_MAX = 4  # for one lookup
SMALL_JOBS_MAX = 32  # that a child process indexes at once: a process and its messages cost more than most of them
SMALL_BYTES = 4 * 1024 * 1024  # of their outcomes, about
FORGOTTEN_MAX = 500  # jobs of one query, and of a sweep of what is in an object store alone
RANKS_S = 600.0  # how long it is known which jobs are the newest: one sweep asks of many
MORE_JOBS = "only the newest {:,} ended jobs were looked at, and there are more: see projects.{}.reuse_jobs_max"
log = logging.getLogger("batchmill.owner")


class Space(Protocol):
    """What is needed of `jobs.job_space.JobSpace`."""

    data_dir: Path
    stored: StoredFiles
    projects: Mapping[str, ProjectEntry]


class EarlierJobs:
    def __init__(self, space: Space, ledger: Ledger, clock: Clock, offload: Offload, scratch: Scratch) -> None:
        self._data_dir, self._stored, self._projects = space.data_dir, space.stored, space.projects
        self._ledger, self._clock, self._offload, self._scratch = ledger, clock, offload, scratch
        self._owned = OwnedFiles(ledger.database.term)  # a successor may keep results for longer
        self._oldest: dict[str, tuple[float, float]] = {}  # project -> until when that is known, and `_oldest_of`

    async def count(self, spec: JobSpec, dataset: str, plan: str) -> ReuseCount:
        """How many of the rows of a sealed and planned dataset would take over a result."""
        async with self._use(spec, Path(dataset)) as (earlier, note):
            order = LookupOrder(spec, dataset, plan, earlier, self._since(spec))
            return ReuseCount((await self._look_up(order, lambda _: None)).rows, note)

    async def take_over(
        self, spec: JobSpec, files: JobFiles, progress: Callable[[float], None]
    ) -> tuple[bool, JobSpec]:
        """Write the results that rows of a planned job take over to a segment of it.

        Returns: whether they are so few, and follow each other so much, that copying them in the owner costs little;
            the spec, which says if not all earlier jobs were looked at.
        """
        async with self._use(spec, files.dataset) as (earlier, note):
            if note:
                log.warning("the job %s: %s", spec.id, note)
            places = str(files.dataset), str(files.plan(0)), earlier, self._since(spec), str(files.segments)
            order = LookupOrder(spec, *places, term=self._ledger.database.term.path)
            reused = await self._look_up(order, progress)
        faults.point("after_reuse")
        is_copied = ROWS_A_RUN * reused.runs <= reused.rows <= COPIED_ROWS_MAX
        return is_copied, replace(spec, reuse_note=note)

    async def _look_up(self, order: LookupOrder, progress: Callable[[float], None]) -> Reused:
        order = replace(order, store=self._stored.url)
        stores = bool(order.store) or any(spec.uses_stores for spec in (order.spec, *(e.spec for e in order.earlier)))
        rebuilt: set[str] = set()
        while True:
            reused = await self._in_parts(order, progress, stores=stores)
            for reason in reused.skipped:
                log.warning("results are not taken over of %s", reason)
            if not reused.unsound:
                await self._publish_new(order.earlier)
                return reused
            order = replace(order, earlier=await self._mended(order.earlier, frozenset(reused.unsound), rebuilt))

    async def _in_parts(self, order: LookupOrder, progress: Callable[[float], None], *, stores: bool) -> Reused:
        """Look the rows up in one child, or in several if there are many."""
        parts = await asyncio.to_thread(_children_for, Path(order.dataset))
        shares = [0.0] * parts

        async def look_up(part: int) -> Reused:
            def note(share: float) -> None:
                shares[part] = share
                progress(sum(shares) / parts)

            data = msgspec.json.encode(replace(order, part=part, parts=parts))
            answer = await self._offload(LOOK_UP, data, note, project=order.spec.project, stores=stores)
            return msgspec.json.decode(answer, type=Reused)

        found = await each(look_up, list(range(parts)), parts, lambda _: None)
        skipped = dict.fromkeys(reason for reused in found for reason in reused.skipped)
        unsound = dict.fromkeys(job_id for reused in found for job_id in reused.unsound)
        rows, runs = sum(reused.rows for reused in found), sum(reused.runs for reused in found)
        return Reused(rows, runs, [*skipped], [*unsound])

    async def _mended(self, jobs: list[EarlierJob], unsound: frozenset[str], rebuilt: set[str]) -> list[EarlierJob]:
        """The jobs of the next lookup: those whose index is damaged with what it is made of, unless it was made anew.

        Args: rebuilt: the jobs whose index was; it gets those whose index will be.
        """
        mended = []
        for job in jobs:
            if job.spec.id not in unsound:
                mended.append(job)
            elif job.spec.id in rebuilt:
                log.warning("nothing is taken over of the job %s: its new index is damaged, too", job.spec.id)
            else:
                rebuilt.add(job.spec.id)
                mended.append(replace(job, committed=await self._committed(job.spec.id)))
        return mended

    async def _publish_new(self, looked_at: list[EarlierJob]) -> None:
        """Make new indexes durable: so the next lookup need not bring what they are made of."""
        for job in looked_at if self._stored.is_elsewhere else []:
            if job.committed is not None:
                await self._stored.publish(JobFiles(self._data_dir, job.spec.id).reuse)

    def _since(self, spec: JobSpec) -> float:
        return self._clock.now() - self._projects.get(spec.project, ProjectEntry()).reuse_age_s

    async def _oldest_of(self, project: str) -> float:
        """When the oldest of the jobs that lookups of a project look at has ended; minus infinity: they look at all."""
        now, entry = self._clock.now(), self._projects.get(project, ProjectEntry())
        until, oldest = self._oldest.get(project, (-math.inf, 0.0))
        if until <= now:
            oldest = await self._ledger.database.read(_oldest_ended, project, entry.reuse_jobs_max)
            self._oldest[project] = now + RANKS_S, oldest
        return oldest

    @asynccontextmanager
    async def _use(self, spec: JobSpec, dataset: Path) -> AsyncIterator[tuple[list[EarlierJob], str]]:
        """The earlier jobs of one, the newest first, and a note if not all were looked at. Their files stay in the data
        directory meanwhile.
        """
        jobs_max = self._projects.get(spec.project, ProjectEntry()).reuse_jobs_max
        records = await self._ledger.database.read(_ended, spec, self._since(spec), jobs_max + 1)
        note = MORE_JOBS.format(jobs_max, spec.project) if len(records) > jobs_max else ""
        keys = await asyncio.to_thread(read_keys, dataset)
        wanted = frozenset() if keys is None else frozenset(keys.keys) - {""}
        fitting = await asyncio.to_thread(lambda: [each for each in records[:jobs_max] if self._may_have(each, wanted)])
        unindexed = await self._index_small([each for each in fitting if read_spec(each["spec"]).is_small])
        async with AsyncExitStack() as stack:
            chosen = []
            for record in fitting:
                earlier = None if record["id"] in unindexed else await self._chosen(record, wanted, stack)
                chosen += [] if earlier is None else [earlier]
            yield chosen, note

    async def _chosen(self, record: Record, wanted: frozenset[str], stack: AsyncExitStack) -> EarlierJob | None:
        """An ended job whose rows may have gone to one of the targets that are wanted."""
        spec = read_spec(record["spec"])
        files = JobFiles(self._data_dir, spec.id)
        is_whole = record["compacted"] is None and not spec.is_small
        if self._stored.is_elsewhere and not await self._brought_for_lookup(record, files, wanted, stack):
            return None
        generation, finished, committed = record["generation"], record["finished"], None
        head = await asyncio.to_thread(read_head, files.reuse, spec.id, generation)
        if head is None:
            if not is_whole:
                return None
            committed = await self._committed(spec.id)
        elif wanted.isdisjoint(section.key for section in head.sections):
            return None
        place = files.segment_place
        return EarlierJob(
            spec, str(self._data_dir), generation, finished, place, committed, is_reduced=not is_whole,
            term=self._ledger.database.term.path,
        )  # fmt: skip

    async def _index_small(self, records: Sequence[Record]) -> set[str]:
        """Have indexes of small jobs made that have none. The first lookup makes them, with copies of the results: they
        lie in the database for as long as retention keeps what a retry needs. Returns the jobs that get none.
        """
        missing = [record for record in records if not await self._has_index(record)]
        waiting = [record for record in missing if record["compacted"] is None]
        without = {record["id"] for record in missing} - {record["id"] for record in waiting}
        for first in range(0, len(waiting), SMALL_JOBS_MAX):
            without |= await self._index_some(waiting[first : first + SMALL_JOBS_MAX])
        return without

    async def _has_index(self, record: Record) -> bool:
        home = JobFiles(self._data_dir, record["id"]).reuse
        if await self._stored.holds(home):
            return True
        return await asyncio.to_thread(read_head, home, record["id"], record["generation"]) is not None

    async def _index_some(self, records: Sequence[Record]) -> set[str]:
        """As `_index_small`, of jobs without one."""
        failed: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            some: list[EarlierJob] = []
            size_bytes = 0
            for record in records:
                try:
                    job = await self._small_job(record, stack)
                except BatchmillError as error:
                    failed[record["id"]] = error.message
                    continue
                some.append(job)
                size_bytes += sum(len(data) for pieces in job.segments.blocks.values() for _, data in pieces)
                if size_bytes > SMALL_BYTES:
                    failed |= await self._keep_small(some)
                    some, size_bytes = [], 0
            failed |= await self._keep_small(some)
        for job_id, reason in failed.items():
            log.warning("nothing is taken over of the job %s: %s", job_id, reason)
        indexed = [record["id"] for record in records if record["id"] not in failed]
        known = await self._ledger.database.read(_known, indexed)
        for job_id in indexed:
            files = JobFiles(self._data_dir, job_id)
            if job_id in known:
                await self._stored.publish(files.reuse)
            else:  # removed meanwhile: nothing of it may stay
                await asyncio.to_thread(self._owned.remove_tree, files.home)
        return {*failed, *(set(indexed) - known)}

    async def _small_job(self, record: Record, stack: AsyncExitStack) -> EarlierJob:
        """A small job, unpacked until the stack is left."""
        spec = read_spec(record["spec"])
        committed, blocks = await self._ledger.database.call_reader(self._ledger.results, spec.id)
        refs = [ref for generation, ref in committed if generation == 0]
        unpacked = await stack.enter_async_context(self._scratch.use(spec))
        home = JobFiles(self._data_dir, spec.id).home
        await asyncio.to_thread(home.mkdir, mode=0o700, parents=True, exist_ok=True)
        place = replace(unpacked.segment_place, blocks=blocks)
        return EarlierJob(
            spec, str(self._data_dir), record["generation"], record["finished"], place, refs,
            scratch=str(self._scratch.home), results=RESULTS, term=self._ledger.database.term.path,
        )  # fmt: skip

    async def _keep_small(self, some: Sequence[EarlierJob]) -> dict[str, str]:
        """Index some jobs in one child process, each by itself if it dies. Returns those that failed, and why."""
        if not some:
            return {}
        try:
            order = msgspec.json.encode(some)
            answer = await self._offload(KEEP_SMALL, order, lambda _: None, project=some[0].spec.project)
            return msgspec.json.decode(answer, type=dict[str, str])
        except BatchmillError as error:
            if len(some) == 1:
                return {some[0].spec.id: error.message}
        failed: dict[str, str] = {}
        for job in some:
            failed |= await self._keep_small([job])
        return failed

    async def _committed(self, job_id: str) -> list[SegmentRef]:
        committed = await self._ledger.database.call_reader(self._ledger.committed, job_id)
        return [ref for generation, ref in committed if generation == 0]

    def _may_have(self, record: Record, wanted: frozenset[str]) -> bool:
        """Whether rows of an ended job may have gone to one of the targets that are wanted."""
        files = JobFiles(self._data_dir, record["id"])
        earlier, keys = read_spec(record["spec"]), read_keys(files.dataset)
        if keys is not None:
            return not wanted.isdisjoint(keys.keys)
        if record["generation"] or earlier.routing or record["compacted"] is not None:
            return self._stored.is_elsewhere or (files.reuse / INDEX).exists()  # its models may have changed since
        return not wanted.isdisjoint(target_keys(earlier))

    async def _brought_for_lookup(
        self, record: Record, files: JobFiles, wanted: frozenset[str], stack: AsyncExitStack
    ) -> bool:
        """Bring the index of a job from the object store; of its segments, the lookup reads what rows take over. Where
        there is no index, bring everything. False if that is not there.
        """
        try:
            head = None
            if await self._stored.holds(files.reuse):
                await stack.enter_async_context(using(self._stored, files.reuse))
                head = await asyncio.to_thread(read_head, files.reuse, record["id"], record["generation"])
            if head is None:
                return record["compacted"] is None and await self._brought(record, files, stack)
            if wanted.isdisjoint(section.key for section in head.sections):
                return False
            published = [Path(name) for name in head.files if Path(name).is_absolute()]
            await stack.enter_async_context(using(self._stored, files.home, *published))
        except BatchmillError as error:
            log.warning("nothing is taken over of the job %s: %s", record["id"], error)
            return False
        return True

    async def _brought(self, record: Record, files: JobFiles, stack: AsyncExitStack) -> bool:
        """Bring the files of a job from the object store. False if it was removed meanwhile."""
        storage = JobStorage(self._stored, files)
        stack.callback(storage.release)
        try:
            await storage.bring(read_spec(record["spec"]), record)
        except BatchmillError as error:
            log.warning("nothing is taken over of the job %s: %s", record["id"], error)
            return False
        return True

    async def keep(self, record: Record) -> None:
        """Called before the segments of an ended job are removed: what later jobs may take over stays, indexed.

        Published lines on this machine stay where they are. Of other results, what rows may take over is copied. Of
        small jobs, which may be very many, only those that lookups still look at are kept.
        """
        spec, files = read_spec(record["spec"]), JobFiles(self._data_dir, record["id"])
        if not await self._is_kept(record, spec, files):
            return
        if spec.is_small:
            await self._index_small([record])
            return
        async with AsyncExitStack() as stack:
            if self._stored.is_elsewhere and not await self._brought(record, files, stack):
                return
            generation, finished = record["generation"], record["finished"]
            committed, place = await self._committed(spec.id), files.segment_place
            results = record["output"] if _has_lines(record["output"]) else RESULTS
            earlier = EarlierJob(
                spec, str(self._data_dir), generation, finished, place, committed, results=results,
                term=self._ledger.database.term.path,
            )  # fmt: skip
            order = msgspec.json.encode(earlier)
            try:
                await self._offload(KEEP, order, lambda _: None, project=spec.project, stores=spec.uses_stores)
            except BatchmillError as error:
                log.warning("the results of the job %s cannot be reused any more: %s", spec.id, error)
                return
            await self._stored.publish(files.reuse)

    async def _is_kept(self, record: Record, spec: JobSpec, files: JobFiles) -> bool:
        """Whether later jobs may take over results of an ended one once it keeps nothing else."""
        is_wanted = stays_reusable(spec) or (files.reuse / INDEX).exists()
        if not is_wanted or not record["rows_ok"] or record["finished"] < self._since(spec):
            return False
        if await self._ledger.database.read(_has_deleted_results, spec.id):
            return False
        return not spec.is_small or record["finished"] >= await self._oldest_of(spec.project)

    async def index_small(self, job_ids: Sequence[str]) -> None:
        """Called before `keep`: those of the jobs that are small get their indexes in few child processes."""
        by_project: dict[str, list[Record]] = {}
        for record in await self._ledger.database.read(_ended_of, job_ids):
            spec = read_spec(record["spec"])
            with _left_to_keep():
                if spec.is_small and await self._is_kept(record, spec, JobFiles(self._data_dir, spec.id)):
                    by_project.setdefault(spec.project, []).append(record)
        for records in by_project.values():
            with _left_to_keep():
                await self._index_small(records)

    async def forget(self) -> None:
        """Remove what is kept of results that are too old to be taken over, or that were deleted; of small jobs, also
        of those that no lookup looks at any more.
        """
        self._oldest.clear()
        ages = [ProjectEntry().reuse_age_s, *(entry.reuse_age_s for entry in self._projects.values())]
        now = self._clock.now()
        homes = await asyncio.to_thread(lambda: list((self._data_dir / "jobs").glob(f"*/{REUSE}")))
        if self._stored.is_elsewhere:  # its cache may have no copy
            old = [
                JobFiles(self._data_dir, job).reuse for job in await self._ledger.database.read(_old, now - min(ages))
            ]
            homes = [*{*homes, *[home for home in old if await self._stored.holds(home)]}]
        for first in range(0, len(homes), FORGOTTEN_MAX):
            some = {home.parent.name: home for home in homes[first : first + FORGOTTEN_MAX]}
            projects = await self._ledger.database.read(_projects, list(some))
            oldest = {project: await self._oldest_of(project) for project in projects}
            before = max([now - min(ages), *oldest.values()])
            for record in await self._ledger.database.read(_maybe_old, list(some), before):
                if record["is_deleted"] or self._is_old(record, oldest[record["project"]]):
                    await self._ledger.database.write(_forget, record)
                    await self._stored.remove(some[record["id"]])
                    await asyncio.to_thread(_remove_index, some[record["id"]], self._owned)

    def _is_old(self, record: Record, oldest: float) -> bool:
        age_s = self._projects.get(record["project"], ProjectEntry()).reuse_age_s
        is_beyond = record["finished"] < oldest and read_spec(record["spec"]).is_small
        return is_beyond or record["finished"] < self._clock.now() - age_s


@contextlib.contextmanager
def _left_to_keep() -> Iterator[None]:
    """Log an error of jobs that are indexed together: `keep` tries each by itself."""
    try:
        yield
    except (BatchmillError, OSError) as error:
        log.warning("small jobs are indexed one by one: %s", error)


def _children_for(dataset: Path) -> int:
    try:
        rows = (dataset / REQUESTS).stat().st_size // DIGEST_BYTES
    except FileNotFoundError:
        rows = 0  # the child says what is wrong
    return max(1, min(CHILDREN_MAX, len(os.sched_getaffinity(0)), rows // CHILD_ROWS))


def _has_lines(output: str | None) -> bool:
    """Whether published results are lines of a file on this machine."""
    return output is not None and output.endswith(".jsonl") and not is_object_url(output) and Path(output).is_file()


_HAS_DELETED_RESULTS = sa.exists().where(
    removals.c.job == jobs.c.id, removals.c.id.startswith(FILE_PREFIX), removals.c.by != ELSEWHERE
)


_HAS_RESULTS = jobs.c.state.in_(ENDED), jobs.c.rows_ok > 0, ~_HAS_DELETED_RESULTS


def _remove_index(home: Path, owned: OwnedFiles) -> None:
    owned.remove_tree(home)
    owned.remove_empty(home.parent)  # of another job than a small one there is more


def _known(db: sa.Connection, job_ids: Sequence[str]) -> set[str]:
    """Those of some jobs that there are."""
    return set(db.execute(sa.select(jobs.c.id).where(jobs.c.id.in_(job_ids))).scalars())


def _has_deleted_results(db: sa.Connection, job_id: str) -> bool:
    return bool(db.execute(sa.select(sa.literal(1)).where(jobs.c.id == job_id, _HAS_DELETED_RESULTS)).first())


def _maybe_old(db: sa.Connection, job_ids: Sequence[str], before: float) -> Sequence[Record]:
    """Those of some jobs that ended before, or whose results were deleted."""
    names = ("id", "project", "spec", "finished", "compacted")
    query = sa.select(*(jobs.c[name] for name in names), _HAS_DELETED_RESULTS.label("is_deleted")).where(
        jobs.c.id.in_(job_ids), jobs.c.state.in_(ENDED), sa.or_(jobs.c.finished < before, _HAS_DELETED_RESULTS),
    )  # fmt: skip
    return db.execute(query).mappings().all()


def _projects(db: sa.Connection, job_ids: Sequence[str]) -> Sequence[str]:
    return db.execute(sa.select(jobs.c.project).where(jobs.c.id.in_(job_ids)).distinct()).scalars().all()


def _old(db: sa.Connection, before: float) -> Sequence[str]:
    """The last jobs that ended before: what was kept of earlier ones was removed in earlier calls."""
    query = sa.select(jobs.c.id).where(jobs.c.state.in_(ENDED), jobs.c.finished < before)
    return db.execute(query.order_by(jobs.c.finished.desc()).limit(FORGOTTEN_MAX)).scalars().all()


def _forget(db: sa.Connection, record: Record) -> None:
    """What is kept of a job's results no longer counts as its bytes."""
    if record["compacted"] is not None:
        db.execute(jobs.update().where(jobs.c.id == record["id"]).values(bytes=2 * len(record["spec"])))
        note_change(db, record["id"])


def _ended(db: sa.Connection, spec: JobSpec, since: float, jobs_max: int) -> Sequence[Record]:
    """Jobs of the same project that have results, none of which was deleted or has expired, the newest first."""
    names = ("id", "spec", "generation", "rows", "finished", "compacted", "output")
    query = sa.select(*(jobs.c[name] for name in names)).where(
        jobs.c.project == spec.project, jobs.c.id != spec.id, jobs.c.finished >= since, *_HAS_RESULTS
    )
    return db.execute(query.order_by(jobs.c.finished.desc()).limit(jobs_max)).mappings().all()


def _ended_of(db: sa.Connection, job_ids: Sequence[str]) -> Sequence[Record]:
    """Those of some jobs that have ended, and have everything."""
    names = ("id", "spec", "generation", "rows_ok", "finished", "compacted")
    query = sa.select(*(jobs.c[name] for name in names)).where(
        jobs.c.id.in_(job_ids), jobs.c.state.in_(ENDED), jobs.c.compacted.is_(None)
    )
    return db.execute(query.order_by(jobs.c.finished)).mappings().all()


def _oldest_ended(db: sa.Connection, project: str, jobs_max: int) -> float:
    """When the oldest of so many of those jobs has ended; minus infinity if there are fewer."""
    is_of_project = jobs.c.project == project, jobs.c.finished.is_not(None)  # as the index has it
    query = sa.select(jobs.c.finished).where(*is_of_project, *_HAS_RESULTS)
    oldest = db.execute(query.order_by(jobs.c.finished.desc()).limit(1).offset(jobs_max - 1)).scalar()
    return -math.inf if oldest is None else oldest
