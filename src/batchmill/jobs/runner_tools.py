"""What all jobs share: where their files are, and the tools of their runners."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from batchmill.children.offload import Offload
from batchmill.jobs.finishing import EndListener
from batchmill.jobs.intake.reuse_jobs import EarlierJobs
from batchmill.jobs.intake.schema_code import SchemaCode
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.turns import Turns
from batchmill.ports.clock import Clock
from batchmill.ports.executors import NodeTasks
from batchmill.ports.jobs import Adapters
from batchmill.store.disk_room import DiskQuota, DiskReserve
from batchmill.store.sql.database import Database
from batchmill.store.stored_files import StoredFiles
from batchmill.wire.job_spec import JobSpec


class RunnerTools(Struct, frozen=True):
    """What all runners of a data directory share."""

    data_dir: Path
    commit_log: CommitLog
    dispatcher: Dispatcher
    clock: Clock
    disk_reserve: DiskReserve
    offload: Offload  # in child processes that are reused
    adapters: Adapters
    schema_code: SchemaCode
    disk_quota: DiskQuota
    stored: StoredFiles
    scratch: Scratch
    turns: Turns
    is_shared: bool  # see JobSpace
    tasks: NodeTasks | None
    earlier_jobs: EarlierJobs
    end_listeners: list[EndListener]

    @property
    def database(self) -> Database:
        return self.commit_log.ledger.database

    def disk_quota_of(self, spec: JobSpec) -> DiskQuota | None:
        """The disk quota that counts the bytes of a server's job; None for a command's job."""
        return None if spec.origin is None else self.disk_quota

    def quota_of(self, spec: JobSpec) -> int | None:
        """How many unfinished jobs the project may have; None for a command's job."""
        return None if spec.origin is None else self.disk_quota.quotas.of(spec.project).unfinished_jobs
