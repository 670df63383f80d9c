"""Many jobs at one worker: who gets rows there, what the worker is told of them, and what is counted."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from dispatcher_stage import SHARD_ROWS, SHARDS, Stage, finish, grant, positions

from batchmill.jobs.pools import pool_worker
from batchmill.types import Policy, Usage
from batchmill.wire.messages import Ack, Grant, Open, Released, Revoke, SetShare


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    made.clock.sleep = lambda _: asyncio.Event().wait()  # time stands still but for the test
    yield made
    await made.close()


async def test_a_new_job_waits_for_no_worker_to_ask(stage):
    """The first grant of each job goes out at once, more of it only when the worker has room."""
    stage.begin("first")
    worker = await stage.executor.next()
    await grant(worker)
    stage.begin("second")
    assert (await grant(worker)).lease.job == "second"
    for _ in range(20):
        await asyncio.sleep(0)
    assert not worker.has_heard(Grant)
    assert (await grant(worker, more_of="first")).lease.job == "first"


async def test_a_worker_has_so_many_jobs_open(stage, monkeypatch):
    """Beyond the most that one worker has open, a job waits until another has left, the oldest first."""
    monkeypatch.setattr(pool_worker, "JOBS_OPEN_MAX", 2)
    runs = [stage.begin(name) for name in ("a", "b", "c", "d")]
    worker = await stage.executor.next()
    assert [(await worker.expect(Grant)).lease.job for _ in range(2)] == ["a", "b"]
    assert [stage.dispatcher.ahead_of(name) for name in ("a", "b", "c", "d")] == [0, 0, 2, 3]
    runs[0].cancel()
    leaving = asyncio.create_task(stage.dispatcher.remove(runs[0]))
    assert (await worker.expect(Revoke)).job == "a"
    worker.say(Released("a"))
    await leaving
    assert (await worker.expect(Open)).job == "c"


async def test_a_worker_has_room_for_another_project(stage, monkeypatch):
    """However many jobs one project has at a worker, there is room for another's."""
    monkeypatch.setattr(pool_worker, "JOBS_OPEN_MAX", 3)
    monkeypatch.setattr(pool_worker, "JOBS_OPEN_PROJECT_MAX", 2)
    for name in ("a", "b", "c"):
        stage.begin(name)
    worker = await stage.executor.next()
    assert [(await worker.expect(Grant)).lease.job for _ in range(2)] == ["a", "b"]
    stage.begin("other", project="other")
    assert (await worker.expect(Grant)).lease.job == "other"


async def test_workers_hear_what_has_changed(stage):
    """Shares change with the jobs beside, a priority at once; what has hardly changed is not told."""
    first = stage.begin("first")
    worker = await stage.executor.next()
    alone = await grant(worker)
    assert (alone.priority, alone.share) == (0, 1.0)
    stage.begin("second")
    less = await worker.expect(SetShare)
    assert (less.job, less.share) == ("first", 0.625)
    second = await grant(worker)
    assert (second.lease.job, second.share) == ("second", 0.375)
    assert await finish(worker, alone)
    assert not worker.has_heard(SetShare)
    first.spec = msgspec.structs.replace(first.spec, policy=Policy(priority=3))
    stage.clock.at += 1.0
    assert await finish(worker, second)
    news = {each.job: each for each in [await worker.expect(SetShare), await worker.expect(SetShare)]}
    assert (news["first"].priority, news["first"].share, news["second"].share) == (6, 1.0, 1.0)
    assert stage.dispatcher.ahead_of("second") == 1


async def test_a_row_is_reckoned_at_its_tokens(stage):
    """What a job's rows have cost lately is what the next ones count as; a new job's are reckoned as the others'."""
    stage.begin("first")
    worker = await stage.executor.next()
    granted = await grant(worker)
    assert granted.row_cost == 1.0
    worker.finish(granted, positions(granted), usage=Usage(90 * SHARD_ROWS, 50 * SHARD_ROWS, 10 * SHARD_ROWS))
    await worker.expect(Ack)
    stage.clock.at += 1.0  # it is reckoned now and then
    assert (await grant(worker, more_of="first")).row_cost == 100.0
    stage.begin("second")
    assert (await grant(worker)).row_cost == 100.0


async def test_what_workers_do_is_counted(stage):
    """Rows and tokens by project and model as the ledger counts them, and what waits at each model."""
    stage.begin("first")
    worker = await stage.executor.next()
    granted = await grant(worker)
    (gauge,) = stage.dispatcher.gauges()
    assert (gauge.name, gauge.workers, gauge.ready, gauge.jobs, gauge.jobs_waiting) == ("m", 1, 1, 1, 0)
    assert gauge.rows_waiting == SHARDS * SHARD_ROWS
    worker.finish(granted, positions(granted), usage=Usage(8, 2, 4))
    await worker.expect(Ack)
    tallies = stage.dispatcher.tallies
    assert tallies.rows == {("default", "m", "ok"): SHARD_ROWS, ("default", "m", "failed"): 0}
    assert [tallies.tokens["default", "m", kind] for kind in ("input", "cached", "output")] == [8, 2, 4]
    assert stage.dispatcher.gauges()[0].rows_waiting == (SHARDS - 1) * SHARD_ROWS


async def test_one_jobs_trouble_is_its_own(stage):
    """A job whose lease cannot be written pauses; those leased with it go on."""
    broken, sound = stage.open_run("broken"), stage.open_run("sound")
    broken.generation = None  # the database refuses it
    stage.dispatcher.add(broken)
    stage.dispatcher.add(sound)
    worker = await stage.executor.next()
    assert (await grant(worker)).lease.job == "sound"
    assert broken.ended.exception() is not None and broken.is_waiting and not sound.ended.done()
