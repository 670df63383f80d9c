"""A ledger made anew: every sound outcome counts, once, and a job is never left worse than it was."""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa
from finished_job import quiet
from ledgered_job import LedgeredJob

from batchmill.errors import InvalidTransition, LedgerBroken
from batchmill.jobs.repair import rebuild
from batchmill.states import JobState
from batchmill.store.sql.tables import shards

ROWS = 20


@pytest.fixture
def job(tmp_path):
    made = LedgeredJob(tmp_path, rows=ROWS, shard_rows=5)
    yield made
    made.ledger.close()


def run_all(job: LedgeredJob, failed: tuple[int, ...] = ()) -> list:
    """Every shard in a commit of its own, in one segment; rows that fail in another commit."""
    file = job.segment(f"w{job.generation}")
    refs = []
    for lo in range(0, len(job.job.leaders), job.shard_rows):
        positions = range(lo, min(lo + job.shard_rows, len(job.job.leaders)))
        ok = [position for position in positions if job.job.leaders[position] not in failed]
        bad = [position for position in positions if job.job.leaders[position] in failed]
        refs += [job.run(file, part, failed=part is bad) for part in (ok, bad) if part]
    file.close()
    return refs


def end(job: LedgeredJob) -> None:
    record = job.ledger.job("job")
    job.ledger.move("job", JobState.FINALIZING)
    job.ledger.move("job", JobState.COMPLETED, rows_ok=record["rows_ok"], rows_failed=record["rows_failed"])


def retry(job: LedgeredJob, rows: list[int]) -> None:
    job.job.again(rows)
    job.shard_rows = 1000  # of the plan that this makes
    job.ledger.open_generation("job", job.generation, {}, ROWS - len(rows))
    job.ledger.move("job", JobState.RUNNING)


def test_only_damaged_rows_are_open_again(job):
    """What lies behind a damaged block is kept; only the rows in it run again, and the report names them."""
    refs = run_all(job)
    end(job)
    job.damage(refs[1])
    before = job.ledger.snapshot("job").commits
    rebuilt = job.rebuild()
    record = job.ledger.job("job")
    assert (record["state"], record["rows"], record["rows_ok"], record["rows_failed"]) == ("paused", ROWS, 15, 0)
    assert (rebuilt.adopted, rebuilt.reopened) == (0, 5)
    assert len(rebuilt.damaged) == 1 and "shard 1: 5 rows" in rebuilt.damaged[0]
    assert job.ledger.progress("job", 0) == {0: 5, 1: 0, 2: 5, 3: 5}
    assert job.verify().broken == []
    kept = [(commit.shard, commit.segment, commit.offset) for commit in before if commit.shard != 1]
    assert [(commit.shard, commit.segment, commit.offset) for commit in job.ledger.snapshot("job").commits] == kept


def test_a_lost_header_costs_its_block_only(job):
    """Where even the header of a block is damaged, the next one is searched for."""
    refs = run_all(job)
    job.damage(refs[0], at=-refs[0].length)
    assert job.rebuild().reopened == 5
    assert job.ledger.progress("job", 0) == {0: 0, 1: 5, 2: 5, 3: 5}


def test_a_segment_that_is_gone(job):
    """A lost segment opens its rows again and is named."""
    refs = run_all(job)
    (job.files.segments / refs[0].segment).unlink()
    rebuilt = job.rebuild()
    assert rebuilt.reopened == ROWS and "is gone: 5 rows" in rebuilt.damaged[0]


def test_a_sound_ledger_stays_as_it_is(job):
    """A rebuild of a sound ledger changes epochs and nothing else, and finds nothing new."""
    run_all(job, failed=(3, 11))
    before = job.ledger.snapshot("job")
    rebuilt = job.rebuild()
    after = job.ledger.snapshot("job")
    assert (rebuilt.adopted, rebuilt.reopened, rebuilt.damaged) == (0, 0, [])
    assert after.counters == before.counters
    assert [shard.bitmap for shard in after.shards] == [shard.bitmap for shard in before.shards]
    assert [commit.offset for commit in after.commits] == [commit.offset for commit in before.commits]
    assert all(new.epoch > old.epoch for new, old in zip(after.shards, before.shards, strict=True))
    assert job.ledger.errors("job")["went_wrong"][0] == 2


@pytest.mark.parametrize("changes", [{"hi": 5 + (1 << 62)}, {"hi": 5 ^ 4}, {"lo": 1 << 62}])
def test_a_damaged_shard_record_costs_no_memory(job, changes):
    """A flipped bit in the bounds of a shard is found by an audit, and a rebuild mends it."""
    run_all(job)
    before = job.ledger.snapshot("job")
    with job.ledger.database.writer.begin() as db:
        db.execute(shards.update().where(shards.c.shard == 0).values(**changes))
    assert "generation 0, shard 0: positions" in "\n".join(job.verify().broken)
    rebuilt = job.rebuild()
    assert (rebuilt.adopted, rebuilt.reopened, rebuilt.damaged) == (0, 0, [])
    after = job.ledger.snapshot("job").shards
    assert [(each.lo, each.hi, each.bitmap) for each in after] == [(s.lo, s.hi, s.bitmap) for s in before.shards]
    assert job.verify().broken == []


