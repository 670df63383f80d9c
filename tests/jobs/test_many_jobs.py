"""Jobs of every size at one worker: the small ones begin at once, and the large one goes on."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.types import DatasetSpec, JobOrder, JobView, LiveHead, LiveRequest, ModelSpec, Policy

LARGE_ROWS, SMALL_ROWS = 100_000, 10
URGENT_ROWS, URGENT = 200, 1_000_000  # the first number of an urgent job's rows
CODE = """
import time
calls = open({calls!r}, "a", buffering=1)
def slow(n):
    print(n, file=calls)
    time.sleep(0.01)
    return n
"""


class Shop:
    """A service with one worker, and jobs over a function that takes its time."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        (folder / "app.py").write_text(CODE.format(calls=str(self._calls)))
        data = folder / "data"
        data.mkdir()
        self.service = job_service(
            data,
            open_ledger(data / "batchmill.db"),
            LocalExecutor(data / "workers"),
            SystemClock(),
            idle_timeout_s=600.0,
        )
        self.model = ModelSpec("slow", "function", f"{folder / 'app.py'}:slow")

    async def submit(self, name: str, rows: int, first: int = 0, **more) -> str:
        row = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"n":%d}}\n'
        (self.folder / f"{name}.jsonl").write_text("".join(row % (n, n) for n in range(first, first + rows)))
        dataset = DatasetSpec([str(self.folder / f"{name}.jsonl")])
        return (await self.service.submit(JobOrder(dataset, [self.model], **more))).id

    async def wait_for(self, job_id: str, rows: int) -> JobView:
        """Until so many rows are counted."""
        async for view in self.service.watch(job_id, 0.02):
            if view.rows_ok >= rows:
                return view
        raise AssertionError(f"{job_id} ended with {view.rows_ok} rows: {view.message}")

    async def end_of(self, job_id: str) -> JobView:
        return [view async for view in self.service.watch(job_id, 0.02)][-1]

    def calls(self) -> list[int]:
        """The numbers of all rows, in the order in which they were run."""
        return [int(line) for line in self._calls.read_text().splitlines()]

    async def rows_of(self, job_id: str) -> int:
        return (await self.service.show(job_id)).rows_ok


@pytest.fixture
async def shop(tmp_path):
    made = Shop(tmp_path)
    yield made
    await made.service.close(at_once=True)


async def test_a_small_job_does_not_wait_for_a_large_one(shop):
    """Ten rows that are planned have run before a job of 100,000, submitted long before, has run a hundredth of it."""
    large = await shop.submit("large", LARGE_ROWS)
    await shop.wait_for(large, 1)
    small = await shop.submit("small", SMALL_ROWS, URGENT)
    async for view in shop.service.watch(small, 0.02):
        if view.state == "running":
            break
    before = len(shop.calls())
    view = await shop.end_of(small)
    assert (view.state, view.rows_ok) == ("completed", SMALL_ROWS)
    last = max(at for at, number in enumerate(shop.calls()) if number >= URGENT)
    assert last - before < LARGE_ROWS / 100


async def test_many_small_jobs_do_not_stop_a_large_one(shop):
    """While small jobs keep coming, the large one is not stopped: it gets at least a tenth of what the worker does."""
    large = await shop.submit("large", LARGE_ROWS)
    await shop.wait_for(large, 1)
    before = await shop.rows_of(large)
    names = [await shop.submit(f"small-{n}", SMALL_ROWS) for n in range(20)]
    views = await asyncio.gather(*(shop.end_of(each) for each in names))
    assert [view.state for view in views] == ["completed"] * len(names)
    done = await shop.rows_of(large) - before
    assert done >= 0.1 * (done + len(names) * SMALL_ROWS)


async def test_a_higher_priority_goes_first(shop):
    """A job of a higher priority has all the worker's rows from then on, until it is through."""
    large = await shop.submit("large", LARGE_ROWS)
    await shop.wait_for(large, 1)
    urgent = await shop.submit("urgent", URGENT_ROWS, URGENT, policy=Policy(priority=1))
    await shop.end_of(urgent)
    is_urgent = [number >= URGENT for number in shop.calls()]
    assert sum(is_urgent) == URGENT_ROWS
    first, last = is_urgent.index(True), len(is_urgent) - is_urgent[::-1].index(True)
    assert last - first - URGENT_ROWS < 100, "rows of the large job that were run in between"


async def test_a_live_request_goes_past_the_rows(shop):
    """A live request is answered by the worker that runs rows, before these are through."""
    large = await shop.submit("large", LARGE_ROWS)
    await shop.wait_for(large, 1)
    before = await shop.rows_of(large)
    pieces = shop.service.live.predict(shop.model, LiveRequest("/v1/x", b'{"model":"slow","n":7}'))
    head, *body = [piece async for piece in pieces]
    assert isinstance(head, LiveHead) and head.status == 200
    assert json.loads(b"".join(body)) == 7
    assert await shop.rows_of(large) - before < LARGE_ROWS / 100
