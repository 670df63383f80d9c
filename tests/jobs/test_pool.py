"""The workers of one model: whose death counts, and how they end."""

from __future__ import annotations

import asyncio
import errno
import json
import re
from pathlib import Path

import pytest
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.job_service import job_service
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.pools import pool
from batchmill.jobs.pools.pool import Death, Pool, PoolTools
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.replicas import EngineLog, Load
from batchmill.jobs.pools.resources import Allocations, Resources
from batchmill.owner_term import ENDLESS
from batchmill.states import PauseReason
from batchmill.types import Commit, DatasetSpec, JobOrder, Lease, ModelSpec, SegmentRef, Usage
from batchmill.wire.messages import Answered, Drain, Failed, Record, StorageBroken

MODEL = ModelSpec("m", "function", "app.py:f")
FINE = Commit(Lease("job_1", 0, 0, 1), 0, SegmentRef("w.seg", 0, 1), b"", 1, 0, Usage())
GIVEN_UP = Commit(Lease("job_1", 0, 0, 1), 0, SegmentRef("w.seg", 0, 1), b"", 0, 1, Usage(), {pool.GIVEN_UP: 1})


class Owner:
    """Hears the pool; `death` is what it says of every worker's end."""

    term = ENDLESS

    def __init__(self) -> None:
        self.death = Death()
        self.failure: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()
        self.deaths = 0

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        """No rows are given out here, and none are counted."""

    def failed(self, pool: Pool, failure: Failed) -> None:
        self.failure.set_result(failure)

    def load(self, key: str) -> Load:
        return Load()

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        self.deaths += 1
        return self.death


def tools(executor, owner, clock=None, machine: Resources | None = None) -> PoolTools:
    clock = clock or SystemClock()
    return PoolTools(executor, owner, clock, Allocations(machine or Resources()), EngineLog(clock), Quarantine(clock))


@pytest.fixture
async def stage(tmp_path):
    """(what starts workers, who hears, the pool)."""
    executor, owner = ScriptedExecutor(), Owner()
    made = Pool("key", MODEL, tmp_path, tools(executor, owner))
    yield executor, owner, made
    executor.gate.set()
    await made.stop(at_once=True)


async def die(executor: ScriptedExecutor, times: int, said: Commit | None = None) -> None:
    for _ in range(times):
        worker = await executor.next()
        if said is not None:
            worker.say(Record(said))
        worker.exit(1)


def write_log(worker: ScriptedWorker, text: str) -> None:
    Path(worker.home).mkdir(exist_ok=True)
    (Path(worker.home) / f"{worker.name}.log").write_text(text)


class Full:
    """Starts no worker: it has nowhere to write what one says."""

    async def start(self, start):
        raise OSError(errno.ENOSPC, "No space left on device")

    def sweep(self) -> None:
        """Nothing to end."""


async def test_a_full_disk_is_no_fault_of_the_model(tmp_path):
    """Where there is no room to start a worker its jobs wait for room; they have not failed."""
    owner = Owner()
    made = Pool("key", MODEL, tmp_path, tools(Full(), owner))
    failure = await owner.failure
    assert (failure.code, failure.reason) == ("storage_full", PauseReason.STORAGE_FULL)
    await made.stop(at_once=True)


async def test_a_model_that_always_dies_is_given_up(stage):
    """So many deaths in a row without a commit between, and the model has failed."""
    executor, owner, made = stage
    await die(executor, pool.DEATHS_MAX)
    failure = await owner.failure
    assert failure.code == "worker_crashed" and made.failure is failure


async def test_what_workers_that_never_start_wrote_is_shown(stage):
    """Why a model fails says how its last worker ended, and what that wrote."""
    executor, owner, _ = stage
    for number in range(pool.DEATHS_MAX):
        worker = await executor.next(ready=False)
        write_log(worker, f"no licence {number}")
        worker.exit(7)
    failure = await owner.failure
    assert re.search(r"one after another \(exit code 7\); the last lines of .*\.log:\nno licence 4$", failure.message)


async def test_what_workers_wrote_that_were_ready_is_not_shown(stage):
    """What a worker wrote after it was ready may be of other projects' requests: a failure names the log alone."""
    executor, owner, _ = stage
    for number in range(pool.DEATHS_MAX):
        worker = await executor.next()
        write_log(worker, f"a request {number}")
        worker.exit(7)
    failure = await owner.failure
    assert re.search(r"one after another \(exit code 7\); see .*\.log$", failure.message)


async def test_a_disk_that_fails_costs_a_worker(stage):
    """A worker whose segment fails is replaced like any that died; where all fail in a row, the disk is to blame."""
    executor, owner, made = stage
    for _ in range(pool.DEATHS_MAX):
        assert not owner.failure.done()
        worker = await executor.next()
        worker.say(StorageBroken("[Errno 5] Input/output error"))
        worker.exit(1)
    failure = await owner.failure
    assert failure.code == "storage_failed" and "Input/output error" in failure.message


