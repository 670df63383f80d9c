"""The feed of an engine that holds whole leases: what was begun already can be taken by itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from batchmill.datasets.orders import SealOrder
from batchmill.datasets.sealed import SealedRows
from batchmill.datasets.sealing import seal
from batchmill.errors import AuthRefused
from batchmill.executors.feed import GrantFeed
from batchmill.executors.leases import Allowance, Held, OpenJob
from batchmill.executors.recorder import NO_USAGE, empty_rows
from batchmill.ports.engines import Columns, LeaseFeed
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import SegmentHead
from batchmill.types import ColumnBlock, DatasetSpec, Lease, ModelSpec, Price, Row
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.messages import Grant, Spending, pack_u32
from batchmill.wire.rows.forms import OpenAIForm

MEDIA = MediaTokens(ModelSpec("m", "http", "m"))

ROWS = 40


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OpenJob]:
    source = tmp_path / "in.jsonl"
    lines = [{"custom_id": f"r{n}", "url": "/v1/embeddings", "body": {"input": "x"}} for n in range(ROWS)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for folder in ("dataset", "segments"):
        (tmp_path / folder).mkdir()
    seal(SealOrder(DatasetSpec([str(source)])), tmp_path / "dataset", lambda _: None)
    segment = SegmentFile(tmp_path / "segments", SegmentHead("job_1", "same", "w1"))
    rows = SealedRows(tmp_path / "dataset")
    yield OpenJob("job_1", OpenAIForm(), rows, segment)
    segment.close()
    rows.close()


@pytest.fixture
async def feed(tmp_path: Path) -> GrantFeed:
    wants, changed, broken = list[str](), list[object](), list[OSError]()
    return GrantFeed(
        want=lambda job, _: wants.append(job),
        failed=lambda *it: changed.append(it),
        broken=broken.append,
        suspect=tmp_path / "suspect",
    )


def give(feed: GrantFeed, job: OpenJob, grant: Grant) -> None:
    held = Held(
        lease=grant.lease, job=msgspec.structs.replace(job, id=grant.lease.job), seq=0, base=0, key="k", undone=grant.n,
        isolated=False, ok=empty_rows(), failed=empty_rows(), ok_usage=NO_USAGE, failed_usage=NO_USAGE, failures=[],
        unsent=[],
    )  # fmt: skip
    feed.grant(held, grant)


async def test_what_is_begun_comes_by_itself(job: OpenJob, feed: GrantFeed) -> None:
    """Rows of a lease that is noted, or of one that is to end, are given while those of others stay."""
    assert isinstance(feed, LeaseFeed)
    give(feed, job, Grant(Lease("plain", 0, 0, 1), 0, 0, 10))
    give(feed, job, Grant(Lease("noted", 0, 0, 1), 0, 0, 10, row=10, notes={"tag": b"{}"}))
    give(feed, job, Grant(Lease("over", 0, 0, 1), 0, 0, 10, row=20, is_over=True))
    taken = [row.number for _ in range(4) for row in await feed.take_noted(5)]
    assert sorted(taken) == list(range(10, 30))
    waiting = asyncio.create_task(feed.take_noted(5))
    plain = [row.number for _ in range(2) for row in await feed.take(5)]
    assert plain == list(range(10)) and not waiting.done()
    give(feed, job, Grant(Lease("later", 0, 0, 1), 0, 0, 3, row=30, is_over=True))
    assert [row.number for row in await waiting] == [30, 31, 32]


async def test_nothing_begun_at_the_end(job: OpenJob, feed: GrantFeed) -> None:
    """At the feed's end whoever waits for what is begun hears that there is none; the rest is still there."""
    give(feed, job, Grant(Lease("plain", 0, 0, 1), 0, 0, 10))
    waiting = asyncio.create_task(feed.take_noted(5))
    await asyncio.sleep(0)
    feed.end()
    assert await waiting == []
    assert len(await feed.take(20)) == 10


