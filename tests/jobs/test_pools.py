"""Workers are started for whoever needs them, kept a while, and never more of them than the machine has room for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.scripted_workers import ScriptedExecutor, ScriptedWorker

from batchmill.jobs.pools import pools as keeping
from batchmill.jobs.pools.pool import Death, Pool
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.pools import Pools
from batchmill.jobs.pools.replicas import Load
from batchmill.owner_term import ENDLESS
from batchmill.states import PauseReason
from batchmill.types import FunctionSpec, ModelSpec
from batchmill.wire.messages import Drain, Failed, Ready


class StoppedClock:
    """Time passes for those who sleep when the test says so."""

    def __init__(self) -> None:
        self.passed = asyncio.Event()

    def monotonic(self) -> float:
        return 0.0

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        if seconds == LINGER_S:
            await self.passed.wait()
        else:
            await asyncio.Event().wait()


LINGER_S = 77.0


class Stage:
    term = ENDLESS

    def __init__(self, folder: Path, idle_timeout_s: float = LINGER_S) -> None:
        self.executor, self.clock = ScriptedExecutor(), StoppedClock()
        self.failures: list[Failed] = []
        self.pools = Pools(folder, self.executor, self.clock, dispatcher=self, idle_timeout_s=idle_timeout_s)

    def use(self, user: str, model: ModelSpec) -> Pool:
        return self.pools.use(user, model, self.pools.key_of(model))

    def names(self) -> list[str]:
        return [pool.model.name for _, pool in self.pools.items()]

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        """No rows are given out here, and none are counted."""

    def failed(self, pool: Pool, failure: Failed) -> None:
        if not self.pools.restart_after_eviction(pool):
            self.failures.append(failure)

    def load(self, key: str) -> Load:
        return Load()

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        return Death()


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.pools.close(at_once=True)


def model(name: str, engine: str = "llm") -> ModelSpec:
    return ModelSpec(name, engine, f"/models/{name}")


async def left(worker: ScriptedWorker) -> None:
    """The worker is asked to end, and does."""
    await worker.expect(Drain)
    worker.exit(0)


async def test_a_pool_waits_for_its_next_user(stage):
    """Workers that nobody uses stay for whoever comes in time, and end when nobody did."""
    pool = stage.use("job_1", model("a"))
    worker = await stage.executor.next()
    await stage.pools.release("job_1")
    assert stage.use("job_2", model("a")) is pool
    stage.clock.passed.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not worker.has_heard(Drain)
    await stage.pools.release("job_2")
    await left(worker)
    assert stage.names() == []


async def test_without_lingering_a_pool_ends_with_its_user(tmp_path):
    """Where nothing is kept, releasing returns when the workers have gone."""
    stage = Stage(tmp_path, idle_timeout_s=0.0)
    stage.use("job_1", model("a"))
    worker = await stage.executor.next()
    releasing = asyncio.create_task(stage.pools.release("job_1"))
    await left(worker)
    await releasing
    assert stage.names() == [] and not stage.pools.end_tasks


async def test_few_idle_pools_are_kept(stage):
    """Beyond the most that are kept idle, the one unused for longest ends."""
    names = [f"m{n}" for n in range(keeping.IDLE_POOLS_MAX + 1)]
    workers = []
    for name in names:
        stage.use(name, model(name))
        workers.append(await stage.executor.next())
    for name in names[:-1]:
        await stage.pools.release(name)
    assert stage.names() == names
    await stage.pools.release(names[-1])
    await left(workers[0])
    assert stage.names() == names[1:]


async def test_more_deployed_functions_are_kept_idle(stage, monkeypatch):
    """Deployed functions are kept beside other models, as many as their own limit says; they take no other's place."""
    monkeypatch.setattr(keeping, "IDLE_FUNCTIONS_MAX", 2)
    deployed = [
        ModelSpec(f"f{n}", "function_process", "app.py:f", function=FunctionSpec("main/1", f"/{n}", "d"))
        for n in range(3)
    ]
    workers = []
    for spec in (model("m"), *deployed):
        stage.use(spec.name, spec)
        workers.append(await stage.executor.next())
    for name in ("m", "f0", "f1"):
        await stage.pools.release(name)
    assert stage.names() == ["m", "f0", "f1", "f2"]
    await stage.pools.release("f2")
    await left(workers[1])
    assert stage.names() == ["m", "f1", "f2"]


async def test_edited_code_gets_workers_of_its_own(stage, tmp_path):
    """A function whose file has changed is another pool; the old one goes on for those who began with it."""
    source = tmp_path / "app.py"
    source.write_text("def f(): return 1\n")
    spec = ModelSpec("f", "function", f"{source}:f")
    before = stage.pools.key_of(spec)
    assert stage.pools.key_of(spec) == before
    source.write_text("def f(): return 22\n")
    assert stage.pools.key_of(spec) != before
    assert stage.pools.key_of(spec, {"f": "abc"}) == stage.pools.key_of(spec, {"f": "abc"})
    assert stage.use("old", spec) is stage.use("new", spec)
    source.unlink()
    stage.use("gone", spec)
    assert len(stage.names()) == 2


async def test_what_rows_may_name_makes_no_other_pool(stage):
    """Jobs that may use fewer of a model's names share its workers, which know them all."""
    spec = ModelSpec("m", "llm", "/models/m", adapters={"a": "/a", "b": "/b"})
    part = ModelSpec("m", "llm", "/models/m", adapters={"a": "/a", "b": "/b"}, allowed=["a"])
    pool = stage.use("job_1", part)
    assert stage.use("job_2", spec) is pool and pool.model.allowed is None


async def test_a_server_that_finds_no_room_is_tried_again(stage):
    """Idle servers leave the machine to one that could not start; it fails if it still cannot."""
    stage.use("old", model("idle"))
    idle = await stage.executor.next()
    await stage.pools.release("old")
    stage.use("new", model("big"))
    no_room = Failed("model_failed", "out of memory", PauseReason.ENGINE_FAILED)
    first = await stage.executor.next(ready=False)
    first.say(no_room)
    first.exit(1)
    await idle.expect(Drain)
    assert stage.executor.is_quiet and stage.names() == ["big"]
    idle.exit(0)
    second = await stage.executor.next(ready=False)
    assert stage.failures == [] and stage.pools.users(stage.pools.key_of(model("big"))) == {"new"}
    second.say(no_room)
    second.exit(1)
    while not stage.failures:
        await asyncio.sleep(0)
    assert stage.failures == [no_room]


async def test_a_failed_pool_is_started_anew(stage):
    """Whoever needs a model that failed gets new workers for it, once what is left of the old ones has ended."""
    failed = stage.use("job_1", model("a"))
    worker = await stage.executor.next(ready=False)
    worker.say(Failed("model_failed", "no such file", PauseReason.ENGINE_FAILED))
    worker.exit(1)
    while not stage.failures:
        await asyncio.sleep(0)
    again = stage.use("job_2", model("a"))
    assert again is not failed and again.failure is None
    (await stage.executor.next(ready=False)).say(Ready(1))
