"""The end of a short job: stored with the commit of its last rows, or not at all."""

from __future__ import annotations

import pytest
from ledgered_job import USAGE, LedgeredJob

from batchmill.jobs.finishing import Finish
from batchmill.part_files import HeldFile
from batchmill.states import JobState
from batchmill.store.file_log import FileLog
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, SegmentRef

ROWS = 4


class Listener:
    """Whoever stores something with the end."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def store_end(self, db, record) -> None:
        self.states.append(record["state"])

    def ended(self, job_id: str) -> None:
        """It is told by the job's runner."""


@pytest.fixture
def job(tmp_path):
    job = LedgeredJob(tmp_path, ROWS, ROWS)
    yield job
    job.ledger.close()


def finish_of(job: LedgeredJob, listener: Listener) -> Finish:
    held = HeldFile(job.data_dir / "results.jsonl")
    held.write(b"results\n")
    held.publish()
    log = FileLog(job.ledger.database, job.data_dir)
    fields = {"finished": 2.0, "finalizing": 2.0, "rows_ok": ROWS, "rows_failed": 0, "output": str(held.path)}
    return Finish(job.id, log, [held], fields, [listener])


def last_commit(job: LedgeredJob) -> Commit:
    leased = job.ledger.lease(job.id, 0, job.shard(0))
    done = pack_positions(range(ROWS), 0)
    return Commit(leased.lease, leased.seq, SegmentRef("w1-0001", 0, 10), done, ROWS, 0, USAGE)


def test_a_job_ends_with_its_last_commit(job):
    """Its rows are counted, it has ended, and its results are there, all in one transaction."""
    listener = Listener()
    finish, commit = finish_of(job, listener), last_commit(job)
    assert job.ledger.commit([(commit, None)], {0: finish}) == ["counted"]
    record = job.ledger.job(job.id)
    assert finish.is_stored and (record["state"], record["rows_ok"]) == (JobState.COMPLETED, ROWS)
    assert (job.data_dir / "results.jsonl").read_bytes() == b"results\n"
    assert listener.states == [JobState.COMPLETED]
    again = finish_of(job, listener)
    assert job.ledger.commit([(commit, None)], {0: again}) == ["repeated"] and not again.is_stored


def test_a_job_that_is_being_cancelled_does_not_end_so(job):
    """The commit counts; how the job ends is its runner's affair, and no result is written."""
    finish, commit = finish_of(job, Listener()), last_commit(job)
    job.ledger.move(job.id, JobState.CANCELLING)
    assert job.ledger.commit([(commit, None)], {0: finish}) == ["counted"]
    assert not finish.is_stored and job.ledger.job(job.id)["state"] == JobState.CANCELLING
    assert not (job.data_dir / "results.jsonl").exists()


def test_a_stale_commit_ends_nothing(job):
    """Somebody else holds the shard: the job goes on."""
    finish, commit = finish_of(job, Listener()), last_commit(job)
    job.ledger.lease(job.id, 0, job.shard(0))
    assert job.ledger.commit([(commit, None)], {0: finish}) == ["stale"]
    assert not finish.is_stored and job.ledger.job(job.id)["state"] == JobState.RUNNING


def test_without_room_for_results_the_rows_count(job):
    """The runner finds out why results cannot be written, and says it."""
    finish, commit = finish_of(job, Listener()), last_commit(job)
    (job.data_dir / "results.jsonl").mkdir()  # nothing can be written there
    assert job.ledger.commit([(commit, None)], {0: finish}) == ["counted"]
    assert not finish.is_stored and job.ledger.job(job.id)["rows_ok"] == ROWS
