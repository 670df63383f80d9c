"""The ledger: which outcomes count. Every method is one transaction; the caller gives it one thread.

Order is the whole protocol: outcome bytes durable -> commit record durable -> anything visible. A commit is a
compare-and-set on (shard, epoch, seq): a worker that lost the lease is refused, and no position is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby, pairwise
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill import faults
from batchmill.errors import InvalidTransition, UnknownName
from batchmill.jobs.ledger import misfits, records
from batchmill.jobs.ledger import snapshot as ledger_snapshot
from batchmill.jobs.ledger.counting import CommitBatch
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.ledger.job_changes import TIMES, Ending, change_job
from batchmill.jobs.ledger.packed import store as store_packed
from batchmill.jobs.ledger.snapshot import UNFINISHED_JOBS, Rebuilt, Snapshot
from batchmill.states import ENDED, NEXT, JobState
from batchmill.store.quotas import forget_counts
from batchmill.store.segments.format import Span, merged
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import commits, error_counts, jobs, notes, outcome_blocks, shards
from batchmill.store.sql.transactions import Record, note_change
from batchmill.types import Commit, Lease, RemoteJob, SegmentRef, Shard
from batchmill.types.position_runs import Runs
from batchmill.wire.job_spec import JobSpec

NOTES_MAX = 1000  # of one shard; an engine that wants more has lost count
KEY_CHARS_MAX = 128
DATA_BYTES_MAX = 2 * 1024 * 1024  # a batch of 100,000 rows, no two of which are neighbours

INTENT, UNKNOWN, SUBMITTED, FORGOTTEN = "intent", "unknown", "submitted", "forgotten"
AT_REST = frozenset({"ended", "collected", FORGOTTEN})  # states of remote jobs that run no more


class ShardNote(Struct, frozen=True):
    """A note for a shard; empty `data` deletes it."""

    lease: Lease
    key: str
    data: bytes
    at: float  # seconds since the epoch


def keep(db: sa.Connection, note: ShardNote) -> bool:
    """Store a note if its lease is the newest of its shard; return whether it is.

    The job may have ended meanwhile: a note may record that its work is finished.
    """
    lease = note.lease
    key = (shards.c.job == lease.job) & (shards.c.generation == lease.generation) & (shards.c.shard == lease.shard)
    if db.execute(sa.select(shards.c.epoch).where(key)).scalar() != lease.epoch:
        return False
    place = _place(lease.job, lease.generation, lease.shard, note.key)
    if not note.data:
        db.execute(notes.delete().where(place))
        return True
    values = {"data": note.data, "changed": note.at}
    if db.execute(notes.update().where(place).values(**values)).rowcount == 0:
        if not _has_room(db, note):
            return False
        db.execute(
            notes.insert().values(job=lease.job, generation=lease.generation, shard=lease.shard, key=note.key, **values)
        )
    return True


def _has_room(db: sa.Connection, note: ShardNote) -> bool:
    lease = note.lease
    place = (notes.c.job == lease.job) & (notes.c.generation == lease.generation) & (notes.c.shard == lease.shard)
    count = db.execute(sa.select(sa.func.count()).where(place)).scalar_one()
    return count < NOTES_MAX and len(note.key) <= KEY_CHARS_MAX and len(note.data) <= DATA_BYTES_MAX


def of_shard(db: sa.Connection, job_id: str, generation: int, shard: int) -> dict[str, bytes]:
    """Key -> what was noted."""
    place = (notes.c.job == job_id) & (notes.c.generation == generation) & (notes.c.shard == shard)
    return {key: bytes(data) for key, data in db.execute(sa.select(notes.c.key, notes.c.data).where(place))}


def remote_jobs(db: sa.Connection, job_id: str, generation: int | None = None) -> list[RemoteJob]:
    """The provider batches in the notes of a generation, or of all, by creation.

    A remote job whose shard has all its outcomes counts as collected, even if no note says so.
    """
    at = (shards.c.job == notes.c.job) & (shards.c.generation == notes.c.generation) & (shards.c.shard == notes.c.shard)
    query = sa.select(notes.c.shard, notes.c.data, shards.c.done == shards.c.hi - shards.c.lo).join(shards, at)
    query = query.where(notes.c.job == job_id)
    if generation is not None:
        query = query.where(notes.c.generation == generation)
    found = [_shown(read(bytes(data), shard), is_full=is_full) for shard, data, is_full in db.execute(query)]
    return sorted(filter(None, found), key=lambda job: (job.created, job.shard, job.tag))


def _shown(remote: RemoteJob | None, *, is_full: bool) -> RemoteJob | None:
    is_done = remote is not None and is_full and remote.state in ("submitted", "cancelling", "ended")
    return msgspec.structs.replace(remote, state="collected") if is_done else remote


def read(data: bytes, shard: int) -> RemoteJob | None:
    """The provider batch of a note; None for a note of another kind."""
    try:
        return msgspec.structs.replace(msgspec.json.decode(data, type=RemoteJob), shard=shard)
    except msgspec.MsgspecError:
        return None


def settle(
    db: sa.Connection, job_id: str, generation: int, *, tag: str, remote_id: str | None, now: float
) -> RemoteJob:
    """Store a person's decision about an unknown submission. Raises: UnknownName, InvalidTransition."""
    query = sa.select(notes).where(notes.c.job == job_id, notes.c.generation == generation, notes.c.key == tag)
    found = db.execute(query).first()
    if found is None:
        known = [each.tag for each in remote_jobs(db, job_id, generation) if each.state == UNKNOWN]
        message = f"those that are unknown: {', '.join(known)}" if known else "none of its submissions is unknown"
        raise UnknownName(f"the job {job_id} has no submission {tag!r}; {message}", code="unknown_submission")
    remote = read(bytes(found.data), found.shard)
    if remote is None or remote.state != UNKNOWN:
        message = "something else" if remote is None else remote.state
        raise InvalidTransition(f"the submission {tag} is {message}: only one that is unknown is adopted or forgotten")
    settled = _settled(remote, remote_id, now)
    stored = msgspec.json.encode(msgspec.structs.replace(settled, shard=-1))
    db.execute(notes.update().where(_place(job_id, generation, found.shard, tag)).values(data=stored, changed=now))
    return settled


