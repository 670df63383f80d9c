"""Files of projects: uploads, and the results of jobs. Bytes lie in DATA_DIR/files/ID, records in the database.

The order is the promise: bytes durable -> record durable -> anything visible. Whatever a crash leaves without a record
is nobody's file, and is swept. Knows no dialect; a file of another project is unknown, in the same words as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.config import ServerEntry
from batchmill.errors import Conflict, Gone, InvalidInput, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.ports import Clock
from batchmill.services.incoming import (
    ROOM_BYTES,
    Disk,
    Incoming,
    names_in,
    piece_bytes,
    remove_others,
    to_its_end,
    unlink_all,
)
from batchmill.states import JobState
from batchmill.store import removals
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskQuota, Writing
from batchmill.store.quotas import refuse_beyond
from batchmill.store.removals import ELSEWHERE, Removal
from batchmill.store.segments import sync_folder
from batchmill.store.tables import files, jobs
from batchmill.types import JobView, ProjectQuotas
from batchmill.wire.native import FILENAME_CHARS_MAX

BATCH = "batch"  # the purpose of what jobs read
SHOWN_CHARS = 80  # of an id nobody knows, in a message


class FileRecord(Struct, frozen=True):
    """A file of a project. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    purpose: str
    filename: str  # for people: no path is ever made of it
    bytes: int
    sha256: str | None
    created: float
    expires: float | None
    job: str | None  # of results: the job they are of


class FileQuery(Struct, frozen=True):
    """Which files to list. None: no restriction."""

    project: str
    now: float  # what has expired by then is not there any more
    limit: int
    purpose: str | None = None
    after: str | None = None
    newest_first: bool = True


class JobResults(Struct, frozen=True):
    """Where a job's own result files lie, and whether anybody still writes them."""

    state: str
    generation: int
    paths: list[str]


_FIELDS = [files.c[name] for name in FileRecord.__struct_fields__]


def unknown(file_id: str) -> UnknownName:
    return UnknownName(f"No such File object: {file_id[:SHOWN_CHARS]}", code="unknown_file")


def find(db: sa.Connection, file_id: str) -> FileRecord | None:
    found = db.execute(sa.select(*_FIELDS).where(files.c.id == file_id)).first()
    return None if found is None else FileRecord(*found)


def find_all(db: sa.Connection, file_ids: Sequence[str]) -> dict[str, FileRecord]:
    found = db.execute(sa.select(*_FIELDS).where(files.c.id.in_(file_ids)))
    return {record.id: record for record in (FileRecord(*row) for row in found)}


def page(db: sa.Connection, query: FileQuery) -> list[FileRecord]:
    """The files asked for, and one more where there is one. Raises: UnknownName for an `after` that is none of them."""
    wanted = sa.select(*_FIELDS).where(files.c.project == query.project, _is_there(query.now))
    if query.purpose is not None:
        wanted = wanted.where(files.c.purpose == query.purpose)
    place = sa.tuple_(files.c.created, files.c.id)
    if query.after is not None:
        last = find(db, query.after)
        if last is None or last.project != query.project:
            raise unknown(query.after)
        beyond = sa.tuple_(sa.literal(last.created), sa.literal(last.id))
        wanted = wanted.where(place < beyond if query.newest_first else place > beyond)
    order = (files.c.created.desc(), files.c.id.desc()) if query.newest_first else (files.c.created, files.c.id)
    return [FileRecord(*row) for row in db.execute(wanted.order_by(*order).limit(query.limit + 1))]


def insert(db: sa.Connection, record: FileRecord) -> None:
    db.execute(files.insert().values(msgspec.structs.asdict(record)))


def insert_missing(db: sa.Connection, records: Sequence[FileRecord]) -> None:
    """Insert those that are not there. One thread writes, so nobody comes in between."""
    known = find_all(db, [record.id for record in records])
    for record in records:
        if record.id not in known:
            insert(db, record)


def delete(db: sa.Connection, file_id: str) -> None:
    db.execute(files.delete().where(files.c.id == file_id))


def expired(db: sa.Connection, now: float, after: str, limit: int) -> list[FileRecord]:
    """Files that have expired, by id, behind `after`."""
    wanted = sa.select(*_FIELDS).where(files.c.expires <= now, files.c.id > after)
    return [FileRecord(*row) for row in db.execute(wanted.order_by(files.c.id).limit(limit))]


