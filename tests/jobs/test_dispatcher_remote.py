"""Shards that a provider holds: noted, found again by the next worker, collected when their job is over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from dispatcher_stage import MODEL, SHARD_ROWS, Stage, finish, grant, positions
from fakes.scripted_workers import ScriptedWorker

from batchmill.errors import JobPaused
from batchmill.jobs import early_end
from batchmill.jobs.ledger import ledger
from batchmill.jobs.pools import dispatcher as dispatching
from batchmill.jobs.pools.job_run import JobRun
from batchmill.states import PauseReason
from batchmill.types import ModelSpec, RemoteJob
from batchmill.wire.messages import Failed, Grant, LeaseReleased, Note, Noted, Released, Revoke

FAR = ModelSpec("far", "provider_batch", "gpt", provider="openai")


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.close()


async def noted(worker: ScriptedWorker, granted: Grant, state: str = "submitted", *, tag: str = "t") -> bool:
    """Note a job at the provider; whether that is kept."""
    data = msgspec.json.encode(RemoteJob(tag, "openai", state, created=1.0))
    worker.say(Note(7, granted.lease, tag, data))
    answer = await worker.expect(Noted)
    assert answer.id == 7
    return answer.is_kept


def over(stage: Stage, name: str, *shards: int) -> JobRun:
    """A run of a job that ends, over what providers have of these shards."""
    run = stage.open_run(name, FAR)
    last = JobRun(run.spec, 0, run.plan, files=run.files, clock=stage.clock, is_over=True)
    last.load(stage.commit_log.ledger.progress(name, 0), frozenset(shards))
    return last


async def test_the_next_worker_has_the_notes(stage):
    """A worker that dies leaves what it noted to the one that gets its shard, and its death is nobody's fault."""
    stage.begin("job", FAR)
    for _ in range(4):
        worker = await stage.executor.next()
        granted = await grant(worker)
        assert (granted.lease.shard, granted.isolated, granted.is_over) == (0, False, False)
        assert await noted(worker, granted)
        worker.exit(-9)
    last = await stage.executor.next()
    remote = ledger.read((await grant(last)).notes["t"], 0)
    assert remote is not None and remote.state == "submitted"


async def test_a_worker_without_the_lease_is_told_so(stage):
    """A note of a lease that is another's meanwhile is refused: what it announces must not be done."""
    stage.begin("job", FAR)
    worker = await stage.executor.next()
    granted = await grant(worker)
    stage.commit_log.ledger.fence("job", 0)
    assert not await noted(worker, granted)


@pytest.mark.parametrize("is_over", [False, True])
async def test_how_a_job_is_let_go(stage, is_over):
    """Paused, what a provider has may stay there; cancelled, it is to be ended, and workers know which."""
    run = stage.begin("job", FAR)
    worker = await stage.executor.next()
    granted = await grant(worker)
    if is_over:
        run.cancel()
    else:
        run.pause(JobPaused("enough"))
    removing = asyncio.create_task(stage.dispatcher.remove(run))
    assert (await worker.expect(Revoke)).is_over is is_over
    worker.say(LeaseReleased(granted.lease))
    worker.say(Released("job"))
    await removing
    assert not worker.was_killed


async def test_what_a_provider_has_gets_its_time(stage, monkeypatch):
    """Rows that only a worker runs are cut off in the end; those that a provider has are waited for."""
    monkeypatch.setattr(dispatching, "RELEASE_S", 0.01)
    for name, model in (("near", MODEL), ("far", FAR)):
        run = stage.begin(name, model)
        worker = await stage.executor.next()
        granted = await grant(worker)
        run.cancel()
        removing = asyncio.create_task(stage.dispatcher.remove(run))
        if model is FAR:
            await asyncio.wait({removing}, timeout=0.05)
            assert not removing.done()
            assert await finish(worker, granted)
            worker.say(Released(name))
        await removing
        assert worker.was_killed is (model is MODEL)
        assert stage.rows_ok(name) == (SHARD_ROWS if model is FAR else 0)
        await stage.dispatcher.unreserve(name, at_once=True)


async def test_only_shards_with_notes_are_wound_up(stage):
    """A job that is over goes once more to a worker with what providers have of it, until every lease was left."""
    run = over(stage, "job", 0, 2)
    worker = await stage.executor.next()
    winding = asyncio.create_task(early_end.cancel_remote(run, stage.dispatcher, is_at_once=False))
    first = await grant(worker)
    second = await grant(worker, more_of="job")
    assert [(each.lease.shard, each.is_over) for each in (first, second)] == [(0, True), (2, True)]
    worker.finish(first, positions(first)[:1])
    worker.say(LeaseReleased(first.lease))
    assert await finish(worker, second)
    assert (await worker.expect(Revoke)).is_over
    worker.say(Released("job"))
    await winding
    assert stage.rows_ok("job") == 1 + SHARD_ROWS


async def test_one_that_cannot_be_collected_is_left(stage):
    """A submission that nobody can find keeps the others from nothing; refused credentials pause the ending."""
    run = over(stage, "job", 0, 1)
    worker = await stage.executor.next()
    winding = asyncio.create_task(early_end.cancel_remote(run, stage.dispatcher, is_at_once=False))
    first = await grant(worker)
    worker.say(Failed("submit_unknown", "where is it?", PauseReason.SUBMIT_UNKNOWN, "job"))
    worker.say(LeaseReleased(first.lease))
    second = await grant(worker, more_of="job")
    assert second.lease.shard == 1
    worker.say(Failed("auth_refused", "401", PauseReason.AUTH, "job"))
    await worker.expect(Revoke)
    worker.say(Released("job"))
    with pytest.raises(JobPaused, match="cancel it again") as raised:
        await winding
    assert raised.value.reason is PauseReason.AUTH


async def test_functions_are_never_asked_to_collect(stage):
    """What went another way is not a provider's any more: a note of it sends no row to an engine of another kind."""
    run = stage.open_run("job", MODEL)
    last = JobRun(run.spec, 0, run.plan, files=run.files, clock=stage.clock, is_over=True)
    last.load({}, frozenset({0, 1, 2}))
    assert last.rows_left == 0 and last.ended.done()


async def test_the_model_whose_way_failed_is_known(stage):
    """An engine that gives its way up pauses the job and says which of its models it is."""
    run = stage.begin("job", FAR)
    worker = await stage.executor.next()
    await grant(worker)
    worker.say(Failed("route_failed", "stuck", PauseReason.ROUTE_FAILED, "job"))
    with pytest.raises(JobPaused, match="stuck"):
        await run.ended
    assert run.failing == {0}
