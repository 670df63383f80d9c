"""Uploads of files in parts. Each part is durable when it is acknowledged, and joining the parts makes one file.

Parts are in DATA_DIR/files/.parts/ID until their upload ends. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import DatabaseUnavailable, InvalidInput, InvalidTransition, TooLarge, UnknownName
from batchmill.part_files import sync_folder
from batchmill.ports.clock import Clock
from batchmill.services.files.arrivals import Arrivals
from batchmill.services.files.files import FileService, checked_filename, new_id
from batchmill.services.files.incoming import discard_all, names_in, run_to_completion
from batchmill.services.files.records import FileRecord
from batchmill.store.disk_room import Writing
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import upload_parts, uploads
from batchmill.store.stored_files import using

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
PARTS_MAX = 10_000  # of one upload
REPEATS_MAX = 2  # the parts of an upload may hold this many times its size, because clients may resend parts
PART_BYTES_MAX = 64 * 1024 * 1024
ENDED_MAX = 10_000  # ended uploads of one project whose records are kept


class UploadRecord(Struct, frozen=True):
    """A file that is uploaded in parts. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    purpose: str
    filename: str
    mime_type: str
    bytes: int  # as announced
    status: str
    created: float
    expires: float
    file_expires_s: float | None
    file: str | None


class PartRecord(Struct, frozen=True):
    """One piece of an upload."""

    id: str
    upload: str
    bytes: int
    created: float
    project: str


_UPLOAD = [uploads.c[name] for name in UploadRecord.__struct_fields__]
_PART = [upload_parts.c[name] for name in PartRecord.__struct_fields__]


def find(db: sa.Connection, upload_id: str) -> UploadRecord | None:
    row = db.execute(sa.select(*_UPLOAD).where(uploads.c.id == upload_id)).first()
    return None if row is None else UploadRecord(*row)


def insert(db: sa.Connection, record: UploadRecord, quota: int) -> None:
    """Raises: OverQuota if the project has too many pending uploads."""
    refuse_beyond(
        db, uploads, quota, quota="uploads", project=record.project, way_out="complete or cancel some",
        where=uploads.c.status == PENDING,
    )  # fmt: skip
    _forget_oldest_ended(db, record.project)
    db.execute(uploads.insert().values(msgspec.structs.asdict(record)))


def parts_of(db: sa.Connection, upload_id: str) -> dict[str, PartRecord]:
    rows = db.execute(sa.select(*_PART).where(upload_parts.c.upload == upload_id))
    return {record.id: record for record in (PartRecord(*row) for row in rows)}


def check_pending(db: sa.Connection, upload_id: str) -> UploadRecord:
    """Return the upload, if it is pending. Raises: InvalidTransition."""
    record = find(db, upload_id)
    assert record is not None  # uploads in use are never removed
    if record.status != PENDING:
        raise not_pending(record)
    return record


def not_pending(record: UploadRecord) -> InvalidTransition:
    return InvalidTransition(
        f"the upload {record.id} is {record.status}: only a pending one can be changed", code="upload_not_pending"
    )


def check_space(db: sa.Connection, upload_id: str, size_bytes: int) -> None:
    """Check that an upload may have another part. Raises: InvalidTransition, TooLarge."""
    record = check_pending(db, upload_id)
    size_of_parts = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(upload_parts.c.bytes), 0))
    count, total = db.execute(size_of_parts.where(upload_parts.c.upload == upload_id)).one()
    if count >= PARTS_MAX:
        raise TooLarge(f"an upload has at most {PARTS_MAX:,} parts: send larger ones", code="too_many_parts")
    if total + size_bytes > REPEATS_MAX * record.bytes + PART_BYTES_MAX:
        raise TooLarge(
            f"the upload was announced with {record.bytes:,} bytes, and its parts already hold {total:,}",
            code="too_many_parts",
        )


def add_part(db: sa.Connection, part: PartRecord) -> None:
    """Raises: InvalidTransition, TooLarge."""
    check_space(db, part.upload, part.bytes)
    db.execute(upload_parts.insert().values(msgspec.structs.asdict(part)))


