"""Short jobs of a server: sealed and planned on the event loop, and stored running, in one transaction."""

from __future__ import annotations

import asyncio
import errno
import gzip
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service
from msgspec.structs import replace

from batchmill.engines.clock import SystemClock
from batchmill.errors import DatabaseUnavailable, InvalidInput, LedgerBroken, OverQuota, UnknownName
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import recorded_job
from batchmill.jobs.intake import orders, preview
from batchmill.jobs.ledger import packed, records
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.results import counted_commits
from batchmill.jobs.service import JobService
from batchmill.store.sql.tables import jobs, shards, submissions
from batchmill.types import (
    DatasetSpec,
    JobOrder,
    JobQuery,
    ModelSpec,
    Once,
    Policy,
    ProjectQuotas,
    Quotas,
    Submitted,
)

LINE = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"model":"%s","n":%d}}\n'


@pytest.fixture
async def opened(tmp_path) -> AsyncIterator:
    services: list[JobService] = []
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    data = tmp_path / "data"
    data.mkdir()

    async def open_service(**space: object) -> JobService:
        ledger = open_ledger(data / "batchmill.db")
        services.append(job_service(data, ledger, LocalExecutor(data / "workers"), SystemClock(), **space))
        await services[-1].recover(resume_server_jobs=True)
        return services[-1]

    yield open_service
    await services[-1].close()


def order(folder, rows: int = 5, *, model: str = "double", once: Once | None = None) -> JobOrder:
    path = folder / f"{model}-{rows}.jsonl"
    path.write_text("".join(LINE % (n, model, n) for n in range(rows)))
    spec = ModelSpec("double", "function", f"{folder / 'app.py'}:double", allowed=["double"])
    return JobOrder(
        DatasetSpec([str(path)], format="openai"), [spec], origin={"frontend": "openai"}, default_model=False, once=once
    )


async def stored(service: JobService, query: sa.Select) -> list:
    return await service._ledger.database.read(lambda db: db.execute(query).all())


def is_left(service: JobService) -> bool:
    """Whether anything of a job is left in the scratch folder, or a runner of one."""
    return bool(list(service._scratch.home.glob("jobs/*")) or service._active.all_running())


def noting(function, threads: set[bool]):
    """A function that notes whether it is called on the event loop."""

    def noted(*args: object) -> object:
        threads.add(threading.current_thread() is threading.main_thread())
        return function(*args)

    return noted


async def test_it_is_stored_with_its_plan_and_its_first_lease(opened, tmp_path):
    """Once the submission returns, the job runs: no state before that was ever stored, and its shard is leased once."""
    service = await opened()
    first: list[tuple[str, int]] = []
    service._ledger.database.writer.listen(
        lambda changes: first.extend((each["state"], each["rows"]) for each in changes.values() if each is not None)
    )
    job_id = (await service.submit(order(tmp_path))).id
    assert first[0] == ("running", 5)
    assert (await service.show(job_id)).started is not None
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok, (await service.verify(job_id)).broken) == ("completed", 5, [])
    assert await stored(service, sa.select(shards.c.epoch, shards.c.done)) == [(1, 5)]


async def test_a_longer_one_is_stored_before_it_is_sealed(opened, tmp_path):
    """A job beyond SHORT_BYTES_MAX does not hold up the event loop, nor its submission."""
    service = await opened()
    rows = packed.SHORT_BYTES_MAX // len(LINE % (1, "double", 1)) + 1
    wanted = order(tmp_path, rows)
    assert not packed.is_short(wanted.dataset, 1) and packed.is_short(order(tmp_path, rows - 20).dataset, 1)
    states: list[str] = []
    service._ledger.database.writer.listen(
        lambda changes: states.extend(each["state"] for each in changes.values() if each is not None)
    )
    view = await end_of(service, (await service.submit(wanted)).id)
    assert (states[0], view.state, view.rows_ok) == ("validating", "completed", rows)


