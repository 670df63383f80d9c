"""Files of projects: uploads, and the results of jobs. Bytes are in DATA_DIR/files/ID, records in the database.

The order is guaranteed: bytes durable -> record durable -> file visible. After a crash, a sweep removes bytes without a
record. Knows no dialect. A file of another project gets the same error as a file that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa

from batchmill import faults
from batchmill.config import ServerEntry
from batchmill.errors import Conflict, DatabaseUnavailable, Gone, InvalidInput, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger.files import RESULTS, REUSE
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import sync_folder
from batchmill.ports.clock import Clock
from batchmill.run_next import answer_with, start_next
from batchmill.services.files import records as file_records
from batchmill.services.files.arrivals import Arrivals
from batchmill.services.files.incoming import (
    FREE_BYTES_MIN,
    Disk,
    Incoming,
    check_free_space,
    full_disk,
    names_in,
    piece_bytes,
    remove_others,
    remove_same,
    run_to_completion,
    same_files,
)
from batchmill.services.files.job_results import AdoptedResults, Result, ResultFiles, result_record
from batchmill.services.files.records import FileQuery, FileRecord, unknown
from batchmill.states import JobState
from batchmill.store import removals
from batchmill.store.disk_room import DiskQuota, Writing
from batchmill.store.file_log import FILE_BYTES_MAX, FileLog
from batchmill.store.quotas import refuse_beyond
from batchmill.store.removals import ELSEWHERE, Removal
from batchmill.store.sql.database import Database
from batchmill.store.sql.portable import insert_missing
from batchmill.store.sql.tables import files
from batchmill.store.sql.transactions import Changes, Record
from batchmill.store.stored_files import LocalFiles, StoredFiles, using
from batchmill.types import JobView, ProjectQuotas
from batchmill.wire.native import FILENAME_CHARS_MAX

BATCH = "batch"  # the purpose of input files of jobs


__all__ = ["BATCH", "FileService", "FileWriter", "OpenFile", "Removal", "Result"]

WRITE_THREADS, READ_THREADS = 4, 4
READ_BYTES = 1024 * 1024  # per read
PAGE_MAX = 10_000
SWEEP_MAX = 500  # files per query
UPLOADED_MAX = 1000  # records in memory
ARRIVING = ".incoming"
EXPIRY = "the server, because it had expired,"  # who deleted a file, in messages
FOUND_AT_ONCE = 1000  # files of one statement
IS_UPLOAD = files.c.job.is_(None)
Within = Callable[[sa.Connection, FileRecord], None]


class _Ordered(msgspec.Struct):
    """What of a job's description says how long its results are kept."""

    origin: dict[str, Any] | None = None


_ordered = msgspec.json.Decoder(_Ordered)


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


