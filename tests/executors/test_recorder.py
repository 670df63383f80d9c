"""The recorder and the feed: every outcome of a lease ends in exactly one commit, whatever the order and the timing."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from msgspec import structs

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sealing import seal
from batchmill.errors import InputChanged
from batchmill.executors import recorder as recording
from batchmill.executors.feed import GrantFeed
from batchmill.executors.leases import Held, OpenJob
from batchmill.executors.recorder import NO_USAGE, Recorder, empty_rows
from batchmill.executors.row_rate import MEASURE_S
from batchmill.models import redaction
from batchmill.ports.storage import SegmentSink
from batchmill.store.segments import blocks
from batchmill.store.segments.blocks import CarriedSegment
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import SegmentHead, read_payload, read_ref
from batchmill.store.sql.positions import unpack_positions
from batchmill.types import Commit, DatasetSpec, Lease, Outcome, ResultBlock, Row, RowBlock, RowError, Usage
from batchmill.wire.messages import Grant, pack_u32
from batchmill.wire.rows.forms import OpenAIForm, TableForm

ROWS = 40
NEVER_S = 10_000.0


@pytest.fixture
def job(tmp_path):
    source = tmp_path / "in.jsonl"
    line = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"n":%d}}\n'
    source.write_text("".join(line % (n, n) for n in range(ROWS)))
    for folder in ("dataset", "segments"):
        (tmp_path / folder).mkdir()
    seal(SealOrder(DatasetSpec([str(source)])), tmp_path / "dataset", lambda _: None)
    segment = SegmentFile(tmp_path / "segments", SegmentHead("job_1", "same", "w1"))
    rows = SealedRows(tmp_path / "dataset")
    yield OpenJob("job_1", OpenAIForm(), rows, segment)
    segment.close()
    rows.close()


@pytest.fixture
def source(job):
    """The segments that the job's worker has written."""
    with closing(SegmentFolder(job.segment.folder)) as folder:
        yield folder


class Desk:
    """Collects what a worker would send to its owner."""

    def __init__(self, job: OpenJob, tmp_path, until_owned=None, pace_s=0.0, grants_max=1, ahead_s=0.0) -> None:
        self.is_busy = True
        self.job, self.wants, self.commits, self.changed, self.broken, self.refused = job, 0, [], [], [], []
        changed = self.changed
        self.feed = GrantFeed(
            want=self._want,
            failed=lambda *it: changed.append(it),
            broken=self.broken.append,
            suspect=tmp_path / "suspect",
            grants_max=grants_max,
            ahead_s=ahead_s,
        )
        self.recorder = Recorder(
            commit=self.commits.append,
            settled=self.feed.settled,
            spent=lambda held, done: None,
            broken=self.broken.append,
            refused=lambda held, error: self.refused.append(error),
            until_owned=until_owned,
            pace_s=lambda rows: pace_s if self.is_busy and rows < 20 else 0.0,
        )

    def _want(self, job: str, grants: int) -> None:
        self.wants += grants

    def grant(self, shard: int, grant: Grant) -> Held:
        held = Held(
            lease=grant.lease, job=self.job, seq=0, base=grant.base, key="k", undone=grant.n, isolated=grant.isolated,
            ok=empty_rows(), failed=empty_rows(), ok_usage=NO_USAGE, failed_usage=NO_USAGE, failures=[], unsent=[],
        )  # fmt: skip
        self.feed.grant(held, grant)
        return held


def lease(shard: int) -> Lease:
    return Lease("job_1", 0, shard, 1)


def rows_of(source: SegmentFolder, commit: Commit) -> list[int]:
    return [row for block in read_ref(source, commit.ref) for row in block.rows()]


