"""Queries about jobs. Each function only reads, in its caller's transaction."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, UnknownName
from batchmill.jobs.ledger import deployed, snapshot
from batchmill.jobs.ledger.files import read_spec, result_exists
from batchmill.jobs.ledger.snapshot import UNFINISHED_JOBS
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store import removals
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.database import Database
from batchmill.store.sql.portable import put
from batchmill.store.sql.tables import error_counts, files, job_models, jobs, submissions
from batchmill.store.sql.transactions import Record
from batchmill.types import JobOrder, JobQuery, Once
from batchmill.wire.job_spec import JobSpec

Errors = dict[str, tuple[int, str]]  # code -> (rows, one message), the most frequent first
SHOWN_CHARS = 64  # of an unknown id, in a message
READ_ROWS = 128  # records of a list that one statement reads

T = TypeVar("T")


class _Dataset(Struct):
    paths: list[str]


class _Reads(Struct):
    """What of a job's description says which files it reads."""

    dataset: _Dataset


_reads = msgspec.json.Decoder(_Reads)
_BY_ID = CompiledStatement(sa.select(jobs).where(jobs.c.id == sa.bindparam("job")))
_ERRORS_OF_ONE = CompiledStatement(
    sa.select(error_counts.c.code, error_counts.c.rows, error_counts.c.sample)
    .where(error_counts.c.job == sa.bindparam("job"), error_counts.c.rows > 0)
    .order_by(error_counts.c.rows.desc(), error_counts.c.code)
)
_OF_ORDER = submissions.c.key == sa.bindparam("order")
_FIND_ORDER = CompiledStatement(
    sa.select(submissions.c.job, submissions.c.fingerprint, submissions.c.created, submissions.c.answered).where(
        _OF_ORDER
    )
)
_ANSWERED = CompiledStatement(submissions.update().where(_OF_ORDER).values(answered=sa.bindparam("now")))
_UNFINISHED = jobs.c.state.in_([state for state in JobState if state not in ENDED])
_NEXT_DEADLINES = (
    sa.select(jobs.c.id, jobs.c.deadline)
    .where(
        jobs.c.deadline.is_not(None), jobs.c.cancelling.is_(None),
        jobs.c.state.not_in({*ENDED, JobState.CANCELLING, JobState.FINALIZING}),
    )
    .order_by(jobs.c.deadline)
    .limit(sa.bindparam("count"))
)  # fmt: skip
_listed = [column for column in jobs.c if column is not jobs.c.problems]


def find(db: sa.Connection, job_id: str) -> Record:
    """The record of a job, by its id or a unique prefix of it. Raises: UnknownName."""
    exact = _BY_ID.record(db, {"job": job_id})
    if exact is not None:
        return exact
    begins = sa.select(jobs).where(jobs.c.id >= job_id, jobs.c.id < job_id + "\U0010ffff").limit(2)
    found = db.execute(begins).mappings().all()
    if len(found) == 1:
        return found[0]
    if not found and (removal := removals.find(db, job_id)) is not None:
        raise removal.error()
    why = "is the beginning of several ids; write more of it" if found else "is unknown; `batchmill jobs` lists them"
    raise UnknownName(f"the job {job_id[:SHOWN_CHARS]!r} {why}", code="unknown_job")


def find_with_errors(db: sa.Connection, job_id: str) -> tuple[Record, Errors]:
    """A job's record and its errors by cause. Raises: UnknownName."""
    record = find(db, job_id)
    if not record["rows_failed"]:  # each row that is counted by its error is counted there, too
        return record, {}
    found = _ERRORS_OF_ONE.rows(db, {"job": record["id"]})
    return record, {code: (rows, sample) for code, rows, sample in found}


def errors_of(db: sa.Connection, job_ids: Sequence[str] | sa.Select[tuple[str]]) -> dict[str, Errors]:
    """Job -> its errors by cause."""
    table = error_counts.c
    query = (
        sa.select(table.job, table.code, table.rows, table.sample)
        .where(table.job.in_(job_ids), table.rows > 0)
        .order_by(table.rows.desc(), table.code)
    )
    found: dict[str, Errors] = {}
    for job, code, rows, sample in db.execute(query):
        found.setdefault(job, {})[code] = rows, sample
    return found


def page(db: sa.Connection, query: JobQuery, view: Callable[[Record, Errors], T]) -> list[T]:
    """The views of jobs, the newest first, from records without problems. A record may have a description of hundreds
    of KiB: a database in a file reads one after the other, and PostgreSQL `READ_ROWS` at once.

    Raises: UnknownName for an `after` that is none of them.
    """
    wanted = _of_frontend(query).order_by(jobs.c.created.desc(), jobs.c.id.desc())
    if query.state is not None:
        wanted = wanted.where(jobs.c.state == query.state)
    if query.model is not None:
        wanted = wanted.where(jobs.c.id.in_(sa.select(job_models.c.job).where(job_models.c.model == query.model)))
    if query.since is not None:
        wanted = wanted.where(jobs.c.created >= query.since)
    after = None if query.after is None else _found_after(db, query)
    views: list[T] = []
    while True:
        size = READ_ROWS if query.limit is None else min(READ_ROWS, query.limit - len(views))
        some = (wanted if after is None else wanted.where(_is_beyond(after))).limit(size)
        errors, before = errors_of(db, some.with_only_columns(jobs.c.id)), len(views)
        for record in db.execute(some).mappings():
            views.append(view(record, errors.get(record["id"], {})))
            after = {"id": record["id"], "created": record["created"]}
        if len(views) < before + size or len(views) == query.limit:
            return views


