"""Notes: durable with a lease, after everything put before them, and found again by whoever has the shard next."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from ledgered_job import LedgeredJob

from batchmill.errors import InvalidTransition, LedgerBroken, UnknownName
from batchmill.jobs.ledger import ledger
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.ledger import NOTES_MAX, ShardNote
from batchmill.store.sql.positions import pack_positions
from batchmill.types import Commit, Lease, RemoteJob, SegmentRef, Usage


@pytest.fixture
def job(tmp_path):
    made = LedgeredJob(tmp_path, rows=12, shard_rows=4)
    yield made
    made.ledger.close()


def remote(tag: str, state: str = "submitted", **fields: object) -> bytes:
    return msgspec.json.encode(RemoteJob(tag, "openai", state, **fields))


def note(lease: Lease, key: str, data: bytes) -> ShardNote:
    return ShardNote(lease, key, data, at=1.0)


def read(job: LedgeredJob) -> list[RemoteJob]:
    with job.ledger.database.reader.connect() as db:
        return ledger.remote_jobs(db, "job", 0)


def settle(job: LedgeredJob, tag: str, remote_id: str | None) -> RemoteJob:
    with job.ledger.database.writer.begin() as db:
        return ledger.settle(db, "job", 0, tag=tag, remote_id=remote_id, now=9.0)


def test_the_next_lease_brings_them(job):
    """Whoever gets a shard next gets what was noted for it, and nothing that was noted for another."""
    first = job.ledger.lease("job", 0, job.shard(0))
    assert first.notes == {}
    other = job.ledger.lease("job", 0, job.shard(1)).lease
    wanted = [note(first.lease, "a", b"1"), note(first.lease, "b", b"2"), note(other, "a", b"3")]
    assert job.ledger.keep_notes(wanted) == [True, True, True]
    assert job.ledger.keep_notes([note(first.lease, "a", b"4"), note(first.lease, "b", b"")]) == [True, True]
    assert job.ledger.lease("job", 0, job.shard(0)).notes == {"a": b"4"}
    assert job.ledger.lease("job", 0, job.shard(1)).notes == {"a": b"3"}


def test_an_older_lease_notes_nothing(job):
    """A worker that has lost its shard can neither add to its notes nor take one back."""
    old = job.ledger.lease("job", 0, job.shard(0)).lease
    new = job.ledger.lease("job", 0, job.shard(0)).lease
    assert job.ledger.keep_notes([note(new, "a", b"1"), note(old, "a", b"2"), note(old, "a", b"")]) == [
        True, False, False
    ]  # fmt: skip
    job.ledger.fence("job", 0)
    assert job.ledger.keep_notes([note(new, "a", b"3")]) == [False]
    assert job.ledger.lease("job", 0, job.shard(0)).notes == {"a": b"1"}


def test_a_shard_has_so_many(job, monkeypatch):
    """At the most there can be, one can still be changed, and none added."""
    monkeypatch.setattr(ledger, "NOTES_MAX", 3)
    assert NOTES_MAX > 3
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    assert job.ledger.keep_notes([note(lease, key, b"1") for key in "abcd"]) == [True, True, True, False]
    assert job.ledger.keep_notes([note(lease, "a", b"2")]) == [True]


def test_a_rebuilt_ledger_keeps_them(job):
    """Rebuilding the record of which rows are done forgets no job at a provider."""
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    job.run(job.segment(), [0, 1])
    job.ledger.keep_notes([note(lease, "t1", remote("t1"))])
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    job.ledger.keep_notes([note(lease, "t1", remote("t1", id="batch_1"))])
    job.rebuild()
    assert [(each.tag, each.id, each.shard) for each in read(job)] == [("t1", "batch_1", 0)]
    assert job.ledger.lease("job", 0, job.shard(0)).notes.keys() == {"t1"}


def test_what_is_told_of_them(job):
    """Jobs at providers come in the order of their making; those of a shard that is done have been collected."""
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    second = job.ledger.lease("job", 0, job.shard(1)).lease
    job.ledger.keep_notes(
        [
            note(second, "late", remote("late", created=3.0)),
            note(lease, "soon", remote("soon", created=1.0)),
            note(lease, "other", b"not of a provider"),
        ]
    )
    job.run(job.segment(), [0, 1, 2, 3])
    found = read(job)
    assert [(each.tag, each.state, each.shard) for each in found] == [
        ("soon", "collected", 0),
        ("late", "submitted", 1),
    ]
    assert ledger.uncollected_shards(found) == {1}


def test_an_unknown_submission_is_settled(job):
    """It is adopted under the provider's id, or forgotten; nothing else is, and nothing twice."""
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    notes = [
        note(lease, tag, remote(tag, state)) for tag, state in (("a", "unknown"), ("b", "unknown"), ("c", "ended"))
    ]
    job.ledger.keep_notes(notes)
    assert (settle(job, "a", "batch_7").state, settle(job, "b", None).state) == ("submitted", "forgotten")
    assert [(each.tag, each.state, each.id) for each in read(job)] == [
        ("a", "submitted", "batch_7"), ("b", "forgotten", ""), ("c", "ended", "")
    ]  # fmt: skip
    for tag in "abc":
        with pytest.raises(InvalidTransition, match="only one that is unknown"):
            settle(job, tag, None)
    with pytest.raises(UnknownName, match="no submission 'z'"):
        settle(job, "z", None)