async def test_every_outcome_is_committed_once(job, source, tmp_path):
    """Rows of interleaved leases, ok and failed, out of order: each is in one commit of its own lease."""
    lease_host = Desk(job, tmp_path)
    numbers = [39, 20, 31, 25]
    scattered = Grant(lease(1), 0, 20, 4, positions=pack_u32([20, 21, 22, 23]), rows=pack_u32(numbers))
    granted = [lease_host.grant(0, Grant(lease(0), 0, 0, 20)), lease_host.grant(1, scattered)]
    lease_host.feed.end()
    taken = [row for _ in range(3) for row in await lease_host.feed.take(17)]
    assert await lease_host.feed.take(1) == []
    for row in sorted(taken, key=lambda row: -row.number):
        error = RowError("odd", "an odd row") if row.number % 2 else None
        lease_host.recorder.put([Outcome(row, None if error else b"{}", error, usage=Usage(1, 0, 1))])
    lease_host.recorder.flush()
    await lease_host.recorder.sync()
    counted = {shard: [] for shard in (0, 1)}
    for commit in lease_host.commits:
        positions = [p + (0, 20)[commit.lease.shard] for s, n in unpack_positions(commit.done) for p in range(s, s + n)]
        assert len(positions) == commit.rows_ok + commit.rows_failed == commit.usage.input_tokens
        counted[commit.lease.shard] += rows_of(source, commit)
    assert sorted(counted[0]) == list(range(20)) and sorted(counted[1]) == sorted(numbers)
    assert sum(commit.errors.get("odd", 0) for commit in lease_host.commits) == 10 + 3
    assert all(lease_host.recorder.is_done_with(held) for held in granted)


async def test_leases_that_end_at_about_the_same_time(job, tmp_path):
    """While other rows are in flight they wait for each other; they are committed together when none is, or once there
    are many.
    """
    job.segment.commit_delay_s = NEVER_S  # no timer ends the wait
    lease_host = Desk(job, tmp_path, pace_s=NEVER_S)
    for shard in range(4):
        lease_host.grant(shard, Grant(lease(shard), 0, 10 * shard, 10, position=10 * shard, row=10 * shard))
    running = asyncio.create_task(lease_host.recorder.run())
    seen = []
    for shard in range(4):
        lease_host.is_busy = shard < 3
        lease_host.recorder.put([Outcome(row, b"{}") for row in await lease_host.feed.take(10)])
        lease_host.recorder.flush()
        while len(lease_host.commits) < (1, 1, 3, 4)[shard]:
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        seen.append([commit.lease.shard for commit in lease_host.commits])
    running.cancel()
    assert seen == [[0], [0], [0, 1, 2], [0, 1, 2, 3]]


async def test_a_lease_that_goes_on_is_not_committed_with_one_that_ends(job, tmp_path, monkeypatch):
    """What commits carry waits for the next rows of its lease, however many others end meanwhile: a short job most
    often ends with its only commit. It waits for CARRIED_DELAY_S, no longer, and for nobody who wants everything.
    """
    monkeypatch.setattr(blocks, "CARRIED_DELAY_S", NEVER_S)
    lease_host = Desk(job, tmp_path)
    for shard in range(4):
        segment = CarriedSegment(SegmentHead(f"job_{shard}", "same", "w1"), lambda _: pytest.fail("no file is needed"))
        lease_host.job = OpenJob(f"job_{shard}", job.form, job.rows, segment)
        lease_host.grant(shard, Grant(lease(shard), 0, 10 * shard, 10, position=10 * shard, row=10 * shard))
    rows = [row for _ in range(4) for row in await lease_host.feed.take(10)]
    running = asyncio.create_task(lease_host.recorder.run())

    async def put(some: list[Row], commits: int) -> list[int]:
        lease_host.recorder.put([Outcome(row, b"{}") for row in some])
        lease_host.recorder.flush()
        while len(lease_host.commits) < commits:
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        return [commit.rows_ok for commit in lease_host.commits]

    assert await put(rows[:4], 0) == []
    assert await put(rows[10:20], 1) == [10]
    assert await put(rows[4:10], 2) == [10, 10]
    assert await put(rows[20:25], 2) == [10, 10]
    await lease_host.recorder.sync()
    assert [commit.rows_ok for commit in lease_host.commits] == [10, 10, 5]
    monkeypatch.setattr(blocks, "CARRIED_DELAY_S", 0.001)
    assert await put(rows[30:36], 4) == [10, 10, 5, 6]
    running.cancel()


