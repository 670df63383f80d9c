"""Replicas on a machine that cannot hold all: they wait, others leave for them, and what became of them is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.manual_clock import ManualClock, settled
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.jobs.pools import replicas
from batchmill.jobs.pools.pool import DEATHS_MAX, RETRY_DELAY_S, Death, Pool
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.pools import Pools
from batchmill.jobs.pools.replicas import EngineLog, Load
from batchmill.jobs.pools.resources import Resources
from batchmill.owner_term import ENDLESS
from batchmill.states import PauseReason
from batchmill.types import EngineState, ModelSpec, Needs, Scaling
from batchmill.wire.messages import Drain, Failed, Ready

GIB = 2**30
LINGER_S = 600.0
BROKEN = Failed("model_failed", "CUDA error: out of memory", PauseReason.ENGINE_FAILED)


class Stage:
    """Pools on a small machine, with workers that the test plays."""

    term = ENDLESS

    def __init__(self, folder: Path, idle_timeout_s: float = LINGER_S, machine: Resources | None = None) -> None:
        self.executor, self.clock = ScriptedExecutor(), ManualClock()
        self.failures: list[Failed] = []
        self.loads: dict[str, Load] = {}  # by model name
        machine = machine or Resources(24 * GIB, ["0", "1", "2"])
        self.pools = Pools(
            folder, self.executor, self.clock, dispatcher=self, idle_timeout_s=idle_timeout_s, machine=machine
        )

    def use(self, user: str, model: ModelSpec) -> Pool:
        return self.pools.use(user, model, self.pools.key_of(model))

    def state(self, model: ModelSpec) -> str:
        return self.pools.view(model).state

    def kinds(self, model: ModelSpec) -> list[str]:
        return [event.kind for event in self.pools.view(model).events]

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        """No rows are given out here, and none are counted."""

    def failed(self, pool: Pool, failure: Failed) -> None:
        self.failures.append(failure)

    def load(self, key: str) -> Load:
        pool = self.pools.get(key)
        return self.loads.get(pool.model.name, Load()) if pool is not None else Load()

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        return Death()


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.pools.close(at_once=True)


def model(name: str, gib: float = 0, gpus: int = 0, scaling: Scaling | None = None, **more) -> ModelSpec:
    return ModelSpec(name, "http", f"/models/{name}", needs=Needs(int(gib * GIB), gpus), scaling=scaling, **more)


async def left(worker: ScriptedWorker) -> None:
    """The worker is asked to end, and does."""
    await worker.expect(Drain)
    worker.exit(0)
    await settled()


async def test_a_model_waits_until_another_is_released(stage):
    """What a job uses stays; what waits for its room says so in numbers, and starts when it has gone."""
    stage.use("job_1", model("other", 20))
    other = await stage.executor.next()
    stage.use("job_2", model("big", 12))
    await settled()
    seen = stage.pools.view(model("big", 12))
    why = "'big' needs 12 GiB and 4 of 24 GiB are free: 'other' (a job runs on it) holds 20 GiB"
    assert (seen.state, seen.replicas, seen.wanted, seen.message) == (EngineState.WAITING, 0, 1, why)
    assert [(event.kind, event.message) for event in seen.events] == [("waiting", why)]
    stage.pools.leave(stage.pools.key_of(model("other", 20)), "job_1")
    await left(other)
    await stage.executor.next()
    await settled()
    assert stage.state(model("big", 12)) == EngineState.READY
    assert stage.kinds(model("big", 12)) == ["waiting", "starting", "ready"]
    assert stage.state(model("other", 20)) == EngineState.STOPPED
    assert stage.kinds(model("other", 20))[-1] == "stopped"


async def test_idle_pools_leave_as_few_as_will_do(stage):
    """Of those that nobody uses the one unused longest leaves first, and the others stay if that is enough."""
    specs = [model(name, 8) for name in ("a", "b", "c")]
    workers = []
    for spec in specs:
        stage.use("job", spec)
        workers.append(await stage.executor.next())
    for spec in (specs[1], specs[0]):
        stage.pools.leave(stage.pools.key_of(spec), "job")
    stage.use("job", model("big", 8))
    await left(workers[1])
    await stage.executor.next()
    assert [pool.model.name for _, pool in stage.pools.items()] == ["a", "c", "big"]
    assert not workers[0].has_heard(Drain)


async def test_nobody_leaves_in_vain(stage):
    """Where even all idle pools would not make room enough, they stay."""
    stage.use("job", model("used", 20))
    await stage.executor.next()
    stage.use("job", model("idle", 2))
    idle = await stage.executor.next()
    stage.pools.leave(stage.pools.key_of(model("idle", 2)), "job")
    stage.use("job", model("big", 12))
    await settled()
    assert not idle.has_heard(Drain) and stage.state(model("big", 12)) == EngineState.WAITING


async def test_who_is_not_needed_waits_no_more(stage):
    """A model that waits for room and that nobody needs any longer leaves the queue to those behind it."""
    stage.use("job_1", model("other", 20))
    await stage.executor.next()
    stage.use("job_2", model("large", 24))
    stage.use("job_3", model("small", 4))
    await settled()
    assert stage.executor.is_quiet
    stage.pools.leave(stage.pools.key_of(model("large", 24)), "job_2")
    await stage.executor.next()
    assert stage.state(model("small", 4)) == EngineState.STARTING
    assert stage.state(model("large", 24)) == EngineState.STOPPED


async def test_what_never_fits_fails_at_once(stage):
    """A model larger than the machine fails with both numbers, whoever runs beside it."""
    stage.use("job", model("huge", 25))
    await settled()
    assert stage.failures[0].message.startswith("'huge' needs 25 GiB and the machine has 24 GiB for models")
    assert stage.executor.is_quiet and stage.state(model("huge", 25)) == EngineState.FAILED


async def test_each_worker_is_told_its_devices(stage):
    """Two models never share a device, and a replica that takes another's place takes its device too."""
    stage.use("job", model("a", gpus=2))
    stage.use("job", model("b", gpus=1))
    stage.use("job", model("c"))
    workers = [await stage.executor.next() for _ in range(3)]
    assert [worker.gpus for worker in workers] == [["0", "1"], ["2"], None]
    workers[0].exit(1)
    assert (await stage.executor.next()).gpus == ["0", "1"]


