"""Small jobs of a server lie in the database, and everything that can be done with a job can be done with them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from types import ModuleType

import pytest
from fakes.databases import open_ledger
from fakes.job_service import job_service
from msgspec.structs import replace

from batchmill.engines.clock import SystemClock
from batchmill.errors import UnknownName
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger import packed
from batchmill.jobs.ledger.plan import KEY_ORDER
from batchmill.jobs.service import JobService
from batchmill.store.sql.tables import model_versions
from batchmill.types import (
    DatasetSpec,
    FunctionSpec,
    JobOrder,
    JobQuery,
    JobView,
    ModelSpec,
    Once,
    OutputSchema,
    Policy,
    SchemaVersion,
)

CODE = """
import os, time
def double(n):
    return 2 * n
def fragile(n):
    if n % 2 and not os.path.exists(__file__ + ".mended"):
        raise ValueError(f"no {n}")
    return n
def held(n):
    with open(__file__ + ".calls", "a") as calls:
        calls.write(str(n))
    if n == 3 and os.path.exists(__file__ + ".held"):
        open(__file__ + ".held").read()
    time.sleep(0.1)  # its result leaves before the next row begins, not with others
    return n
def long(n):
    return "x" * 3000
"""


@pytest.fixture
async def opened(tmp_path) -> AsyncIterator:
    services: list[JobService] = []
    (tmp_path / "app.py").write_text(CODE)
    data = tmp_path / "data"
    data.mkdir()

    async def open_service(**space: object) -> JobService:
        executor = LocalExecutor(data / "workers")
        service = job_service(data, open_ledger(data / "batchmill.db"), executor, SystemClock(), **space)
        services.append(service)
        await service.recover(resume_server_jobs=True)
        return service

    yield open_service
    await services[-1].close()


def order(folder, model: str, rows: int, **policy: object) -> JobOrder:
    line = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"model":"%s","n":%d}}\n'
    (folder / f"{model}.jsonl").write_text("".join(line % (n, model, n) for n in range(rows)))
    spec = ModelSpec(model, "function", f"{folder / 'app.py'}:{model}", allowed=[model])
    dataset = DatasetSpec([str(folder / f"{model}.jsonl")], format="openai")
    return JobOrder(dataset, [spec], origin={"frontend": "openai"}, default_model=False, policy=Policy(**policy))


async def run(service: JobService, wanted: JobOrder) -> JobView:
    job_id = (await service.submit(wanted)).id
    return [view async for view in service.watch(job_id, 0.05)][-1]


def bodies(path: str) -> list[object]:
    with open(path) as file:
        return [json.loads(line)["response"]["body"] for line in file]


async def test_a_small_job_has_no_folder(opened, tmp_path):
    """Its results are one file, and an audit finds the rest in the database; a removal leaves nothing."""
    service = await opened()
    view = await run(service, order(tmp_path, "double", 5))
    assert (view.state, bodies(view.output)) == ("completed", [0, 2, 4, 6, 8])
    assert not (tmp_path / "data" / "jobs" / view.id).exists()
    assert [path.name for path in (tmp_path / "data" / "results").iterdir()] == [f"{view.id}.results.jsonl"]
    report = await service.verify(view.id)
    assert (report.broken, report.rows_done) == ([], 5)
    assert not list(service._scratch.home.glob("jobs/*"))
    await service.remove(view.id)
    assert list((tmp_path / "data" / "results").iterdir()) == []


async def test_the_first_ordered_job_stops_no_other(opened, tmp_path, monkeypatch):
    """What orders rows takes long to import: a thread does so before the event loop needs it. A job in the order of its
    file needs it not."""
    service, real, threads = await opened(), importlib.import_module, []

    def import_module(name: str) -> ModuleType:
        if name == KEY_ORDER and name not in sys.modules:
            threads.append(threading.current_thread())
        return real(name)

    monkeypatch.delitem(sys.modules, KEY_ORDER, raising=False)
    monkeypatch.setattr(importlib, "import_module", import_module)
    assert (await run(service, order(tmp_path, "double", 3))).state == "completed"
    assert KEY_ORDER not in sys.modules and threads == []
    view = await run(service, order(tmp_path, "double", 3, dedupe=True))
    assert (view.state, bodies(view.output)) == ("completed", [0, 2, 4])
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_a_cancelled_caller_waits_for_its_submission(opened, tmp_path):
    """Its input is read until then, so whoever holds that does not let it go."""
    service = await opened()
    wanted = replace(order(tmp_path, "double", 3), once=Once("key:1", "f" * 64))
    lock = service._active.lock("key:1")
    await lock.__aenter__()
    calling = asyncio.create_task(service.submit(wanted))
    for _ in range(10):
        await asyncio.sleep(0)
    calling.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not calling.done()
    await lock.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await calling
    submitted = await service.submit(wanted)
    assert submitted.how == "repeated"
    view = [view async for view in service.watch(submitted.id, 0.05)][-1]
    assert bodies(view.output) == [0, 2, 4]


async def test_a_class_is_brought_before_rows_run(opened, tmp_path):
    """A small job has the class that validates its answers before it asks for any, as every other job."""
    service = await opened()
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    model = ModelSpec("m", "http", "m", base_url="http://127.0.0.1:9", allowed=["m"])
    schema = OutputSchema('{"type":"object"}', validator="a.py:A", code="0", version=SchemaVersion("review@main/1"))
    dataset = DatasetSpec([str(tmp_path / "in.jsonl")], format="openai")
    asked = JobOrder(dataset, [model], origin={"frontend": "openai"}, default_model=False, schema=schema)
    values = {"name": "review", "branch": "main", "number": 1, "state": "ready", "created": 0.0, "source": ""}
    await service._tools.database.write(lambda db: db.execute(model_versions.insert().values(values)))
    view = await run(service, asked)
    assert (view.state, view.message) == ("paused", "the class review@main/1 is not deployed here")


@pytest.mark.parametrize("rows", [5, 1200])
async def test_a_version_that_is_removed_while_an_order_is_taken(opened, tmp_path, rows):
    """An order that names it is refused; of others, only rows that name it are, as those of an unknown model."""
    service, asked = await opened(), order(tmp_path, "double", rows)
    function = FunctionSpec("main/1", str(tmp_path), "0")
    gone = ModelSpec("gone", "function_process", "app.py:double", function=function, allowed=["gone"])
    view = await run(service, replace(asked, models=[*asked.models, gone]))
    assert (view.state, view.rows_ok) == ("completed", rows)
    named = replace(order(tmp_path, "gone", rows), models=[*asked.models, gone])
    view = await run(service, named)
    assert (view.state, view.problems[0].code) == ("failed", "unknown_model")
    with pytest.raises(UnknownName, match="the version gone@main/1 does not exist; ready versions of gone: none"):
        await service.submit(replace(named, models=[gone], default_model=True))
    assert len(await service.list(JobQuery())) == 2


@pytest.mark.parametrize("rows", [4, 1200])
async def test_a_retry_whose_version_was_removed(opened, tmp_path, rows):
    """It is refused if failed rows go to that version, and the job stays as it was; other rows are run."""
    service = await opened()
    database = service._tools.database
    values = {"name": "fragile", "branch": "main", "number": 1, "state": "ready", "created": 0.0, "source": ""}
    await database.write(lambda db: db.execute(model_versions.insert().values(values)))
    asked = order(tmp_path, "fragile", rows)
    function = FunctionSpec("main/1", str(tmp_path), "0")
    deployed = ModelSpec("fragile", "function_process", "app.py:fragile", function=function, allowed=["fragile"])
    ended = await run(service, replace(asked, models=[deployed]))
    assert (ended.state, ended.rows_failed) == ("completed", rows // 2)
    await database.write(lambda db: db.execute(model_versions.update().values(state="removed")))
    with pytest.raises(UnknownName, match="the version fragile@main/1 is removed; ready versions of fragile: none"):
        await service.retry(ended.id)
    assert ((view := await service.show(ended.id)).state, view.generation) == ("completed", 0)
    assert (await service.verify(ended.id)).broken == []


async def test_the_most_rows_of_a_small_job(opened, tmp_path):
    """A job of ROWS_MAX rows is a small one; with one row more it has a folder."""
    service = await opened()
    for rows, is_small in ((packed.ROWS_MAX, True), (packed.ROWS_MAX + 1, False)):
        view = await run(service, order(tmp_path, "double", rows))
        assert (view.state, bodies(view.output)) == ("completed", [2 * n for n in range(rows)])
        assert (tmp_path / "data" / "jobs" / view.id).exists() != is_small
        assert (await service.verify(view.id)).broken == []


async def test_results_that_are_too_long_for_the_database(opened, tmp_path):
    """Outcomes beyond the bound go to a segment file in the middle of the job; none is lost or out of order."""
    service = await opened()
    view = await run(service, order(tmp_path, "long", 600))
    assert (view.state, len(bodies(view.output))) == ("completed", 600)
    assert list((tmp_path / "data" / "jobs" / view.id / "segments").glob("*.seg"))
    report = await service.verify(view.id)
    assert (report.broken, report.rows_done) == ([], 600)


async def test_failed_rows_are_retried_by_a_later_owner(opened, tmp_path):
    """A retry plans the failed rows again, also in another process than the one that ran the job."""
    service = await opened()
    view = await run(service, order(tmp_path, "fragile", 6))
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", 3, 3)
    await service.close()
    service = await opened()
    (tmp_path / "app.py.mended").touch()
    await service.retry(view.id)
    view = [view async for view in service.watch(view.id, 0.05)][-1]
    assert (view.state, view.generation, view.rows_ok, view.rows_failed) == ("completed", 1, 6, 0)
    assert bodies(view.output) == list(range(6)) and view.errors_output is None
    assert (await service.verify(view.id)).broken == []


async def test_a_cluster_goes_on_with_small_jobs(opened, tmp_path):
    """A job that began in the database gets a folder, which nodes see, where a cluster goes on with it, or retries it.
    No row that has an outcome runs again.
    """
    service = await opened()
    ended = await run(service, order(tmp_path, "fragile", 6))
    os.mkfifo(tmp_path / "app.py.held")
    paused = (await service.submit(order(tmp_path, "held", 6))).id
    async for view in service.watch(paused, 0.05):
        if view.rows_ok == 3:
            break
    await service.close(at_once=True)
    (tmp_path / "app.py.held").unlink()
    (tmp_path / "app.py.mended").touch()
    service = await opened(is_shared=True)
    await service.retry(ended.id)
    for job_id in (ended.id, paused):
        view = [view async for view in service.watch(job_id, 0.05)][-1]
        assert (view.state, view.rows_ok, view.rows_failed, bodies(view.output)) == ("completed", 6, 0, list(range(6)))
        report = await service.verify(job_id)
        assert (report.broken, report.rows_done) == ([], 6)
        folder = tmp_path / "data" / "jobs" / job_id
        assert (folder / "dataset" / "seal.json").exists() and view.output == str(folder / "results.jsonl")
        await service.remove(job_id)
    assert (tmp_path / "app.py.calls").read_text() == "0123" + "345"
    for name in ("jobs", "results"):
        assert list((tmp_path / "data" / name).iterdir()) == []


async def test_a_rebuilt_ledger_keeps_its_outcomes(opened, tmp_path):
    """A rebuild finds the outcomes in the database, and the job ends again without running a row."""
    service = await opened()
    view = await run(service, order(tmp_path, "double", 5))
    report = await service.rebuild(view.id)
    assert (report.broken, report.rows_done, report.adopted, report.reopened) == ([], 5, 0, 0)
    (tmp_path / "app.py").write_text(CODE)  # the same: other code would be refused
    await service.resume(view.id)
    view = [view async for view in service.watch(view.id, 0.05)][-1]
    assert (view.state, view.rows_ok, bodies(view.output)) == ("completed", 5, [0, 2, 4, 6, 8])


async def test_refused_rows_of_a_small_job(opened, tmp_path):
    """A refused row fails the job, or is skipped: then it is in the error file."""
    service = await opened()
    wanted = order(tmp_path, "double", 3)
    with open(tmp_path / "double.jsonl", "a") as file:
        file.write("no row\n")
    view = await run(service, wanted)
    assert (view.state, view.problems_total, view.rows) == ("failed", 1, 4)
    await run(service, order(tmp_path, "double", 3, on_invalid="skip"))
    wanted = order(tmp_path, "double", 3, on_invalid="skip")
    with open(tmp_path / "double.jsonl", "a") as file:
        file.write("no row\n")
    view = await run(service, wanted)
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", 3, 1)
    assert (await service.verify(view.id)).broken == []