class Told(list):
    """What those in the line heard, in the order in which they heard it."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def callback(self, what: str):
        def received(answer: object) -> None:
            self.append((what, answer))
            self.news.set()

        return received

    async def all(self, count: int) -> list:
        while len(self) < count:
            self.news.clear()
            await self.news.wait()
        return list(self)


async def test_a_note_waits_for_what_was_put_before_it(job):
    """In the line before the ledger a note comes after the commits before it, and none of a lease that lost one."""
    commit_log, result = CommitLog(job.ledger), Told()
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    other = job.ledger.lease("job", 0, job.shard(1)).lease
    ref, done = SegmentRef("w-0001.seg", 64, 10), pack_positions([0], 0)
    commit = Commit(lease=lease, seq=0, ref=ref, done=done, rows_ok=1, rows_failed=0, usage=Usage())
    await commit_log.commit(commit, None, result.callback("commit"))
    await commit_log.note(note(lease, "a", b"1"), result.callback("note"))
    assert await result.all(2) == [("commit", "counted"), ("note", True)]
    await commit_log.commit(
        msgspec.structs.replace(commit, seq=1), None, result.callback("twice")
    )  # rows that are counted
    await commit_log.note(note(lease, "a", b"2"), result.callback("mine"))
    await commit_log.note(note(other, "a", b"3"), result.callback("other"))
    twice, *notes = (await result.all(5))[2:]
    assert isinstance(twice[1], LedgerBroken) and notes == [("mine", False), ("other", True)]
    assert job.ledger.lease("job", 0, job.shard(0)).notes == {"a": b"1"}
    commit_log.close()
    await asyncio.sleep(0)


async def test_a_note_nobody_can_store_stays_its_own_trouble(job):
    """A note that makes the ledger fail in any way hears of it, and so does a callback that fails; the others go on."""
    commit_log, result, heard = CommitLog(job.ledger), Told(), []
    lease = job.ledger.lease("job", 0, job.shard(0)).lease
    bad = note(lease, "bad", ["no bytes"])  # type: ignore[arg-type]

    def hears_badly(answer: object) -> None:
        heard.append(answer)
        if len(heard) == 1:
            raise ValueError("deaf")

    await commit_log.note(note(lease, "a", b"1"), result.callback("a"))
    await commit_log.note(bad, result.callback("bad"))
    await commit_log.note(note(lease, "deaf", b"2"), hears_badly)
    await commit_log.note(note(lease, "b", b"3"), result.callback("b"))
    await commit_log.settle()
    (a, failed, b), (stored, broken) = result, heard
    assert (a, b, stored) == (("a", True), ("b", True), True)
    assert isinstance(failed[1], LedgerBroken) and isinstance(broken, LedgerBroken) and "deaf" in broken.message
    assert job.ledger.lease("job", 0, job.shard(0)).notes == {"a": b"1", "deaf": b"2", "b": b"3"}
    commit_log.close()
    await asyncio.sleep(0)
