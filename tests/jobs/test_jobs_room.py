"""Jobs whose models do not fit on the machine together: they take turns, and each says for what it waits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.pools.resources import Resources
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Needs, Scaling

GIB = 2**30
ROWS = 40
WAIT_S = 100.0


class Stage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = folder / "data"
        data.mkdir()
        self.jobs = job_service(
            data,
            open_ledger(data / "batchmill.db"),
            LocalExecutor(data / "workers"),
            SystemClock(),
            idle_timeout_s=600.0,
            machine=Resources(24 * GIB, []),
        )

    def model(self, name: str, gib: int, body: str = "return n", **more) -> ModelSpec:
        source = self.folder / f"{name}.py"
        source.write_text(f"import os, time\ndef {name}(n):\n    {body}\n")
        return ModelSpec(name, "function", f"{source}:{name}", needs=Needs(gib * GIB), **more)

    async def submit(self, name: str, models: list[ModelSpec]) -> str:
        path = self.folder / f"{name}.jsonl"
        names = [models[n % len(models)].name for n in range(ROWS)]
        rows = [
            {"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": each, "n": n}}
            for n, each in enumerate(names)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        order = JobOrder(DatasetSpec([str(path)]), models, output=str(self.folder / f"{name}-out.jsonl"))
        return (await self.jobs.submit(order)).id

    async def end(self, job_id: str) -> tuple[str, int]:
        async with asyncio.timeout(WAIT_S):
            view = [view async for view in self.jobs.watch(job_id, 0.05)][-1]
        return view.state, view.rows_ok

    async def waits(self, job_id: str, words: str) -> str:
        """The sentence with these words, once the job says it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = [each for each in (await self.jobs.explain(job_id)).reasons if words in each]
                if found:
                    return found[0]
                await asyncio.sleep(0.02)


@pytest.fixture
async def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    await made.jobs.close(at_once=True)


async def test_a_job_of_two_models_that_do_not_fit_together(stage):
    """The first model's rows run, then it leaves for the second's: a job is never in its own way."""
    job = await stage.submit("both", [stage.model("a", 20), stage.model("b", 20)])
    assert await stage.end(job) == ("completed", ROWS)


async def test_a_job_says_for_which_limit_it_waits(stage):
    """A job whose model has no room names the limit and what holds it, and runs once that has gone."""
    gate = stage.folder / "gate"
    hold = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n    return n"
    holder = stage.model("holder", 20, hold)
    first = await stage.submit("first", [holder])
    async with asyncio.timeout(WAIT_S):
        while not stage.jobs.dispatcher.engine_of(holder).replicas:
            await asyncio.sleep(0.02)
    second = await stage.submit("second", [stage.model("big", 12)])
    reply = await stage.waits(second, "waits for room")
    assert reply == (
        "the model 'big' waits for room: 'big' needs 12 GiB and 4 of 24 GiB are free: "
        "'holder' (a job runs on it) holds 20 GiB"
    )
    (note,) = (await stage.jobs.show(second)).notes  # which the command shows that runs it
    assert note == reply.replace("waits for room", "waits").replace("'holder'", "another model")
    gate.touch()
    assert await stage.end(first) == ("completed", ROWS)
    assert await stage.end(second) == ("completed", ROWS)


async def test_a_job_whose_model_never_fits_says_so(stage):
    """It pauses at once with both numbers."""
    job = await stage.submit("huge", [stage.model("huge", 25)])
    state, _ = await stage.end(job)
    assert state == "paused"
    assert "'huge' needs 25 GiB and the machine has 24 GiB" in (await stage.jobs.show(job)).message


async def test_a_job_with_many_shards_uses_all_replicas(stage):
    """Its rows count: a model that scales has its most replicas while they run, each with rows of its own."""
    gate = stage.folder / "gate"
    mark = f"open(os.path.join({str(stage.folder)!r}, 'pid-%d' % os.getpid()), 'w').close()"
    hold = f"{mark}\n    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n    return n"
    model = stage.model("scaled", 1, hold, scaling=Scaling(replicas_max=3, scale_up_requests=4))
    job = await stage.submit("scaled", [model])
    async with asyncio.timeout(WAIT_S):
        while len(list(stage.folder.glob("pid-*"))) < 3:
            await asyncio.sleep(0.02)
    assert stage.jobs.dispatcher.engine_of(model).ready == 3
    gate.touch()
    assert await stage.end(job) == ("completed", ROWS)