def known_of(db: sa.Connection, names: Sequence[str]) -> set[str]:
    """Those of `names` that are ids of files."""
    return set(db.execute(sa.select(files.c.id).where(files.c.id.in_(names))).scalars())


def results_of(db: sa.Connection, job_id: str) -> JobResults | None:
    columns = (jobs.c.state, jobs.c.generation, jobs.c.output, jobs.c.errors_output)
    found = db.execute(sa.select(*columns).where(jobs.c.id == job_id)).first()
    if found is None:
        return None
    return JobResults(found.state, found.generation, [path for path in (found.output, found.errors_output) if path])


def _is_there(now: float) -> sa.ColumnElement[bool]:
    return files.c.expires.is_(None) | (files.c.expires > now)


__all__ = ["BATCH", "FileRecord", "FileService", "FileWriter", "OpenFile", "Removal", "Result"]

WRITE_THREADS, READ_THREADS = 4, 4
READ_BYTES = 1024 * 1024  # of a file, at once
PAGE_MAX = 10_000
SWEEP_MAX = 500  # files looked at at once
ARRIVING = ".incoming"
EXPIRY = "the server, because it had expired,"
Result = FileRecord | Removal | None
Within = Callable[[sa.Connection, FileRecord], None]
OUTPUT = "batch_output"  # their purpose


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


