"""`ledger salvage`: rebuilds a damaged or missing database from everything that can still be read.

Table rows come from the damaged file and, if they were lost, from the newest backup. Jobs come from their folders. The
new database is built beside the old one and replaces it in idempotent steps: if the process is killed between two of
them, the next process that opens the data directory finishes them (`finish`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.errors import BatchmillError, InvalidConfig
from batchmill.jobs import repair, retention
from batchmill.jobs.ledger import audit, snapshot
from batchmill.jobs.ledger.audit import AuditOrder
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.ledger.plan import PLAN
from batchmill.part_files import make_folder, sync_file, sync_folder
from batchmill.services.data_dirs import backups, salvaged_small_jobs
from batchmill.services.data_dirs.salvaged_small_jobs import Recovery, SalvagedSmallJobs
from batchmill.services.data_dirs.salvaged_tables import SalvagedTables
from batchmill.services.files.files import BATCH
from batchmill.services.files.records import FileRecord
from batchmill.states import JobState
from batchmill.store.names import DATABASE
from batchmill.store.sql import schema as schema_version
from batchmill.store.sql.damaged_database import DamagedDatabase, Row, in_sql, is_sound
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import files as file_table
from batchmill.store.sql.tables import jobs, logged_files, metadata, removals
from batchmill.types import SalvageReport
from batchmill.wire.job_spec import JobSpec

WORK, SALVAGED = "salvage", f"{DATABASE}.salvaged"
DAMAGED = "damaged"  # the folder for the files that were replaced
LOGS = ("-wal", "-shm")
LEDGER = frozenset({"jobs", "shards", "commits", "error_counts"})  # tables that a job's own folder can rebuild
Progress = Callable[[str], None]
INCOMPLETE, KEYS = "incomplete.json", "keys.db"  # in the work folder: the tables that lost rows, and `SalvagedTables`
REBUILT = "its ledger is rebuilt"
LOST_AND_FOUND = "lost+found"
STAGING = "staging"
_PATHS = {  # table -> the paths of its records' files, below the data directory
    "files": "files/*",
    "adapters": "adapters/*",
    "model_versions": "models/*/*/*",
}


def salvage(data_dir: Path, progress: Progress) -> SalvageReport:
    """Build a new database from what can be read. The caller holds the lock of the data directory.

    Raises: InvalidConfig if another version of batchmill wrote the database.
    """
    finish(data_dir)
    old, work = data_dir / DATABASE, data_dir / WORK
    if old.exists() and is_sound(old) and not _unknown_jobs(data_dir, old):
        return SalvageReport(is_sound=True)
    shutil.rmtree(work, ignore_errors=True)
    make_folder(work)
    rebuild = _Salvage(data_dir, work, progress)
    try:
        rebuild.copy_tables()
        rebuild.restore_uploads()
        rebuild.rebuild_jobs()
        report = rebuild.report()
    finally:
        rebuild.close()
    with open(rebuild.path, "rb") as file:
        os.fsync(file.fileno())
    (work / INCOMPLETE).write_bytes(msgspec.json.encode(sorted(map(str, rebuild.incomplete))))
    sync_file(work / INCOMPLETE)
    sync_folder(work)
    faults.point("before_salvaged")
    os.replace(rebuild.path, data_dir / SALVAGED)
    sync_folder(data_dir)
    faults.point("after_salvaged")
    moved = finish(data_dir)
    return msgspec.structs.replace(report, moved=moved, damaged=str(data_dir / DAMAGED))


def finish(data_dir: Path) -> list[str]:
    """Install a salvaged database if one is ready. Returns the paths that were moved to `lost+found`."""
    ready, old, work = data_dir / SALVAGED, data_dir / DATABASE, data_dir / WORK
    moved: list[str] = []
    if ready.exists():
        aside = data_dir / DAMAGED / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(ready.stat().st_mtime))
        make_folder(aside)
        for path in (old, *(old.with_name(DATABASE + each) for each in LOGS)):
            if path.exists() and not (aside / path.name).exists():
                os.link(path, aside / path.name)
        sync_folder(aside)
        faults.point("after_set_aside")
        moved = move_aside(data_dir, ready, work)
        faults.point("after_strays")
        for each in LOGS:  # they belong to the old database: the new one must not read them
            old.with_name(DATABASE + each).unlink(missing_ok=True)
        sync_folder(data_dir)
        faults.point("after_logs")
        os.replace(ready, old)
        sync_folder(data_dir)
    if work.exists():
        shutil.rmtree(work)
    return moved


def make_ready(data_dir: Path) -> None:
    """Prepare the data directory before the database is opened. The caller holds the lock of the data directory.

    Raises: InvalidConfig if there are jobs but no database.
    """
    finish(data_dir)
    _refuse_missing(data_dir)


def _refuse_missing(data_dir: Path) -> None:
    database = data_dir / DATABASE
    if database.exists() and database.stat().st_size:
        return
    if next((data_dir / "jobs").glob("*/job.json"), None) is not None:
        raise InvalidConfig(
            f"the database {database} is missing, but there are jobs in {data_dir / 'jobs'}: restore it, or run "
            "`batchmill ledger salvage`, which builds a new one from backups and the jobs' own files",
            code="database_missing",
        )


def _unknown_jobs(data_dir: Path, path: Path) -> list[str]:
    """Return the jobs that have a folder with work in it but no record."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        job_ids = {job_id for (job_id,) in db.execute("SELECT id FROM jobs UNION SELECT id FROM removals")}
    homes = [home.name for home in (data_dir / "jobs").glob("job_*") if home.name not in job_ids]
    return [name for name in homes if not JobFiles(data_dir, name).is_untouched()]


