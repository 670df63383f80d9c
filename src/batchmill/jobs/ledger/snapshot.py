"""Snapshot: everything the ledger knows of one job, read in one transaction, replaced in one.

What audits or repairs a ledger works on a snapshot, in a process of its own, and never on the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import InvalidTransition
from batchmill.jobs.ledger import misfits
from batchmill.states import NEXT, JobState, PauseReason
from batchmill.store.quotas import forget_counts, note_added
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.tables import commits, error_counts, job_models, jobs, shards
from batchmill.store.sql.transactions import note_change
from batchmill.types import Shard, Usage
from batchmill.wire.job_spec import JobSpec

UNFINISHED_JOBS = "unfinished_jobs"  # the quota
INSERT_ROWS = 1000  # records of one statement
REBUILT = (
    "the ledger was rebuilt; resume the job: it runs what is missing and writes its results again, "
    "or cancel it: then its results are those of the rows that are done"
)

_INSERT_MODELS = CompiledStatement(job_models.insert(), ("job", "model"))
_DELETE_MODELS = CompiledStatement(job_models.delete().where(job_models.c.job == sa.bindparam("of_job")))


def _initial(column: sa.Column[Any]) -> Any:
    """The value that a column has where an INSERT does not name it."""
    if isinstance(column.default, sa.ColumnDefault):
        return column.default.arg
    default = column.server_default
    return column.type.python_type(default.arg) if isinstance(default, sa.DefaultClause) else None


_INITIAL = {column.name: _initial(column) for column in jobs.c}
_INSERT_JOB = CompiledStatement(jobs.insert(), list(_INITIAL))


class ShardRecord(Struct, frozen=True, array_like=True, gc=False):
    """A shard that was leased at least once.

    Bit i of `bitmap`, lowest first: position lo + i has its outcome. Empty: all have it, as in most shards of a job.
    """

    generation: int
    shard: int
    lo: int
    hi: int
    epoch: int
    seq: int
    done: int
    bitmap: bytes

    @property
    def bits(self) -> int:
        return int.from_bytes(self.bitmap, "little") if self.bitmap else (1 << max(0, self.hi - self.lo)) - 1

    @classmethod
    def read(cls, *columns: Any) -> ShardRecord:
        """From the ledger, which stores every bit. Its columns may be damaged: only a bitmap of its length is full."""
        *others, bitmap = columns
        record = cls(*others, bitmap or b"\0")
        rows = record.hi - record.lo
        is_full = rows > 0 and len(bitmap) == -(-rows // 8) and record.bits == (1 << rows) - 1
        return msgspec.structs.replace(record, bitmap=b"") if is_full else record

    @staticmethod
    def packed(bits: int, shard: Shard) -> bytes:
        """The `bitmap` of a shard."""
        rows = shard.hi - shard.lo
        return b"" if bits == (1 << rows) - 1 else bits.to_bytes(-(-rows // 8), "little")

    def columns(self) -> dict[str, object]:
        """For the ledger."""
        bitmap = self.bits.to_bytes(-(-(self.hi - self.lo) // 8), "little")
        return msgspec.structs.asdict(self) | {"bitmap": bitmap}


class CommitRecord(Struct, frozen=True, array_like=True, gc=False):
    """A range of a segment that counts."""

    generation: int
    shard: int
    seq: int
    epoch: int
    segment: str
    offset: int
    length: int
    rows_ok: int
    rows_failed: int
    cost: float | None

    def columns(self) -> dict[str, object]:
        """For the ledger."""
        return msgspec.structs.asdict(self)


class Counters(Struct, frozen=True):
    """The sums that a job's record keeps."""

    rows: int = 0
    rows_ok: int = 0
    rows_failed: int = 0
    rows_folded: int = 0
    rows_reused: int = 0
    rows_rejected: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    warnings: dict[str, int] = {}


class Snapshot(Struct, frozen=True):
    """A job in the ledger. `state` is None for a job that the ledger does not know."""

    state: str | None
    generation: int
    counters: Counters
    shards: list[ShardRecord]
    commits: list[CommitRecord]  # by generation, shard and seq
    errors: int = 0  # rows in the counts by cause


class Rebuilt(Struct, frozen=True):
    """A rebuilt ledger of a job, from its plans and segments, and how it differs from the old one."""

    generation: int
    counters: Counters
    shards: list[ShardRecord]
    commits: list[CommitRecord]
    errors: dict[str, tuple[int, str]]  # code -> (rows, one message)
    adopted: int = 0  # rows that the ledger did not know
    reopened: int = 0  # rows that it counted and whose outcome cannot be read
    damaged: list[str] = []  # what could not be read
    misfits: list[tuple[int, int, str, list[tuple[int, int]]]] = []  # generation, shard, tag of a remote job, runs


UNKNOWN = Snapshot(None, 0, Counters(), [], [])


def read(db: sa.Connection, job_id: str) -> Snapshot:
    """What the ledger has of a job now."""
    job = db.execute(sa.select(jobs).where(jobs.c.id == job_id)).mappings().first()
    if job is None:
        return UNKNOWN
    errors = sa.select(sa.func.coalesce(sa.func.sum(error_counts.c.rows), 0)).where(error_counts.c.job == job_id)
    return Snapshot(
        state=job["state"],
        generation=job["generation"],
        counters=Counters(
            rows=job["rows"], rows_ok=job["rows_ok"], rows_failed=job["rows_failed"], rows_folded=job["rows_folded"],
            rows_reused=job["rows_reused"], rows_rejected=job["rows_rejected"], cost=job["cost"],
            warnings=msgspec.json.decode(job["warnings"] or b"{}"),
            usage=Usage(job["input_tokens"], job["cached_tokens"], job["output_tokens"]),
        ),
        shards=[ShardRecord.read(*record) for record in db.execute(_shards_of(job_id))],
        commits=[CommitRecord(*record) for record in db.execute(_commits_of(job_id))],
        errors=db.execute(errors).scalar_one(),
    )  # fmt: skip