class FileService:
    """Raises, everywhere: UnknownName (`unknown_file`) for a file that this project does not have (any more), and Gone
    for a result that was deleted."""

    def __init__(
        self, database: Database, data_dir: Path, clock: Clock, limits: ServerEntry,
        quotas: ProjectQuotas = ProjectQuotas(), room: DiskQuota | None = None,
    ) -> None:  # fmt: skip
        self.room = room or DiskQuota(database, data_dir, quotas)
        self._database, self._clock, self.limits, self.quotas = database, clock, limits, quotas
        self._jobs_home = data_dir / "jobs"
        self.home = data_dir / "files"
        self.room_bytes = ROOM_BYTES
        self.disk, self._reading = Disk("files-write", WRITE_THREADS), Disk("files-read", READ_THREADS)
        self._arriving: set[str] = set()  # ids whose bytes may lie there before their record does
        self._held: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._sweeping = asyncio.Lock()
        self._adopting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by job
        self._swept_orphans = False
        (self.home / ARRIVING).mkdir(parents=True, exist_ok=True, mode=0o700)
        sync_folder(data_dir)

    # -- in ---------------------------------------------------------------------------------------------------------

    async def writer(self, project: str, *, is_joined: bool = False) -> FileWriter:
        """A new file of a project. It is there once it is committed, and nothing of it before.

        Args: is_joined: its bytes lie here already, and go once it is there.

        Raises: OverQuota where the project has no room left.
        """
        return FileWriter(self, project, None if is_joined else await self.room.begin(project))

    def arrive(self, file_id: str, bytes_max: int, writing: Writing | None) -> Incoming:
        """A place for bytes that are nobody's yet; `leave` it in the end."""
        self._arriving.add(file_id)
        return Incoming(
            self.disk,
            self.home / ARRIVING / file_id,
            bytes_max=bytes_max,
            room_bytes=self.room_bytes,
            piece_bytes=piece_bytes(len(self._arriving)),
            writing=writing,
        )

    def leave(self, file_id: str) -> None:
        self._arriving.discard(file_id)

    async def store(self, record: FileRecord, incoming: Incoming, within: Within | None = None) -> None:
        """Bytes, then the record; `within` may do more in the record's transaction, or refuse it."""
        await incoming.settle(self.path(record))
        faults.point("after_settle")
        try:
            await self._database.write(_insert, record, within, self.quotas.of(record.project).files)
        except BaseException:
            await self.disk.run(self.path(record).unlink)
            raise

    def record(self, file_id: str, project: str, *, purpose: str, filename: str, expires_s: float | None) -> FileRecord:
        """The record of a file that is made now. Raises: InvalidInput for a name that cannot be shown."""
        if expires_s is None and purpose == BATCH:
            expires_s = self.limits.file_expires_s
        now = self._clock.now()
        expires = None if expires_s is None else now + expires_s
        return FileRecord(file_id, project, purpose, checked_filename(filename), 0, None, now, expires, None)

    # -- out --------------------------------------------------------------------------------------------------------

    async def get(self, project: str, file_id: str) -> FileRecord:
        record = await self._database.read(find, file_id)
        now = self._clock.now()
        if record is None:
            removal = await self._database.read(removals.find, file_id)
            raise removal.error() if removal is not None and removal.project == project else unknown(file_id)
        if record.project != project:
            raise unknown(file_id)
        if record.expires is not None and record.expires <= now:
            raise unknown(file_id) if record.job is None else _removal(record, EXPIRY, record.expires).error()
        return record

    @contextlib.asynccontextmanager
    async def hold(self, project: str, file_id: str) -> AsyncIterator[FileRecord]:
        """`get` a file that cannot be deleted before a job that reads it has been written down."""
        self._held[file_id] += 1
        try:
            if file_id in self._leaving:
                raise unknown(file_id)
            try:
                record = await self.get(project, file_id)
            except Gone:
                raise unknown(file_id) from None  # to read it is to be told that of any other
            yield record
        finally:
            self._held[file_id] -= 1
            if not self._held[file_id]:
                del self._held[file_id]

    def path(self, record: FileRecord) -> Path:
        """Where its bytes lie. They never change, and stay until the record has gone."""
        return self.home / record.id

    async def open(self, record: FileRecord) -> OpenFile:
        """Its bytes, to be read even if it is deleted meanwhile."""
        try:
            fd = await self._reading.run(os.open, self.path(record), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise unknown(record.id) from None  # deleted between the look at its record and this
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
        """A page of files, and whether there are more. Raises: UnknownName for an `after` that is none of them."""
        query = FileQuery(project, self._clock.now(), min(limit, PAGE_MAX), purpose, after, newest_first)
        found = await self._database.read(page, query)
        return found[: query.limit], len(found) > query.limit

    # -- results ----------------------------------------------------------------------------------------------------

    async def adopt_results(self, view: JobView) -> tuple[Result, Result]:
        """The output and the error file of a job that has ended, made files of its project; done twice, it is once.

        None: there is no such file. A Removal: there was one. Only files that lie with the job are adopted: one that
        its caller named is theirs.
        """
        if not JobState(view.state).is_at_rest:
            return None, None
        is_apart = view.errors_output is not None  # else results hold the rows that failed too
        wanted = {"output": view.output if view.rows_ok or not is_apart else None, "errors": view.errors_output}
        ids = {which: result_id(view.id, view.generation, which) for which in wanted}
        known = await self._database.read(_find_results, list(ids.values()))
        if any(path is not None and ids[which] not in known for which, path in wanted.items()):
            async with self._adopting.setdefault(view.id, asyncio.Lock()):
                known = await self._database.read(_find_results, list(ids.values()))
                for which, path in wanted.items():
                    if path is not None and ids[which] not in known:
                        found = await self._adopt(view, ids[which], Path(path))
                        known |= {} if found is None else {found.id: found}
        return known.get(ids["output"]), known.get(ids["errors"])

    async def _adopt(self, view: JobView, file_id: str, path: Path) -> Result:
        if path.parent != self._jobs_home / view.id:
            return None
        self._arriving.add(file_id)
        try:
            target = self.home / file_id
            size_bytes = await self.disk.run(link, path, target)
            now = await self._database.read(results_of, view.id)
            if now is None or now.generation != view.generation or now.state != view.state:
                await self.disk.run(
                    target.unlink, missing_ok=True
                )  # a retry has begun: the next one to look sees its results
                return None
            if size_bytes is None:
                gone = Removal(file_id, view.project, view.id, ELSEWHERE, self._clock.now())
                await self._database.write(removals.insert, gone)
                return gone
            record = result_record(view, file_id, path.suffixes, size_bytes)
            await self._database.write(insert_missing, [record])
            return record
        finally:
            self._arriving.discard(file_id)

    # -- away -------------------------------------------------------------------------------------------------------

    async def delete(self, project: str, file_id: str, by: str) -> None:
        """Remove a file, and the copy of a result that lies with its job. Who did it is remembered of results.

        Raises: Conflict (`file_in_use`) while a job that has not ended reads it.
        """
        record = await self.get(project, file_id)
        await to_its_end(self._remove(record, project, by))

    async def _remove(self, record: FileRecord, readers: str | None, by: str) -> None:
        """`readers`: the project whose jobs may read it; None: none does."""
        if record.id in self._leaving:
            raise unknown(record.id)
        if self._held[record.id]:
            raise Conflict(f"{record.id} is in use: a job that reads it is being made", code="file_in_use")
        self._leaving.add(record.id)
        try:
            path = str(self.path(record))
            if readers is not None and await self._database.read(job_records.in_use, [path], readers):
                raise Conflict(
                    f"{record.id} is in use: a job that has not ended reads it; cancel it, or wait for its end",
                    code="file_in_use",
                )
            if record.job is not None:
                await self._remove_copies(record)
            await self._database.write(_forget, record, by, self._clock.now())
            faults.point("after_forget")
            await self.disk.run(self.path(record).unlink, missing_ok=True)
        finally:
            self._leaving.discard(record.id)

    async def _remove_copies(self, record: FileRecord) -> None:
        """The job's own copy goes first: a record that is gone must not come back at the next look at the job."""
        assert record.job is not None
        results = await self._database.read(results_of, record.job)
        if results is not None and JobState(results.state).is_at_rest:
            home = self._jobs_home / record.job
            copies = [path for path in map(Path, results.paths) if path.parent == home]
            await self.disk.run(unlink_same, self.path(record), copies)

    async def sweep(self) -> int:
        """Remove what has expired and what a crash left; returns how many files went. Files in use stay until later."""
        async with self._sweeping:
            await self.disk.run(remove_others, self.home / ARRIVING, lambda: self._arriving)
            if not self._swept_orphans:
                await self._sweep_orphans()
                self._swept_orphans = True
            await self._database.write(removals.forget_old, self._clock.now())
            return await self._sweep_expired()

    async def _sweep_expired(self) -> int:
        """No new job can begin to read what has expired: one look at those there are is enough for all."""
        gone, after = 0, ""
        while found := await self._database.read(expired, self._clock.now(), after, SWEEP_MAX):
            after = found[-1].id
            held = set(self._held)  # a job that is being made of one is stored a moment later
            used = await self._database.read(job_records.in_use, [str(self.path(record)) for record in found])
            for record in found:
                if record.id in held or str(self.path(record)) in used:
                    continue
                with contextlib.suppress(Conflict, UnknownName):  # held, or deleted just now
                    await self._remove(record, None, EXPIRY)
                    gone += 1
        return gone

    async def _sweep_orphans(self) -> None:
        names = await self.disk.run(names_in, self.home)
        names = [name for name in names if name not in self._arriving]  # looked at before the records are
        for first in range(0, len(names), SWEEP_MAX):
            some = names[first : first + SWEEP_MAX]
            known = await self._database.read(known_of, some)
            await self.disk.run(unlink_all, [self.home / name for name in some if name not in known])

    def close(self) -> None:
        """Write and read no more; what is on its way ends by itself."""
        self.disk.close()
        self._reading.close()


class FileWriter:
    """A file on its way in: `write` its bytes in order, then `commit`; `discard` in any case."""

    def __init__(self, files: FileService, project: str, writing: Writing | None) -> None:
        self.id = new_id("file-")
        self._files, self._project, self._writing = files, project, writing
        self._incoming = files.arrive(self.id, files.limits.file_bytes_max, writing)
        self._storing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Raises: TooLarge (`file_too_large`), OverQuota, StorageFull."""
        await self._incoming.write(data)

    async def append_files(self, paths: Sequence[Path], size_bytes: int, *, with_md5: bool) -> str | None:
        """Append whole files, `size_bytes` in all; returns the md5 of the bytes if it is wanted."""
        return await self._incoming.append_files(paths, size_bytes, with_md5=with_md5)

    async def commit(
        self, *, purpose: str, filename: str, expires_s: float | None = None, within: Within | None = None
    ) -> FileRecord:
        """Make it a file: durable when this returns. `expires_s` counts from now.

        Raises: InvalidInput for a name that cannot be shown, TooLarge, StorageFull; and what `within` raises.
        """
        record = self._files.record(self.id, self._project, purpose=purpose, filename=filename, expires_s=expires_s)
        record = msgspec.structs.replace(record, bytes=self._incoming.size_bytes)
        self._storing = asyncio.create_task(self._files.store(record, self._incoming, within))
        await asyncio.shield(self._storing)  # a caller that goes away leaves no record without bytes
        if self._writing is not None:
            self._writing.end(is_kept=True)
        self._files.leave(self.id)
        return record

    async def discard(self) -> None:
        """Drop what was not committed. Safe to call twice."""
        await self._incoming.discard()
        if self._storing is not None:
            await asyncio.wait({self._storing})
            self._storing.exception()  # whoever called commit has heard of it, or has gone away
        self._files.leave(self.id)


class OpenFile:
    """A file's bytes, read by a thread. Close it."""

    def __init__(self, disk: Disk, fd: int, record: FileRecord) -> None:
        self.record, self.size_bytes = record, record.bytes
        self._disk, self._fd = disk, fd

    async def read(self, offset: int, n: int) -> bytes:
        """Up to `n` bytes from `offset`, at most READ_BYTES; empty at the end."""
        return await self._disk.run(os.pread, self._fd, min(n, READ_BYTES), offset)

    async def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            await to_its_end(self._disk.run(os.close, fd))


def checked_filename(name: str) -> str:
    """A name for people to see. Raises: InvalidInput for one that is empty, too long or not printable."""
    if not name or len(name) > FILENAME_CHARS_MAX:
        raise InvalidInput(
            f"a file's name has 1 to {FILENAME_CHARS_MAX} characters, not {len(name):,}", code="invalid_filename"
        )
    if bad := [char for char in name if ord(char) < 32 or ord(char) == 127 or "\ud800" <= char <= "\udfff"]:
        raise InvalidInput(f"a file's name holds no control characters: there is a {bad[0]!r}", code="invalid_filename")
    return name


def _insert(db: sa.Connection, record: FileRecord, within: Within | None, quota: int) -> None:
    """Results of jobs do not count: nobody chose to have them kept."""
    refuse_beyond(
        db, files, quota, quota="files", project=record.project, way_out="delete some",
        where=files.c.job.is_(None),
    )  # fmt: skip
    insert(db, record)
    if within is not None:
        within(db, record)


def _find_results(db: sa.Connection, ids: Sequence[str]) -> dict[str, FileRecord | Removal]:
    return {**removals.find_all(db, ids), **find_all(db, ids)}


def _forget(db: sa.Connection, record: FileRecord, by: str, now: float) -> None:
    """Remove a record; of a result it stays known who did it."""
    delete(db, record.id)
    if record.job is not None:
        removals.insert(db, _removal(record, by, now))


def _removal(record: FileRecord, by: str, at: float) -> Removal:
    assert record.job is not None, "only results are remembered"
    return Removal(record.id, record.project, record.job, by, at)


def result_id(job_id: str, generation: int, which: str) -> str:
    """The id of a job's result file: the same for everybody who looks."""
    return f"file-{hashlib.sha256(f'{job_id}:{generation}:{which}'.encode()).hexdigest()[:24]}"


def result_record(view: JobView, file_id: str, suffixes: Sequence[str], size_bytes: int) -> FileRecord:
    which = "output" if file_id == result_id(view.id, view.generation, "output") else "errors"
    suffix = "".join(each for each in suffixes if each != ".errors")
    created = view.finished or view.created
    expires_s = (view.origin or {}).get("output_expires_s")
    return FileRecord(
        id=file_id, project=view.project, purpose=OUTPUT, filename=f"{view.id}_{which}{suffix}", bytes=size_bytes,
        sha256=None, created=created, expires=None if expires_s is None else created + expires_s, job=view.id,
    )  # fmt: skip


def link(source: Path, target: Path) -> int | None:
    """A second name for a file that never changes; its size, or None where it is not there (any more)."""
    with contextlib.suppress(FileNotFoundError):
        target.unlink()  # of a look that did not come to its end: it may be of an older generation
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        return None
    sync_folder(target.parent)
    return target.stat().st_size


def unlink_same(path: Path, others: Sequence[Path]) -> None:
    """Remove those of `others` that are the file at `path` under another name."""
    with contextlib.suppress(FileNotFoundError):
        own = path.stat()
        for other in others:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(own, other.stat()):
                    other.unlink()
                    sync_folder(other.parent)
