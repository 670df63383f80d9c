"""Jobs come and go over workers that others need too; every finished row is counted, once."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from dispatcher_stage import MODEL, SHARD_ROWS, SHARDS, Stage, finish, grant, positions
from fakes.scripted_workers import ScriptedWorker

from batchmill.errors import JobPaused
from batchmill.jobs.ledger import outcome_map
from batchmill.jobs.pools import dispatcher as dispatching
from batchmill.jobs.pools import pool as pools
from batchmill.jobs.pools.job_run import JobRun
from batchmill.states import JobState, PauseReason
from batchmill.store.segments.files import SegmentFile
from batchmill.store.segments.format import BlockMeta, BlockRows, SegmentHead, frame
from batchmill.types import ModelSpec
from batchmill.wire.messages import (
    Ack,
    Drain,
    Failed,
    Grant,
    LeaseReleased,
    Open,
    Ready,
    Released,
    RequestRows,
    Revoke,
)


@pytest.fixture
async def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatching, "RELEASE_S", 0.02)
    made = Stage(tmp_path)
    yield made
    await made.close()


def pause(run: JobRun) -> None:
    run.pause(JobPaused("enough", reason=PauseReason.REQUESTED))


async def two_jobs(stage: Stage) -> tuple[JobRun, JobRun, ScriptedWorker, Grant, Grant]:
    """Two jobs with a shard each in the hands of the one worker."""
    first = stage.begin("first")
    worker = await stage.executor.next()
    one = await grant(worker)
    second = stage.begin("second")
    two = await grant(worker)
    assert (one.lease.job, two.lease.job) == ("first", "second")
    return first, second, worker, one, two


async def test_pausing_leaves_a_worker_that_others_need(stage):
    """A job that is paused takes nobody's worker away, and what it had in flight still counts."""
    first, second, worker, one, two = await two_jobs(stage)
    pause(first)
    await stage.dispatcher.remove(first)
    stage.commit_log.ledger.move("first", JobState.PAUSED)
    assert (await worker.expect(Revoke)).job == "first" and not worker.was_killed
    assert second.is_held_by(worker.name)
    assert await finish(worker, one) and await finish(worker, two)
    assert (stage.rows_ok("first"), stage.rows_ok("second")) == (SHARD_ROWS, SHARD_ROWS)
    assert (await grant(worker, more_of="second")).isolated is False


async def test_a_cancelled_job_leaves_nothing_that_commits(stage):
    """Rows of a cancelled job that a shared worker finishes after all are refused."""
    first, _, worker, one, _ = await two_jobs(stage)
    first.cancel()
    await stage.dispatcher.remove(first)
    assert not worker.was_killed and not await finish(worker, one)
    assert stage.rows_ok("first") == 0


async def test_rows_that_end_in_time_are_counted(stage, monkeypatch):
    """A job is not taken back before the rows in flight have had their time, nor later than they need."""
    monkeypatch.setattr(dispatching, "RELEASE_S", 3600.0)
    first, _, worker, one, _ = await two_jobs(stage)
    first.cancel()
    removing = asyncio.create_task(stage.dispatcher.remove(first))
    await worker.expect(Revoke)
    assert await finish(worker, one)
    worker.say(Released("first"))
    await removing
    assert stage.rows_ok("first") == SHARD_ROWS


async def test_a_killed_worker_is_buried_first(stage):
    """A worker that only this job needs is killed when its time is up, and what it had written is counted by then."""
    run = stage.begin("first")
    worker = await stage.executor.next()
    granted = await grant(worker)
    segment = SegmentFile(run.files.segments, SegmentHead("first", "first", worker.name))
    lines = BlockRows(positions(granted)[:3], positions(granted)[:3], [b"{}\n"] * 3)
    segment.append(frame(lines, generation=0, shard=granted.lease.shard, epoch=1, ok=True, meta=BlockMeta()))
    segment.close()
    run.cancel()
    await stage.dispatcher.remove(run)
    assert worker.was_killed and stage.rows_ok("first") == 3
    assert stage.dispatcher.workers_of([MODEL]) == [] and stage.executor.is_quiet
    assert not run.is_held_by(worker.name)