def end(db: sa.Connection, upload_id: str, status: str, file_id: str | None = None) -> list[str]:
    """End a pending upload and delete the records of its parts. Returns their ids.

    Raises: InvalidTransition.
    """
    check_pending(db, upload_id)
    parts = list(parts_of(db, upload_id))
    db.execute(uploads.update().where(uploads.c.id == upload_id).values(status=status, file=file_id))
    db.execute(upload_parts.delete().where(upload_parts.c.upload == upload_id))
    return parts


def overdue_uploads(db: sa.Connection, now: float, limit: int) -> list[str]:
    """Return pending uploads that have expired."""
    query = sa.select(uploads.c.id).where(uploads.c.status == PENDING, uploads.c.expires <= now)
    return list(db.execute(query.order_by(uploads.c.expires).limit(limit)).scalars())


def _forget_oldest_ended(db: sa.Connection, project: str) -> None:
    """Delete the oldest ended uploads of a project beyond ENDED_MAX."""
    ended = sa.and_(uploads.c.project == project, uploads.c.status != PENDING)
    count = db.execute(sa.select(sa.func.count()).select_from(uploads).where(ended)).scalar_one()
    if count >= ENDED_MAX:
        oldest = sa.select(uploads.c.id).where(ended).order_by(uploads.c.created).limit(count - ENDED_MAX + 1)
        db.execute(uploads.delete().where(uploads.c.id.in_(oldest)))


def forget_ended(db: sa.Connection, before: float) -> None:
    """Delete the records of ended uploads that were created before this time."""
    db.execute(uploads.delete().where(uploads.c.status != PENDING, uploads.c.created < before))


def known_parts(db: sa.Connection, names: Sequence[str]) -> set[str]:
    """Return those of `names` that are ids of parts."""
    return set(db.execute(sa.select(upload_parts.c.id).where(upload_parts.c.id.in_(names))).scalars())


LIFETIME_S = 3600.0  # of a pending upload
KEPT_S = 30 * 86_400.0  # how long the record of an ended upload is kept
SWEEP_MAX = 500
SHOWN_CHARS = 80  # of an unknown id, in a message
MIME_CHARS_MAX = 256
PARTS = ".parts"


class NewUpload(Struct, frozen=True):
    """What the client announces about a file that it will upload in parts."""

    purpose: str
    filename: str
    mime_type: str
    bytes: int
    file_expires_s: float | None = None  # of the file, from its creation


