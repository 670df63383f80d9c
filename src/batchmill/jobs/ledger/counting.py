"""Counts many commits with few statements: a commit of a thousand workers each second must cost little.

The state of the batch's shards is read once, the commits are applied to it in memory in their order, and what changed
is written with one statement for each table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct, field

from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.job_changes import Ending, change_job
from batchmill.states import ENDED
from batchmill.store.segments.blocks import CARRIED
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.positions import unpack_positions
from batchmill.store.sql.tables import commits, jobs, outcome_blocks, shards
from batchmill.store.sql.transactions import Record
from batchmill.types import Commit

ShardKey = tuple[str, int, int]  # job, generation, shard

_SUMS = ("rows_ok", "rows_failed", "rows_reused", "input_tokens", "cached_tokens", "output_tokens", "bytes")
_KEY = sa.tuple_(shards.c.job, shards.c.generation, shards.c.shard)
_STATES = CompiledStatement(
    sa.select(jobs.c.state, jobs.c.rows_failed, jobs.c.warnings, jobs.c.generation, *shards.c)
    .join(jobs, shards.c.job == jobs.c.id)
    .where(_KEY.in_(sa.bindparam("keys", expanding=True)))
)
_INSERT_COMMITS = CompiledStatement(commits.insert(), [column.name for column in commits.c])
_INSERT_BLOCKS = CompiledStatement(outcome_blocks.insert(), [column.name for column in outcome_blocks.c])
_CHANGE = CompiledStatement(
    shards.update()
    .where(
        shards.c.job == sa.bindparam("of_job"), shards.c.generation == sa.bindparam("of_generation"),
        shards.c.shard == sa.bindparam("of_shard"), shards.c.epoch == sa.bindparam("of_epoch"),
        shards.c.seq == sa.bindparam("of_seq"),
    )
    .values(seq=sa.bindparam("new_seq"), done=sa.bindparam("new_done"), bitmap=sa.bindparam("new_bitmap"))
)  # fmt: skip


class _Shard(Struct):
    """A shard as the batch has left it so far."""

    epoch: int
    is_open: bool  # its job takes commits of this generation
    first_seq: int  # as it is in the database
    seq: int
    done: int
    bitmap: int
    rows: int
    bytes: int  # of the bitmap


class JobSums(Struct):
    """What a batch adds to the record of a job."""

    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))
    cost: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)  # those of the record and of the batch
    has_warnings: bool = False  # the batch has some


class CommitBatch:
    """Commits of one transaction."""

    def __init__(self, db: sa.Connection, batch: Sequence[Commit]) -> None:
        self._db = db
        self._shards: dict[ShardKey, _Shard] = {}
        self._rows: dict[tuple[ShardKey, int], dict[str, Any]] = {}  # of the table of commits
        self._blocks: list[dict[str, Any]] = []  # that commits of small jobs carried
        self._states: dict[str, tuple[str, int]] = {}  # job -> its state, and its failed rows
        self.jobs: defaultdict[str, JobSums] = defaultdict(JobSums)
        for state, failed, warnings, now, *key, lo, hi, epoch, seq, done, bitmap in _STATES.rows(
            db, {"keys": sorted({key_of(each) for each in batch})}
        ):
            job, generation, number = key
            self._states[job] = state, failed
            is_open = state not in ENDED and generation == now
            self._shards[job, generation, number] = _Shard(
                epoch, is_open, seq, seq, done, int.from_bytes(bitmap, "little"), hi - lo, len(bitmap)
            )
            if warnings is not None and job not in self.jobs:
                self.jobs[job] = JobSums(warnings=msgspec.json.decode(warnings))

    def add(self, commit: Commit, cost: float | None) -> bool:
        """Count a commit; False: another worker holds the shard, its job takes no more, or it was counted before.

        Raises: LedgerBroken when positions are counted already.
        """
        key = key_of(commit)
        shard = self._shards.get(key)
        if shard is None or shard.epoch != commit.lease.epoch or shard.seq != commit.seq or not shard.is_open:
            return False
        fresh, n = mask_of(commit.done), commit.rows_ok + commit.rows_failed
        if fresh & shard.bitmap or fresh.bit_count() != n or fresh.bit_length() > shard.rows:
            raise LedgerBroken(
                f"job {key[0]}, shard {key[2]}: a commit of {n} rows overlaps the {shard.done} counted already"
            )
        if commit.ref.segment.endswith(CARRIED) and len(commit.blocks) != commit.ref.length:
            raise LedgerBroken(f"job {key[0]}, shard {key[2]}: a commit lacks the blocks that it names")
        shard.bitmap |= fresh
        shard.done += n
        shard.seq += 1
        self._rows[key, commit.seq] = {
            "job": key[0], "generation": key[1], "shard": key[2], "seq": commit.seq, "epoch": shard.epoch,
            "segment": commit.ref.segment, "offset": commit.ref.offset, "length": commit.ref.length,
            "rows_ok": commit.rows_ok, "rows_failed": commit.rows_failed, "cost": cost,
        }  # fmt: skip
        if commit.blocks:
            place = {"job": key[0], "segment": commit.ref.segment, "offset": commit.ref.offset}
            self._blocks.append(place | {"blocks": commit.blocks})
        self._sum(commit, cost)
        return True

    def has_counted(self, commit: Commit) -> bool:
        """Whether this batch counts this very commit."""
        row, ref = self._rows.get((key_of(commit), commit.seq)), commit.ref
        place = None if row is None else (row["epoch"], row["segment"], row["offset"], row["length"])
        return place == (commit.lease.epoch, ref.segment, ref.offset, ref.length)

    def is_known(self, commit: Commit) -> bool:
        """Whether this very commit was counted: before this batch, or earlier in it."""
        key, ref = key_of(commit), commit.ref
        if (key, commit.seq) in self._rows:
            return self.has_counted(commit)
        if key not in self._shards:
            return False
        query = sa.select(sa.literal(1)).where(
            commits.c.job == key[0], commits.c.generation == key[1], commits.c.shard == key[2],
            commits.c.seq == commit.seq, commits.c.epoch == commit.lease.epoch, commits.c.segment == ref.segment,
            commits.c.offset == ref.offset, commits.c.length == ref.length,
        )  # fmt: skip
        return self._db.execute(query).first() is not None

    def _sum(self, commit: Commit, cost: float | None) -> None:
        job, usage = self.jobs[commit.lease.job], commit.usage
        values = (
            commit.rows_ok, commit.rows_failed, commit.rows_reused, usage.input_tokens, usage.cached_tokens,
            usage.output_tokens, commit.ref.length,
        )  # fmt: skip
        for name, value in zip(_SUMS, values, strict=True):
            job.sums[name] += value
        if cost is not None:
            job.cost = (job.cost or 0.0) + cost
        for code, rows in commit.errors.items():
            job.errors[code] = job.errors.get(code, 0) + rows
            job.samples.setdefault(code, commit.samples.get(code, ""))
        for name, replies in commit.warnings.items():
            job.has_warnings = True
            job.warnings[name] = job.warnings.get(name, 0) + replies

    def state_of(self, job_id: str) -> str:
        """The state of a job, as it was before the batch; empty: it is gone."""
        return self._states[job_id][0] if job_id in self._states else ""

    def has_errors(self, job_id: str) -> bool:
        """Whether rows of a job have failed, before the batch or in it."""
        return self._states[job_id][1] > 0 or self.jobs[job_id].sums["rows_failed"] > 0

    def write(self, endings: Mapping[str, Ending] = {}) -> dict[str, Record]:
        """Write the shards, commits and sums, with what ends jobs. Returns the records of jobs that were read.

        Raises: LedgerBroken where a shard has changed meanwhile: a bug.
        """
        if not self._rows:
            return {}
        changed = [
            {
                "of_job": key[0], "of_generation": key[1], "of_shard": key[2], "of_epoch": shard.epoch,
                "of_seq": shard.first_seq, "new_seq": shard.seq, "new_done": shard.done,
                "new_bitmap": shard.bitmap.to_bytes(shard.bytes, "little"),
            }
            for key, shard in self._shards.items()
            if shard.seq != shard.first_seq
        ]  # fmt: skip
        if _CHANGE.run_all(self._db, changed) != len(changed):
            raise LedgerBroken("a shard has changed while its commits were counted: another process writes the ledger")
        _INSERT_COMMITS.run_all(self._db, list(self._rows.values()))
        if self._blocks:
            _INSERT_BLOCKS.run_all(self._db, self._blocks)
        small = {each["job"] for each in self._blocks}  # whose commits are few, and whose clients poll
        changed: dict[str, Record] = {}
        for job_id, job in self.jobs.items():
            ending = endings.get(job_id)
            fields: dict[str, Any] = {"warnings": msgspec.json.encode(job.warnings)} if job.has_warnings else {}
            added: dict[str, float] = job.sums if job.cost is None else {**job.sums, "cost": job.cost}
            if ending is not None:
                fields, added = fields | ending.fields, {**added, "elapsed_s": ending.spent_s}
            returns = job_id in small or ending is not None
            record = change_job(self._db, job_id, fields, added, returns=returns)
            if record is not None:
                changed[job_id] = record
        return changed


def key_of(commit: Commit) -> ShardKey:
    """The shard of a commit."""
    return commit.lease.job, commit.lease.generation, commit.lease.shard


def mask_of(runs: bytes) -> int:
    """Packed positions as a bitmap."""
    mask = 0
    singles: list[int] = []
    for start, count in unpack_positions(runs):
        if count == 1:
            singles.append(start)
        else:
            mask |= ((1 << count) - 1) << start
    if singles:
        bits = bytearray(singles[-1] // 8 + 1)
        for start in singles:
            bits[start >> 3] |= 1 << (start & 7)
        mask |= int.from_bytes(bits, "little")
    return mask
