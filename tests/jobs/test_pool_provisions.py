"""What workers are given beside their model: at their start, anew when it changes, and what happens without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.scripted_workers import ScriptedExecutor

from batchmill.engines.clock import SystemClock
from batchmill.errors import ModelFailed
from batchmill.jobs.pools.pool import Death, Pool
from batchmill.jobs.pools.pool_worker import PoolWorker
from batchmill.jobs.pools.pools import Pools
from batchmill.jobs.pools.replicas import Load
from batchmill.models.secrets import NoSecrets
from batchmill.owner_term import ENDLESS
from batchmill.types import ModelSpec, Provision
from batchmill.wire.messages import Failed, Provide

MODEL = ModelSpec("m", "http", "remote", api_key="secret:service", workers=2)
FIRST, SECOND = Provision({"secret:service": "first"}), Provision({"secret:service": "second"})


class Secrets:
    """`ports.executors.Provisions` whose answer a test sets; None: a secret is missing."""

    storage_term = NoSecrets.storage_term

    def __init__(self) -> None:
        self.now: Provision | None = FIRST
        self.asked = 0

    async def of(self, model: ModelSpec) -> Provision:
        self.asked += 1
        await asyncio.sleep(0)
        if self.now is None:
            raise ModelFailed("there is no secret 'service'", code="missing_secret")
        return self.now


class Dispatcher:
    """Hears that the model has failed."""

    term = ENDLESS

    def __init__(self) -> None:
        self.failure: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()

    async def receive(self, pool: Pool, worker: PoolWorker, message: object) -> None:
        """No rows are given out here, and none are counted."""

    def failed(self, pool: Pool, failure: Failed) -> None:
        self.failure.set_result(failure)

    def load(self, key: str) -> Load:
        return Load()

    async def recover_worker(self, pool: Pool, worker: PoolWorker, code: int) -> Death:
        return Death()


class Stage:
    def __init__(self, folder: Path) -> None:
        self.executor, self.dispatcher, self.secrets = ScriptedExecutor(), Dispatcher(), Secrets()
        self.pools = Pools(
            folder,
            self.executor,
            SystemClock(),
            dispatcher=self.dispatcher,
            idle_timeout_s=0.0,
            provisions=self.secrets,
        )


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.executor.gate.set()
    await made.pools.close(at_once=True)


async def test_workers_are_started_with_what_their_model_names(stage: Stage) -> None:
    """Each worker finds its secrets in the first message it is sent."""
    stage.pools.use("job", MODEL, "key")
    assert [(await stage.executor.next()).provision for _ in range(2)] == [FIRST, FIRST]


async def test_a_changed_secret_reaches_all_workers_once(stage: Stage) -> None:
    """After a change every worker is told once; after one that concerns another model, none is."""
    stage.pools.use("job", MODEL, "key")
    workers = [await stage.executor.next() for _ in range(2)]
    await stage.pools.provide()
    stage.secrets.now = SECOND
    await stage.pools.provide()
    await stage.pools.provide()
    for worker in workers:
        assert (await worker.expect(Provide)).provision == SECOND
        assert not worker.has_heard(Provide)


async def test_a_worker_that_was_starting_is_told_too(stage: Stage) -> None:
    """A secret that changes between a worker's first message and its place among the others is not missed."""
    stage.executor.gate.clear()
    stage.pools.use("job", ModelSpec("m", "http", "remote", api_key="secret:service"), "key")
    while not stage.secrets.asked:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    stage.secrets.now = SECOND
    await stage.pools.provide()
    while stage.secrets.asked < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    stage.executor.gate.set()
    worker = await stage.executor.next()
    assert worker.provision == FIRST
    assert (await worker.expect(Provide)).provision == SECOND


async def test_without_its_secret_a_model_fails(stage: Stage) -> None:
    """A model whose secret is missing starts no worker, and says which it is."""
    stage.secrets.now = None
    stage.pools.use("job", MODEL, "key")
    failure = await stage.dispatcher.failure
    assert failure.code == "missing_secret" and "'service'" in failure.message
    assert not stage.pools.get("key").workers


async def test_a_secret_that_is_removed_fails_what_needs_it(stage: Stage) -> None:
    """Once a secret is removed the model that runs with it has failed: its jobs pause rather than go on with it."""
    stage.pools.use("job", MODEL, "key")
    for _ in range(2):
        await stage.executor.next()
    stage.secrets.now = None
    await stage.pools.provide()
    assert (await stage.dispatcher.failure).code == "missing_secret"
    stage.secrets.now = SECOND
    again = stage.pools.use("job", MODEL, "key")
    assert again.failure is None