class FileService:
    """Raises, everywhere: UnknownName (`unknown_file`) for a file that this project does not have (any more), and Gone
    for a deleted result."""

    def __init__(
        self, database: Database, data_dir: Path, clock: Clock, limits: ServerEntry,
        quotas: ProjectQuotas = ProjectQuotas(), disk_quota: DiskQuota | None = None,
        stored: StoredFiles = LocalFiles(),
    ) -> None:  # fmt: skip
        self.stored = stored
        self.disk_quota = disk_quota or DiskQuota(database, data_dir, quotas)
        self._database, self._clock, self.limits, self.quotas = database, clock, limits, quotas
        self._jobs_home, self._results_home = data_dir / "jobs", data_dir / RESULTS
        self.home = data_dir / "files"
        self.free_bytes_min = FREE_BYTES_MIN
        self.owned = OwnedFiles(database.term)  # for what a successor knows too: of its files, and of results
        self.disk, self._reading = Disk("files-write", WRITE_THREADS), Disk("files-read", READ_THREADS)
        self.arrivals = Arrivals()
        self._uploaded: OrderedDict[str, FileRecord] = OrderedDict()  # lately: most are read by a job at once
        self._holds: Counter[str] = Counter()
        self._deleting: set[str] = set()
        self._sweeping = asyncio.Lock()
        self._adopting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by job
        self._ending: dict[str, AdoptedResults] = {}  # by a transaction that has not ended yet
        database.writer.listen(self._changed)
        self._adopted_lately: OrderedDict[str, AdoptedResults] = OrderedDict()  # by job: most are polled at once
        self._swept_orphans = False
        (self.home / ARRIVING).mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_folder(data_dir)

    # -- write ------------------------------------------------------------------------------------------------------

    async def writer(self, project: str, *, is_joined: bool = False) -> FileWriter:
        """Return a writer for a new file of a project. The file is visible once it is committed.

        Args: is_joined: the file is joined from parts that already count against the quota.
        Raises: OverQuota if the project has no disk space left.
        """
        return FileWriter(self, project, None if is_joined else await self.disk_quota.begin(project))

    def begin_incoming(self, file_id: str, bytes_max: int, writing: Writing | None) -> Incoming:
        """Begin an incoming file that has no record yet. Call `end_incoming` when it is stored or dropped."""
        self.arrivals.begin([file_id])
        return Incoming(
            self.disk,
            self.home / ARRIVING / file_id,
            bytes_max=bytes_max,
            free_bytes_min=self.free_bytes_min,
            piece_bytes=piece_bytes(len(self.arrivals.ids)),
            writing=writing,
        )

    def end_incoming(self, file_id: str) -> None:
        self.arrivals.end([file_id])

    async def store(self, record: FileRecord, incoming: Incoming, within: Within | None = None) -> None:
        """Store the bytes, then the record. `within` runs in the record's transaction and may refuse it."""
        path, quota, log = self.path(record), self.quotas.of(record.project).files, self.stored.log
        data = None if log is None else incoming.take_short(FILE_BYTES_MAX)
        if log is None or data is None:
            await incoming.settle(path)
            faults.point("after_settle")

        def insert(db: sa.Connection) -> None:
            _insert(db, record, within, quota)
            if log is not None and data is not None:
                check_free_space(self.home, self.free_bytes_min)
                log.write(db, path, data)
                faults.point("in_file_record")

        try:
            await self.stored.publish(path)
            with full_disk():
                await (self._database.write if data is None else self._database.write_short)(insert)
            self._uploaded[record.id] = record
            if len(self._uploaded) > UPLOADED_MAX:
                self._uploaded.popitem(last=False)
        except BaseException as error:
            if not isinstance(error, DatabaseUnavailable):  # else it may be stored all the same: the next owner knows
                await self.disk.run(discard, path)
                await self.stored.remove(path)
            raise

    def record(self, file_id: str, project: str, *, purpose: str, filename: str, expires_s: float | None) -> FileRecord:
        """Return the record of a new file. Raises: InvalidInput for an invalid name."""
        if expires_s is None and purpose == BATCH:
            expires_s = self.limits.file_expires_s
        now = self._clock.now()
        expires = None if expires_s is None else now + expires_s
        return FileRecord(file_id, project, purpose, checked_filename(filename), 0, None, now, expires, None)

    # -- read -------------------------------------------------------------------------------------------------------

    async def get(self, project: str, file_id: str) -> FileRecord:
        record = self._uploaded.get(file_id) or await self._database.read(file_records.find, file_id)
        now = self._clock.now()
        if record is None:
            removal = await self._database.read(removals.find, file_id)
            raise (removal.error() if removal is not None and removal.project == project else unknown(file_id))
        if record.project != project:
            raise unknown(file_id)
        if record.expires is not None and record.expires <= now:
            raise (unknown(file_id) if record.job is None else _removal(record, EXPIRY, record.expires).error())
        return record

    @contextlib.asynccontextmanager
    async def hold(self, project: str, file_id: str) -> AsyncIterator[FileRecord]:
        """`get` a file that cannot be deleted until the job that reads it is stored."""
        self._holds[file_id] += 1
        try:
            if file_id in self._deleting:
                raise unknown(file_id)
            try:
                record = await self.get(project, file_id)
            except Gone:
                raise unknown(file_id) from None  # for a reader it is like any other unknown file
            async with using(self.stored, self.path(record)):
                yield record
        finally:
            self._holds[file_id] -= 1
            if not self._holds[file_id]:
                del self._holds[file_id]

    def path(self, record: FileRecord) -> Path:
        """Return the path of its bytes. They never change, and stay until the record is deleted."""
        return self.home / record.id

    async def open(self, record: FileRecord) -> OpenFile:
        """Open its bytes. They can be read even if the file is deleted meanwhile."""
        path = self.path(record)
        try:
            async with using(self.stored, path):
                fd = await self._reading.run(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise unknown(record.id) from None  # deleted after its record was read
        return OpenFile(self._reading, fd, record)

    async def list(
        self,
        project: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = PAGE_MAX,
        newest_first: bool = True,
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether there are more. Raises: UnknownName for an unknown `after`."""
        query = FileQuery(project, self._clock.now(), min(limit, PAGE_MAX), purpose, after, newest_first)
        records = await self._database.read(file_records.page, query)
        return records[: query.limit], len(records) > query.limit

    # -- results ----------------------------------------------------------------------------------------------------

    async def adopt_results(self, view: JobView) -> tuple[Result, Result]:
        """Return the output and error file of an ended job as files of its project. Creates their records if needed.

        None: no such file. A Removal: it was deleted. Only files in the job's folder are adopted: an output path that
        the caller named belongs to the caller. Idempotent.
        """
        if not JobState(view.state).is_at_rest:
            return None, None
        if (results := self.adopted_lately(view)) is not None:
            return results
        files_of_job = ResultFiles.of(view)
        async with self._adopting.setdefault(view.id, asyncio.Lock()):
            if (log := self.stored.log) is not None:
                return files_of_job.chosen(await self._adopt_logged(view, files_of_job, log))
            results = await self._database.read(_find_results, files_of_job.ids)
            for file_id, path in files_of_job.missing(results):
                adopted = await self._adopt(view, file_id, Path(path))
                results |= {} if adopted is None else {adopted.id: adopted}
        return files_of_job.chosen(results)

    def adopted_lately(self, view: JobView) -> tuple[Result, Result] | None:
        """As `adopt_results` of a short job that has just ended, without waiting; None: it must be called."""
        adopted = self._adopted_lately.get(view.id)
        return adopted.results if adopted is not None and adopted.is_of(view) else None

    def store_end(self, db: sa.Connection, record: Record) -> None:
        """As `adopt_results`, in the transaction that ends the first run of a short job. See `jobs.finishing`."""
        log = self.stored.log
        assert log is not None, "short jobs end so where there is a log"
        origin = _ordered.decode(record["spec"]).origin
        names = ("id", "state", "project", "created", "finished", "generation", "output", "errors_output", "rows_ok")
        view = JobView(**{name: record[name] for name in names}, origin=origin)
        files_of_job, results = ResultFiles.of(view), {}
        found = files_of_job.missing({})
        ids = [file_id for file_id, _ in found]
        if not self.arrivals.begin(ids):
            return  # a request for the results adopts them
        try:
            for file_id, path in found:
                results[file_id] = self._adopted(view, file_id, path, log.link(db, path, f"{self.home}/{file_id}"))
            for result in results.values():  # once none can fail: a sweep removes what neither has a record nor arrives
                _insert_result(db, result)
            faults.point("in_adoption")
        except OSError:
            self.arrivals.end(ids)
            return  # as above, or says why they cannot be
        except BaseException:  # of the database, or the term is over: the transaction fails, and `_changed` knows none
            self.arrivals.end(ids)
            raise
        self._ending[view.id] = AdoptedResults(view.generation, view.state, files_of_job.chosen(results))

    def _changed(self, changes: Changes) -> None:
        """A transaction has ended: what `store_end` has stored is committed, or need not be."""
        for job_id, record in changes.items():
            if (adopted := self._ending.pop(job_id, None)) is None:
                continue
            self.arrivals.end(each.id for each in adopted.results if each is not None)
            if record is not None:
                self._adopted_lately[job_id] = adopted
                if len(self._adopted_lately) > UPLOADED_MAX:
                    self._adopted_lately.popitem(last=False)

    async def _adopt_logged(self, view: JobView, files_of_job: ResultFiles, log: FileLog) -> dict[str, Result]:
        """As `_adopt` for all files of a job, in one transaction: the log makes the links durable."""

        def adopt(db: sa.Connection) -> dict[str, Result]:
            results: dict[str, Result] = dict(_find_results(db, files_of_job.ids))
            missing = [(id_, path) for id_, path in files_of_job.missing(results) if self._is_own(view.id, Path(path))]
            if missing and _is_final(db, view):  # otherwise a retry began: the next call adopts its results
                for file_id, path in missing:
                    size_bytes = log.link(db, Path(path), self.home / file_id)
                    results[file_id] = self._adopted(view, file_id, path, size_bytes)
                    _insert_result(db, results[file_id])
                faults.point("in_adoption")
            return results

        await self.arrivals.begin_soon(files_of_job.ids)
        try:
            with full_disk():
                return await self._database.write_short(adopt)
        finally:
            self.arrivals.end(files_of_job.ids)

    def _is_own(self, job_id: str, path: Path) -> bool:
        """Whether a result file is where jobs keep theirs."""
        is_small = path.parent == self._results_home and path.name.startswith(f"{job_id}.")
        return is_small or path.parent == self._jobs_home / job_id

    def _adopted(self, view: JobView, file_id: str, path: str, size_bytes: int | None) -> FileRecord | Removal:
        """The record of a result file. Args: size_bytes: None: it is not there any more."""
        if size_bytes is None:
            return Removal(file_id, view.project, view.id, ELSEWHERE, self._clock.now())
        name = os.path.basename(path).removeprefix(f"{view.id}.")  # "results.jsonl.gz"
        suffixes = [f".{suffix}" for suffix in name.split(".")[1:]]
        return result_record(view, file_id, suffixes, size_bytes)

    async def find_results(self, views: Sequence[JobView]) -> dict[str, tuple[Result, Result]]:
        """As `adopt_results` for many jobs at once: job -> its files, of those that have nothing to be adopted."""
        wanted = {view.id: ResultFiles.of(view) for view in views if JobState(view.state).is_at_rest}
        ids = [file_id for files_of_job in wanted.values() for file_id in files_of_job.ids]
        results: dict[str, Result] = {}
        for first in range(0, len(ids), FOUND_AT_ONCE):
            results |= await self._database.read(_find_results, ids[first : first + FOUND_AT_ONCE])
        return {job: its.chosen(results) for job, its in wanted.items() if not its.missing(results)}

    async def _adopt(self, view: JobView, file_id: str, path: Path) -> Result:
        if not self._is_own(view.id, path):
            return None
        await self.arrivals.begin_soon([file_id])
        try:
            target = self.home / file_id
            async with using(self.stored, path):
                size_bytes = await self.disk.run(link, self.owned, path, target)
                await self.stored.link(path, target)
            adopted = self._adopted(view, file_id, str(path), size_bytes)
            if not await self._database.write(_insert_final_result, view, adopted):
                await self.disk.run(self.owned.remove, target)  # a retry began: the next call adopts its results
                await self.stored.remove(target)
                return None
            return adopted
        finally:
            self.arrivals.end([file_id])

    # -- delete -----------------------------------------------------------------------------------------------------

    async def delete(self, project: str, file_id: str, by: str) -> None:
        """Delete a file, and for a result the job's own copy too, with who deleted it. Raises: Conflict
        (`file_in_use`) while a job that has not ended reads the file.
        """
        record = await self.get(project, file_id)
        await run_to_completion(self._remove(record, project, by))

    async def _remove(self, record: FileRecord, readers: str | None, by: str) -> None:
        """Args: `readers`: the project whose jobs may read the file; None: no job reads it."""
        if record.id in self._deleting:
            raise unknown(record.id)
        if self._holds[record.id]:
            raise Conflict(f"{record.id} is in use by a job that is being created", code="file_in_use")
        self._deleting.add(record.id)
        try:
            path = str(self.path(record))
            if readers is not None and await self._database.read(job_records.in_use, [path], readers):
                raise file_records.in_use(record)
            if record.job is not None:
                await self._remove_copies(record)
            self._uploaded.pop(record.id, None)
            await self._database.write(
                _forget, record, by, self._clock.now(), self.path(record), self.stored.log, readers
            )  # fmt: skip
            self._adopted_lately.pop(record.job or "", None)
            faults.point("after_forget")
            await self.disk.run(discard, self.path(record))
            await self.stored.remove(self.path(record))
        finally:
            self._deleting.discard(record.id)

    async def _remove_copies(self, record: FileRecord) -> None:
        """Remove the job's own copies first: otherwise `adopt_results` would create the deleted record again."""
        assert record.job is not None
        results = await self._database.read(file_records.results_of, record.job)
        if results is not None and JobState(results.state).is_at_rest:
            home = self._jobs_home / record.job
            copies = [path for path in map(Path, results.paths) if self._is_own(record.job, path)]
            if self.stored.log is not None:  # which would write them again after a crash
                await self._database.write(_forget_same, self.path(record), copies, self.stored.log)
            await self.disk.run(remove_same, self.owned, self.path(record), copies)
            linked = await self.stored.same(self.path(record), copies)
            await self.disk.run(self.owned.remove, *linked)
            await self.disk.run(self.owned.remove_tree, home / REUSE)  # no later job takes anything over
            await self.stored.remove(home / REUSE, *linked)

    async def sweep(self) -> int:
        """Remove expired files and what a crash left. Returns the number of removed files. Skips files in use."""
        async with self._sweeping:
            await self.disk.run(remove_others, self.owned, self.home / ARRIVING, lambda: self.arrivals.ids)
            if not self._swept_orphans:
                await self._sweep_orphans()
                self._swept_orphans = True
            await self._database.write(removals.forget_old, self._clock.now())
            return await self._sweep_expired()

    async def _sweep_expired(self) -> int:
        """Remove expired files. No new job can start to read one, so one query for readers per page is enough."""
        removed_count, after = 0, ""
        while records := await self._database.read(file_records.find_expired, self._clock.now(), after, SWEEP_MAX):
            after = records[-1].id
            held_ids = set(self._holds)  # a job that is being created is stored a moment later
            paths_in_use = await self._database.read(job_records.in_use, [str(self.path(record)) for record in records])
            for record in records:
                if record.id in held_ids or str(self.path(record)) in paths_in_use:
                    continue
                with contextlib.suppress(Conflict, UnknownName):  # held, or deleted just now
                    await self._remove(record, None, EXPIRY)
                    removed_count += 1
        return removed_count

    async def _sweep_orphans(self) -> None:
        names = await self.disk.run(names_in, self.home)
        names = sorted({*names, *await self.stored.names_in(self.home)})
        await self.arrivals.sweep(names, partial(self._database.read, file_records.find_ids), self._remove_bytes)

    async def _remove_bytes(self, file_ids: Sequence[str]) -> None:
        paths = [self.home / file_id for file_id in file_ids]
        await self.disk.run(self.owned.remove, *paths)
        await self.stored.remove(*paths)

    def close(self) -> None:
        """Stop reading and writing. Running calls end by themselves."""
        self.disk.close()
        self._reading.close()


class FileWriter:
    """A new file: `write` its bytes in order, then `commit`. Always call `discard`."""

    def __init__(self, files: FileService, project: str, writing: Writing | None) -> None:
        self.id = new_id("file-")
        self._files, self._project, self._writing = files, project, writing
        self._incoming = files.begin_incoming(self.id, files.limits.file_bytes_max, writing)
        self._storing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Raises: TooLarge (`file_too_large`), OverQuota, StorageFull."""
        await self._incoming.write(data)

    async def append_files(self, paths: Sequence[Path], size_bytes: int, *, with_md5: bool) -> str | None:
        """Append whole files of `size_bytes` in total. Returns the md5 of the bytes, if `with_md5`."""
        return await self._incoming.append_files(paths, size_bytes, with_md5=with_md5)

    async def commit(
        self, *, purpose: str, filename: str, expires_s: float | None = None, within: Within | None = None
    ) -> FileRecord:
        """Store the file. It is durable when this returns. `expires_s` counts from now.

        Raises: InvalidInput for an invalid name, TooLarge, StorageFull; and what `within` raises.
        """
        record = self._files.record(self.id, self._project, purpose=purpose, filename=filename, expires_s=expires_s)
        record = msgspec.structs.replace(record, bytes=self._incoming.size_bytes)
        stored = asyncio.get_running_loop().create_future()
        # In a task of its own: a cancelled caller must not leave a record without bytes.
        self._storing = start_next(answer_with(self._files.store(record, self._incoming, within), stored))
        await stored
        if self._writing is not None:
            self._writing.end(is_kept=True)
        self._files.end_incoming(self.id)
        return record

    async def discard(self) -> None:
        """Remove the bytes unless they were committed. Safe to call twice."""
        await self._incoming.discard()
        if self._storing is not None and not self._storing.done():
            await asyncio.wait({self._storing})
        self._files.end_incoming(self.id)


class OpenFile:
    """An open file whose bytes a thread reads. Close it."""

    def __init__(self, disk: Disk, fd: int, record: FileRecord) -> None:
        self.record, self.size_bytes = record, record.bytes
        self._disk, self._fd = disk, fd

    async def read(self, offset: int, n: int) -> bytes:
        """Return up to `n` bytes from `offset`, at most READ_BYTES. Empty at the end of the file."""
        return await self._disk.run(os.pread, self._fd, min(n, READ_BYTES), offset)

    async def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            await run_to_completion(self._disk.run(os.close, fd))


def checked_filename(name: str) -> str:
    """Return the name. Raises: InvalidInput if it is empty, too long or not printable."""
    if not name or len(name) > FILENAME_CHARS_MAX:
        raise InvalidInput(
            f"a file's name has 1 to {FILENAME_CHARS_MAX} characters, not {len(name):,}", code="invalid_filename"
        )
    if bad := [char for char in name if ord(char) < 32 or ord(char) == 127 or "\ud800" <= char <= "\udfff"]:
        raise InvalidInput(
            f"a file's name must not contain control characters, such as {bad[0]!r}", code="invalid_filename"
        )
    return name


def _insert(db: sa.Connection, record: FileRecord, within: Within | None, quota: int) -> None:
    """Insert a record. Results of jobs do not count against the quota of uploads."""
    refuse_beyond(
        db, files, quota, quota="files", project=record.project, way_out="delete some",
        where=IS_UPLOAD, is_noted=True,
    )  # fmt: skip
    file_records.insert(db, record)
    if within is not None:
        within(db, record)


def _find_results(db: sa.Connection, ids: Sequence[str]) -> dict[str, FileRecord | Removal]:
    return {**removals.find_all(db, ids), **file_records.find_all(db, ids)}


def _is_final(db: sa.Connection, view: JobView) -> bool:
    """Whether an ended job has not gone on since."""
    job = file_records.results_of(db, view.id)
    return job is not None and job.generation == view.generation and job.state == view.state


def _insert_final_result(db: sa.Connection, view: JobView, adopted: FileRecord | Removal) -> bool:
    """Store the result file of an ended job; False: the job has gone on since."""
    if not _is_final(db, view):
        return False
    _insert_result(db, adopted)
    return True


def _insert_result(db: sa.Connection, adopted: FileRecord | Removal) -> None:
    if isinstance(adopted, Removal):
        removals.insert(db, adopted)
    else:
        insert_missing(db, files, msgspec.structs.asdict(adopted))


def _forget(
    db: sa.Connection, record: FileRecord, by: str, now: float, path: Path, log: FileLog | None, readers: str | None
) -> None:  # fmt: skip
    """Delete a record. For a result, store who deleted it. Raises: Conflict if a job that had ended was retried since
    `FileService._remove` has looked: no other can have begun to read the file.
    """
    if job_records.in_use(db, [str(path)], readers, by_retries=True):
        raise file_records.in_use(record)
    file_records.delete(db, record.id)
    if log is not None:
        log.forget(db, [path])
    if record.job is not None:
        removals.insert(db, _removal(record, by, now))


def _forget_same(db: sa.Connection, path: Path, copies: Sequence[Path], log: FileLog) -> None:
    """Have the log forget copies of a file. Another result of the job may not be on the disk yet."""
    log.forget(db, same_files(path, copies))


def _removal(record: FileRecord, by: str, at: float) -> Removal:
    assert record.job is not None, "only removals of results are stored"
    return Removal(record.id, record.project, record.job, by, at)


def link(owned: OwnedFiles, source: Path, target: Path) -> int | None:
    """Hard-link a file that never changes. Returns its size, or None if it does not exist (any more)."""
    try:
        owned.link(source, target)  # what an interrupted call left may be of an older generation
    except FileNotFoundError:
        return None
    sync_folder(target.parent)
    return target.stat().st_size
