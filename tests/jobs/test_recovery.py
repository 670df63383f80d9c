"""What reached a segment is counted, once, and nothing else is."""

from __future__ import annotations

import pytest
from ledgered_job import LedgeredJob

from batchmill.jobs.ledger import outcome_map
from batchmill.jobs.ledger.plan import PlanReader


@pytest.fixture
def job(tmp_path):
    made = LedgeredJob(tmp_path, rows=40, shard_rows=4)
    yield made
    made.ledger.close()


def adopt(job: LedgeredJob, worker: str | None = None) -> int:
    plan = PlanReader(job.files.plan(job.generation))
    counted = outcome_map.adopt(job.ledger, job.spec, job.generation, plan, job.files, worker)
    return sum(commit.rows_ok + commit.rows_failed for commit, _ in counted)


def test_orphans_before_the_last_commit_are_adopted(job):
    """A block that no commit names is found wherever it lies: commits are not sent in the order of the file."""
    file = job.segment()
    orphans = [file.append(job.block([0, 1])), None, file.append(job.block([8, 9], failed=True))]
    job.run(file, [4, 5, 6, 7])
    orphans.append(file.append(job.block([12, 13])))
    file.close()
    assert adopt(job) == 6
    record = job.ledger.job("job")
    assert (record["rows_ok"], record["rows_failed"]) == (8, 2)
    assert job.verify().broken == []
    assert adopt(job) == 0


def test_committed_bytes_are_not_read_again(job):
    """Adoption reads what lies between commits only, so a long job is resumed as soon as a short one."""
    file = job.segment()
    refs = [job.run(file, [0, 1]), job.run(file, [4, 5])]
    file.append(job.block([8, 9]))
    file.close()
    for ref in refs:
        job.damage(ref)
    assert adopt(job) == 2


def test_only_the_worker_that_died_is_looked_at(job):
    """What another worker has just written stays its own to commit."""
    for worker, positions in (("w1", [0, 1]), ("w2", [4, 5])):
        file = job.segment(worker)
        file.append(job.block(positions))
        file.close()
    assert adopt(job, "w1") == 2
    assert job.ledger.progress("job", 0) == {0: 2}


def test_rows_that_ran_again_leave_the_lease_alone(job):
    """An orphan whose rows have their outcome already takes no lease from whoever holds the shard now."""
    file = job.segment()
    file.append(job.block([0, 1]))
    job.run(file, [0, 1, 2])
    file.close()
    held = job.ledger.lease("job", 0, job.shard(0)).lease.epoch
    assert adopt(job) == 0
    assert job.ledger.lease("job", 0, job.shard(0)).lease.epoch == held + 1


def test_a_lease_is_above_every_block(job):
    """A ledger that was restored from an older copy gives out epochs above those in the segments."""
    file = job.segment()
    file.append(job.block([0, 1], epoch=17))
    file.close()
    assert adopt(job) == 2
    assert job.ledger.lease("job", 0, job.shard(0)).lease.epoch == 19


def test_rows_that_the_plan_has_elsewhere_are_not_adopted(job):
    """A block of another plan is left where it is."""
    file = job.segment()
    job.shard_rows = 5  # so that the block of position 5 says shard 1, which is positions 4 to 7
    file.append(job.block([5, 6, 7, 8]))
    file.close()
    assert adopt(job) == 0


def test_many_shards_are_adopted_together(job, monkeypatch):
    """Ten shards take two transactions, and no more than so many shards go into one."""
    file = job.segment()
    for shard in range(10):
        file.append(job.block([4 * shard, 4 * shard + 1]))
    file.close()
    written = []
    begin = job.ledger.database.writer.begin
    monkeypatch.setattr(job.ledger.database.writer, "begin", lambda: written.append(1) or begin())
    assert adopt(job) == 20
    assert len(written) == 2
    monkeypatch.setattr(outcome_map, "ADOPT_SHARDS", 3)
    file = job.segment("w2")
    for shard in range(10):
        file.append(job.block([4 * shard + 2]))
    file.close()
    assert adopt(job) == 10
    assert len(written) == 2 + 2 * 4
    assert job.verify().broken == []


def test_blocks_behind_damage_are_adopted(job):
    """Damage between two orphans costs the rows in it and no others."""
    file = job.segment()
    refs = [file.append(job.block(positions)) for positions in ([0, 1], [4, 5], [8, 9])]
    file.close()
    job.damage(refs[1])
    assert adopt(job) == 4


def test_an_adoption_that_is_repeated_forgets_nothing(job, monkeypatch):
    """Where the connection is lost between two transactions, the second call also knows what the first one counted."""
    file = job.segment()
    for first in (0, 4, 8):
        file.append(job.block([first, first + 1]))
    file.close()
    monkeypatch.setattr(outcome_map, "ADOPT_ROWS", 1)
    bitmaps, asked = job.ledger.bitmaps, []

    def lose_second(*args):
        asked.append(args)
        if len(asked) == 2:
            raise ConnectionError
        return bitmaps(*args)

    monkeypatch.setattr(job.ledger, "bitmaps", lose_second)
    counted: outcome_map.Counted = []
    plan = PlanReader(job.files.plan(job.generation))
    order = job.ledger, job.spec, job.generation, plan, job.files
    with pytest.raises(ConnectionError):
        outcome_map.adopt(*order, counted=counted)
    outcome_map.adopt(*order, counted=counted)
    assert sum(commit.rows_ok for commit, _ in counted) == 6 == job.ledger.job("job")["rows_ok"]
