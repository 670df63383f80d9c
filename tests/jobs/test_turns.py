"""So many jobs of a model run at once; the others wait, hold no files, and can be ended, paused and explained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import turns
from batchmill.jobs.service import JobService
from batchmill.jobs.turns import Turns
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

CODE = """
import os, time
def held(n):
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.01)
    return n
def quick(n):
    return n
"""


def spec_of(*models: str, project: str = "default", priority: int = 0, engine: str = "function") -> JobSpec:
    return JobSpec(
        id="job_1", dataset=DatasetSpec(["/data/in.jsonl"]), models=[ModelSpec(m, engine, "app.py:f") for m in models],
        form=OpenAIForm(), policy=Policy(priority=priority), output=None, identity="same", code={}, created=1.0,
        project=project,
    )  # fmt: skip


@pytest.mark.once
async def test_a_job_waits_for_those_of_its_model_and_priority():
    shared = Turns(2)  # one for each project
    first = shared.turn_of(spec_of("m"))
    await first.take()
    second = shared.turn_of(spec_of("m"))
    assert not second.is_free()
    for free in (spec_of("other"), spec_of("m", priority=1), spec_of("m", project="theirs")):
        assert shared.turn_of(free).is_free()
    assert shared.turn_of(spec_of("m", engine="provider_batch")).is_free()  # runs elsewhere
    taking = asyncio.create_task(second.take())
    await asyncio.sleep(0)
    assert "'m'" in second.waits_for
    await first.give_back()
    await taking
    assert second.is_held
    assert second.waits_for == ""


@pytest.mark.once
async def test_jobs_of_several_models_do_not_wait_for_each_other():
    shared = Turns(2)
    both, reverse = shared.turn_of(spec_of("a", "b")), shared.turn_of(spec_of("b", "a"))
    await both.take()
    waiting = asyncio.create_task(reverse.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await both.give_back()
    await reverse.take()
    assert reverse.is_held


@pytest.fixture
async def service(tmp_path, monkeypatch) -> AsyncIterator[JobService]:
    monkeypatch.setattr(turns.Turns.__init__, "__defaults__", (2,))
    (tmp_path / "app.py").write_text(CODE)
    data = tmp_path / "data"
    data.mkdir()
    executor = LocalExecutor(data / "workers")
    service = job_service(data, open_ledger(data / "batchmill.db"), executor, SystemClock())
    await service.recover(resume_server_jobs=True)
    yield service
    (tmp_path / "app.py.go").touch()
    await service.close()


def order(folder, model: str, *, rows: int = 3, **policy: object) -> JobOrder:
    line = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"model":"%s","n":%d}}\n'
    path = folder / f"{model}-{rows}.jsonl"
    path.write_text("".join(line % (n, model, n) for n in range(rows)))
    spec = ModelSpec(model, "function", f"{folder / 'app.py'}:{model}", allowed=[model])
    dataset = DatasetSpec([str(path)], format="openai")
    return JobOrder(dataset, [spec], origin={"frontend": "openai"}, default_model=False, policy=Policy(**policy))


async def reached(service: JobService, job_id: str, state: str) -> JobView:
    async for view in service.watch(job_id, 0.02):
        if view.state == state:
            return view
    view = await service.show(job_id)
    assert view.state == state, view
    return view


@pytest.mark.parametrize("rows", [3, 1500], ids=["small", "ordinary"])
async def test_waiting_jobs_run_when_there_is_room(service, tmp_path, rows):
    first = (await service.submit(order(tmp_path, "held", rows=rows))).id
    await reached(service, first, "running")
    second = (await service.submit(order(tmp_path, "held", rows=rows))).id
    await reached(service, second, "queued")
    while not any("as many as may at once" in reason for reason in (await service.explain(second)).reasons):
        await asyncio.sleep(0.01)  # it is queued a moment before it asks for a turn
    quick = (await service.submit(order(tmp_path, "quick"))).id  # another model
    urgent = (await service.submit(order(tmp_path, "held", priority=5))).id  # more important
    await reached(service, quick, "completed")
    await reached(service, urgent, "running")
    (tmp_path / "app.py.go").touch()
    views = [await reached(service, job, "completed") for job in (first, second, urgent)]
    assert [view.rows_ok for view in views] == [rows, rows, 3]


async def test_a_waiting_job_is_cancelled_and_paused(service, tmp_path):
    running = (await service.submit(order(tmp_path, "held"))).id
    await reached(service, running, "running")
    cancelled = (await service.submit(order(tmp_path, "held"))).id
    paused = (await service.submit(order(tmp_path, "held"))).id
    await reached(service, cancelled, "queued")
    await reached(service, paused, "queued")
    await service.cancel(cancelled)
    view = await reached(service, cancelled, "cancelled")
    assert (view.rows, view.rows_ok, view.rows_failed) == (3, 0, 3)
    assert (await service.pause(paused)).state == "paused"
    (tmp_path / "app.py.go").touch()
    await reached(service, running, "completed")
    await service.resume(paused)
    assert (await reached(service, paused, "completed")).rows_ok == 3