async def test_which_deaths_are_the_rows_fault(stage):
    """Shards of a worker that we killed, or that died once, go on at full speed; after two deaths a row at a time."""
    run = stage.begin("first")
    worker = await stage.executor.next()
    granted = await grant(worker)
    (held,) = stage.dispatcher.workers_of([MODEL])
    held.end()
    heir = await stage.executor.next()
    again = await grant(heir)
    assert (again.lease.shard, again.isolated) == (granted.lease.shard, False)
    heir.exit(1)
    second = await stage.executor.next()
    assert (await grant(second)).isolated is False
    second.exit(1)
    last = await grant(await stage.executor.next())
    assert last.isolated and run.held_by(worker.name) == []


async def test_at_once_waits_for_nothing_but_the_end(stage, monkeypatch):
    """Taken back at once, a job's worker is killed without the time that rows in flight have otherwise."""
    for module, name in ((dispatching, "RELEASE_S"), (pools, "DRAIN_S"), (pools, "END_S")):
        monkeypatch.setattr(module, name, 3600.0)
    run = stage.begin("first")
    worker = await stage.executor.next()
    await grant(worker)
    pause(run)
    await stage.dispatcher.remove(run, at_once=True)
    assert worker.was_killed


async def test_closing_at_once_overtakes_what_is_under_way(stage, monkeypatch):
    """A close at once ends workers that are being let go in peace, also those of jobs that share them."""
    monkeypatch.setattr(dispatching, "RELEASE_S", 3600.0)
    monkeypatch.setattr(pools, "DRAIN_S", 3600.0)
    first, second, worker, _, _ = await two_jobs(stage)
    stage.dispatcher.reserve("third", [ModelSpec("other", "function", "app.py:g")])
    idle = await stage.executor.next()
    letting_go = asyncio.create_task(stage.dispatcher.unreserve("third"))
    await idle.expect(Drain)
    pause(first)
    pause(second)
    await asyncio.gather(*(stage.dispatcher.remove(run, at_once=True) for run in (first, second)))
    assert worker.was_killed
    await stage.dispatcher.close(at_once=True)
    await letting_go
    assert idle.was_killed


async def test_only_a_worker_that_waits_gets_a_reply_to_its_commit(stage):
    """What was counted and lies in a file needs no reply; what a commit carried does, and what was refused."""
    stage.begin("first")
    worker = await stage.executor.next()
    one = await grant(worker)
    (first, *others), end = positions(one), {"blocks": b""}
    worker.finish(one, [first], **end)
    worker.finish(one, others, seq=1)
    assert (await worker.expect(Ack)).seq == one.seq + 1  # the first one's, which was counted before, would come first
    assert stage.rows_ok("first") == SHARD_ROWS
    worker.finish(one, [first], seq=2, **end)
    assert not (await worker.expect(Ack)).counted


# -- resuming ---------------------------------------------------------------------------------------------------------


async def test_a_resumed_job_takes_over_what_is_in_flight(stage):
    """Rows still in flight when their job goes on are not run again: they count, and the rest goes out after them."""
    first, second, worker, one, two = await two_jobs(stage)
    pause(first)
    await stage.dispatcher.remove(first)
    again = stage.begin("first")
    assert await finish(worker, two)
    others = [await grant(worker, more_of="second"), await grant(worker, more_of="second")]
    assert {each.lease.job for each in others} == {"second"}  # the worker has yet to let go of the first
    for each in others:
        assert await finish(worker, each)
    await second.ended
    worker.finish(one, positions(one)[:1])
    assert (await worker.expect(Ack)).counted
    worker.say(Released("first"))
    assert (await worker.expect(Open)).job == "first"
    rest = [await grant(worker), *[await grant(worker, more_of="first") for _ in range(2)]]
    assert [each.n for each in rest] == [SHARD_ROWS - 1, SHARD_ROWS, SHARD_ROWS]
    for each in rest:
        numbers = positions(each) if not each.positions else positions(one)[1:]
        worker.finish(each, numbers)
    assert not (await again.ended).cancelled
    assert stage.rows_ok("first") == SHARDS * SHARD_ROWS