def _settled(remote: RemoteJob, remote_id: str | None, now: float) -> RemoteJob:
    if remote_id is None:
        return msgspec.structs.replace(remote, state=FORGOTTEN, changed=now, message="a person said that it never was")
    return msgspec.structs.replace(
        remote, state=SUBMITTED, id=remote_id, submitted=now, changed=now, message="a person said that it is this one"
    )


def uncollected_shards(remotes: Sequence[RemoteJob]) -> frozenset[int]:
    """Shards of which a provider may have results that were not collected."""
    settled = {"collected", FORGOTTEN, UNKNOWN}
    return frozenset(remote.shard for remote in remotes if remote.state not in settled)


def _place(job_id: str, generation: int, shard: int, key: str) -> sa.ColumnElement[bool]:
    of_shard_ = (notes.c.job == job_id) & (notes.c.generation == generation) & (notes.c.shard == shard)
    return of_shard_ & (notes.c.key == key)


ERROR_CODES_MAX = 100  # distinct codes that a job's errors are counted by; user code may raise without end
OTHER_ERRORS = "other"  # the code that all further ones are counted under


class LeasedShard(Struct, frozen=True):
    """A shard with a new lease, and which of its rows are done."""

    lease: Lease
    seq: int
    bitmap: int  # bit i: position lo + i has its outcome
    notes: dict[str, bytes] = {}  # what engines noted with earlier leases of it


class JobEnd(Protocol):
    """The end of a job, which the transaction may store that counts its last rows, and which may be repeated."""

    @property
    def is_stored(self) -> bool: ...

    def write(self, db: sa.Connection, state: str, *, is_counted: bool) -> Ending | None:
        """Write the results, before anything of the job is changed. None: it does not end with these rows.

        Args: state: of the job. is_counted: whether the rows count.
        """
        ...

    def store(self, db: sa.Connection, record: Record) -> None:
        """Store what else there is. Args: record: of the job, which has ended."""
        ...


class Verdict(StrEnum):
    COUNTED = "counted"
    REPEATED = "repeated"  # this very commit is in the ledger already: its acknowledgement was lost
    STALE = "stale"  # another worker holds the shard, or the job has ended


_STATE = CompiledStatement(sa.select(jobs.c.state, jobs.c.rows_failed).where(jobs.c.id == sa.bindparam("job")))

