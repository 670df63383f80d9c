"""The shards of a run: each is with one holder, ready, or done, and goes out once."""

from __future__ import annotations

import pytest
from fakes.held_clock import HeldClock
from written_dataset import RowKeys, write_dataset

from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.ledger import LeasedShard
from batchmill.jobs.ledger.plan import PlanOrder, PlanReader, ShardRows, make
from batchmill.jobs.pools.job_run import CRASHES_MAX, USER_CODE_DEATHS, JobRun
from batchmill.types import Commit, DatasetSpec, Lease, ModelSpec, Policy, SegmentRef, Shard, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import Grant
from batchmill.wire.rows.forms import OpenAIForm

SHARDS, SHARD_ROWS = 5, 4


@pytest.fixture
async def run(tmp_path):
    written = write_dataset(tmp_path, [RowKeys()] * (SHARDS * SHARD_ROWS), keys=False)
    make(PlanOrder([(0, None)], [ShardRows(SHARD_ROWS)]), written.dataset, written.plan, lambda _: None)
    plan = PlanReader(written.plan)
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec(["/data/in.jsonl"]), models=[ModelSpec("m", "function", "app.py:f")],
        form=OpenAIForm(), policy=Policy(), output=None, identity="same", code={}, created=1.0,
    )  # fmt: skip
    made = JobRun(spec, 0, plan, files=JobFiles(tmp_path, "job_1"), clock=HeldClock(), open_shards=2)
    made.load({})
    return made


def finish(run: JobRun, number: int, rows: int = SHARD_ROWS) -> None:
    run.apply_commit(Commit(Lease("job_1", 0, number, 1), 0, SegmentRef("w.seg", 0, 1), b"", rows, 0, Usage()))


def take_all(run: JobRun, worker: str = "w") -> list[int]:
    numbers = []
    while run.has_ready(0):
        numbers.append(run.pop(0, worker).number)
    return numbers


async def test_a_shard_that_ended_before_its_turn_is_passed_over(run):
    """Shards whose rows were counted while nobody held them do not go out any more."""
    finish(run, 0)
    finish(run, 3)
    assert take_all(run) == [1, 2, 4]
    assert run.rows_left == 3 * SHARD_ROWS and run.models_left == [0]


async def test_a_shard_that_came_back_goes_first(run):
    """What a holder gives back is the next to go out, and only once."""
    first = run.pop(0, "w") if run.has_ready(0) else None
    assert first is not None and run.is_held_by("w")
    run.put_back(first, died=True)
    run.put_back(first, died=True)
    assert not run.is_held_by("w")
    assert take_all(run) == [0, 1, 2, 3, 4]


async def test_rows_in_hands_are_known(run):
    """The rows that workers hold go up with each shard and down with each row that is done or given back."""
    assert run.has_ready(0)
    first = run.pop(0, "w")
    assert run.has_ready(0)
    second = run.pop(0, "v")
    assert run.rows_held(0) == 2 * SHARD_ROWS
    finish(run, 0, rows=3)
    assert run.rows_held(0) == SHARD_ROWS + 1
    assert run.held == {0: "w", 1: "v"} and run.held_by("v") == [second]
    run.put_back(second, died=False)
    assert run.rows_held(0) == 1
    finish(run, 0, rows=1)
    assert run.rows_held(0) == 0 and run.held == {} and run.held_by("w") == []
    run.put_back(first, died=True)
    assert take_all(run) == [1, 2, 3, 4]


async def test_shards_in_flight_are_taken_over(run):
    """Shards that a worker has from before do not go out until it gives them back; finished ones never."""
    run.take_over({1: "old", 4: "old"})
    finish(run, 4)
    assert take_all(run, "new") == [0, 2, 3]
    assert [shard.number for shard in run.held_by("old")] == [1]
    run.put_back(run.shard(1), died=False)
    assert take_all(run, "new") == [1]


async def test_catching_up_counts_each_row_once(run):
    """What the ledger counted unheard is counted here, however often it is told, and ends the run at the last row."""
    finish(run, 0, rows=1)
    for _ in range(2):
        run.catch_up({0: 3, 2: SHARD_ROWS})
    assert run.rows_left == (SHARDS - 1) * SHARD_ROWS - 3
    run.catch_up(dict.fromkeys(range(SHARDS), SHARD_ROWS))
    assert run.rows_left == 0 and run.ended.done() and run.models_left == []


async def test_shards_are_opened_in_windows(run):
    """A few shards are in memory at a time; one that got rows before its turn goes out once, in its turn."""
    finish(run, 3, rows=1)
    assert run.has_ready(0) and sorted(run._shards) == [0, 1, 3]
    assert take_all(run) == [0, 1, 2, 3, 4] and not run.has_ready(0)
    assert run.rows_held(0) == run.rows_left == SHARDS * SHARD_ROWS - 1


async def test_what_is_done_before_is_not_opened(run, tmp_path):
    """A run that goes on opens neither finished shards nor rows twice."""
    again = JobRun(run.spec, 0, run.plan, files=JobFiles(tmp_path, "job_1"), clock=HeldClock(), open_shards=1)
    again.load({0: SHARD_ROWS, 1: 0, 2: 3, 4: SHARD_ROWS})
    assert (again.rows_left, again.shards_left_of(0), again.rows_left_of(0)) == (9, 3, 9)
    assert take_all(again) == [1, 2, 3]
    for number, rows in ((0, 1), (1, 4), (2, 1), (3, 4)):
        finish(again, number, rows)
    assert again.rows_left == 0 and again.ended.done()


async def test_one_shard_of_many(run):
    """A shard is what the plan says."""
    assert run.shard(2) == Shard(2, 8, 12, 0)


async def test_rows_run_together_again_once_one_was_given_up(run):
    """A shard runs a row at a time until the row that kills is found; the next death makes it do so again."""

    def die() -> bool:
        """Whether the shard runs a row at a time after one more death."""
        run.put_back(run.shard(0), died=True)
        return grant().isolated

    def grant() -> Grant:
        assert run.has_ready(0)
        shard = run.pop(0, "w")
        return run.grant(shard, LeasedShard(Lease("job_1", 0, shard.number, 1), 0, 0))

    grant()
    assert [die() for _ in range(USER_CODE_DEATHS)] == [False] * (USER_CODE_DEATHS - 1) + [True]
    for _ in range(CRASHES_MAX - 1):
        run.suspect(2)
    run.put_back(run.shard(0), died=True)
    granted = grant()
    assert granted.quarantined == [2] and not granted.isolated
    assert die(), "another row kills"
    assert die(), "a row is given up once"