async def test_thousands_of_tiny_lines_are_not_checked_on_the_event_loop(opened, tmp_path):
    """To refuse each of them takes longer than to check as many bytes of rows that are accepted."""
    service = await opened()
    wanted = order(tmp_path)
    (tmp_path / "double-5.jsonl").write_text("1\n" * (packed.SHORT_BYTES_MAX // 2))
    states: list[str] = []
    service._ledger.database.writer.listen(
        lambda changes: states.extend(each["state"] for each in changes.values() if each is not None)
    )
    view = await end_of(service, (await service.submit(wanted)).id)
    assert (states[0], view.state, view.problems_total) == ("validating", "failed", packed.SHORT_BYTES_MAX // 2)


async def test_an_order_that_may_use_many_models_does_not_hold_up_the_event_loop(opened, tmp_path, monkeypatch):
    """A server with many models hands all of them to each job: to describe and to plan it takes time in proportion."""
    service, threads = await opened(), set[bool]()
    monkeypatch.setattr(preview, "prepare_in", noting(preview.prepare_in, threads))
    monkeypatch.setattr(orders, "describe", noting(orders.describe, threads))
    for models in (packed.SHORT_MODELS_MAX, packed.SHORT_MODELS_MAX + 1):
        wanted = order(tmp_path)
        more = [replace(wanted.models[0], name=f"m{n}", allowed=[f"m{n}"]) for n in range(1, models)]
        view = await end_of(service, (await service.submit(replace(wanted, models=[*wanted.models, *more]))).id)
        assert (view.state, view.rows_ok, threads) == ("completed", 5, {models == packed.SHORT_MODELS_MAX})
        threads.clear()


async def test_a_job_with_a_prompt_does_not_hold_up_the_event_loop(opened, tmp_path, monkeypatch):
    """A prompt may name columns 20,000 times, and is filled for each row: half a second."""
    service, threads = await opened(), set[bool]()
    monkeypatch.setattr(recorded_job, "prepare", noting(recorded_job.prepare, threads))
    monkeypatch.setattr(orders, "describe", noting(orders.describe, threads))
    (tmp_path / "in.jsonl").write_text('{"n":1}\n')
    model = ModelSpec("m", "llm", str(tmp_path), python=str(tmp_path / "no-python"))
    dataset = DatasetSpec([str(tmp_path / "in.jsonl")], format="jsonl")
    view = await end_of(
        service, (await service.submit(JobOrder(dataset, [model], prompt="say {n}", origin={"frontend": "native"}))).id
    )
    assert (view.rows, view.reason, threads) == (1, "engine_failed", {False})


async def test_many_files_do_not_hold_up_the_event_loop(opened, tmp_path, monkeypatch):
    service, threads, wanted = await opened(), set[bool](), order(tmp_path)
    monkeypatch.setattr(preview, "prepare_in", noting(preview.prepare_in, threads))
    paths = [tmp_path / f"empty-{number}.jsonl" for number in range(packed.SHORT_FILES_MAX)]
    for path in paths:
        path.write_text("")
    dataset = replace(wanted.dataset, paths=[*wanted.dataset.paths, *map(str, paths)])
    view = await end_of(service, (await service.submit(replace(wanted, dataset=dataset))).id)
    assert (view.state, view.rows_ok, threads) == ("completed", 5, {False})


async def test_a_file_that_becomes_another_while_it_is_described(opened, tmp_path, monkeypatch):
    """Rows that must be converted have no room in memory: such a job gets files in the data directory."""
    service, wanted = await opened(), order(tmp_path)
    path, enter = Path(wanted.dataset.paths[0]), recorded_job.packed.is_short
    wanted = replace(wanted, dataset=replace(wanted.dataset, paths=[str(tmp_path / "in")]))
    path.rename(tmp_path / "in")

    def is_short(*args: object) -> bool:
        found = enter(*args)
        if found and service._active.all_running():
            (tmp_path / "in").write_bytes(gzip.compress((tmp_path / "in").read_bytes()))
        return found

    monkeypatch.setattr(packed, "is_short", is_short)
    job_id = (await service.submit(wanted)).id
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok) == ("completed", 5)
    assert (tmp_path / "data" / "jobs" / job_id / "dataset" / "rows.jsonl").exists()


async def test_results_that_are_not_kept_in_memory_come_from_the_database(opened, tmp_path, monkeypatch):
    """What a running job has counted is kept up to a limit: 512 of them may run at once, with a megabyte each."""
    monkeypatch.setattr(counted_commits, "BYTES_MAX", 0)
    service = await opened()
    view = await end_of(service, (await service.submit(order(tmp_path))).id)
    assert (view.state, view.rows_ok, (await service.verify(view.id)).broken) == ("completed", 5, [])
    lines = [msgspec.json.decode(line) for line in Path(view.output).read_bytes().splitlines()]
    assert [line["response"]["body"] for line in lines] == [0, 2, 4, 6, 8]


async def test_equal_orders_at_once_are_one_job(opened, tmp_path):
    """Those that come second get its id, and nothing of their own is left."""
    service = await opened()
    once = Once("key:1", "f" * 64)
    submitted = await asyncio.gather(*(service.submit(order(tmp_path, once=once)) for _ in range(4)))
    assert sorted(each.how for each in submitted) == ["repeated"] * 3 + ["started"]
    assert len({each.id for each in submitted}) == 1 == len(await service.list(JobQuery()))
    assert (await end_of(service, submitted[0].id)).rows_ok == 5
    again = await service.submit(order(tmp_path, once=once))
    assert (again.id, again.how) == (submitted[0].id, "repeated")
    await asyncio.sleep(0)
    assert not is_left(service)


async def test_a_repeated_order_is_its_job_whatever_says_no_now(opened, tmp_path):
    """Its deadline has passed meanwhile, or its project has no room on the disk; a new order would be refused."""
    service = await opened(quotas=(quotas := ProjectQuotas(own={})))
    first = await service.submit(order(tmp_path, once=Once("key:1", "f" * 64)))
    late = replace(order(tmp_path), policy=Policy(deadline=1.0))
    assert await service.submit(replace(late, once=Once("key:1", "f" * 64))) == Submitted(first.id, "repeated")
    with pytest.raises(InvalidInput):
        await service.submit(replace(late, once=Once("key:2", "f" * 64)))
    quotas.own["default"] = Quotas(disk=1)
    service._tools.disk_quota._read_at.clear()
    assert await service.submit(order(tmp_path, once=Once("key:1", "f" * 64))) == Submitted(first.id, "repeated")
    with pytest.raises(OverQuota):
        await service.submit(order(tmp_path, once=Once("key:2", "f" * 64)))


async def test_refused_rows_fail_the_job(opened, tmp_path):
    """A job whose rows are refused is stored as failed, with what is wrong; an order is never lost."""
    service = await opened()
    view = await end_of(service, (await service.submit(order(tmp_path, model="unknown"))).id)
    assert (view.state, view.reason, len(view.problems)) == ("failed", "invalid_dataset", 5)


@pytest.mark.parametrize("gone", ["quota", "database", "removed"])
async def test_a_submission_that_cannot_be_stored(gone, opened, tmp_path):
    """Its caller gets the error, and nothing of the job is left."""
    service = await opened(quotas=ProjectQuotas(own={"default": Quotas(unfinished_jobs=0)} if gone == "quota" else {}))
    error: type[Exception] = {"quota": OverQuota, "database": LedgerBroken, "removed": UnknownName}[gone]
    if gone != "quota":

        def enter(*args: object, **fields: object) -> None:
            raise error("it is gone")

        service._ledger.enter = enter
    with pytest.raises(error):
        await service.submit(order(tmp_path, once=Once("key:1", "f" * 64)))
    await asyncio.sleep(0)
    assert await stored(service, sa.select(jobs.c.id)) == await stored(service, sa.select(submissions.c.key)) == []
    assert not is_left(service) and not list(service.dispatcher._pools.workers()), "a refused order starts no worker"


@pytest.mark.parametrize("rows", [5, 1200])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_submission_of_which_nobody_knows_whether_it_is_stored(is_stored, rows, opened, tmp_path, monkeypatch):
    """Its caller gets the error. If it is stored, it runs once the database answers; else nothing is left of it."""
    service, target = await opened(), (records, "enter_once") if rows > 5 else (Ledger, "enter")
    enter = getattr(*target)

    def lose_the_reply(*args: object, **fields: object) -> None:
        assert not is_stored or enter(*args, **fields) is None
        monkeypatch.undo()
        if not is_stored:
            raise DatabaseUnavailable("it does not answer")
        lost.append(1)

    lost: list[int] = []
    monkeypatch.setattr(*target, lose_the_reply)
    name = "write_short" if rows == 5 else "write"
    write = getattr(service._ledger.database, name)

    async def write_and_lose(*args: object, **fields: object) -> object:
        result = await write(*args, **fields)
        if lost:
            lost.clear()
            raise DatabaseUnavailable("nobody knows whether it is committed")
        return result

    setattr(service._ledger.database, name, write_and_lose)
    with pytest.raises(DatabaseUnavailable):
        await service.submit(order(tmp_path, rows))
    await asyncio.sleep(0)
    assert not service._active.all_running()
    await asyncio.gather(*await service._maintenance.poll())
    views = await service.list(JobQuery())
    assert len(views) == is_stored and not service._stalled.stranded
    for view in views:
        end = await end_of(service, view.id)
        assert (end.state, end.rows_ok, (await service.verify(view.id)).broken) == ("completed", rows, [])


async def test_what_fails_before_it_is_stored_pauses_it(opened, tmp_path, monkeypatch):
    """A job that cannot be sealed for a reason of the machine is stored first, and says why it does not run."""
    service = await opened()
    wanted = order(tmp_path)

    def prepare_in(*_: object) -> None:
        raise OSError(errno.EIO, "an input/output error")

    monkeypatch.setattr(preview, "prepare_in", prepare_in)
    submitted = await service.submit(wanted)
    view = await end_of(service, submitted.id)
    assert (view.state, view.reason) == ("paused", "storage_failed")
    monkeypatch.undo()
    await service.resume(submitted.id)
    assert (await end_of(service, submitted.id)).state == "completed"