def _found_after(db: sa.Connection, query: JobQuery) -> Record:
    wanted = _of_frontend(query).where(jobs.c.id == query.after)
    after = db.execute(wanted.with_only_columns(jobs.c.id, jobs.c.created)).mappings().first()
    if after is None:
        raise UnknownName(f"there is no job {(query.after or '')[:SHOWN_CHARS]!r} to list after", code="unknown_job")
    return after


def _is_beyond(after: Record) -> sa.ColumnElement[bool]:
    is_older = (jobs.c.created < after["created"]) | (jobs.c.id < after["id"])
    return (jobs.c.created <= after["created"]) & is_older  # of which an index finds the first


def _of_frontend(query: JobQuery) -> sa.Select:
    """The jobs of a frontend that `after` may name, in any state: the state may have changed since."""
    wanted = sa.select(*_listed)
    if query.project is not None:
        wanted = wanted.where(jobs.c.project == query.project)
    return wanted if query.origin is None else wanted.where(jobs.c.frontend == query.origin)


def unfinished(db: sa.Connection) -> Sequence[Record]:
    """Every job that has not ended, the oldest first."""
    return db.execute(sa.select(jobs).where(jobs.c.state.not_in(ENDED)).order_by(jobs.c.created)).mappings().all()


def in_use(
    db: sa.Connection, paths: Collection[str], project: str | None = None, *, by_retries: bool = False
) -> set[str]:
    """Which of `paths` are inputs of a job that has not ended, of one project or of all; or of one that was retried."""
    query = sa.select(jobs.c.spec).where(_UNFINISHED)
    if by_retries:
        query = query.where(jobs.c.generation > 0)
    if project is not None:
        query = query.where(jobs.c.project == project)
    wanted, used = set(paths), set[str]()
    for (spec,) in db.execute(query):
        used |= wanted.intersection(_reads.decode(spec).dataset.paths)
    return used


def refuse_unfinished(db: sa.Connection, project: str, quota: int) -> None:
    """Raises: OverQuota if a project has its maximum of unfinished jobs."""
    refuse_beyond(
        db, jobs, quota, quota=UNFINISHED_JOBS, project=project, way_out="let some end, or cancel them",
        where=_UNFINISHED, is_noted=True,
    )  # fmt: skip


def ids(db: sa.Connection) -> set[str]:
    """Every job."""
    return set(db.execute(sa.select(jobs.c.id)).scalars())


def naming_outputs(db: sa.Connection) -> Sequence[Record]:
    """The jobs whose callers may name where results go, the newest first: those without a frontend, and those that
    write to an object store.
    """
    is_named = jobs.c.frontend.is_(None) | jobs.c.output.contains("://")
    query = sa.select(*_listed).where(is_named).order_by(jobs.c.created.desc())
    return db.execute(query).mappings().all()


def writing_objects(db: sa.Connection) -> Sequence[Record]:
    """The jobs that have not ended and write to an object store. Read them before the store is asked what is there:
    a job that ends in between has written its results.
    """
    query = sa.select(*_listed).where(jobs.c.state.not_in(ENDED), jobs.c.output.contains("://"))
    return db.execute(query).mappings().all()


def next_deadlines(db: sa.Connection, count: int) -> Sequence[tuple[str, float]]:
    """(job, deadline) of those that a deadline can still end, the next one first."""
    return [tuple(found) for found in db.execute(_NEXT_DEADLINES, {"count": count})]


def paused_for(db: sa.Connection, reason: PauseReason) -> Sequence[Record]:
    """The jobs that are paused for a reason, the oldest first."""
    query = sa.select(jobs).where(jobs.c.state == JobState.PAUSED, jobs.c.reason == reason).order_by(jobs.c.created)
    return db.execute(query).mappings().all()


def columns_of(spec: JobSpec) -> dict[str, object]:
    """The columns of the job's record that come from its spec."""
    return {
        "spec": msgspec.json.encode(spec),
        "priority": spec.policy.priority,
        "deadline": spec.policy.deadline,
    }


def samples_at_rest(db: sa.Connection) -> Sequence[Record]:
    """The paused jobs of commands that began with a sample, the newest first."""
    query = (
        sa.select(*_listed)
        .where(jobs.c.state == JobState.PAUSED, jobs.c.frontend.is_(None), jobs.c.cancelling.is_(None))
        .order_by(jobs.c.created.desc())
    )
    return [record for record in db.execute(query).mappings() if read_spec(record["spec"]).sample is not None]