@pytest.mark.parametrize("how", ["project", "job", "answers"])
async def test_rows_that_are_held_back_are_neither_lost_nor_given_twice(
    how: str, job: OpenJob, feed: GrantFeed
) -> None:  # fmt: skip
    """Others' rows come meanwhile; what is granted to it, before or after, comes in order once it is let go. No other
    reason to hold rows back lets it go."""
    ours, theirs = (msgspec.structs.replace(job, project=name) for name in "ab")

    async def taken(most: int) -> list[tuple[str, int]]:
        return [(row.lease.lease.job, row.number) for row in await feed.take(most)]

    def hold(*names: str) -> None:
        if how == "project":
            feed.hold_back(frozenset(names))
            return
        hold_jobs, hold_others = (
            (feed.hold_jobs, feed.hold_answers) if how == "job" else (feed.hold_answers, feed.hold_jobs)
        )
        hold_jobs(frozenset(f"job_{name}" for name in names))
        hold_others(frozenset({"job_c"}))
        hold_others(frozenset())

    give(feed, ours, Grant(Lease("job_a", 0, 0, 1), 0, 0, 4))
    hold("a")
    give(feed, theirs, Grant(Lease("job_b", 0, 0, 1), 0, 0, 3))
    give(feed, ours, Grant(Lease("job_a", 0, 0, 1), 0, 0, 2, 4, 4))
    assert await taken(10) == [("job_b", n) for n in range(3)]
    feed.end()
    waiting = asyncio.create_task(taken(3))
    await asyncio.sleep(0)
    assert not waiting.done()
    hold()
    hold()
    found = await waiting
    while more := await taken(10):
        found += more
    assert found == [("job_a", n) for n in range(6)]


class RemoteRows:
    """Rows that lie in a store: a read waits for `may_read`, and may fail."""

    is_remote = True

    def __init__(self, rows: SealedRows) -> None:
        self._rows = rows
        self.threads: list[int] = []
        self.untils: list[int | None] = []
        self.error: Exception | None = None
        self.begun, self.may_read = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def read_lines(self, first: int, last: int, until: int | None = None) -> bytes:
        self.untils.append(until)
        self._wait()
        return self._rows.read_lines(first, last, until)

    def read_many(self, numbers: Sequence[int]) -> list[bytes]:
        self._wait()
        return self._rows.read_many(numbers)

    def _wait(self) -> None:
        self.threads.append(threading.get_ident())
        assert threading.get_ident() != self._loop._thread_id, "the event loop waits for a store"
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.may_read.wait(60)
        if self.error is not None:
            raise self.error


def taken_from(rows: list[Row]) -> list[tuple[str, int]]:
    return [(row.lease.lease.job, row.number) for row in rows]


async def test_the_event_loop_never_waits_for_a_store(job: OpenJob, feed: GrantFeed) -> None:
    """Rows of a store are read in a thread, once, while rows of other jobs are not held up by the event loop."""
    rows = RemoteRows(job.rows)
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 10))
    waiting = asyncio.create_task(feed.take(6))
    await asyncio.sleep(0)  # the loop runs on
    rows.may_read.set()
    assert [row.number for row in await waiting] == list(range(6))
    assert [row.number for row in await feed.take(6)] == list(range(6, 10))
    assert len(rows.threads) == 2
    assert threading.get_ident() not in rows.threads
    assert rows.untils == [10, 10], "the store is not read beyond the grant"


async def test_a_store_that_refuses_ends_only_its_job(job: OpenJob, tmp_path: Path) -> None:
    """A job whose rows cannot be read is forgotten and reported; rows of another follow."""
    failed: list[tuple[str, Exception]] = []
    feed = GrantFeed(
        want=lambda *_: None, failed=lambda *it: failed.append(it), broken=lambda _: None, suspect=tmp_path / "s"
    )
    rows = RemoteRows(job.rows)
    rows.error = AuthRefused("expired", code="auth_error")
    rows.may_read.set()
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 10, priority=1))
    give(feed, job, Grant(Lease("near", 0, 0, 1), 0, 0, 3))
    assert len(await feed.take(20)) == 3
    feed.end()
    assert await feed.take(20) == []
    assert [(name, error.code) for name, error in failed] == [("far", "auth_error")]