SCALING = Scaling(replicas_min=0, replicas_max=3, cooldown_s=20.0, scale_up_requests=10)


async def test_replicas_come_and_go_with_the_work(stage):
    """More start at once when there is work for them; those not needed for a while finish what they have and end."""
    spec = model("m", 8, scaling=SCALING)
    stage.use("job", spec)
    workers = [await stage.executor.next()]
    stage.loads["m"] = Load(rows=1000, shards=50)
    await stage.clock.go_on(2)
    workers += [await stage.executor.next() for _ in range(2)]
    await settled()
    seen = stage.pools.view(spec)
    assert (seen.replicas, seen.ready, seen.wanted) == (3, 3, 3)
    assert [event.message for event in seen.events if event.kind == "scaled"] == [
        "3 instead of 1: 0 requests and 1000 rows"
    ]
    stage.loads["m"] = Load(rows=5, shards=1)
    await stage.clock.go_on(19)
    assert not any(worker.has_heard(Drain) for worker in workers)
    await stage.clock.go_on(3)
    ending = [worker for worker in workers if worker.has_heard(Drain)]
    assert len(ending) == 2 and not any(worker.was_killed for worker in ending)
    assert len(stage.pools.get(stage.pools.key_of(spec)).ready()) == 1
    for worker in ending:
        worker.exit(0)
    await settled()
    assert stage.pools.view(spec).replicas == 1 and stage.failures == []


async def test_a_replica_that_is_leaving_stays_away(stage):
    """One that is to end and says that it is ready is given nothing, and its place is not taken before it has ended."""
    spec = model("m", 8, scaling=Scaling(replicas_max=2, cooldown_s=0.0, scale_up_requests=10))
    pool = stage.use("job", spec)
    await stage.executor.next()
    stage.loads["m"] = Load(rows=1000, shards=50)
    await stage.clock.go_on(1)
    late = await stage.executor.next(ready=False)
    stage.loads["m"] = Load()
    await stage.clock.go_on(1)
    late.say(Ready(1))
    await settled()
    assert len(pool.ready()) == 1 and pool.least_loaded_worker() is pool.ready()[0]
    stage.loads["m"] = Load(rows=1000, shards=50)
    await stage.clock.go_on(1)
    assert (await stage.executor.next()).replica == 2
    await left(late)