def finished_lately(db: sa.Connection, count: int) -> Sequence[tuple[bytes, int, float]]:
    """(description, rows that ran, seconds) of jobs that completed, the newest first."""
    rows = jobs.c.rows - jobs.c.rows_rejected - jobs.c.rows_folded
    query = (
        sa.select(jobs.c.spec, rows, jobs.c.elapsed_s)
        .where(jobs.c.state == JobState.COMPLETED, jobs.c.generation == 0, jobs.c.elapsed_s > 0, rows > 0)
        .order_by(jobs.c.finished.desc())
        .limit(count)
    )
    return [tuple(found) for found in db.execute(query)]


BLIND_S = 3600.0  # how long a repeated order without a key finds its job if its reply was never sent
KEPT_S = 86_400.0  # and one with a key so long


async def known(database: Database, once: Once, now: float) -> str | None:
    """As `standing`, with every reply counted whose delivery was heard of before this was asked."""
    found = await database.read(standing, once, now)
    if found is None or not once.blind:
        return found
    return await database.write_short(
        standing, once, now
    )  # behind the note of a reply, which may be on its way to the disk


def standing(db: sa.Connection, once: Once, now: float) -> str | None:
    """The job that this order is already; None: it is a new one. Raises: Conflict."""
    found = _FIND_ORDER.row(db, {"order": once.key})
    if found is None:
        return None
    job, fingerprint, created, answered_at = found
    age_s = now - created
    is_same = fingerprint == once.fingerprint
    if once.blind:
        is_asked_again = once.again_s is not None and age_s <= once.again_s
        was_answered = answered_at is not None and (once.arrived is None or answered_at < once.arrived or age_s < 0)
        is_open = not was_answered and age_s <= BLIND_S
        return job if is_same and (is_open or is_asked_again) else None
    if age_s > KEPT_S:
        return None
    if not is_same:
        raise Conflict(
            f"this idempotency key belongs to the job {job}, which was created with another body or parameters: "
            "use a new key for a new order",
            code="idempotency_key_reused",
        )
    return job


def must_run_again(record: Record, order: JobOrder) -> bool:
    """Whether an order that is a known job runs it from its beginning again."""
    if record["compacted"] is not None and not result_exists(record["output"]):
        return True  # its results are gone, and what they could be written from
    looks_again = order.update and bool(order.media)  # what its cells name may have changed, though the input has not
    return order.restart or ((order.overwrite or looks_again) and record["state"] == JobState.COMPLETED)


def enter(
    db: sa.Connection, spec: JobSpec, once: Once | None, quota: int | None, fields: Mapping[str, Any] = {}
) -> None:
    """Insert a job and the keys of its order, in one transaction.

    Args:
        quota: how many unfinished jobs its project may have; None: the machine's user submits it.
        fields: as of `snapshot.insert_job`.

    Raises: OverQuota; UnknownName where a result that it reads, or the class of its schema, has been removed;
    ModelsRemoved.
    """
    if spec.origin is not None:
        refuse_deleted(db, spec.dataset.paths)
    deployed.refuse_removed(db, spec)
    if quota is not None:
        refuse_unfinished(db, spec.project, quota)
    snapshot.insert_job(db, spec, fields)
    if once is not None:
        note_order(db, once, spec.id, spec.created)


def note_order(db: sa.Connection, once: Once, job_id: str, now: float) -> None:
    """Record the job of an order, or of a change of a job. Its earlier job, if any, is forgotten."""
    values = {"key": once.key, "job": job_id, "fingerprint": once.fingerprint, "created": now}
    put(db, submissions, values | {"answered": None})


def refuse_deleted(db: sa.Connection, paths: Sequence[str]) -> None:
    """Raises: UnknownName where one of these files of a server was deleted."""
    for removed in removals.find_all(db, [os.path.basename(path) for path in paths]):
        raise UnknownName(f"No such File object: {removed}", code="unknown_file")


def refuse_unrecorded(db: sa.Connection, paths: Sequence[str]) -> None:
    """Raises: UnknownName where one of these files among those of a server has no record any more."""
    names = {os.path.basename(path) for path in paths}
    found = set(db.execute(sa.select(files.c.id).where(files.c.id.in_(names))).scalars()) if names else set()
    for name in sorted(names - found):
        raise UnknownName(f"the file {name} was deleted: its rows cannot run again", code="unknown_file")


class NewJob(Struct, frozen=True):
    """A job to be stored. `quota`: as of `enter`."""

    spec: JobSpec
    once: Once | None
    quota: int | None
    now: float


def enter_once(db: sa.Connection, job: NewJob, fields: Mapping[str, Any] = {}) -> str | None:
    """As `enter`, unless the order is a job already: then its id is returned. Raises: also Conflict."""
    known_id = None if job.once is None else standing(db, job.once, job.now)
    if known_id is None:
        enter(db, job.spec, job.once, job.quota, fields)
    return known_id


def answered(db: sa.Connection, key: str, now: float) -> None:
    """Record that the reply to this order was delivered."""
    _ANSWERED.run(db, {"order": key, "now": now})


def forget_old(db: sa.Connection, now: float) -> None:
    """Delete expired keys of orders."""
    db.execute(submissions.delete().where(submissions.c.created < now - KEPT_S))
