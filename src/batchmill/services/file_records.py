"""The records of files: what the table `files` says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.store.service_tables import files
from batchmill.store.tables import jobs

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


class Results(Struct, frozen=True):
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


def results_of(db: sa.Connection, job_id: str) -> Results | None:
    columns = (jobs.c.state, jobs.c.generation, jobs.c.output, jobs.c.errors_output)
    found = db.execute(sa.select(*columns).where(jobs.c.id == job_id)).first()
    if found is None:
        return None
    return Results(found.state, found.generation, [path for path in (found.output, found.errors_output) if path])


def _is_there(now: float) -> sa.ColumnElement[bool]:
    return files.c.expires.is_(None) | (files.c.expires > now)