async def test_what_puts_objects_waits_for_its_owner(job, source, tmp_path):
    """While the owner may have been replaced, nothing is synced or committed; then everything is, at once."""
    owned = asyncio.Event()
    lease_host = Desk(job, tmp_path, owned.wait)
    held = lease_host.grant(0, Grant(lease(0), 0, 0, 20))
    lease_host.feed.end()
    rows = await lease_host.feed.take(20)
    lease_host.recorder.put([Outcome(row, b"{}", None) for row in rows[:10]])
    syncing = asyncio.create_task(lease_host.recorder.sync())
    await asyncio.sleep(0)
    lease_host.recorder.put([Outcome(row, b"{}", None) for row in rows[10:]])
    assert not syncing.done() and not lease_host.recorder.is_done_with(held)
    owned.set()
    await syncing
    assert [rows_of(source, commit) for commit in lease_host.commits] == [list(range(20))]


def results_of(block: RowBlock, *, keep: slice = slice(None), text: bytes = b"{}") -> ResultBlock:
    """Results for some rows of a block, as an engine puts them."""
    positions, numbers = block.positions[keep], block.numbers[keep]
    lines = b"".join([b'{"n":%d,"output":%b}\n' % (number, text) for number in numbers])
    return ResultBlock(lines, positions, numbers, block.lease, Usage(len(numbers)))


@pytest.mark.parametrize("keep", [slice(None), slice(0, None, 2)], ids=["all rows", "every second row"])
@pytest.mark.parametrize("is_scattered", [False, True], ids=["in order", "scattered"])
async def test_blocks_of_results(job, source, tmp_path, monkeypatch, keep, is_scattered):
    """Lines that an engine has joined are committed once each, beside rows that failed, in blocks of a bounded size."""
    monkeypatch.setattr(recording, "BLOCK_ROWS", 8)
    monkeypatch.setattr(recording, "RUN_ROWS", 16)
    lease_host = Desk(job, tmp_path)
    numbers = [39, 20, 31, 25, 7, 8, 9, 3] if is_scattered else list(range(10, 36))
    places = (
        {"positions": pack_u32(list(range(len(numbers)))), "rows": pack_u32(numbers)} if is_scattered else {"row": 10}
    )
    held = lease_host.grant(0, Grant(lease(0), 0, 0, len(numbers), **places))
    block = await lease_host.feed.take_block(100)
    assert list(block.numbers) == numbers and [row.number for row in block.rows()] == numbers
    assert block.lines.count(b"\n") == len(numbers)
    done = results_of(block, keep=keep)
    lease_host.recorder.put_block(done)
    others = [row for row in block.rows() if row.number not in done.numbers]
    if others:
        assert held.undone == len(others)
        lease_host.recorder.put([Outcome(row, error=RowError("odd", "an odd row")) for row in others])
    lease_host.recorder.flush()
    await lease_host.recorder.sync()
    blocks = [block for commit in lease_host.commits for block in read_ref(source, commit.ref)]
    assert sorted(row for block in blocks for row in block.rows()) == sorted(numbers)
    assert sum(commit.rows_ok for commit in lease_host.commits) == len(done.numbers)
    assert sum(commit.usage.input_tokens for commit in lease_host.commits) == len(done.numbers)
    assert all(block.n <= 16 for block in blocks)
    for block in blocks:
        texts = read_payload(source, block).splitlines()
        assert len(texts) == block.n
        assert all(
            f'"n":{row},'.encode() in text for row, text in zip(block.rows(), texts, strict=True) if b'"n"' in text
        )
    assert lease_host.recorder.is_done_with(held)