async def test_a_job_that_is_dropped_while_it_is_read(job: OpenJob, feed: GrantFeed) -> None:
    """What a read finds after its job was dropped, and its dataset closed, means nothing."""
    rows = RemoteRows(job.rows)
    rows.error = OSError("closed")
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 10))
    waiting = asyncio.create_task(feed.take(6))
    await asyncio.sleep(0)
    feed.drop("far")
    rows.may_read.set()
    feed.end()
    assert await waiting == []


async def test_local_rows_do_not_wait_for_a_store(job: OpenJob, feed: GrantFeed) -> None:
    """Rows of this machine that come while a store is slow are given at once, whatever the priority of the others."""
    for priority in (1, -1):
        rows = RemoteRows(job.rows)
        far, near = f"far{priority}", f"near{priority}"
        give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease(far, 0, 0, 1), 0, 0, 5))
        waiting = asyncio.create_task(feed.take(5))
        await rows.begun.wait()
        give(feed, job, Grant(Lease(near, 0, 0, 1), 0, 0, 5, row=10, priority=priority))
        assert taken_from(await waiting) == [(near, n) for n in range(10, 15)]
        rows.may_read.set()
        assert taken_from(await feed.take(5)) == [(far, n) for n in range(5)]


async def test_rows_that_are_there_come_by_priority(job: OpenJob, feed: GrantFeed) -> None:
    """The next rows of a store are read while the engine runs the last ones: a job of higher priority stays ahead."""
    rows = RemoteRows(job.rows)
    rows.may_read.set()
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 9, priority=1))
    found = taken_from(await feed.take(3))
    give(feed, job, Grant(Lease("near", 0, 0, 1), 0, 0, 3, row=10))
    while feed._reads:
        await asyncio.wait(feed._reads)
        found += taken_from(await feed.take(3))
    found += taken_from(await feed.take(3))
    assert found == [("far", n) for n in range(9)] + [("near", n) for n in range(10, 13)]


async def test_rows_that_were_read_ahead_are_given_in_any_number(job: OpenJob, feed: GrantFeed) -> None:
    """Rows that were read in one piece are taken in smaller ones, and each once; scattered rows, too."""
    rows = RemoteRows(job.rows)
    rows.may_read.set()
    remote = msgspec.structs.replace(job, rows=rows)
    give(feed, remote, Grant(Lease("run", 0, 0, 1), 0, 0, 20))
    numbers = [3, 1, 30, 7, 8, 2, 0]
    scattered = Grant(Lease("run", 0, 1, 1), 0, 0, 7, positions=pack_u32(range(7)), rows=pack_u32(numbers))
    give(feed, remote, scattered)
    feed.end()
    found: list[Row] = []
    for n in itertools.cycle((8, 1, 3, 2, 50)):
        if not (rows_taken := await feed.take(n)):
            break
        assert len(rows_taken) <= n
        found += rows_taken
    assert [row.number for row in found] == [*range(20), *numbers]
    assert all(json.loads(row.raw)["custom_id"] == f"r{row.number}" for row in found)
    assert len(rows.threads) < len(found)


async def test_what_is_begun_is_read_in_a_thread(job: OpenJob, feed: GrantFeed) -> None:
    """Rows of a store that an engine has begun already do not hold up those of this machine, nor the end."""
    rows = RemoteRows(job.rows)
    far = Grant(Lease("far", 0, 0, 1), 0, 0, 5, notes={"tag": b"{}"})
    give(feed, msgspec.structs.replace(job, rows=rows), far)
    waiting = asyncio.create_task(feed.take_noted(5))
    await rows.begun.wait()
    give(feed, job, Grant(Lease("near", 0, 0, 1), 0, 0, 5, row=10, is_over=True))
    assert taken_from(await waiting) == [("near", n) for n in range(10, 15)]
    feed.end()
    waiting = asyncio.create_task(feed.take_noted(5))
    rows.may_read.set()
    assert taken_from(await waiting) == [("far", n) for n in range(5)]
    assert await feed.take_noted(5) == []


