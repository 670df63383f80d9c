"""Small jobs of a salvaged database. They have no folder, so their ledgers are compared with what the database has left
of their plans and outcomes, and made again from that.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.jobs import repair
from batchmill.jobs.ledger import audit, packed
from batchmill.jobs.ledger.audit import AuditOrder
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.scratch import Scratch
from batchmill.jobs.ledger.snapshot import Counters, Rebuilt
from batchmill.states import ENDED, JobState
from batchmill.store.sql.damaged_database import in_sql
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
from batchmill.store.sql.transactions import Record, note_change
from batchmill.wire.job_spec import JobSpec

TABLES = frozenset({"jobs", "shards", "commits", "error_counts", "packed_jobs", "outcome_blocks"})
LEDGER_TABLES = (shards, commits, error_counts)
PARTS = (shards, commits, notes, outcome_blocks, packed_jobs)  # what retention removes of an ended job
UNPLANNED = Rebuilt(0, Counters(), [], [], {})
JOBS_AT_ONCE = 1000  # records of one query


class Recovery(Struct, frozen=True):
    """What has become of a job that was not as its files, or its plans and outcomes, say: its ledger is rebuilt."""

    reopened: int = 0  # rows of which the outcomes are lost
    is_reduced: bool = False  # it has ended, and keeps only its results

    @classmethod
    def of(cls, record: Record | None, after: Rebuilt) -> Recovery:
        """Args: record: of the job, before."""
        return cls(max(after.reopened, 0 if record is None else _lost(record, after)))


class SalvagedSmallJobs:
    """The small jobs of a new database. Close it."""

    def __init__(self, ledger: Ledger, data_dir: Path) -> None:
        self._ledger, self._data_dir = ledger, data_dir
        self._database = ledger.database
        self._scratch = Scratch(data_dir, self._database)

    def close(self) -> None:
        self._scratch.close()

    def restore_ledgers(self, backup: Path, from_backup: Collection[str]) -> None:
        """Add what a backup has of the ledgers of small jobs whose records come from it."""
        small = {job_id for job_id in from_backup if read_spec(self._ledger.job(job_id)["spec"]).is_small}
        with closing(sqlite3.connect(f"file:{backup}?mode=ro&immutable=1", uri=True)) as old:
            for table in LEDGER_TABLES:
                names = [column.name for column in table.columns]
                insert = in_sql(table.insert().prefix_with("OR IGNORE").values(dict.fromkeys(names)))
                rows = old.execute(in_sql(sa.select(*table.columns))).fetchall()
                with self._database.writer.begin() as db:
                    db.connection.cursor().executemany(insert, [row for row in rows if row[0] in small])

    def specs(self) -> Iterator[JobSpec]:
        """The small jobs of the new database."""
        last = ""
        query = sa.select(jobs.c.id, jobs.c.spec).order_by(jobs.c.id).limit(JOBS_AT_ONCE)
        while True:
            with self._database.reader.connect() as db:
                some = db.execute(query.where(jobs.c.id > last)).all()
            if not some:
                return
            last = some[-1].id
            yield from (spec for spec in (read_spec(each.spec) for each in some) if spec.is_small)

    def rebuild(self, job_id: str) -> Recovery | None:
        """Rebuild the ledger of a job if it is not what the job's plan and outcomes say. Returns None if it is.

        Of an ended job of which rows are lost, only the results remain.

        Raises: LedgerBroken, OSError.
        """
        record = self._ledger.job(job_id)
        spec, state = read_spec(record["spec"]), JobState(record["state"])
        if record["compacted"] is not None or state is JobState.FAILED:
            return None
        with self._unpacked(spec) as order:
            if order is None:
                return self._lose(record) if record["rows"] > 0 else None
            if not audit.verify(order, lambda _: None).broken:
                return None
            after = repair.rebuild(order, lambda _: None)
            if state in ENDED and _lost(record, after) and _has_results(record):
                return self._lose(record)
            plans = packed.pack(packed.folders_of(order.files))
        with self._database.writer.begin() as db:
            packed.store(db, job_id, plans)
        self._ledger.replace(spec, order.before, after)
        return Recovery.of(record, after)

    @contextmanager
    def _unpacked(self, spec: JobSpec) -> Iterator[AuditOrder | None]:
        """The files of a job in scratch; None if its plan is lost."""
        with self._database.reader.connect() as db:
            data = packed.read(db, spec.id)
        files = self._scratch.files(spec)
        try:
            if data is None:
                yield None
                return
            packed.unpack(files.home, data)
            place = replace(files.segment_place, blocks=self._ledger.blocks(spec.id))
            before = self._ledger.snapshot(spec.id)
            yield AuditOrder(spec, str(self._data_dir), place, before, str(self._scratch.home))
        finally:
            shutil.rmtree(files.home, ignore_errors=True)

    def _lose(self, record: Record) -> Recovery:
        """What a retry needs of a job is lost: of an ended one the results remain, another one begins again."""
        job_id = record["id"]
        if JobState(record["state"]) in ENDED:
            with self._database.writer.begin() as db:
                _drop(db, job_id)
                db.execute(jobs.update().where(jobs.c.id == job_id).values(compacted=time.time()))
                note_change(db, job_id)
            return Recovery(is_reduced=True)
        with self._database.writer.begin() as db:
            _drop(db, job_id)
        self._ledger.replace(read_spec(record["spec"]), self._ledger.snapshot(job_id), UNPLANNED)
        return Recovery.of(record, UNPLANNED)

    def remove_parts(self) -> list[str]:
        """Remove what is left of jobs that are lost: an order that comes again must not be answered with one. Of ended
        jobs that keep only their results, remove what the backup still had.

        Returns: the jobs that are lost.
        """
        all_lost: set[str] = set()
        known, reduced = sa.select(jobs.c.id), sa.select(jobs.c.id).where(jobs.c.compacted.is_not(None))
        with self._database.writer.begin() as db:
            for table in (submissions, job_models, error_counts, *PARTS):
                lost = db.execute(sa.select(table.c.job).where(table.c.job.not_in(known)).distinct()).scalars().all()
                for job_id in lost:
                    if not JobFiles(self._data_dir, job_id).spec.exists():  # else a person may rebuild it
                        db.execute(table.delete().where(table.c.job == job_id))
                        all_lost.add(job_id)
            for table in PARTS:
                db.execute(table.delete().where(table.c.job.in_(reduced)))
        return sorted(all_lost)


def _lost(record: Record, after: Rebuilt) -> int:
    """Rows that a job's record counts, and of which there is no outcome. That of an ended job also counts rows that
    share the outcome of another.
    """
    counted = min(record["rows_ok"] + record["rows_failed"], record["rows"] - record["rows_folded"])
    return max(counted - after.counters.rows_ok - after.counters.rows_failed, 0)


def _drop(db: sa.Connection, job_id: str) -> None:
    for table in PARTS:
        db.execute(table.delete().where(table.c.job == job_id))


def _has_results(record: Record) -> bool:
    """Whether the files with the results of a job are there."""
    outputs = [record[name] for name in ("output", "errors_output") if record[name] is not None]
    return bool(outputs) and all(Path(path).exists() for path in outputs)