@pytest.mark.parametrize("how", ["said", "adopted"])
async def test_workers_that_get_on_are_not_given_up(stage, how):
    """Workers that finish rows before they die are replaced without end, whether they could tell of the rows or not."""
    executor, owner, _ = stage
    owner.death = Death(adopted=[FINE]) if how == "adopted" else Death()
    await die(executor, 3 * pool.DEATHS_MAX, FINE if how == "said" else None)
    await executor.next()
    assert not owner.failure.done()


async def test_deaths_that_a_row_explains_do_not_count(stage):
    """Many rows in a row that kill the worker are their own trouble; only past a far larger number it is the model."""
    executor, owner, _ = stage
    owner.death = Death(adopted=[GIVEN_UP], by_row=True)
    await die(executor, pool.ROW_DEATHS_MAX - 1)
    last = await executor.next()
    assert not owner.failure.done()
    last.exit(1)
    assert (await owner.failure).code == "worker_crashed"


async def test_a_row_that_got_through_ends_the_count(stage):
    """One row that ended otherwise, and the rows that killed workers before it are forgotten."""
    executor, owner, _ = stage
    owner.death = Death(by_row=True)
    for _ in range(3):
        await die(executor, pool.ROW_DEATHS_MAX - 2)
        await die(executor, 1, FINE)
    await executor.next()
    assert not owner.failure.done()


async def test_live_requests_that_kill_are_not_the_models_fault(stage):
    """Deaths with live requests under way count only past the larger number in a row, and not past an answer."""
    executor, owner, made = stage

    async def die_answering(*said: Answered) -> None:
        worker = await executor.next()
        while worker.name not in made.workers:
            await asyncio.sleep(0)
        made.workers[worker.name].calls |= {1: lambda _: None, 2: lambda _: None}
        for message in said:
            worker.say(message)
        worker.exit(1)

    for _ in range(pool.ROW_DEATHS_MAX - 1):
        await die_answering()
    await die_answering(Answered(1))
    for _ in range(pool.ROW_DEATHS_MAX - 2):
        await die_answering()
    await executor.next()
    assert not owner.failure.done()
    for worker in made.workers.values():
        worker.calls[1] = lambda _: None
        worker.handle.exit(1)
    assert (await owner.failure).code == "worker_crashed"


async def test_deaths_we_caused_do_not_count(stage):
    """Workers that we killed say nothing about the model."""
    executor, owner, made = stage
    for _ in range(pool.DEATHS_MAX + 1):
        await executor.next()
        for worker in made.workers.values():
            worker.end()
    await executor.next()
    assert not owner.failure.done() and owner.deaths == pool.DEATHS_MAX + 1


async def test_a_worker_that_starts_too_late_is_ended(stage, monkeypatch):
    """A worker whose start was under way when the pool was stopped is killed as soon as it is there."""
    monkeypatch.setattr(pool, "DRAIN_S", 3600.0)
    executor, owner, made = stage
    first = await executor.next()
    executor.gate.clear()
    first.exit(1)
    while not owner.deaths:
        await asyncio.sleep(0)
    stopping = asyncio.create_task(made.stop())
    await asyncio.sleep(0)
    executor.gate.set()
    await stopping
    assert (await executor.next()).was_killed and made.workers == {}


async def test_stopping_at_once_overtakes_a_drain(stage):
    """A pool that lets its workers end in peace ends at once when that is asked for."""
    executor, _, made = stage
    worker = await executor.next()
    draining = asyncio.create_task(made.stop())
    await worker.expect(Drain)
    await made.stop(at_once=True)
    await draining
    assert worker.was_killed and made.workers == {}


async def test_a_pool_begins_after_the_one_before(tmp_path):
    """No worker starts before what has to end first has ended."""
    executor = ScriptedExecutor()
    over = asyncio.Event()
    before = asyncio.create_task(over.wait())
    made = Pool("key", MODEL, tmp_path, tools(executor, Owner(), HeldClock()), after=before)
    for _ in range(5):
        await asyncio.sleep(0)
    assert executor.is_quiet
    over.set()
    await executor.next()
    await made.stop(at_once=True)


async def test_adjacent_deadly_rows_end_alone(tmp_path):
    """Three rows side by side that kill every worker become errors; every other row has its result."""
    code = "import os, signal\ndef deadly(n):\n    if n in (33, 34, 35):\n"
    code += "        os.kill(os.getpid(), signal.SIGSEGV)\n    return n\n"
    (tmp_path / "app.py").write_text(code)
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data").mkdir()
    ledger = open_ledger(tmp_path / "data" / "batchmill.db")
    service = job_service(tmp_path / "data", ledger, LocalExecutor(tmp_path / "data" / "workers"), SystemClock())
    model = ModelSpec("deadly", "function", f"{tmp_path / 'app.py'}:deadly")
    order = JobOrder(DatasetSpec([str(tmp_path / "in.jsonl")]), [model], output=str(tmp_path / "out.jsonl"))
    try:
        job = (await service.submit(order)).id
        view = [view async for view in service.watch(job, 0.05)][-1]
    finally:
        await service.close(at_once=True)
    assert (view.state, view.rows_ok, view.errors) == ("completed", 47, {"worker_crashed": 3})