_SHARD = (
    (shards.c.job == sa.bindparam("of_job"))
    & (shards.c.generation == sa.bindparam("of_generation"))
    & (shards.c.shard == sa.bindparam("of_shard"))
)
_FIND_SHARD = CompiledStatement(sa.select(shards.c.epoch, shards.c.seq, shards.c.bitmap).where(_SHARD))
_RAISE_EPOCH = CompiledStatement(shards.update().where(_SHARD).values(epoch=sa.bindparam("new_epoch")))
_INSERT_SHARD = CompiledStatement(shards.insert(), [column.name for column in shards.c])
_COMMITTED = CompiledStatement(
    sa.select(commits.c.generation, commits.c.segment, commits.c.offset, commits.c.length)
    .where(commits.c.job == sa.bindparam("job"))
    .order_by(commits.c.generation, commits.c.segment, commits.c.offset)
)
_BLOCKS = CompiledStatement(
    sa.select(outcome_blocks.c.segment, outcome_blocks.c.offset, outcome_blocks.c.blocks).where(
        outcome_blocks.c.job == sa.bindparam("job")
    )
)


def move(
    db: sa.Connection,
    job_id: str,
    state: JobState,
    *,
    via: Sequence[JobState] = (),
    packed: bytes | None = None,
    errors: dict[str, tuple[int, str]] | None = None,
    spent_s: float = 0.0,
    within: Callable[[sa.Connection], object] | None = None,
    **fields: object,
) -> Record | None:
    """Move a job to another state, through those of `via`, and set fields; return its record.

    Raises: InvalidTransition.

    `within` is called in the transaction, before anything is changed.
    `spent_s`: running time to add. `packed`: the files of a small job. `errors` replaces the error counts: a
    gathered result knows them exactly, followers included. No time that is set lies before one that the job has:
    the clock may have been set back.
    """
    path = [*via, state]
    assert all(b in NEXT[a] for a, b in pairwise(path)), f"{path} are never followed in this order"
    before, had_errors = _check_next(db, job_id, path[0])
    if before in ENDED:
        forget_counts(db, UNFINISHED_JOBS)
    if within is not None:
        within(db)
    record = change_job(db, job_id, {"state": state, **fields}, {"elapsed_s": spent_s})
    if isinstance(spec := fields.get("spec"), bytes):
        ledger_snapshot.note_models(db, read_spec(spec))
    if packed is not None:
        store_packed(db, job_id, packed)
    if errors or (errors is not None and had_errors):
        _replace_errors(db, job_id, errors)
    return record