async def test_blocks_hold_no_secret(job, source, tmp_path, monkeypatch):
    """A secret in a result is masked in every line that is stored."""
    monkeypatch.setattr(redaction, "_known", redaction._LearntSecrets())
    redaction.learn("hunter2-and-more")
    lease_host = Desk(job, tmp_path)
    lease_host.grant(0, Grant(lease(0), 0, 0, 3))
    block = await lease_host.feed.take_block(3)
    lease_host.recorder.put_block(results_of(block, text=b'"hunter2-and-more"'))
    await lease_host.recorder.sync()
    (commit,) = lease_host.commits
    (stored,) = read_ref(source, commit.ref)
    text = read_payload(source, stored)
    assert b"hunter2" not in text and text.count(b"\n") == commit.rows_ok == 3


async def test_blocks_of_a_lease_that_is_lost(job, tmp_path):
    """Results of a lease whose commit was refused are not written."""
    lease_host = Desk(job, tmp_path)
    held = lease_host.grant(0, Grant(lease(0), 0, 0, 3))
    block = await lease_host.feed.take_block(3)
    held.stale = True
    lease_host.recorder.put_block(results_of(block))
    await lease_host.recorder.sync()
    assert lease_host.commits == [] and held.undone == 0


async def test_lines_hold_the_rows_own_ids(job, source, tmp_path):
    """A block's lines are the finished output lines of its rows."""
    lease_host = Desk(job, tmp_path)
    lease_host.grant(0, Grant(lease(0), 0, 0, 2, row=7))
    lease_host.recorder.put([Outcome(row, b'{"x":1}') for row in await lease_host.feed.take(5)])
    await lease_host.recorder.sync()
    (commit,) = lease_host.commits
    (block,) = read_ref(source, commit.ref)
    first, second = read_payload(source, block).splitlines()
    assert b'"custom_id":"r7"' in first and b'"custom_id":"r8"' in second


async def test_a_reply_that_makes_no_line_is_an_error(job, tmp_path):
    """A reply whose line cannot be written is that row's error; the rows beside it keep their results."""
    form = TableForm(prompt="{n}")
    lease_host = Desk(OpenJob("job_1", form, job.rows, job.segment), tmp_path)
    lease_host.grant(0, Grant(lease(0), 0, 0, 3))
    rows = [Row(row.position, row.number, b'{"n":1}', form, row.lease) for row in await lease_host.feed.take(3)]
    replies = [b'{"choices":[]}', b'{"x":1e999,"choices":[{"message":{"content":"a"}}]}', b'{"choices":[]}']
    lease_host.recorder.put([Outcome(row, reply, usage=Usage(1)) for row, reply in zip(rows, replies, strict=True)])
    await lease_host.recorder.sync()
    assert sum(commit.rows_ok for commit in lease_host.commits) == 2
    assert [commit.errors for commit in lease_host.commits if commit.errors] == [{"bad_reply": 1}]
    assert sum(commit.usage.input_tokens for commit in lease_host.commits) == 3


async def test_a_full_disk_names_no_byte(job, tmp_path, monkeypatch):
    """When the disk cannot be written, no commit is sent and the error is reported."""
    lease_host = Desk(job, tmp_path)
    lease_host.grant(0, Grant(lease(0), 0, 0, 2))

    def refuse(segments: list[SegmentSink]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "_sync_all", refuse)
    lease_host.recorder.put([Outcome(row, b"{}") for row in await lease_host.feed.take(5)])
    await lease_host.recorder.sync()
    assert lease_host.commits == [] and [error.errno for error in lease_host.broken] == [28]