class UploadService:
    """Raises, everywhere: UnknownName (`unknown_upload`), InvalidTransition (`upload_not_pending`)."""

    def __init__(self, database: Database, files: FileService, clock: Clock) -> None:
        self._database, self._files, self._clock = database, files, clock
        self.home = files.home / PARTS
        self._arrivals = Arrivals()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by upload
        self._swept_orphans = False
        self.home.mkdir(exist_ok=True, mode=0o700)
        sync_folder(files.home)

    async def create(self, project: str, new: NewUpload) -> UploadRecord:
        """Raises: TooLarge (`file_too_large`), OverQuota, InvalidInput for an invalid name."""
        if new.bytes > self._files.limits.file_bytes_max:
            raise TooLarge(
                f"the file is larger than the {self._files.limits.file_bytes_max:,} bytes allowed",
                code="file_too_large",
            )
        await self._files.disk_quota.check(project, new.bytes)
        now = self._clock.now()
        record = UploadRecord(
            id=new_id("upload_"), project=project, purpose=new.purpose, filename=checked_filename(new.filename),
            mime_type=new.mime_type[:MIME_CHARS_MAX], bytes=new.bytes, status=PENDING, created=now,
            expires=now + LIFETIME_S, file_expires_s=new.file_expires_s, file=None,
        )  # fmt: skip
        await self._database.write(insert, record, self._files.quotas.of(project).uploads)
        return record

    async def get(self, project: str, upload_id: str) -> UploadRecord:
        record = await self._database.read(find, upload_id)
        if record is None or record.project != project:
            raise UnknownName(f"No such Upload object: {upload_id[:SHOWN_CHARS]}", code="unknown_upload")
        if record.status == PENDING and record.expires <= self._clock.now():
            return msgspec.structs.replace(record, status=EXPIRED)
        return record

    async def part_writer(self, project: str, upload_id: str) -> PartWriter:
        """Return a writer for a new part of a pending upload. Raises: TooLarge (`too_many_parts`)."""
        await self._pending(project, upload_id)
        await self._database.read(check_space, upload_id, 0)
        return PartWriter(self._files, self, upload_id, project, await self._files.disk_quota.begin(project))

    async def store_part(self, part: PartRecord, writer: PartWriter) -> None:
        """Store the bytes, then the record."""
        path = self.home / part.id
        self._arrivals.begin([part.id])
        try:
            await writer.incoming.settle(path)
            await self._files.stored.publish(path)
            await self._database.write(add_part, part)
        except DatabaseUnavailable:
            raise  # as of a file
        except BaseException:
            await self._discard([part.id])
            raise
        finally:
            self._arrivals.end([part.id])

    async def complete(
        self, project: str, upload_id: str, *, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[UploadRecord, FileRecord]:
        """Join the parts in this order to one file. Idempotent: a completed upload is returned as it is.

        Raises: InvalidInput if the parts are not parts of the upload or do not make the announced file.
        """
        return await run_to_completion(self._complete(project, upload_id, part_ids, md5))

    async def _complete(
        self, project: str, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> tuple[UploadRecord, FileRecord]:
        async with self._lock(upload_id):
            record = await self.get(project, upload_id)
            if record.status == COMPLETED and record.file is not None:
                return record, await self._files.get(project, record.file)
            await self._pending(project, upload_id)
            parts = await self._database.read(parts_of, upload_id)
            chosen = _select_parts(record, parts, part_ids)
            file, removed_parts = await self._join(record, chosen, md5)
            await self._discard(removed_parts)
            return msgspec.structs.replace(record, status=COMPLETED, file=file.id), file

    async def _join(
        self, record: UploadRecord, parts: Sequence[PartRecord], md5: str | None
    ) -> tuple[FileRecord, list[str]]:
        """Make the file in the transaction that ends the upload. Returns it, and the parts to remove."""
        removed_parts: list[str] = []

        def complete(db: sa.Connection, file: FileRecord) -> None:
            removed_parts.extend(end(db, record.id, COMPLETED, file.id))

        writer = await self._files.writer(record.project, is_joined=True)
        try:
            paths = [self.home / part.id for part in parts]
            async with using(self._files.stored, *paths):
                actual_md5 = await writer.append_files(paths, record.bytes, with_md5=md5 is not None)
            if md5 is not None and actual_md5 != md5.lower():
                raise InvalidInput(f"the md5 of the parts is {actual_md5}, not {md5[:32]!r}", code="md5_mismatch")
            file = await writer.commit(
                purpose=record.purpose, filename=record.filename, expires_s=record.file_expires_s, within=complete
            )
        finally:
            await writer.discard()
        return file, removed_parts

    async def cancel(self, project: str, upload_id: str) -> UploadRecord:
        """Cancel an upload and remove its parts. Idempotent."""
        async with self._lock(upload_id):
            record = await self.get(project, upload_id)
            if record.status != CANCELLED:
                await self._pending(project, upload_id)
                await self._end(upload_id, CANCELLED)
            return msgspec.structs.replace(record, status=CANCELLED)

    async def sweep(self) -> int:
        """End overdue uploads and remove what a crash left. Returns the number of uploads that expired."""
        if not self._swept_orphans:
            await self._sweep_orphans()
            self._swept_orphans = True
        now = self._clock.now()
        overdue = await self._database.read(overdue_uploads, now, SWEEP_MAX)
        for upload_id in overdue:
            async with self._lock(upload_id):
                with contextlib.suppress(InvalidTransition):  # it has just been completed
                    await self._end(upload_id, EXPIRED)
        await self._database.write(forget_ended, now - KEPT_S)
        return len(overdue)

    async def _end(self, upload_id: str, status: str) -> None:
        await self._discard(await self._database.write(end, upload_id, status))

    async def _discard(self, part_ids: Sequence[str]) -> None:
        paths = [self.home / part_id for part_id in part_ids]
        await self._files.disk.run(discard_all, paths)
        await self._files.stored.remove(*paths)

    async def _remove_orphans(self, part_ids: Sequence[str]) -> None:
        paths = [self.home / part_id for part_id in part_ids]
        await self._files.disk.run(self._files.owned.remove, *paths)
        await self._files.stored.remove(*paths)

    async def _sweep_orphans(self) -> None:
        names = await self._files.disk.run(names_in, self.home)
        names = sorted({*names, *await self._files.stored.names_in(self.home)})
        await self._arrivals.sweep(names, partial(self._database.read, known_parts), self._remove_orphans)

    async def _pending(self, project: str, upload_id: str) -> UploadRecord:
        record = await self.get(project, upload_id)
        if record.status != PENDING:
            raise not_pending(record)
        return record

    def _lock(self, upload_id: str) -> asyncio.Lock:
        return self._locks.setdefault(upload_id, asyncio.Lock())

    def part(self, part_id: str, upload_id: str, size_bytes: int, project: str) -> PartRecord:
        """Return the record of a new part."""
        return PartRecord(part_id, upload_id, size_bytes, self._clock.now(), project)


class PartWriter:
    """A new part: `write` its bytes, then `commit`. Always call `discard`."""

    def __init__(
        self, files: FileService, uploads: UploadService, upload_id: str, project: str, writing: Writing
    ) -> None:
        self.id, self._project = new_id("part_"), project
        self._files, self._uploads, self._upload_id = files, uploads, upload_id
        self.incoming = files.begin_incoming(self.id, PART_BYTES_MAX, writing)
        self._storing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Raises: TooLarge (`file_too_large`) beyond PART_BYTES_MAX, StorageFull."""
        await self.incoming.write(data)

    async def commit(self) -> PartRecord:
        """Store the part. It is durable when this returns. Raises: InvalidTransition if the upload ended; TooLarge."""
        part = self._uploads.part(self.id, self._upload_id, self.incoming.size_bytes, self._project)
        self._storing = asyncio.create_task(self._uploads.store_part(part, self))
        await asyncio.shield(self._storing)
        if self.incoming.writing is not None:
            self.incoming.writing.end(is_kept=True)
        self._files.end_incoming(self.id)
        return part

    async def discard(self) -> None:
        """Remove the bytes unless they were committed. Safe to call twice."""
        await self.incoming.discard()
        if self._storing is not None:
            await asyncio.wait({self._storing})
            self._storing.exception()  # the caller of `commit` got it, or was cancelled
        self._files.end_incoming(self.id)


def _select_parts(record: UploadRecord, parts: dict[str, PartRecord], part_ids: Sequence[str]) -> list[PartRecord]:
    """Return the parts with these ids, in this order. Raises: InvalidInput."""
    if not 0 < len(part_ids) <= PARTS_MAX or len(set(part_ids)) != len(part_ids):
        raise InvalidInput(f"name 1 to {PARTS_MAX:,} parts, each once", code="invalid_part_ids")
    for part_id in part_ids:
        if part_id not in parts:
            raise InvalidInput(
                f"{part_id[:SHOWN_CHARS]!r} is not a part of the upload {record.id}", code="invalid_part_ids"
            )
    chosen = [parts[part_id] for part_id in part_ids]
    total = sum(part.bytes for part in chosen)
    if total != record.bytes:
        raise InvalidInput(
            f"the parts hold {total:,} bytes, but {record.bytes:,} were announced", code="upload_size_mismatch"
        )
    return chosen