async def test_what_is_in_flight_goes_to_nobody_else(stage):
    """A resumed job's other shards go to other workers; what one still runs goes out when it is given back, counted."""
    two = ModelSpec("m", "function", "app.py:f", workers=2)
    first = stage.begin("first", two)
    holder, other = await stage.executor.next(), await stage.executor.next(ready=False)
    one = await grant(holder)
    stage.begin("second", two)
    assert (await grant(holder)).lease.job == "second"
    pause(first)
    await stage.dispatcher.remove(first)
    stage.begin("first", two)
    other.say(Ready(1))
    got = [await grant(other), await grant(other)] + [await grant(other, more_of="first")]
    taken = sorted(each.lease.shard for each in got if each.lease.job == "first")
    assert taken == [number for number in range(SHARDS) if number != one.lease.shard]
    slow = threading.Event()
    busy = asyncio.create_task(stage.commit_log.call(slow.wait))
    for place, seq in ((0, 0), (1, 1), (2, 2)):
        holder.finish(one, positions(one)[place : place + 1], seq=seq)
        await asyncio.sleep(0)
    holder.say(Released("first"))
    for _ in range(20):
        await asyncio.sleep(0)
    slow.set()
    assert [(await holder.expect(Ack)).counted for _ in range(3)] == [True] * 3
    last = await holder.expect(Grant)
    assert (last.lease.shard, last.n) == (one.lease.shard, 1)
    await busy


async def test_rows_counted_while_a_job_comes_back_are_known(stage):
    """A row counted after the ledger was read and before the run began is not waited for."""
    first, second, worker, one, _ = await two_jobs(stage)
    pause(first)
    await stage.dispatcher.remove(first)
    again = stage.open_run("first")
    assert await finish(worker, one)
    worker.say(Released("first"))
    stage.dispatcher.add(again)
    pause(second)
    assert await finish(worker, await grant(worker))
    assert await finish(worker, await grant(worker, more_of="first"))
    await again.ended
    assert stage.rows_ok("first") == SHARDS * SHARD_ROWS


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_a_dead_worker_was_left_with_goes_out_again(stage, when):
    """Rows left in flight with a worker that died before or after their job goes on are run by the next one."""
    first, second, worker, _, _ = await two_jobs(stage)
    pause(first)
    await stage.dispatcher.remove(first)
    pause(second)
    if when == "before":
        worker.exit(1)
        heir = await stage.executor.next()
        again = stage.begin("first")
    else:
        again = stage.begin("first")
        worker.exit(1)
        heir = await stage.executor.next()
    got = [await grant(heir)] + [await grant(heir, more_of="first") for _ in range(SHARDS - 1)]
    assert sorted(each.lease.shard for each in got) == [0, 1, 2]
    assert again.rows_left == SHARDS * SHARD_ROWS


# -- pools ------------------------------------------------------------------------------------------------------------


async def test_a_pool_follows_the_one_before(stage):
    """Workers of a model start only when those that had it before have gone, whatever the hurry."""
    stage.dispatcher.reserve("first", [MODEL])
    worker = await stage.executor.next()
    worker.holds_on = True
    leaving = asyncio.create_task(stage.dispatcher.unreserve("first"))
    await worker.expect(Drain)
    stage.dispatcher.reserve("second", [MODEL])
    for _ in range(20):
        await asyncio.sleep(0)
    assert stage.executor.is_quiet
    worker.exit(0)
    await leaving
    await stage.executor.next()


async def test_a_failed_pool_is_stopped_before_another_starts(stage):
    """What is left of a pool that failed ends before the same model is tried again."""
    two = ModelSpec("m", "function", "app.py:f", workers=2)
    stage.dispatcher.reserve("first", [two])
    broken, sound = await stage.executor.next(ready=False), await stage.executor.next(ready=False)
    broken.say(Failed("model_failed", "no such file", PauseReason.ENGINE_FAILED))
    broken.exit(1)
    while len(stage.dispatcher.workers_of([two])) == 2:
        await asyncio.sleep(0)
    stage.dispatcher.reserve("second", [two])
    await sound.expect(Drain)
    assert stage.executor.is_quiet
    sound.exit(0)
    await stage.executor.next()
    await stage.executor.next()


