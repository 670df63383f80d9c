"""Records of a server's files, in the database. Each function runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, UnknownName
from batchmill.store.quotas import note_added
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.tables import files, jobs

SHOWN_CHARS = 80  # of an unknown id, in a message


class FileRecord(Struct, frozen=True):
    """A file of a project. Times are seconds since the epoch, UTC."""

    id: str
    project: str
    purpose: str
    filename: str  # for display: never used in a path
    bytes: int
    sha256: str | None
    created: float
    expires: float | None
    job: str | None  # the job, if the file is its result


class FileQuery(Struct, frozen=True):
    """Which files to list. None: no filter."""

    project: str
    now: float  # files that have expired by then are left out
    limit: int
    purpose: str | None = None
    after: str | None = None
    newest_first: bool = True


class JobResults(Struct, frozen=True):
    """The paths of a job's own result files, and the state that tells whether they are final."""

    state: str
    generation: int
    paths: list[str]


_FIELDS = [files.c[name] for name in FileRecord.__struct_fields__]
_FIND = CompiledStatement(sa.select(*_FIELDS).where(files.c.id == sa.bindparam("file")))
_FIND_ALL = sa.select(*_FIELDS).where(files.c.id.in_(sa.bindparam("ids", expanding=True)))
_INSERT = CompiledStatement(files.insert(), FileRecord.__struct_fields__)
_RESULTS_OF = CompiledStatement(
    sa.select(jobs.c.state, jobs.c.generation, jobs.c.output, jobs.c.errors_output).where(
        jobs.c.id == sa.bindparam("job")
    )
)


def unknown(file_id: str) -> UnknownName:
    return UnknownName(f"No such File object: {file_id[:SHOWN_CHARS]}", code="unknown_file")


def in_use(record: FileRecord) -> Conflict:
    return Conflict(
        f"{record.id} is in use by a job that has not ended: cancel the job, or wait until it ends", code="file_in_use"
    )


def find(db: sa.Connection, file_id: str) -> FileRecord | None:
    row = _FIND.row(db, {"file": file_id})
    return None if row is None else FileRecord(*row)


def find_all(db: sa.Connection, file_ids: Sequence[str]) -> dict[str, FileRecord]:
    rows = db.execute(_FIND_ALL, {"ids": list(file_ids)})
    return {record.id: record for record in (FileRecord(*row) for row in rows)}


def page(db: sa.Connection, query: FileQuery) -> list[FileRecord]:
    """Return the files of the query, and one more if there is one. Raises: UnknownName for an unknown `after`."""
    statement = sa.select(*_FIELDS).where(files.c.project == query.project, _is_live(query.now))
    if query.purpose is not None:
        statement = statement.where(files.c.purpose == query.purpose)
    position = sa.tuple_(files.c.created, files.c.id)
    if query.after is not None:
        last = find(db, query.after)
        if last is None or last.project != query.project:
            raise unknown(query.after)
        last_position = sa.tuple_(sa.literal(last.created), sa.literal(last.id))
        statement = statement.where(position < last_position if query.newest_first else position > last_position)
    order = (files.c.created.desc(), files.c.id.desc()) if query.newest_first else (files.c.created, files.c.id)
    return [FileRecord(*row) for row in db.execute(statement.order_by(*order).limit(query.limit + 1))]


def insert(db: sa.Connection, record: FileRecord) -> None:
    _INSERT.run(db, msgspec.structs.asdict(record))
    if record.job is None:
        note_added(db, "files", record.project)


def insert_missing(db: sa.Connection, records: Sequence[FileRecord]) -> None:
    """Insert the records that are missing. One thread writes, so no other write comes in between."""
    existing = find_all(db, [record.id for record in records])
    for record in records:
        if record.id not in existing:
            insert(db, record)


def delete(db: sa.Connection, file_id: str) -> None:
    db.execute(files.delete().where(files.c.id == file_id))


def find_expired(db: sa.Connection, now: float, after: str, limit: int) -> list[FileRecord]:
    """Return files that have expired, ordered by id, after the id `after`."""
    statement = sa.select(*_FIELDS).where(files.c.expires <= now, files.c.id > after)
    return [FileRecord(*row) for row in db.execute(statement.order_by(files.c.id).limit(limit))]


def find_ids(db: sa.Connection, names: Sequence[str]) -> set[str]:
    """Return those of `names` that are ids of files."""
    return set(db.execute(sa.select(files.c.id).where(files.c.id.in_(names))).scalars())


def results_of(db: sa.Connection, job_id: str) -> JobResults | None:
    row = _RESULTS_OF.row(db, {"job": job_id})
    if row is None:
        return None
    state, generation, *paths = row
    return JobResults(state, generation, [path for path in paths if path])


def _is_live(now: float) -> sa.ColumnElement[bool]:
    return files.c.expires.is_(None) | (files.c.expires > now)
