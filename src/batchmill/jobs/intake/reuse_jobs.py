"""EarlierJobs: the jobs whose results rows may take over, and whether a project's rows do.

Only jobs of the same project are looked at: ended ones that still have their segments, from the newest on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.children.offload import Offload
from batchmill.config.entries import ProjectEntry
from batchmill.errors import BatchmillError
from batchmill.jobs.intake.preparation import reuses
from batchmill.jobs.intake.reuse_orders import (
    INDEX,
    LOOK_UP,
    TARGET_KEYS,
    EarlierJob,
    LookupOrder,
    Reused,
    target_keys,
)
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.storage import JobStorage
from batchmill.ports import Clock
from batchmill.states import ENDED
from batchmill.store.sql.tables import jobs
from batchmill.store.stored_files import StoredFiles
from batchmill.wire.job_spec import JobSpec

JOBS_MAX = 1000  # of a project, that are looked at
log = logging.getLogger("batchmill.owner")


class Space(Protocol):
    """What is needed of `jobs.job_space.JobSpace`."""

    data_dir: Path
    stored: StoredFiles
    projects: Mapping[str, ProjectEntry]


class EarlierJobs:
    def __init__(self, space: Space, ledger: Ledger, clock: Clock, offload: Offload) -> None:
        self._data_dir, self._stored, self._projects = space.data_dir, space.stored, space.projects
        self._ledger, self._clock, self._offload = ledger, clock, offload

    async def count(self, spec: JobSpec, dataset: str, plan: str) -> int:
        """How many of the rows of a sealed and planned dataset would take over a result."""
        async with self._use(spec) as earlier:
            return (await self._look_up(LookupOrder(spec, dataset, plan, earlier), lambda _: None)).rows

    async def take_over(self, spec: JobSpec, files: JobFiles, progress: Callable[[float], None]) -> None:
        """Write the results that rows of a planned job take over to a segment of it."""
        if not reuses(spec):
            return
        async with self._use(spec) as earlier:
            folders = str(files.dataset), str(files.plan(0))
            await self._look_up(LookupOrder(spec, *folders, earlier, str(files.segments)), progress)
        faults.point("after_reuse")

    async def _look_up(self, order: LookupOrder, progress: Callable[[float], None]) -> Reused:
        stores = order.spec.uses_stores or any(each.spec.uses_stores for each in order.earlier)
        data = msgspec.json.encode(order)
        answer = await self._offload(LOOK_UP, data, progress, project=order.spec.project, stores=stores)
        reused = msgspec.json.decode(answer, type=Reused)
        for reason in reused.skipped:
            log.warning("nothing is taken over of the job %s", reason)
        return reused

    @asynccontextmanager
    async def _use(self, spec: JobSpec) -> AsyncIterator[list[EarlierJob]]:
        """The earlier jobs of one, the newest first. Their files stay in the data directory meanwhile."""
        since = self._clock.now() - self._projects.get(spec.project, ProjectEntry()).reuse_age_s
        records = await self._ledger.database.read(_ended, spec, since)
        async with AsyncExitStack() as stack:
            yield await self._chosen(spec, records, stack)

    async def _chosen(self, spec: JobSpec, records: Sequence[sa.RowMapping], stack: AsyncExitStack) -> list[EarlierJob]:
        keys = set(target_keys(spec)) - {""}
        chosen = []
        for record in await asyncio.to_thread(lambda: [each for each in records if self._may_have(each, keys)]):
            files = JobFiles(self._data_dir, record["id"])
            if self._stored.is_elsewhere:
                storage = JobStorage(self._stored, files)
                stack.callback(storage.release)
                try:
                    await storage.bring(read_spec(record["spec"]), record)
                except BatchmillError:
                    continue  # it was removed meanwhile
            chosen.append(await self._earlier(record, files))
        return chosen

    def _may_have(self, record: sa.RowMapping, keys: set[str]) -> bool:
        """Whether rows of an ended job may have gone to one of these targets."""
        earlier = read_spec(record["spec"])
        if earlier.is_small:
            return False
        if record["generation"] or earlier.routing:  # its models may have changed since
            return self._stored.is_elsewhere or (JobFiles(self._data_dir, earlier.id).dataset / TARGET_KEYS).exists()
        return not keys.isdisjoint(target_keys(earlier))

    async def _earlier(self, record: sa.RowMapping, files: JobFiles) -> EarlierJob:
        spec = read_spec(record["spec"])
        committed = []
        if not (files.reuse / INDEX).exists():
            committed = [ref for generation, ref in self._ledger.committed(spec.id) if generation == 0]
        return EarlierJob(spec, str(self._data_dir), record["generation"], files.segment_place, committed)


def _ended(db: sa.Connection, spec: JobSpec, since: float) -> Sequence[sa.RowMapping]:
    """Jobs of the same project that have results and segments, the newest first."""
    query = sa.select(jobs.c.id, jobs.c.spec, jobs.c.generation, jobs.c.rows).where(
        jobs.c.project == spec.project, jobs.c.id != spec.id, jobs.c.state.in_(ENDED), jobs.c.finished >= since,
        jobs.c.rows_ok > 0, jobs.c.compacted.is_(None),
    )  # fmt: skip
    return db.execute(query.order_by(jobs.c.finished.desc()).limit(JOBS_MAX)).mappings().all()
