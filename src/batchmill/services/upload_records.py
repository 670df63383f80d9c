"""The records of uploads and their parts: what the tables `uploads` and `upload_parts` say."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import InvalidTransition, TooLarge
from batchmill.store.quotas import refuse_beyond
from batchmill.store.service_tables import upload_parts, uploads

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"
PARTS_MAX = 10_000  # of one upload
REPEATS_MAX = 2  # times its size that the parts of an upload may hold: some arrive twice
PART_BYTES_MAX = 64 * 1024 * 1024
ENDED_MAX = 10_000  # uploads of one project that have ended and are still known


class UploadRecord(Struct, frozen=True):
    """A file that arrives in parts. Times are seconds since the epoch, UTC."""

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
    found = db.execute(sa.select(*_UPLOAD).where(uploads.c.id == upload_id)).first()
    return None if found is None else UploadRecord(*found)


def insert(db: sa.Connection, record: UploadRecord, quota: int) -> None:
    """Raises: OverQuota where so many of the project's have not ended."""
    refuse_beyond(
        db, uploads, quota, quota="uploads", project=record.project, way_out="complete or cancel some",
        where=uploads.c.status == PENDING,
    )  # fmt: skip
    _forget_beyond(db, record.project)
    db.execute(uploads.insert().values(msgspec.structs.asdict(record)))


def parts_of(db: sa.Connection, upload_id: str) -> dict[str, PartRecord]:
    found = db.execute(sa.select(*_PART).where(upload_parts.c.upload == upload_id))
    return {record.id: record for record in (PartRecord(*row) for row in found)}


def check_pending(db: sa.Connection, upload_id: str) -> UploadRecord:
    """The upload, if it takes parts still. Raises: InvalidTransition."""
    record = find(db, upload_id)
    assert record is not None  # nothing removes an upload that somebody works on
    if record.status != PENDING:
        raise not_pending(record)
    return record


def not_pending(record: UploadRecord) -> InvalidTransition:
    return InvalidTransition(
        f"the upload {record.id} is {record.status}: only a pending one can be changed", code="upload_not_pending"
    )


def check_room(db: sa.Connection, upload_id: str, size_bytes: int) -> None:
    """Whether an upload may have another part. Raises: InvalidTransition, TooLarge."""
    record = check_pending(db, upload_id)
    held = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(upload_parts.c.bytes), 0))
    count, total = db.execute(held.where(upload_parts.c.upload == upload_id)).one()
    if count >= PARTS_MAX:
        raise TooLarge(f"an upload has at most {PARTS_MAX:,} parts: send larger ones", code="too_many_parts")
    if total + size_bytes > REPEATS_MAX * record.bytes + PART_BYTES_MAX:
        raise TooLarge(
            f"the upload was announced with {record.bytes:,} bytes, and its parts hold {total:,} already",
            code="too_many_parts",
        )


def add_part(db: sa.Connection, part: PartRecord) -> None:
    """Raises: InvalidTransition, TooLarge."""
    check_room(db, part.upload, part.bytes)
    db.execute(upload_parts.insert().values(msgspec.structs.asdict(part)))


def end(db: sa.Connection, upload_id: str, status: str, file_id: str | None = None) -> list[str]:
    """Take a pending upload to its end; returns the ids of the parts, which have no records any more.

    Raises: InvalidTransition.
    """
    check_pending(db, upload_id)
    parts = list(parts_of(db, upload_id))
    db.execute(uploads.update().where(uploads.c.id == upload_id).values(status=status, file=file_id))
    db.execute(upload_parts.delete().where(upload_parts.c.upload == upload_id))
    return parts


def overdue(db: sa.Connection, now: float, limit: int) -> list[str]:
    """Pending uploads whose time has passed."""
    query = sa.select(uploads.c.id).where(uploads.c.status == PENDING, uploads.c.expires <= now)
    return list(db.execute(query.order_by(uploads.c.expires).limit(limit)).scalars())


def _forget_beyond(db: sa.Connection, project: str) -> None:
    """Of a project that begins uploads without end, forget those that ended first."""
    ended = sa.and_(uploads.c.project == project, uploads.c.status != PENDING)
    count = db.execute(sa.select(sa.func.count()).select_from(uploads).where(ended)).scalar_one()
    if count >= ENDED_MAX:
        some = sa.select(uploads.c.id).where(ended).order_by(uploads.c.created).limit(count - ENDED_MAX + 1)
        db.execute(uploads.delete().where(uploads.c.id.in_(some)))


def forget_ended(db: sa.Connection, before: float) -> None:
    """Drop the records of uploads that were begun long ago and have ended."""
    db.execute(uploads.delete().where(uploads.c.status != PENDING, uploads.c.created < before))


def known_parts(db: sa.Connection, names: Sequence[str]) -> set[str]:
    """Those of `names` that are ids of parts."""
    return set(db.execute(sa.select(upload_parts.c.id).where(upload_parts.c.id.in_(names))).scalars())
