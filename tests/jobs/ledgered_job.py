"""A job whose rows ran, in a ledger: a test writes what blocks it wants and counts those that it wants counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fakes.databases import databases, open_ledger
from finished_job import FinishedJob, quiet, write_requests

from batchmill.jobs.ledger.audit import AuditOrder, verify
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make
from batchmill.jobs.ledger.snapshot import Rebuilt
from batchmill.jobs.repair import rebuild
from batchmill.states import JobState
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead, error_meta, frame
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, DatasetSpec, LedgerReport, ModelSpec, Policy, RowError, SegmentRef, Shard, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

USAGE = Usage(3, 1, 2)  # of every block


class LedgeredJob:
    def __init__(self, folder: Path, rows: int, shard_rows: int, job_id: str = "job") -> None:
        self.id = job_id
        self.data_dir, self.rows, self.shard_rows = folder / "data", rows, shard_rows
        source = write_requests(folder / "in.jsonl", [f"text {number}" for number in range(rows)])
        self.files = JobFiles(self.data_dir, job_id)
        self.job = FinishedJob(self.files.home, source, OpenAIForm())
        make(PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(shard_rows)]), self.job.dataset, self.job.plan, quiet)
        self.spec = JobSpec(
            id=job_id, dataset=DatasetSpec([str(source)]), models=[ModelSpec("m", "function", "app.py:f")],
            form=OpenAIForm(), policy=Policy(), output=None, identity="identity", code={}, created=1.0,
        )  # fmt: skip
        self.open()
        self.ledger.create(self.spec)
        self.ledger.move(job_id, JobState.PLANNING)
        self.ledger.move(job_id, JobState.QUEUED, rows=rows)
        self.ledger.move(job_id, JobState.RUNNING)

    def open(self) -> None:
        self.ledger = open_ledger(self.data_dir / "batchmill.db")

    def lose_database(self) -> None:
        """As if somebody had deleted it."""
        self.ledger.close()
        databases.lose(self.data_dir / "batchmill.db")
        self.open()

    @property
    def generation(self) -> int:
        return len(self.job.plans) - 1

    def segment(self, worker: str = "w1") -> SegmentFile:
        return SegmentFile(self.files.segments, SegmentHead(self.id, "identity", worker))

    def block(self, positions: Sequence[int], *, failed: bool = False, epoch: int = 1) -> bytes:
        """A block of the shard that the first position is in."""
        numbers = self.job.leaders
        rows = [numbers[position] for position in positions]
        part = BlockRows(list(positions), rows, [self.job.line(row, failed) for row in rows])
        errors = [RowError("went_wrong", f"row {row}") for row in rows]
        return frame(
            part, generation=self.generation, shard=positions[0] // self.shard_rows, epoch=epoch, ok=not failed,
            meta=error_meta(errors, USAGE) if failed else BlockMeta(USAGE),
        )  # fmt: skip

    def count(self, ref: SegmentRef, positions: Sequence[int], *, failed: bool = False) -> None:
        """Commit a block under a new lease of its shard."""
        number, n = positions[0] // self.shard_rows, len(positions)
        shard = self.shard(number)
        leased = self.ledger.lease(self.id, self.generation, shard)
        commit = Commit(
            lease=leased.lease, seq=leased.seq, ref=ref, done=pack_positions(positions, shard.lo),
            rows_ok=0 if failed else n, rows_failed=n if failed else 0, usage=USAGE,
            errors={"went_wrong": n} if failed else {}, samples={"went_wrong": "row"} if failed else {},
        )  # fmt: skip
        assert self.ledger.commit([(commit, None)]) == ["counted"]

    def shard(self, number: int) -> Shard:
        return PlanReader(self.job.plans[-1]).shards()[number]

    def run(self, file: SegmentFile, positions: Sequence[int], *, failed: bool = False) -> SegmentRef:
        """Write a block and count it."""
        ref = file.append(self.block(positions, failed=failed))
        self.count(ref, positions, failed=failed)
        return ref

    def damage(self, ref: SegmentRef, at: int = -3) -> None:
        """Flip a bit of a range; `at` counts from its end."""
        path = self.files.segments / ref.segment
        data = bytearray(path.read_bytes())
        data[ref.offset + ref.length + at] ^= 1
        path.write_bytes(data)

    def order(self) -> AuditOrder:
        """For an audit or a rebuild that keeps what it knows of each row in files, as of a long job."""
        before, segments = self.ledger.snapshot(self.id), self.files.segment_place
        return AuditOrder(self.spec, str(self.data_dir), segments, before, in_memory_rows=4)

    def rebuild(self) -> Rebuilt:
        order = self.order()
        rebuilt = rebuild(order, quiet)
        self.ledger.replace(self.spec, order.before, rebuilt)
        return rebuilt

    def verify(self) -> LedgerReport:
        return verify(self.order(), quiet)
