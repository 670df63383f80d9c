"""A `JobService` over a folder, with a dispatcher of its own, as the owner of a data directory puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchmill.config import RetentionEntry
from batchmill.config.entries import ProjectEntry
from batchmill.jobs.intake.adapters import NoAdapters
from batchmill.jobs.job_space import JobSpace
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.pools.dispatcher import Dispatcher, Sharing
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.resources import Resources
from batchmill.jobs.service import JobService
from batchmill.ports.clock import Clock
from batchmill.ports.executors import Executor
from batchmill.ports.jobs import Adapters
from batchmill.store.disk_room import DiskQuota
from batchmill.store.file_log import FileLog
from batchmill.store.stored_files import LocalFiles, StoredFiles
from batchmill.types import JobView, ProjectQuotas


def job_service(
    data_dir: Path, ledger: Ledger, executor: Executor, clock: Clock, *, idle_timeout_s: float = 0.0,
    machine: Resources | None = None, adapters: Adapters = NoAdapters(), quotas: ProjectQuotas = ProjectQuotas(),
    retention: RetentionEntry = RetentionEntry(), is_shared: bool = False,
    projects: Mapping[str, ProjectEntry] = {}, log: FileLog | None = None, stored: StoredFiles | None = None,
) -> JobService:  # fmt: skip
    """Close it: it closes the ledger too."""
    commit_log = CommitLog(ledger)
    dispatcher = Dispatcher(
        data_dir, commit_log, executor, clock, idle_timeout_s=idle_timeout_s,
        quarantine=Quarantine(clock, ledger.database),
        sharing=Sharing(machine=machine),
    )  # fmt: skip
    disk_quota = DiskQuota(ledger.database, data_dir, quotas)
    space = JobSpace(data_dir, disk_quota, stored or LocalFiles(log), is_shared=is_shared, projects=projects)
    return JobService(space, commit_log, dispatcher, clock, adapters=adapters, retention=retention)


async def end_of(service: JobService, job_id: str) -> JobView:
    """A job that has ended, or is paused."""
    return [view async for view in service.watch(job_id, 0.05)][-1]
