"""What the database tells of jobs, one and many. Each function runs in its caller's transaction and only reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.states import ENDED, JobState, PauseReason
from batchmill.store import removals
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import error_counts, job_models, jobs
from batchmill.types import JobQuery
from batchmill.wire.job_spec import JobSpec

Errors = dict[str, tuple[int, str]]  # code -> (rows, one message), the most frequent first
SHOWN_CHARS = 64  # of an id nobody knows, in a message


class _Dataset(Struct):
    paths: list[str]


class _Reads(Struct):
    """What of a job's description says which files it reads."""

    dataset: _Dataset


_reads = msgspec.json.Decoder(_Reads)
_listed = [column for column in jobs.c if column is not jobs.c.problems]


def find(db: sa.Connection, job_id: str) -> sa.RowMapping:
    """The record of a job, by its id or a unique prefix of it. Raises: UnknownName."""
    exact = db.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().first()
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


def find_with_errors(db: sa.Connection, job_id: str) -> tuple[sa.RowMapping, Errors]:
    """A job's record and its errors by cause. Raises: UnknownName."""
    record = find(db, job_id)
    return record, errors_of(db, [record["id"]]).get(record["id"], {})


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


def page(db: sa.Connection, query: JobQuery) -> list[tuple[sa.RowMapping, Errors]]:
    """Jobs, the newest first, without their problems. Raises: UnknownName for an `after` that is none of them."""
    wanted = _of_door(query).order_by(jobs.c.created.desc(), jobs.c.id.desc())
    if query.state is not None:
        wanted = wanted.where(jobs.c.state == query.state)
    if query.model is not None:
        wanted = wanted.where(jobs.c.id.in_(sa.select(job_models.c.job).where(job_models.c.model == query.model)))
    if query.since is not None:
        wanted = wanted.where(jobs.c.created >= query.since)
    if query.after is not None:
        after = db.execute(_of_door(query).where(jobs.c.id == query.after)).mappings().first()
        if after is None:
            raise UnknownName(f"there is no job {query.after[:SHOWN_CHARS]!r} to list after", code="unknown_job")
        same = (jobs.c.created == after["created"]) & (jobs.c.id < after["id"])
        wanted = wanted.where((jobs.c.created < after["created"]) | same)
    records = db.execute(wanted.limit(query.limit)).mappings().all()
    # A list without end may be longer than what one statement takes.
    errors = errors_of(db, sa.select(jobs.c.id) if query.limit is None else [record["id"] for record in records])
    return [(record, errors.get(record["id"], {})) for record in records]


def _of_door(query: JobQuery) -> sa.Select:
    """The jobs that `after` may name: it may have left the state that is asked for since."""
    wanted = sa.select(*_listed)
    if query.project is not None:
        wanted = wanted.where(jobs.c.project == query.project)
    return wanted if query.origin is None else wanted.where(jobs.c.door == query.origin)


def unfinished(db: sa.Connection) -> Sequence[sa.RowMapping]:
    """Every job that has not ended, the oldest first."""
    return db.execute(sa.select(jobs).where(jobs.c.state.not_in(ENDED)).order_by(jobs.c.created)).mappings().all()


def in_use(db: sa.Connection, paths: Collection[str], project: str | None = None) -> set[str]:
    """Those of `paths` that stand in the dataset of a job that has not ended, of one project or of all."""
    query = sa.select(jobs.c.spec).where(jobs.c.state.not_in(tuple(ENDED)))
    if project is not None:
        query = query.where(jobs.c.project == project)
    wanted, used = set(paths), set[str]()
    for (spec,) in db.execute(query):
        used |= wanted.intersection(_reads.decode(spec).dataset.paths)
    return used


def refuse_unfinished(db: sa.Connection, project: str, quota: int) -> None:
    """Raises: OverQuota where a project has as many unfinished jobs as it may."""
    unfinished_states = [state for state in JobState if state not in ENDED]
    refuse_beyond(
        db, jobs, quota, quota="unfinished_jobs", project=project, way_out="let some end, or cancel them",
        where=jobs.c.state.in_(unfinished_states),
    )  # fmt: skip


def ids(db: sa.Connection) -> set[str]:
    """Every job."""
    return set(db.execute(sa.select(jobs.c.id)).scalars())


def at_home(db: sa.Connection) -> Sequence[sa.RowMapping]:
    """The jobs that no door took, the newest first: only their callers name files for the results."""
    query = sa.select(*_listed).where(jobs.c.door.is_(None)).order_by(jobs.c.created.desc())
    return db.execute(query).mappings().all()


def next_deadlines(db: sa.Connection, count: int) -> Sequence[tuple[str, float]]:
    """(job, deadline) of those that a deadline can still end, the next one first."""
    over = {*ENDED, JobState.CANCELLING, JobState.FINALIZING}
    query = (
        sa.select(jobs.c.id, jobs.c.deadline)
        .where(jobs.c.deadline.is_not(None), jobs.c.cancelling.is_(None), jobs.c.state.not_in(over))
        .order_by(jobs.c.deadline)
        .limit(count)
    )
    return [tuple(found) for found in db.execute(query)]


def paused_for(db: sa.Connection, reason: PauseReason) -> Sequence[sa.RowMapping]:
    """The jobs that are paused for a reason, the oldest first."""
    query = sa.select(jobs).where(jobs.c.state == JobState.PAUSED, jobs.c.reason == reason).order_by(jobs.c.created)
    return db.execute(query).mappings().all()


def columns_of(spec: JobSpec) -> dict[str, object]:
    """What of a description stands in the job's record too."""
    return {
        "spec": msgspec.json.encode(spec),
        "priority": spec.policy.priority,
        "deadline": spec.policy.deadline,
    }


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