class Ledger:
    def __init__(self, database: Database) -> None:
        self.database = database
        self._engine, self._reader = database.writer, database.reader

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def create(self, spec: JobSpec) -> None:
        with self._engine.begin() as db:
            ledger_snapshot.insert_job(db, spec)

    def job(self, job_id: str) -> Record:
        """The record of a job, by its id or a unique prefix of it. Raises: UnknownName."""
        with self._reader.connect() as db:
            return records.find(db, job_id)

    def by_identity(self, identity: str) -> Sequence[Record]:
        """The jobs of this identity that were not ended early or refused, the newest first."""
        query = (
            sa.select(jobs)
            .where(jobs.c.identity == identity, jobs.c.state.not_in(ENDED - {JobState.COMPLETED}))
            .order_by(jobs.c.created.desc())
        )
        with self._reader.connect() as db:
            return db.execute(query).mappings().all()

    def move(self, job_id: str, state: JobState, **fields: Any) -> Record | None:
        """As the function `move`."""
        with self._engine.begin() as db:
            return move(db, job_id, state, **fields)

    def enter(
        self, job: records.NewJob, state: JobState, *,
        via: Sequence[JobState] = (), packed: bytes | None = None,
        errors: dict[str, tuple[int, str]] | None = None, shard: Shard | None = None, **fields: Any,
    ) -> str | None:  # fmt: skip
        """As `records.enter_once`, and move the new job to a state, as `move`, in the same transaction.

        `shard` gets its first lease. Raises: as `records.enter_once`.
        """
        path = [JobState.VALIDATING, *via, state]
        assert path == 2 * [state] or all(b in NEXT[a] for a, b in pairwise(path)), f"{path} are never followed"
        fields |= {name: max(fields[name], job.spec.created) for name in TIMES if fields.get(name) is not None}
        with self._engine.begin() as db:
            known_id = records.enter_once(db, job, {"state": state, **fields})
            if known_id is None and packed is not None:
                store_packed(db, job.spec.id, packed)
            if known_id is None and errors:
                _replace_errors(db, job.spec.id, errors)
            if known_id is None and shard is not None:
                _insert_lease(db, first_lease(job.spec.id, shard), shard)
        return known_id

    def spent(self, job_id: str, seconds: float) -> None:
        """Add running time to a job."""
        with self._engine.begin() as db:
            change_job(db, job_id, {}, {"elapsed_s": seconds})

    def note(self, job_id: str, **fields: object) -> None:
        """Set fields of a job's record other than its state."""
        with self._engine.begin() as db:
            change_job(db, job_id, fields, times=())

    def open_generation(
        self, job_id: str, generation: int, settled: dict[str, int], rows_ok: int, quota: tuple[str, int] | None = None,
        *, packed: bytes | None = None, within: Callable[[sa.Connection], object] | None = None, **fields: object,
    ) -> None:  # fmt: skip
        """Begin a retry: the rows that failed are open again, apart from the `settled` ones (error code -> rows).

        `fields` of the job's record are set with it. `quota`: its project, and how many unfinished jobs that may have.
        `packed`: the files of a small job. `within` is called in the transaction, before anything is changed.

        Raises: OverQuota.
        """
        with self._engine.begin() as db:
            if within is not None:
                within(db)
            if quota is not None:
                records.refuse_unfinished(db, *quota)
            _check_next(db, job_id, JobState.QUEUED)
            failed = sum(settled.values())
            db.execute(
                jobs.update()
                .where(jobs.c.id == job_id)
                .values(
                    generation=generation, state=JobState.QUEUED, rows_ok=rows_ok, rows_failed=failed, finished=None,
                    finalizing=None, cancelling=None, reason=None, message="", **fields,
                )
            )  # fmt: skip
            note_change(db, job_id)
            forget_counts(db, UNFINISHED_JOBS)  # one more that had ended
            if isinstance(spec := fields.get("spec"), bytes):
                ledger_snapshot.note_models(db, read_spec(spec))
            if packed is not None:
                store_packed(db, job_id, packed)
            db.execute(error_counts.delete().where(error_counts.c.job == job_id))
            _count_errors(db, job_id, settled, {})

    def errors(self, job_id: str) -> dict[str, tuple[int, str]]:
        """Error code -> (rows, one message), the most frequent first."""
        with self._reader.connect() as db:
            return records.errors_of(db, [job_id]).get(job_id, {})

    # -- shards -------------------------------------------------------------------------------------------------------

    def lease(self, job_id: str, generation: int, shard: Shard) -> LeasedShard:
        """Raise the shard's epoch: commits of earlier holders are refused from now on."""
        (leased,) = self.lease_all(job_id, generation, [(shard, 0)])
        return leased

    def lease_each(self, wanted: Sequence[tuple[str, int, Shard]]) -> list[LeasedShard]:
        """As `lease` for shards of several jobs: (job, generation, shard)."""
        with self._engine.begin() as db:
            return [_lease_one(db, Lease(job, generation, s.number, 0), s) for job, generation, s in wanted]

    def lease_all(self, job_id: str, generation: int, wanted: Sequence[tuple[Shard, int]]) -> list[LeasedShard]:
        """Lease shards, each above an epoch that was seen: its blocks may be newer than a ledger that was restored."""
        with self._engine.begin() as db:
            return [_lease_one(db, Lease(job_id, generation, shard.number, seen), shard) for shard, seen in wanted]

    def fence(self, job_id: str, generation: int) -> None:
        """End every lease of unfinished shards: their holders cannot commit any more."""
        key = (shards.c.job == job_id) & (shards.c.generation == generation)
        with self._engine.begin() as db:
            db.execute(
                shards.update().where(key, shards.c.done < shards.c.hi - shards.c.lo).values(epoch=shards.c.epoch + 1)
            )

    def bitmaps(self, job_id: str, generation: int, numbers: Sequence[int]) -> dict[int, int]:
        """Shard -> which of its positions have their outcome, of the shards that were ever leased."""
        query = sa.select(shards.c.shard, shards.c.bitmap).where(
            shards.c.job == job_id, shards.c.generation == generation, shards.c.shard.in_(numbers)
        )
        with self._reader.connect() as db:
            return {shard: int.from_bytes(bitmap, "little") for shard, bitmap in db.execute(query)}

    def progress(self, job_id: str, generation: int) -> dict[int, int]:
        """Shard -> rows done, of the shards that were ever leased."""
        query = sa.select(shards.c.shard, shards.c.done).where(
            shards.c.job == job_id, shards.c.generation == generation
        )
        with self._reader.connect() as db:
            return dict(db.execute(query).all())

    def commit(self, batch: Sequence[tuple[Commit, float | None]], ends: Mapping[int, JobEnd] = {}) -> list[Verdict]:
        """Count outcomes: (commit, its cost in USD) each. One transaction for all.

        Args: ends: index of a commit -> the end of its job if it counts.

        A job that has ended, or is in another generation, takes no more: its results are out.
        Raises: LedgerBroken when positions are counted already: a bug, and reason to stop.
        """
        with self._engine.begin() as db:
            counted = CommitBatch(db, [commit for commit, _ in batch])
            verdicts = [_verdict(counted, commit, cost) for commit, cost in batch]
            ending: dict[str, tuple[JobEnd, Ending]] = {}  # by job
            for index, end in ends.items():
                job_id, is_counted = batch[index][0].lease.job, verdicts[index] is Verdict.COUNTED
                if (found := end.write(db, counted.state_of(job_id), is_counted=is_counted)) is not None:
                    ending[job_id] = end, found
            changed = counted.write({job_id: found for job_id, (_, found) in ending.items()})
            misfits.add_all(db, [commit for commit, _ in batch if commit.misfits and counted.has_counted(commit)])
            for job_id, job in counted.jobs.items():
                if job_id not in ending:
                    _count_errors(db, job_id, job.errors, job.samples)
            for job_id, (end, found) in ending.items():
                if found.errors or (found.errors is not None and counted.has_errors(job_id)):
                    _replace_errors(db, job_id, found.errors)
                end.store(db, changed[job_id])
            faults.point("in_commit")
        return verdicts

    def noted_misfits(self, job_id: str, generation: int, numbers: Sequence[int]) -> dict[misfits.Place, Runs]:
        """The misfits of the remote jobs of some shards."""
        with self._reader.connect() as db:
            return misfits.noted(db, job_id, generation, numbers)

    def keep_notes(self, batch: Sequence[ShardNote]) -> list[bool]:
        """Store notes whose lease is still valid, in one transaction; return which were stored."""
        with self._engine.begin() as db:
            return [keep(db, note) for note in batch]

    # -- segments -----------------------------------------------------------------------------------------------------

    def committed(self, job_id: str) -> list[tuple[int, SegmentRef]]:
        """(generation, range) of every commit of a job, the oldest generation first."""
        with self._reader.connect() as db:
            return _committed(db, job_id)

    def committed_spans(self, job_id: str, worker: str = "") -> dict[str, list[Span]]:
        """Segment -> its committed bytes, of one worker's segments or of all."""
        query = (
            sa.select(commits.c.segment, commits.c.offset, commits.c.offset + commits.c.length)
            .where(commits.c.job == job_id, commits.c.segment.startswith(worker, autoescape=True))
            .order_by(commits.c.segment, commits.c.offset)
        )
        with self._reader.connect() as db:
            by_segment = groupby(db.execute(query), key=lambda found: found[0])
            return {segment: merged((start, end) for _, start, end in found) for segment, found in by_segment}

    def blocks(self, job_id: str) -> dict[str, list[tuple[int, bytes]]]:
        """Segment -> (offset, bytes) of the blocks that commits of a small job carried."""
        with self._reader.connect() as db:
            return _blocks(db, job_id)

    def results(self, job_id: str) -> tuple[list[tuple[int, SegmentRef]], dict[str, list[tuple[int, bytes]]]]:
        """What `committed` and `blocks` return."""
        with self._reader.connect() as db:
            return _committed(db, job_id), _blocks(db, job_id)

    def snapshot(self, job_id: str) -> Snapshot:
        """Everything that the ledger has of a job."""
        with self._reader.connect() as db:
            return ledger_snapshot.read(db, job_id)

    def replace(self, spec: JobSpec, before: Snapshot, after: Rebuilt) -> None:
        """Replace a job's ledger, which must still be `before`, with a rebuilt one, and pause the job.

        Raises: InvalidTransition when the job is no longer as it was.
        """
        with self._engine.begin() as db:
            ledger_snapshot.replace(db, spec, before, after)
            rows = {code: count for code, (count, _) in after.errors.items()}
            _count_errors(db, spec.id, rows, {code: sample for code, (_, sample) in after.errors.items()})

    def close(self) -> None:
        self.database.close()