async def test_a_model_scales_to_zero_and_back(stage):
    """Nobody uses it for its own cool-down, and it ends; whoever comes then starts it again."""
    spec = model("m", scaling=SCALING)
    stage.use("job", spec)
    worker = await stage.executor.next()
    stage.pools.leave(stage.pools.key_of(spec), "job")
    await stage.clock.go_on(19)
    assert not worker.has_heard(Drain)
    await stage.clock.go_on(2)
    await left(worker)
    assert stage.state(spec) == EngineState.STOPPED
    stage.use("job", spec)
    await stage.executor.next()


async def test_the_least_is_kept(stage):
    """What is kept stays beyond every cool-down, leaves for nobody, and goes once it is let go."""
    spec = model("m", 20, scaling=Scaling(replicas_min=1, replicas_max=2, cooldown_s=20.0))
    stage.pools.pin(spec)
    stage.pools.pin(spec)
    worker = await stage.executor.next()
    stage.use("job", model("big", 12))
    await stage.clock.go_on(100)
    assert "(it is kept ready) holds 20 GiB" in stage.pools.view(model("big", 12)).message
    stage.pools.unpin(spec)
    stage.pools.unpin(spec)
    await left(worker)
    await stage.executor.next()
    assert stage.state(spec) == EngineState.STOPPED


async def test_what_is_kept_and_fails_is_tried_again(stage):
    """After longer and longer rests, as long as it is kept."""
    spec = model("m", scaling=Scaling(replicas_min=1, cooldown_s=20.0))
    stage.pools.pin(spec)
    for retry_delay_s in (RETRY_DELAY_S, 2 * RETRY_DELAY_S):
        worker = await stage.executor.next(ready=False)
        worker.say(BROKEN)
        worker.exit(1)
        await stage.clock.go_on(retry_delay_s - 1)
        assert stage.executor.is_quiet and stage.state(spec) == EngineState.FAILED
        await stage.clock.go_on(5)
    await stage.executor.next()
    await settled()
    assert stage.state(spec) == EngineState.READY
    stage.pools.unpin(spec)


async def test_a_failed_model_has_failed_while_its_worker_ends(stage):
    """A model that could not start is shown as failed at every moment, also while its worker ends."""
    spec = model("m")
    pool = stage.use("job", spec)
    worker = await stage.executor.next(ready=False)
    worker.say(BROKEN)
    await settled()
    assert stage.failures == [BROKEN]
    stage.pools.retire(pool.key)
    assert pool in stage.pools.ending_pools
    seen = stage.pools.view(spec)
    assert (seen.state, seen.message) == (EngineState.FAILED, BROKEN.message)
    worker.exit(1)
    await settled()
    assert stage.state(spec) == EngineState.FAILED


async def test_another_range_reaches_what_runs(stage):
    """A model that is to have other numbers of replicas gets them without a new engine."""
    spec = model("m", scaling=Scaling(replicas_min=1, replicas_max=2, cooldown_s=5.0))
    stage.pools.pin(spec)
    await stage.executor.next()
    wider = model("m", scaling=Scaling(replicas_min=2, replicas_max=2, cooldown_s=5.0))
    stage.pools.pin(wider)
    await stage.executor.next()
    none = model("m", scaling=Scaling(cooldown_s=5.0))
    stage.pools.pin(none)
    await stage.clock.go_on(20)
    assert stage.state(wider) in (EngineState.STOPPING, EngineState.STOPPED)


async def test_further_replicas_give_way(stage):
    """A model with several replicas gives one up for a model that has none, and gets it back when there is room."""
    spec = model("busy", 12, scaling=SCALING)
    stage.loads["busy"] = Load(rows=1000, shards=50)
    stage.use("job_1", spec)
    workers = [await stage.executor.next()]
    await stage.clock.go_on(1)
    workers.append(await stage.executor.next())
    stage.use("job_2", model("first", 12))
    await settled()
    (ending,) = [worker for worker in workers if worker.has_heard(Drain)]
    await left(ending)
    first = await stage.executor.next()
    await stage.clock.go_on(5)
    assert stage.executor.is_quiet
    seen = stage.pools.view(spec)
    assert (seen.state, seen.ready) == (EngineState.READY, 1)
    assert "'busy' needs 12 GiB and 0 of 24 GiB are free" in seen.message
    stage.pools.leave(stage.pools.key_of(model("first", 12)), "job_2")
    await left(first)
    assert (await stage.executor.next()).replica in (1, 2)


