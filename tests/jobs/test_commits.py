"""The queue before the ledger: everyone is told, whatever fails; and the ledger takes nothing for a job that ended."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest
import sqlalchemy as sa
from fakes.databases import open_ledger

from batchmill.errors import BatchmillError, JobPaused, LedgerBroken, StorageFull
from batchmill.jobs.ledger import commits, ledger
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.ledger import Verdict
from batchmill.states import JobState, PauseReason
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, DatasetSpec, Lease, ModelSpec, Policy, SegmentRef, Shard, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

SHARD = Shard(0, 100, 120, 0)
TO_THE_END = [JobState.PLANNING, JobState.QUEUED, JobState.RUNNING]


def spec(job_id: str = "job_1") -> JobSpec:
    return JobSpec(
        id=job_id, dataset=DatasetSpec(["/data/in.jsonl"]), models=[ModelSpec("m", "function", "app.py:f")],
        form=OpenAIForm(), policy=Policy(), output=None, identity="same", code={}, created=1.0,
    )  # fmt: skip


def commit(lease: Lease, seq: int, position: int, errors: dict[str, int] | None = None) -> Commit:
    failed = len(errors or {})
    positions = list(range(position, position + max(1, failed)))
    return Commit(
        lease=lease, seq=seq, ref=SegmentRef("w-0001.seg", 10 * position, 10),
        done=pack_positions(positions, SHARD.lo), rows_ok=0 if failed else 1, rows_failed=failed, usage=Usage(),
        errors=errors or {}, samples={code: f"it was {code}" for code in errors or {}},
    )  # fmt: skip


@pytest.fixture
async def commit_log(tmp_path):
    opened = CommitLog(open_ledger(tmp_path / "batchmill.db"))
    opened.ledger.create(spec())
    yield opened
    opened.close()


# -- the ledger -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [[JobState.CANCELLING, JobState.CANCELLED], [JobState.FINALIZING, JobState.COMPLETED]])
async def test_a_job_that_ended_takes_no_more(commit_log, end):
    """Once a job's results are out, what a worker still sends is refused, but what was counted is still known."""
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    for state in TO_THE_END + end[:1]:
        commit_log.ledger.move("job_1", state)
    counted = commit(lease, 0, 100)
    assert commit_log.ledger.commit([(counted, None)]) == [Verdict.COUNTED]
    commit_log.ledger.move("job_1", end[1])
    assert commit_log.ledger.commit([(commit(lease, 1, 101), None)]) == [Verdict.STALE]
    assert commit_log.ledger.commit([(counted, None)]) == [Verdict.REPEATED]
    assert commit_log.ledger.job("job_1")["rows_ok"] == 1


async def test_a_paused_job_takes_what_was_paid_for(commit_log):
    """Rows in flight when their job was paused are counted."""
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    commit_log.ledger.move("job_1", JobState.PAUSED)
    assert commit_log.ledger.commit([(commit(lease, 0, 100), None)]) == [Verdict.COUNTED]


async def test_another_generation_takes_no_more(commit_log):
    """A commit of a generation that is over is refused."""
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    commit_log.ledger.note("job_1", generation=1)
    late = commit(lease, 0, 100)
    assert commit_log.ledger.commit([(late, None)]) == [Verdict.STALE]


async def test_distinct_error_codes_have_a_maximum(commit_log):
    """At most so many codes are counted apart; all further ones together, and no row is lost from the sum."""
    lease = commit_log.ledger.lease("job_1", 0, Shard(0, 100, 100 + 2 * ledger.ERROR_CODES_MAX, 0)).lease
    most = {f"E{n}": 1 for n in range(ledger.ERROR_CODES_MAX)}
    commit_log.ledger.commit([(commit(lease, 0, 100, most), None)])
    assert commit_log.ledger.errors("job_1").keys() == most.keys()
    more = {"E0": 1, "F1": 1, "F2": 1}
    commit_log.ledger.commit([(commit(lease, 1, 100 + len(most), more), None)])
    counted = commit_log.ledger.errors("job_1")
    assert len(counted) == len(most) + 1
    assert counted["E0"] == (2, "it was E0") and counted[ledger.OTHER_ERRORS] == (2, "it was F1")


# -- the queue --------------------------------------------------------------------------------------------------------


def broken(_: object) -> None:
    raise ValueError("deaf")


async def test_who_fails_to_hear_is_told(commit_log):
    """Should hearing of a commit fail, that one is told so; the next commit is counted as if nothing was."""
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    first: list[Verdict | BatchmillError] = []
    second: list[Verdict | BatchmillError] = []

    def hears_badly(verdict: Verdict | BatchmillError) -> None:
        first.append(verdict)
        if len(first) == 1:
            raise ValueError("deaf")

    await commit_log.commit(commit(lease, 0, 100), None, hears_badly)
    await commit_log.commit(commit(lease, 1, 101), None, second.append)
    await commit_log.settle()
    assert first[0] is Verdict.COUNTED and isinstance(first[1], LedgerBroken) and "deaf" in first[1].message
    assert second == [Verdict.COUNTED]