class _Salvage:
    def __init__(self, data_dir: Path, work: Path, progress: Progress) -> None:
        self._data_dir, self._work, self._progress = data_dir, work, progress
        self.path = work / DATABASE
        self._damaged = DamagedDatabase(data_dir / DATABASE, work)
        self._backup = backups.newest(data_dir)
        version = self._damaged.version()
        if version not in (None, schema_version.VERSION):
            self._damaged.close()
            raise InvalidConfig(
                f"the database {data_dir / DATABASE} has schema version {version}, this batchmill supports "
                f"{schema_version.VERSION}: salvage it with the batchmill that wrote it"
            )
        self._database = Database(self.path)
        self._ledger = Ledger(self._database)
        self._small_jobs = SalvagedSmallJobs(self._ledger, data_dir)
        self._tables = SalvagedTables(self.path, work / KEYS, self._backup)
        self.incomplete: set[str] = set()  # tables that lost rows
        self._from_backup: set[str] = set()  # jobs whose record comes from the backup
        self._recovered: dict[str, Recovery] = {}  # job id -> what has become of it
        self._lost: list[str] = []
        self._failed: list[str] = []

    def close(self) -> None:
        self._damaged.close()
        self._small_jobs.close()
        self._tables.close()
        self._database.close()
        for each in LOGS:
            assert not self.path.with_name(DATABASE + each).exists(), (
                "closing the last connection empties the write-ahead log"
            )

    # -- tables -------------------------------------------------------------------------------------------------------

    def copy_tables(self) -> None:
        """Copy every readable row, and for a table that lost rows also the backup's rows."""
        for table in metadata.sorted_tables:
            if table.name == "schema":
                continue
            table_rows = self._damaged.read(table)
            copied = self._insert(table, table_rows.rows)
            self._tables.note_read(table, table_rows, copied)
            added = []
            if table_rows.is_damaged:
                self.incomplete.add(table.name)
                added = self._missing_rows(table)
                self._insert(table, added)
            if table_rows.rows or added:
                self._progress(
                    f"{table.name}: {copied} rows read" + (f", {len(added)} from the backup" if added else "")
                )
        if self._backup is not None:
            self._small_jobs.restore_ledgers(self._backup, self._from_backup)
        self._tables.note_copied()

    def _missing_rows(self, table: sa.Table) -> list[Row]:
        """Return the rows that the backup has and the damaged file has lost."""
        if table.name in LEDGER - {"jobs"} or table.name == logged_files.name:
            return []  # what was logged then is on the disk, where another file may have its name by now
        missing = list(self._tables.missing(table))
        if table.name == file_table.name:
            missing = [
                row for row in missing if (self._data_dir / "files" / row[0]).exists()
            ]  # the others were deleted
        if table.name == "jobs":
            missing = [
                row for row in missing if JobFiles(self._data_dir, row[0]).spec.exists() or _is_small(table, row)
            ]  # the others were removed
            self._from_backup = {row[0] for row in missing}
        return missing

    def _insert(self, table: sa.Table, rows: list[Row]) -> int:
        names = [column.name for column in table.columns]
        statement = in_sql(table.insert().prefix_with("OR IGNORE").values(dict.fromkeys(names)))
        with self._database.writer.begin() as db:
            cursor = db.connection.cursor()
            cursor.executemany(statement, rows)
            return max(cursor.rowcount, 0)

    # -- from folders -------------------------------------------------------------------------------------------------

    def restore_uploads(self) -> None:
        """Restore lost records of the files that jobs read. The job says which project they belong to."""
        if file_table.name not in self.incomplete:
            return
        home = self._data_dir / "files"
        for spec in self._specs():
            names: dict[str, str] = (spec.origin or {}).get("files") or {}  # id -> name
            for path in map(Path, spec.dataset.paths):
                if path.parent == home and path.is_file():
                    name = names.get(path.name, path.name)
                    record = FileRecord(
                        path.name, spec.project, BATCH, str(name), path.stat().st_size, None, spec.created, None, None
                    )
                    with self._database.writer.begin() as db:
                        values = msgspec.structs.asdict(record)
                        db.execute(file_table.insert().prefix_with("OR IGNORE").values(values))

    def _specs(self) -> Iterator[JobSpec]:
        """Yield the specs of all jobs that have a folder, and of small ones whose records could be read."""
        yield from self._small_jobs.specs()
        for home in sorted((self._data_dir / "jobs").glob("job_*")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield JobFiles(self._data_dir, home.name).read_spec()

    def rebuild_jobs(self) -> None:
        """Rebuild jobs whose record is lost or does not match their segments."""
        removed = self._removed_jobs()
        if self.incomplete & salvaged_small_jobs.TABLES:
            for spec in self._small_jobs.specs():
                self._try_rebuild(spec.id, self._small_jobs.rebuild)
        for home in sorted((self._data_dir / "jobs").glob("job_*")):
            files = JobFiles(self._data_dir, home.name)
            if home.name in removed or (files.is_untouched() and not files.spec.exists()):
                continue  # the next start removes its remains; a small job has nothing here but an index
            self._try_rebuild(home.name, self._rebuild)
        if self.incomplete & salvaged_small_jobs.TABLES:
            self._lost = [job_id for job_id in self._small_jobs.remove_parts() if job_id not in removed]

    def _try_rebuild(self, job_id: str, rebuild: Callable[[str], Recovery | None]) -> None:
        try:
            if (recovery := rebuild(job_id)) is not None:
                self._recovered[job_id] = recovery
                self._progress(f"{job_id}: {'only its results are left' if recovery.is_reduced else REBUILT}")
        except (OSError, BatchmillError, msgspec.MsgspecError) as error:
            self._failed.append(f"{job_id}: {error}")

    def _removed_jobs(self) -> set[str]:
        """Return the jobs that were removed, and delete the records of them that came from the backup."""
        with self._database.writer.begin() as db:
            removed = set(db.execute(sa.select(removals.c.id).where(removals.c.id == removals.c.job)).scalars())
            for job_id in removed & self._from_backup:
                db.execute(jobs.delete().where(jobs.c.id == job_id))
        return removed

    def _rebuild(self, job_id: str) -> Recovery | None:
        files = JobFiles(self._data_dir, job_id)
        if files.ending.exists() and not (files.plan(0) / PLAN).exists():
            return self._restore_ended(files)
        before, record = self._ledger.snapshot(job_id), None
        if before.state is None:
            spec = files.read_spec()
        else:
            record = self._ledger.job(job_id)
            spec = read_spec(record["spec"])
            if record["compacted"] is not None or not self._is_in_doubt(spec, before):
                return None
        after = repair.rebuild(AuditOrder(spec, str(self._data_dir), files.segment_place, before), lambda _: None)
        self._ledger.replace(spec, before, after)
        return Recovery.of(record, after)

    def _restore_ended(self, files: JobFiles) -> Recovery | None:
        """Restore the lost record of a job of which only the results are left."""
        if self._ledger.snapshot(files.home.name).state is not None and files.home.name not in self._from_backup:
            return None
        values = retention.read_ending(files) | {"spec": files.spec.read_bytes()}
        with self._database.writer.begin() as db:
            db.execute(jobs.insert().prefix_with("OR REPLACE").values(values))
        return Recovery(is_reduced=True)

    def _is_in_doubt(self, spec: JobSpec, before: snapshot.Snapshot) -> bool:
        """Tell whether part of the job's record may be lost and can be rebuilt."""
        if not self.incomplete & LEDGER or before.state == JobState.FAILED:
            return False
        files = JobFiles(self._data_dir, spec.id)
        if not (files.plan(0) / PLAN).exists():
            return False  # none of its rows ran
        if spec.id in self._from_backup:
            return True
        order = AuditOrder(spec, str(self._data_dir), files.segment_place, before)
        return bool(audit.verify(order, lambda _: None).broken)

    def report(self) -> SalvageReport:
        return SalvageReport(
            is_sound=False, tables=self._tables.report(), backup=None if self._backup is None else str(self._backup),
            rebuilt=[job_id for job_id, recovery in self._recovered.items() if not recovery.is_reduced],
            reopened={job_id: recovery.reopened for job_id, recovery in self._recovered.items() if recovery.reopened},
            reduced=[job_id for job_id, recovery in self._recovered.items() if recovery.is_reduced],
            lost=self._lost, failed=self._failed,
        )  # fmt: skip


def _is_small(table: sa.Table, row: Row) -> bool:
    """Whether a job has no folder of its own. That it was removed is known from the table of removals alone."""
    return read_spec(bytes(row[list(table.columns).index(table.c.spec)])).is_small


def move_aside(data_dir: Path, database: Path, work: Path) -> list[str]:
    """Move files without a record in `database` to `lost+found`, for tables that lost rows. Returns the new paths."""
    listed = work / INCOMPLETE
    incomplete = set(msgspec.json.decode(listed.read_bytes(), type=list[str])) if listed.exists() else set(_PATHS)
    moved = []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as db:
        for table in _PATHS.keys() & incomplete:
            for path in _unrecorded_paths(data_dir, db, table):
                target = data_dir / LOST_AND_FOUND / path.relative_to(data_dir)
                make_folder(target.parent)
                if not target.exists():
                    os.rename(path, target)
                    sync_folder(target.parent)
                    sync_folder(path.parent)
                    moved.append(str(target))
    return sorted(moved)


def _unrecorded_paths(data_dir: Path, db: sqlite3.Connection, table: str) -> Iterator[Path]:
    if table == "model_versions":
        version_keys = {(name, str(number)) for name, number in db.execute("SELECT name, number FROM model_versions")}
        for path in sorted(data_dir.glob(_PATHS[table])):
            if STAGING not in path.parts and (path.parts[-3], path.name) not in version_keys:
                yield path
        return
    query = in_sql(sa.select(metadata.tables[table].c.id))
    names = {name for (name,) in db.execute(query)}
    for path in sorted(data_dir.glob(_PATHS[table])):
        if not path.name.startswith(".") and path.name != STAGING and path.name not in names:
            yield path