def test_what_counted_is_preferred_to_what_did_not(job):
    """An older block that never counted does not take the place of one that did, and costs no row of it."""
    file = job.segment()
    file.append(job.block([0, 1], epoch=1))
    job.run(file, [0, 1, 2, 3, 4])
    file.close()
    assert (job.rebuild().reopened, job.ledger.job("job")["rows_ok"]) == (0, 5)
    job.lose_database()
    newer = job.segment("w2")
    newer.append(job.block([0, 1, 2, 3, 4], epoch=2))
    newer.close()
    assert (job.rebuild().adopted, job.ledger.job("job")["rows_ok"]) == (5, 5)
    assert [commit.segment for commit in job.ledger.snapshot("job").commits] == ["w2-0001.seg"]


def test_a_retried_job_counts_each_row_once(job):
    """Rows that failed and ran again count as what the retry made of them."""
    failed = list(range(0, ROWS, 2))
    run_all(job, failed=tuple(failed))
    end(job)
    retry(job, failed)
    run_all(job, failed=(4,))
    for lost in (False, True):
        if lost:
            job.lose_database()
        rebuilt = job.rebuild()
        record = job.ledger.job("job")
        assert (record["rows_ok"], record["rows_failed"], record["generation"]) == (ROWS - 1, 1, 1)
        assert record["rows"] == ROWS
        assert rebuilt.adopted == (ROWS if lost else 0)
        assert job.ledger.errors("job") == {"went_wrong": (1, "row 4")}
        assert job.verify().broken == []


def test_a_retry_that_has_just_begun(job):
    """Rows that are to run again are open, not failed: those of blocks that hold others too are told apart."""
    run_all(job, failed=(0, 1, 2))
    end(job)
    retry(job, [0, 1])
    job.rebuild()
    record = job.ledger.job("job")
    assert (record["rows_ok"], record["rows_failed"]) == (ROWS - 3, 1)
    assert job.ledger.errors("job")["went_wrong"][0] == 1


def test_damage_in_an_earlier_generation(job):
    """Rows that the newest generation does not plan get another one, of just them."""
    refs = run_all(job, failed=(0,))
    end(job)
    retry(job, [0])
    run_all(job)
    job.damage(refs[-1])
    assert job.rebuild().generation == 2
    job.job.plans.append(job.files.plan(2))
    job.shard_rows = 1  # what is left of a small job goes to as many workers as there are
    assert job.job.leaders == [15, 16, 17, 18, 19]
    assert job.ledger.job("job")["rows_ok"] == ROWS - 5
    run_all(job)
    assert job.ledger.job("job")["rows_ok"] == ROWS and job.verify().broken == []
    assert job.rebuild().generation == 2 and job.ledger.job("job")["rows_ok"] == ROWS


def test_all_or_nothing(job):
    """A rebuild that cannot be written to its end has changed nothing."""
    run_all(job)
    end(job)
    order = job.order()
    rebuilt = rebuild(order, quiet)
    broken = msgspec.structs.replace(rebuilt, commits=[*rebuilt.commits, rebuilt.commits[0]])
    with pytest.raises(sa.exc.IntegrityError):
        job.ledger.replace(job.spec, order.before, broken)
    assert job.ledger.snapshot("job") == order.before
    assert job.ledger.job("job")["state"] == "completed"


def test_a_job_that_went_on_is_not_replaced(job):
    """What was counted after a rebuild began is not lost to it."""
    file = job.segment()
    job.run(file, [0, 1])
    order = job.order()
    rebuilt = rebuild(order, quiet)
    job.run(file, [5, 6])
    file.close()
    with pytest.raises(InvalidTransition, match="went on"):
        job.ledger.replace(job.spec, order.before, rebuilt)
    assert job.ledger.job("job")["rows_ok"] == 4


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED])
def test_an_ended_job_is_paused(job, state):
    """A rebuilt job never claims to have ended; a refused one, of which no row ran, has nothing to rebuild."""
    job.ledger.note("job", state=state, finished=1.0)
    if state is JobState.FAILED:
        with pytest.raises(InvalidTransition, match="none of its rows ran"):
            job.rebuild()
        return
    job.rebuild()
    record = job.ledger.job("job")
    assert (record["state"], record["finished"]) == ("paused", 1.0)


def test_a_damaged_plan_is_not_guessed_at(job):
    """Without the plan nobody knows which row an outcome is of: nothing is changed."""
    run_all(job)
    before = job.ledger.snapshot("job")
    path = job.job.plan / "plan.json"
    path.write_bytes(path.read_bytes().replace(b'"most":', b'"most":9'))
    with pytest.raises(LedgerBroken, match="plan.json is damaged"):
        job.rebuild()
    assert job.ledger.snapshot("job") == before


def test_a_job_that_was_never_planned(job):
    """A job stopped before its plan was written is paused with nothing done."""
    job.lose_database()
    (job.job.plan / "plan.json").unlink()
    job.rebuild()
    record = job.ledger.job("job")
    assert (record["state"], record["rows"], record["rows_ok"]) == ("paused", 0, 0)