@pytest.mark.parametrize("how", ["says so", "dies"])
async def test_one_replica_of_several_may_fail(stage, how):
    """The others go on; it rests and is tried again."""
    spec = model("m", workers=2)
    pool = stage.use("job", spec)
    _, broken = await stage.executor.next(), await stage.executor.next()
    await settled()
    if how == "says so":
        broken.say(BROKEN)
        broken.exit(1)
    else:
        for _ in range(DEATHS_MAX - 1):
            broken.exit(1)
            broken = await stage.executor.next()
        broken.exit(1)
    await settled()
    seen = stage.pools.view(spec)
    assert stage.failures == [] and pool.failure is None
    assert (seen.state, seen.replicas, seen.ready, seen.events[-1].kind) == (EngineState.READY, 1, 1, "failed")
    assert seen.events[-1].replica == 1
    await stage.clock.go_on(RETRY_DELAY_S + 1)
    assert (await stage.executor.next()).replica == 1
    await settled()
    assert stage.pools.view(spec).ready == 2


async def test_the_last_replica_that_fails_is_the_model(stage):
    """Where no other is ready, the failure of one is the failure of the model; its words stay after it has gone."""
    spec = model("m", workers=2)
    stage.use("job", spec)
    one, two = await stage.executor.next(), await stage.executor.next()
    await settled()
    for worker in (one, two):
        worker.say(BROKEN)
        worker.exit(1)
    await settled()
    assert stage.failures == [BROKEN]
    stage.pools.leave(stage.pools.key_of(spec), "job")
    await settled()
    seen = stage.pools.view(spec)
    assert (seen.state, seen.message) == (EngineState.FAILED, BROKEN.message)
    stage.use("job", spec)
    await stage.executor.next()
    await settled()
    assert stage.state(spec) == EngineState.READY


async def test_trouble_that_is_not_its_own_is_everybodys(stage):
    """A replica that finds the disk full stops the model, whoever else is ready."""
    stage.use("job", model("m", workers=2))
    worker, _ = await stage.executor.next(), await stage.executor.next()
    await settled()
    worker.say(Failed("storage_full", "no room", PauseReason.STORAGE_FULL))
    await settled()
    assert [each.code for each in stage.failures] == ["storage_full"]


async def test_a_model_that_comes_to_scale_does_so(stage):
    """Engines that were started with a fixed number follow the load once they are to."""
    stage.use("job", model("m"))
    await stage.executor.next()
    stage.pools.pin(model("m", scaling=Scaling(replicas_max=2, scale_up_requests=10)))
    stage.loads["m"] = Load(rows=100, shards=4)
    await stage.clock.go_on(5)
    await stage.executor.next()


async def test_a_dead_workers_last_lines_are_kept(stage):
    """The event of a death has the end of the worker's log."""
    spec = model("m")
    stage.use("job", spec)
    worker = await stage.executor.next()
    Path(worker.home).mkdir(parents=True)
    (Path(worker.home) / f"{worker.name}.log").write_text("loading\nTraceback\nMemoryError: 9 GiB\n")
    worker.exit(-9)
    await stage.executor.next()
    event = next(event for event in stage.pools.view(spec).events if event.kind == "failed")
    assert "exit code -9" in event.message and event.message.endswith("MemoryError: 9 GiB")


def test_events_are_bounded(monkeypatch):
    """So many of one model are kept, the newest, and of so many models."""
    monkeypatch.setattr(replicas, "ENGINES_MAX", 2)
    log = EngineLog(ManualClock())
    for number in range(replicas.EVENTS_MAX + 5):
        log.add("a", "scaled", str(number))
    assert [log.of("a")[0].message, len(log.of("a"))] == ["5", replicas.EVENTS_MAX]
    log.add("b", "failed", "why")
    log.add("c", "starting")
    assert log.of("a") == [] and log.failure("b") == "why"


async def test_without_lingering_the_room_is_free_at_once(tmp_path):
    """Where nothing is kept, a model that waits starts as soon as the one before has gone."""
    stage = Stage(tmp_path, idle_timeout_s=0.0)
    stage.use("job_1", model("a", 20, scaling=SCALING))
    worker = await stage.executor.next()
    stage.use("job_2", model("b", 20))
    stage.pools.leave(stage.pools.key_of(model("a", 20, scaling=SCALING)), "job_1")
    await left(worker)
    await stage.executor.next()
    await stage.pools.close(at_once=True)