async def test_a_dispatcher_that_ended_says_so(stage):
    """A job that comes when nothing is given out any more is paused instead of waiting for ever."""
    run = stage.open_run("first")
    await stage.dispatcher.close(at_once=True)
    stage.dispatcher.add(run)
    with pytest.raises(JobPaused, match="dispatcher has ended"):
        await run.ended


async def test_a_dispatcher_that_fails_interrupts_every_job(stage, monkeypatch, caplog):
    """Jobs of now and later are paused as by the end of the process, and the log has the traceback."""

    def fail(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(stage.dispatcher, "_match", fail)
    runs = [stage.begin("first"), stage.open_run("second")]
    with contextlib.suppress(ValueError):
        await stage.dispatcher.dispatching.task
    stage.dispatcher.add(runs[1])
    for run in runs:
        with pytest.raises(JobPaused, match="ValueError: a bug") as paused:
            await run.ended
        assert (paused.value.reason, paused.value.code) == (PauseReason.INTERNAL_ERROR, "core_task_failed")
    (record,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert str(record.exc_info[1]) == "a bug" and not stage.dispatcher.dispatching.is_alive


class Gate:
    """Lets calls of one function through one at a time, each when the test says so."""

    def __init__(self, call, function) -> None:
        self._call, self._function = call, function
        self._waiting: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def __call__(self, function, *args, **named):
        if function == self._function:
            event = asyncio.Event()
            self._waiting.put_nowait(event)
            await event.wait()
        return await self._call(function, *args, **named)

    async def next(self) -> asyncio.Event:
        """The next call that waits; it goes on once the event is set."""
        async with asyncio.timeout(10):
            return await self._waiting.get()


async def test_a_shard_that_was_given_on_stays_with_its_new_worker(stage, monkeypatch):
    """A worker ends while a shard is leased for it, which another has by the time that the first is recovered."""
    run = stage.begin("job", ModelSpec("m", "function", "app.py:f", workers=2))
    workers = await stage.executor.next(), await stage.executor.next()
    granted = [await grant(worker) for worker in workers]
    log = stage.commit_log
    leasing, adopting = Gate(log.write_short, log.ledger.lease_each), Gate(log.call, outcome_map.adopt)
    monkeypatch.setattr(log, "write_short", leasing)
    monkeypatch.setattr(log, "call", adopting)
    workers[0].say(RequestRows("job"))
    first = await leasing.next()
    workers[0].exit(1)
    adopt = await adopting.next()
    workers[1].say(RequestRows("job"))
    first.set()
    second = await leasing.next()
    assert run.holder(run.shard(2)) == workers[1].name
    adopt.set()
    async with asyncio.timeout(10):
        while run.is_held_by(workers[0].name):
            await asyncio.sleep(0)
    second.set()
    again = await grant(workers[1])
    assert again.lease.shard == 2
    for each in (granted[1], again):
        assert await finish(workers[1], each)


async def test_a_shard_that_ends_while_it_is_leased_is_not_granted(stage, monkeypatch):
    """Its last rows are counted after the worker that had them gave it back, and before the next worker has it."""
    stage.begin("job")
    worker = await stage.executor.next()
    first = await grant(worker)
    leasing = Gate(stage.commit_log.write_short, stage.commit_log.ledger.lease_each)
    monkeypatch.setattr(stage.commit_log, "write_short", leasing)
    worker.say(LeaseReleased(first.lease))
    worker.say(RequestRows("job"))
    lease = await leasing.next()
    worker.finish(first, positions(first))
    assert (await worker.expect(Ack)).counted
    lease.set()
    worker.say(RequestRows("job"))
    (await leasing.next()).set()
    assert (await grant(worker)).lease.shard == 1
