"""The rows of a sample in a plan, and a run of them alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fakes.held_clock import HeldClock
from written_dataset import RowKeys, write_dataset

from batchmill.jobs.ledger import sampled_rows
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.ledger import LeasedShard
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make
from batchmill.jobs.ledger.sampled_rows import MaskOrder, masks, masks_offloaded
from batchmill.jobs.pools.job_run import JobRun
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, DatasetSpec, Lease, ModelSpec, Policy, Sample, SegmentRef, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import unpack_u32
from batchmill.wire.native import PlanSample
from batchmill.wire.rows.forms import OpenAIForm
from batchmill.wire.sampling import rows_of

ROWS, SHARD_ROWS = 20, 4


def planned(folder: Path, keys: list[RowKeys] | None = None) -> PlanReader:
    written = write_dataset(folder, keys or [RowKeys()] * ROWS, keys=keys is not None)
    order = PlanOrder([(0, None)], [ShardRows(SHARD_ROWS)], keys=keys is not None)
    make(order, written.dataset, written.plan, lambda _: None)
    return PlanReader(written.plan)


def sampled(plan: PlanReader, sample: Sample) -> set[int]:
    """The row numbers whose bits are set."""
    order = MaskOrder(str(plan.home), str(plan.home), sample)
    found, shards = masks(order), plan.shards()
    encoded = msgspec.json.decode(masks_offloaded(msgspec.json.encode(order), lambda _: None), type=dict[int, bytes])
    assert {number: int.from_bytes(bits, "little") for number, bits in encoded.items()} == found
    rows: set[int] = set()
    for number, bits in found.items():
        shard = shards[number]
        assert 0 < bits < 1 << (shard.hi - shard.lo)
        numbers = plan.row_numbers(shard.lo, shard.hi)
        rows |= {numbers[index] for index in range(shard.hi - shard.lo) if bits >> index & 1}
    return rows


def test_a_sample_of_a_plan_in_file_order(tmp_path):
    """The first rows are the first positions; the others are drawn by their numbers."""
    plan = planned(tmp_path)
    assert not plan.plan.permuted
    assert sampled(plan, Sample(6)) == set(range(6))
    assert sampled(plan, Sample(5, 3)) == set(rows_of(Sample(5, 3), ROWS))
    assert sampled(plan, Sample(ROWS + 1)) == set(range(ROWS))


def test_a_sample_of_a_plan_in_another_order(tmp_path):
    """Rows that run late in the plan are found; of a row that is folded, the row whose outcome it shares."""
    keys = [RowKeys(prefix=9 - number % 10, fold=(1, number if number < 12 else 1)) for number in range(ROWS)]
    plan = planned(tmp_path, keys)
    assert plan.plan.permuted and plan.plan.followers
    leader = dict(plan.followers())
    for sample in (Sample(3), Sample(14), Sample(4, 1), Sample(9, 2)):
        wanted = rows_of(sample, ROWS)
        assert sampled(plan, sample) == {leader.get(number, number) for number in wanted}


def test_what_a_preview_says_of_a_sample(tmp_path):
    """The rows that run, those that are folded, and their shards are counted."""
    keys = [RowKeys(fold=(1, number % 2)) for number in range(ROWS)]
    plan = planned(tmp_path, keys)
    found = sampled_rows.sampled_rows(plan, tmp_path / "dataset", Sample(6))
    assert (found.rows, found.run, found.folded, found.rejected, found.shards) == (6, 2, 4, 0, 1)
    order = sampled_rows.PreviewOrder(str(plan.home), str(tmp_path / "dataset"), Sample(6, 2))
    answer = sampled_rows.preview_offloaded(msgspec.json.encode(order), lambda _: None)
    assert msgspec.json.decode(answer, type=PlanSample) == PlanSample(6, 2, 4, 0, 1, 2)


@pytest.fixture
async def run(tmp_path) -> JobRun:
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec(["/data/in.jsonl"]), models=[ModelSpec("m", "function", "app.py:f")],
        form=OpenAIForm(), policy=Policy(), output=None, identity="same", code={}, created=1.0,
    )  # fmt: skip
    return JobRun(spec, 0, planned(tmp_path), files=JobFiles(tmp_path, "job_1"), clock=HeldClock())


def finish(run: JobRun, number: int, *positions: int) -> None:
    done = pack_positions(positions, number * SHARD_ROWS)
    lease = Lease("job_1", 0, number, 1)
    run.apply_commit(Commit(lease, 0, SegmentRef("w.seg", 0, 1), done, len(positions), 0, Usage()))


async def test_a_run_gives_out_the_rows_of_a_sample_alone(run):
    """A grant holds the wanted rows of a shard that have no outcome, and the run ends with the last of them."""
    run.load_sample({1: 0b0110, 4: 0b1000, 3: 0}, rows_done=2)
    assert (run.rows_left, run.rows_total, run.sampled_shards) == (3, 5, [1, 4]) and run.is_sample
    assert run.has_ready(0)
    shard = run.pop(0, "w")
    assert (shard.number, run.rows_held(0)) == (1, 2)
    grant = run.grant(shard, LeasedShard(Lease("job_1", 0, 1, 1), 0, 0b0001))
    assert list(unpack_u32(grant.positions)) == list(unpack_u32(grant.rows)) == [5, 6]
    finish(run, 1, 5)
    assert (run.rows_left, run.rows_held(0)) == (2, 1)
    finish(run, 1, 6)
    assert run.has_ready(0) and run.pop(0, "w").number == 4 and not run.has_ready(0)
    assert not run.ended.done()
    finish(run, 4, 19)
    assert run.ended.done() and run.rows_left == 0 and run.models_left == []


async def test_other_rows_that_a_worker_still_had_do_not_count(run):
    """A worker may finish rows that an earlier run had given out: the sample still waits for its own."""
    run.load_sample({1: 0b0110}, rows_done=0)
    run.take_over({1: "old", 3: "old"})
    finish(run, 1, 4, 7)
    finish(run, 3, 12, 13, 14, 15)
    assert run.rows_left == 2 and not run.ended.done()
    finish(run, 1, 5, 6)
    assert run.rows_left == 0 and run.ended.done()


async def test_a_sample_catches_up_with_the_ledger(run):
    """What was counted without a report is seen by its bits, each once."""
    run.load_sample({1: 0b0110, 2: 0b0001}, rows_done=0)
    run.catch_up_sample({1: 0b1011, 0: 0b1111})
    assert run.rows_left == 2
    run.catch_up_sample({1: 0b1111, 2: 0b0001})
    assert run.ended.done()


async def test_a_sample_that_has_run_ends_at_once(run):
    """There is nothing to wait for."""
    run.load_sample({1: 0}, rows_done=2)
    assert run.ended.done() and run.is_sample and not run.has_ready(0)