async def test_a_budget_for_rows_of_a_store(job: OpenJob, feed: GrantFeed) -> None:
    """What all rows of a lease cost is found in a thread; without budget it is read again only when there is some."""
    rows = RemoteRows(job.rows)
    rows.may_read.set()
    sent: list[Spending] = []
    price = Price(input=1e6, output=0.0)
    allowance = Allowance("far", price, has_requests=True, media=MEDIA, send=sent.append, takes_all=True)
    give(
        feed,
        msgspec.structs.replace(job, rows=rows, allowance=allowance),
        Grant(Lease("far", 0, 0, 1), 0, 0, 5, notes={"tag": b"{}"}),
    )
    noted, plain = asyncio.create_task(feed.take_noted(5)), asyncio.create_task(feed.take(5))
    await rows.begun.wait()
    while feed._reads:
        await asyncio.wait(feed._reads)
    feed.wake()
    await asyncio.sleep(0)
    assert not (noted.done() or plain.done() or feed._reads)
    assert len(rows.threads) == 1 and len(sent) == 1
    cost = sent[0].needs
    allowance.add(3 * cost, is_lean=False)
    feed.unblock("far")
    done, _ = await asyncio.wait({noted, plain}, return_when=asyncio.FIRST_COMPLETED)
    assert taken_from(done.pop().result()) == [("far", n) for n in range(3)]
    feed.end()
    assert await asyncio.gather(noted, plain)


async def test_an_error_of_this_machine_reaches_the_engine(job: OpenJob, feed: GrantFeed) -> None:
    """What a thread raises and no job is to blame for ends the engine's run."""
    rows = RemoteRows(job.rows)
    rows.error = OSError("broken")
    rows.may_read.set()
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 5))
    with pytest.raises(OSError, match="broken"):
        await feed.take(5)


class RemoteColumns(RemoteRows):
    """Columns that lie in a store; the stream of a block is its row numbers."""

    rows = ROWS
    columns = ["n"]

    def __init__(self, rows: SealedRows) -> None:
        super().__init__(rows)
        self.read_numbers: list[int] = []

    def read(self, first: int, last: int) -> list[bytes]:
        raise AssertionError("nothing reads it")

    def close(self) -> None:
        """Nothing is open."""

    def read_columns(self, numbers: Sequence[int], names: tuple[str, ...] | None) -> tuple[memoryview, int]:
        self._wait()
        numbers = numbers[:4]
        self.read_numbers += numbers
        return memoryview(bytes(numbers)), len(numbers)

    @staticmethod
    def cut_columns(data: bytes | memoryview, first: int, last: int) -> memoryview:
        return memoryview(data)[first:last]


async def test_columns_of_a_store(job: OpenJob, feed: GrantFeed) -> None:
    """Columns are read in a thread, and so are the whole rows of a block; a block never has more rows than asked."""
    rows = RemoteColumns(job.rows)
    rows.may_read.set()
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 10))
    feed.end()
    found: list[int] = []
    for n in (6, 6, 1, 6):
        block = await feed.take_block(n, Columns(("n",)))
        assert isinstance(block, ColumnBlock) and len(block) <= min(n, 4)
        assert bytes(block.data) == bytes(block.numbers)
        found += block.numbers
        assert [row.number for row in await block.read()] == list(block.numbers)
    assert found == list(range(len(found)))
    rows.error = AuthRefused("expired", code="auth_error")
    assert await block.read() == []


async def test_columns_that_were_read_ahead_are_read_once(job: OpenJob, feed: GrantFeed) -> None:
    """A take that is shorter than the block that was read ahead gets its first rows, and the next takes the others."""
    rows = RemoteColumns(job.rows)
    rows.may_read.set()
    give(feed, msgspec.structs.replace(job, rows=rows), Grant(Lease("far", 0, 0, 1), 0, 0, 10))
    feed.end()
    found: list[int] = []
    for n in (6, 1, 2, 6, 6, 6):
        block = await feed.take_block(n, Columns(("n",)))
        if block is None:
            break
        assert isinstance(block, ColumnBlock) and len(block) <= n
        assert bytes(block.data) == bytes(block.numbers) == bytes(block.positions)
        found += block.numbers
    assert found == rows.read_numbers == list(range(10))