def _committed(db: sa.Connection, job_id: str) -> list[tuple[int, SegmentRef]]:
    return [(generation, SegmentRef(*ref)) for generation, *ref in _COMMITTED.rows(db, {"job": job_id})]


def _blocks(db: sa.Connection, job_id: str) -> dict[str, list[tuple[int, bytes]]]:
    found: dict[str, list[tuple[int, bytes]]] = {}
    for segment, offset, blocks in _BLOCKS.rows(db, {"job": job_id}):
        found.setdefault(segment, []).append((offset, bytes(blocks)))
    return found


def _verdict(counted: CommitBatch, commit: Commit, cost: float | None) -> Verdict:
    if counted.add(commit, cost):
        return Verdict.COUNTED
    return Verdict.REPEATED if counted.is_known(commit) else Verdict.STALE


def _lease_one(db: sa.Connection, seen: Lease, shard: Shard) -> LeasedShard:
    key = {"of_job": seen.job, "of_generation": seen.generation, "of_shard": shard.number}
    found = _FIND_SHARD.row(db, key)
    epoch = max(seen.epoch, 0 if found is None else found[0]) + 1
    lease = Lease(seen.job, seen.generation, shard.number, epoch)
    if found is not None:
        _RAISE_EPOCH.run(db, key | {"new_epoch": epoch})
        noted = of_shard(db, seen.job, seen.generation, shard.number)
        _, seq, bitmap = found
        return LeasedShard(lease, seq, int.from_bytes(bitmap, "little"), noted)
    _insert_lease(db, lease, shard)
    return LeasedShard(lease, 0, 0)