def insert_job(db: sa.Connection, spec: JobSpec, fields: Mapping[str, Any] = {}) -> None:
    """Insert a job. Args: fields: of its record, as far as more than the spec is known."""
    spec_bytes = fields.get("spec") or msgspec.json.encode(spec)
    record = _INITIAL | {
        "id": spec.id, "identity": spec.identity, "state": JobState.VALIDATING, "spec": spec_bytes,
        "bytes": 2 * len(spec_bytes), "created": spec.created, "output": spec.output, "project": spec.project,
        "frontend": (spec.origin or {}).get("frontend"),
        "priority": spec.policy.priority, "deadline": spec.policy.deadline, **fields,
    }  # fmt: skip
    record = {name: value.value if isinstance(value, StrEnum) else value for name, value in record.items()}
    _INSERT_JOB.run(db, record)
    note_added(db, UNFINISHED_JOBS, spec.project)
    has_nul = any(isinstance(value, str) and "\x00" in value for value in record.values())
    note_change(db, spec.id, None if has_nul else record)  # PostgreSQL stores another character
    _insert_models(db, spec)


def note_models(db: sa.Connection, spec: JobSpec) -> None:
    """Store the models of a job, for searches; a frontend's job knows them once it is planned."""
    _DELETE_MODELS.run(db, {"of_job": spec.id})
    _insert_models(db, spec)


def _insert_models(db: sa.Connection, spec: JobSpec) -> None:
    names = spec.used if spec.origin is not None else [model.name for model in spec.models]
    if names:
        _INSERT_MODELS.run_all(db, [{"job": spec.id, "model": name} for name in dict.fromkeys(names)])


def replace(db: sa.Connection, spec: JobSpec, before: Snapshot, after: Rebuilt) -> None:
    """Replace `before` with `after`, except for the error counts, and pause the job.

    When it finished stays known: who has written to its output since then owns that file.
    Raises: InvalidTransition when the job is no longer as it was, or no row of it ever ran.
    """
    if _mark(read(db, spec.id)) != _mark(before):
        raise InvalidTransition(
            f"the job {spec.id} went on while its ledger was being rebuilt: pause it, and try again"
        )
    if before.state is None:
        db.execute(job_models.delete().where(job_models.c.job == spec.id))
        insert_job(db, spec)
    _check_may_pause(spec.id, JobState(before.state or JobState.VALIDATING))
    for table in (shards, commits, error_counts):
        db.execute(table.delete().where(table.c.job == spec.id))
    for table, records in ((shards, after.shards), (commits, after.commits)):
        for some in _values(spec.id, records):
            db.execute(table.insert(), some)
    for *place, runs in after.misfits:
        misfits.add(db, spec.id, (place[0], place[1], place[2]), runs)
    sums = after.counters
    note_change(db, spec.id)
    forget_counts(db, UNFINISHED_JOBS)  # it may have ended
    db.execute(
        jobs.update()
        .where(jobs.c.id == spec.id)
        .values(
            state=JobState.PAUSED, reason=PauseReason.INTERRUPTED, message=REBUILT, finalizing=None, cancelling=None,
            generation=after.generation, rows=sums.rows, rows_ok=sums.rows_ok, rows_failed=sums.rows_failed,
            rows_folded=sums.rows_folded, rows_reused=sums.rows_reused, rows_rejected=sums.rows_rejected,
            cost=sums.cost,
            input_tokens=sums.usage.input_tokens, cached_tokens=sums.usage.cached_tokens,
            output_tokens=sums.usage.output_tokens,
            warnings=msgspec.json.encode(sums.warnings) if sums.warnings else None,
        )
    )  # fmt: skip


def _check_may_pause(job_id: str, state: JobState) -> None:
    """Check that the job may be paused; an ended one goes through QUEUED, as a retry does."""
    if state is JobState.PAUSED or JobState.PAUSED in NEXT[state]:
        return
    if JobState.QUEUED not in NEXT[state]:
        raise InvalidTransition(f"the job {job_id} is {state}: none of its rows ran, there is no ledger to rebuild")


def _mark(snapshot: Snapshot) -> tuple[str | None, int, int, int]:
    """Values of which one changes with every change of a job: state, generation, lease or commit."""
    epochs = sum(shard.epoch + shard.seq for shard in snapshot.shards)
    return snapshot.state, snapshot.generation, len(snapshot.shards), epochs


def _values(job_id: str, records: Sequence[ShardRecord | CommitRecord]) -> Iterator[list[dict[str, object]]]:
    for first in range(0, len(records), INSERT_ROWS):
        yield [{"job": job_id, **record.columns()} for record in records[first : first + INSERT_ROWS]]


def _shards_of(job_id: str) -> sa.Select:
    columns = [shards.c[name] for name in ShardRecord.__struct_fields__]
    return sa.select(*columns).where(shards.c.job == job_id).order_by(shards.c.generation, shards.c.shard)


def _commits_of(job_id: str) -> sa.Select:
    columns = [commits.c[name] for name in CommitRecord.__struct_fields__]
    by = (commits.c.generation, commits.c.shard, commits.c.seq)
    return sa.select(*columns).where(commits.c.job == job_id).order_by(*by)