async def test_careful_rows_come_alone(job, tmp_path):
    """Under a isolated lease a row waits until the one before it is recorded, and its place is noted first."""
    lease_host = Desk(job, tmp_path)
    pairs = {"positions": pack_u32([3, 4]), "rows": pack_u32([3, 4])}
    lease_host.grant(0, Grant(lease(0), 0, 0, 2, isolated=True, **pairs))
    (first,) = await lease_host.feed.take(10)
    assert (tmp_path / "suspect").read_text().split() == ["job_1", "0", "0", "3"]
    waiting = asyncio.create_task(lease_host.feed.take(10))
    await asyncio.sleep(0)
    assert not waiting.done()
    lease_host.recorder.put([Outcome(first, b"{}")])
    (second,) = await waiting
    assert second.number == 4


async def test_asks_ahead(job, tmp_path):
    """The feed asks for the next grant while a grant's worth of rows is still in hand."""
    lease_host = Desk(job, tmp_path)
    lease_host.grant(0, Grant(lease(0), 0, 0, 10))
    assert lease_host.wants == 1
    lease_host.grant(1, Grant(lease(1), 0, 10, 10, position=10, row=10))
    assert lease_host.wants == 1
    await lease_host.feed.take(10)
    assert lease_host.wants == 2


async def test_a_changed_file_stops_its_job_only(job, tmp_path):
    """Rows that are not what was sealed are never run; the job they belong to hears of it."""
    lease_host = Desk(job, tmp_path)
    source = tmp_path / "in.jsonl"
    source.write_text(source.read_text().replace('"n":5}', '"n":6}'))
    lease_host.grant(0, Grant(lease(0), 0, 0, 10))
    lease_host.feed.end()
    assert await lease_host.feed.take(10) == []
    ((job_id, error),) = lease_host.changed
    assert job_id == "job_1" and isinstance(error, InputChanged)


async def test_asks_for_as_many_grants_as_there_is_room_for(job, tmp_path):
    """Where messages cost much, an engine with room for several grants waits for one reply, not for one after the
    other; never beyond the limit, and not beside another job.
    """
    lease_host = Desk(job, tmp_path, grants_max=3)
    waiting = asyncio.create_task(lease_host.feed.take(ROWS))
    await asyncio.sleep(0)
    lease_host.grant(0, Grant(lease(0), 0, 0, 4))
    assert lease_host.wants == 3  # 9 would fit
    assert len(await waiting) == 4
    lease_host.grant(1, Grant(lease(1), 0, 4, 4, position=4, row=4))
    lease_host.grant(2, Grant(lease(2), 0, 8, 4, position=8, row=8))
    assert lease_host.wants == 3  # the third is on its way
    assert len(await lease_host.feed.take(4)) == len(await lease_host.feed.take(5)) == 4
    lease_host.grant(3, Grant(lease(3), 0, 12, 4, position=12, row=12))
    assert lease_host.wants == 3 + 1  # the engine takes one more row alone
    lease_host.job, waiting = structs.replace(job, id="other"), asyncio.create_task(lease_host.feed.take(ROWS))
    await asyncio.sleep(0)
    lease_host.grant(0, Grant(lease(0), 0, 0, 4))
    assert lease_host.wants == 4 + 1
    waiting.cancel()


async def test_asks_for_rows_that_last_until_the_next_message(job, tmp_path):
    """Where the way of a grant takes longer than its rows, so many are requested together as last for some time, and
    before the last one has begun; not beside another job.
    """
    lease_host, now_s = Desk(job, tmp_path, grants_max=8, ahead_s=1.0), 0.0
    lease_host.feed._time = lambda: now_s
    for shard in range(2):
        lease_host.grant(shard, Grant(lease(shard), 0, 4 * shard, 4, position=4 * shard, row=4 * shard))
    for _ in range(2):
        await lease_host.feed.take(4)
        now_s += MEASURE_S
    assert lease_host.wants == 2  # one with each: that 80 rows are taken a second is known only now
    lease_host.grant(2, Grant(lease(2), 0, 8, 20, position=8, row=8))
    assert lease_host.wants == 2 + 4
    lease_host.job = structs.replace(job, id="other")
    lease_host.grant(0, Grant(lease(0), 0, 0, 4))
    assert lease_host.wants == 6 + 1