def _insert_lease(db: sa.Connection, lease: Lease, shard: Shard) -> None:
    values = {
        "job": lease.job, "generation": lease.generation, "shard": shard.number, "lo": shard.lo, "hi": shard.hi,
        "epoch": lease.epoch, "seq": 0, "done": 0, "bitmap": bytes(-(-(shard.hi - shard.lo) // 8)),
    }  # fmt: skip
    _INSERT_SHARD.run(db, values)


def first_lease(job_id: str, shard: Shard) -> Lease:
    """The lease that `Ledger.enter` stores."""
    return Lease(job_id, 0, shard.number, 1)


def _check_next(db: sa.Connection, job_id: str, state: JobState) -> tuple[str, bool]:
    """The state of the job, and whether rows of it have failed so far.

    Raises: InvalidTransition if it cannot enter this state.
    """
    ((now, failed),) = _STATE.rows(db, {"job": job_id})
    if state not in NEXT[JobState(now)]:
        raise InvalidTransition(f"the job {job_id} is {now}: it cannot become {state}")
    return now, failed > 0


def _replace_errors(db: sa.Connection, job_id: str, errors: dict[str, tuple[int, str]]) -> None:
    note_change(db, job_id)
    db.execute(error_counts.delete().where(error_counts.c.job == job_id))
    _count_errors(db, job_id, {c: n for c, (n, _) in errors.items()}, {c: s for c, (_, s) in errors.items()})


def _count_errors(db: sa.Connection, job_id: str, errors: dict[str, int], samples: dict[str, str]) -> None:
    """Add rows of each error code, the most frequent first: only so many codes are kept."""
    if errors:
        note_change(db, job_id)
    for code, rows in sorted(errors.items(), key=lambda counted: -counted[1]):
        if _add_errors(db, job_id, code, rows):
            continue
        known = sa.select(sa.func.count()).where(error_counts.c.job == job_id, error_counts.c.code != OTHER_ERRORS)
        sample = samples.get(code, "")
        if db.execute(known).scalar_one() >= ERROR_CODES_MAX:
            code = OTHER_ERRORS
            if _add_errors(db, job_id, code, rows):
                continue
        db.execute(error_counts.insert().values(job=job_id, code=code, rows=rows, sample=sample))


def _add_errors(db: sa.Connection, job_id: str, code: str, rows: int) -> bool:
    """Add to the rows of a code; False when the job has none of it yet."""
    key = (error_counts.c.job == job_id) & (error_counts.c.code == code)
    return db.execute(error_counts.update().where(key).values(rows=error_counts.c.rows + rows)).rowcount > 0


def undone(bitmap: int, n: int) -> Iterable[int]:
    """The indexes 0 <= i < n whose bit is not set; a range where they have no gap."""
    if bitmap == 0:
        return range(n)
    text = bin(bitmap)[:1:-1].ljust(n, "0")
    return [i for i in range(n) if text[i] == "0"]