async def test_a_commit_nobody_can_count_stays_its_own_trouble(commit_log):
    """A commit that makes the ledger fail in any way is told so; its neighbours are counted."""
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    events: list[Verdict | BatchmillError] = []
    bad = Commit(lease, 1, SegmentRef("w-0001.seg", 0, 10), None, 1, 0, Usage())  # type: ignore[arg-type]
    await commit_log.commit(commit(lease, 0, 100), None, events.append)
    await commit_log.commit(bad, None, events.append)
    await commit_log.commit(commit(lease, 1, 101), None, events.append)
    await commit_log.settle()
    assert events[0] is events[2] is Verdict.COUNTED and isinstance(events[1], LedgerBroken)


async def test_a_queue_that_broke_says_so(commit_log):
    """When the queue itself ends, whoever waits in it and whoever comes later is told; nobody waits for ever."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    events: list[Verdict | BatchmillError] = []
    await commit_log.commit(commit(lease, 0, 100), None, broken)
    waiting = [asyncio.create_task(commit_log.commit(commit(lease, 1, 101), None, events.append))]
    waiting += [asyncio.create_task(commit_log.settle()) for _ in range(commits.QUEUE_MAX + 5)]
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, JobPaused) and end.reason is PauseReason.INTERNAL_ERROR for end in ends[1:])
    await commit_log.commit(commit(lease, 2, 102), None, events.append)
    await asyncio.sleep(0)
    assert [type(each) for each in events] == [JobPaused, JobPaused]
    with pytest.raises(JobPaused, match="deaf"):
        await commit_log.settle()
    assert await commit_log.call(commit_log.ledger.progress, "job_1", 0) == {0: 1}


async def test_who_measures_hears_of_each_transaction(commit_log):
    """A listener gets the number of commits of each transaction and its seconds, before the commits' callers do."""
    heard: list[object] = []
    commit_log.listen(lambda commits, seconds: heard.append((commits, seconds >= 0)))
    lease = commit_log.ledger.lease("job_1", 0, SHARD).lease
    for seq, position in ((0, 100), (1, 101)):
        await commit_log.commit(commit(lease, seq, position), None, heard.append)
    await commit_log.settle()
    assert heard == [(2, True), Verdict.COUNTED, Verdict.COUNTED]


async def test_the_queue_has_a_maximum(commit_log):
    """Up to so many commits are queued at once; one more waits until there is room."""
    stale = commit(Lease("gone", 0, 0, 1), 0, 100)
    slow = threading.Event()
    busy = asyncio.create_task(commit_log.call(slow.wait))
    events: list[Verdict | BatchmillError] = []
    await commit_log.commit(stale, None, events.append)
    await asyncio.sleep(0)  # the queue hands over its first
    for _ in range(commits.QUEUE_MAX):
        await asyncio.wait_for(commit_log.commit(stale, None, events.append), 5)
    one_more = asyncio.create_task(commit_log.commit(stale, None, events.append))
    await asyncio.sleep(0)
    assert not one_more.done()
    slow.set()
    await one_more
    await commit_log.settle()
    await busy
    assert events == [Verdict.STALE] * (commits.QUEUE_MAX + 2)


async def test_a_closed_ledger_says_so(tmp_path):
    """After the close a call is an error of ours, not of the thread that is gone."""
    commit_log = CommitLog(open_ledger(tmp_path / "batchmill.db"))
    commit_log.close()
    with pytest.raises(LedgerBroken, match="closed"):
        await commit_log.call(commit_log.ledger.job, "job_1")


@pytest.mark.once
async def test_a_full_disk_is_told_by_its_code(commit_log):
    """SQLite's code says that the disk is full; a path with the word in it does not."""

    def fill() -> None:
        with commit_log.ledger._engine.begin() as db:
            pages = db.exec_driver_sql("PRAGMA page_count").scalar()
            db.exec_driver_sql(f"PRAGMA max_page_count={pages}")
            db.exec_driver_sql("CREATE TABLE large (data BLOB)")
            db.exec_driver_sql("INSERT INTO large VALUES (zeroblob(1000000))")

    def misname() -> None:
        raise sa.exc.OperationalError("", None, sqlite3.OperationalError("no such table: fullness"))

    with pytest.raises(StorageFull):
        await commit_log.call(fill)
    with pytest.raises(LedgerBroken, match="fullness"):
        await commit_log.call(misname)
