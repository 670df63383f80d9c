"""Jobs that a server's frontend took, with real workers: what their callers may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import resource
import threading
import time

import msgspec
import pytest
import sqlalchemy as sa
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service

from batchmill.engines.clock import SystemClock
from batchmill.errors import Conflict, InvalidInput, InvalidTransition, OverQuota, StorageFull, UnknownName
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.files import read_spec
from batchmill.jobs.service import JobService
from batchmill.states import JobState
from batchmill.store.sql.tables import packed_jobs
from batchmill.types import (
    Amendment,
    DatasetSpec,
    JobOrder,
    JobQuery,
    ModelSpec,
    Once,
    Policy,
    Price,
    ProjectQuotas,
    Quotas,
)

CODE = """
import os, time
def double(n):
    return 2 * n
def slow(n):
    time.sleep(0.02)
    return n
def fragile(n):
    if os.path.exists(os.environ["BROKEN"]) and n % 2:
        raise ValueError(f"no {n}")
    return n
"""
ROWS = 200
LONG = 1024 * 1024  # bytes of a file that is no small job's
FRONTEND = {"frontend": "openai"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    return tmp_path


def write(
    folder, model: str | None, *, rows: int = ROWS, url: str = "/v1/x", name: str = "in.jsonl", padding: int = 0
) -> str:
    """A batch file of rows that all name a model. `padding`: blank bytes at its end."""
    named = {} if model is None else {"model": model}
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": {**named, "n": n}}) for n in range(rows)
    ]
    (folder / name).write_text("\n".join(lines) + "\n" + " " * padding)
    return str(folder / name)


def order(folder, *functions: str, path: str | None = None, **more) -> JobOrder:
    """As a frontend orders: every model that the caller may use, of which rows have to name one."""
    models = [ModelSpec(name, "function", f"{folder / 'app.py'}:{name}", allowed=[name]) for name in functions]
    fields = {"origin": FRONTEND, "default_model": False, **more}
    return JobOrder(DatasetSpec([path or str(folder / "in.jsonl")], format="openai"), models, **fields)


async def midway(service: JobService, asked: JobOrder) -> str:
    """The id of a job that has its first rows."""
    submitted = await service.submit(asked)
    async for view in service.watch(submitted.id, 0.02):
        if view.rows_ok:
            break
    return submitted.id


def lines(path: str | None) -> list[dict]:
    assert path is not None
    with open(path) as file:
        return [json.loads(line) for line in file]


async def test_each_order_is_a_job_of_its_own(folder, opened):
    """The same order twice is two jobs, each with its results; they carry what their callers said of them."""
    write(folder, "double", rows=3)
    service = await opened()
    job_order = order(folder, "double", project="north", labels={"of": "mine"}, policy=Policy(priority=7))
    ids = [(await service.submit(job_order)).id for _ in range(2)]
    assert len(set(ids)) == 2
    for job_id in ids:
        view = await end_of(service, job_id)
        assert (view.state, view.rows_ok, view.model) == ("completed", 3, "double")
        assert (view.project, view.labels, view.origin, view.priority) == ("north", {"of": "mine"}, FRONTEND, 7)
        assert view.created <= view.started <= view.finalizing <= view.finished
        assert [line["response"]["body"] for line in lines(view.output)] == [0, 2, 4]


async def test_only_models_with_rows_are_started(folder, opened):
    """Of all the models that a caller may use, those are started that rows name; one that cannot start harms none."""
    write(folder, "double", rows=3)
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "missing", "double", "slow"))).id)
    assert (view.state, view.rows_ok, view.model) == ("completed", 3, "double")
    assert len(list((folder / "data" / "workers").glob("*/worker-*"))) <= 1


async def test_a_model_whose_file_is_gone(folder, opened):
    """A function of the server that is gone or was changed stops no job whose rows need another."""
    write(folder, "slow", rows=50)
    (folder / "other.py").write_text("def other(n):\n    return n\n")
    service = await opened()
    models = [ModelSpec("other", "function", f"{folder / 'other.py'}:other", allowed=["other"])]
    job_order = order(folder, "slow")
    job_id = await midway(service, msgspec.structs.replace(job_order, models=[*models, *job_order.models]))
    await service.pause(job_id)
    (folder / "other.py").unlink()
    await service.resume(job_id)
    assert (await end_of(service, job_id)).rows_ok == 50
    again = await service.submit(msgspec.structs.replace(job_order, models=[*models, *job_order.models]))
    assert (await end_of(service, again.id)).rows_ok == 50


async def test_a_cancel_that_comes_with_a_resume(folder, opened):
    """A job that is let go on at the moment in which it is cancelled is cancelled."""
    write(folder, "slow")
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    await service.pause(job_id)
    await asyncio.gather(service.resume(job_id), service.cancel(job_id))
    assert (await end_of(service, job_id)).state == "cancelled"


async def test_a_cancel_that_comes_with_the_last_row(folder, opened):
    """A job whose rows are all counted while its end is being written down ends; nothing of it is left to do.

    The end of a small job is one transaction, which nothing can come before.
    """
    rows = 1001
    write(folder, "double", rows=rows)
    service = await opened()
    job_id = (await service.submit(order(folder, "double"))).id
    while (run := service.dispatcher._runs.get(job_id)) is None:
        await asyncio.sleep(0)
    await asyncio.wait({run.ended})
    written = threading.Event()
    holding = asyncio.create_task(service._ledger.database.call(written.wait))  # nothing is written down for now
    while job_id in service.dispatcher._runs:
        await asyncio.sleep(0)
    cancelling = asyncio.create_task(service.cancel(job_id))
    while not service._active.get(job_id)._writing_end.locked():
        await asyncio.sleep(0)
    written.set()
    await holding
    assert (await cancelling).state == "cancelling"
    view = await end_of(service, job_id)
    assert (view.state, view.message, view.rows_ok, len(lines(view.output))) == ("cancelled", "", rows, rows)


async def test_an_order_that_arrives_twice_at_once(folder, opened):
    """Of two that have one name and arrive together, the second is told of the job of the first."""
    write(folder, "double", rows=3)
    service = await opened()
    job_order = order(folder, "double", once=Once("blind:1", "0" * 64, blind=True))
    first, second = await asyncio.gather(service.submit(job_order), service.submit(job_order))
    assert first.id == second.id and {first.how, second.how} == {"started", "repeated"}
    await service._ledger.database.write(records.answered, "blind:1", service._clock.now())
    assert (await service.submit(job_order)).how == "started"
    assert len(await service.list()) == 2


async def test_a_repeat_is_known_after_a_restart(folder, opened):
    """The next owner of the directory knows the job that an order has become; the key stands for nothing else."""
    write(folder, "double", rows=3)
    service = await opened()
    first = await service.submit(order(folder, "double", once=Once("key:1", "0" * 64)))
    await service.close(at_once=True)
    service = await opened()
    again = await service.submit(order(folder, "double", once=Once("key:1", "0" * 64)))
    assert (again.id, again.how) == (first.id, "repeated")
    with pytest.raises(Conflict):
        await service.submit(order(folder, "double", once=Once("key:1", "1" * 64)))


async def test_whoever_asked_may_leave(folder, opened):
    """An order is taken whole although the call that brought it is cancelled."""
    write(folder, "double", rows=3)
    service = await opened()
    once = Once("key:1", "0" * 64)
    call = asyncio.create_task(service.submit(order(folder, "double", once=once)))
    await asyncio.sleep(0)
    call.cancel()
    submitted = await service.submit(order(folder, "double", once=once))
    assert submitted.how == "repeated" and (await end_of(service, submitted.id)).rows_ok == 3
    assert len(await service.list()) == 1


async def test_a_refused_order_leaves_nothing(folder, opened):
    """An order that cannot be run is refused before there is a trace of it, and its key stays free."""
    write(folder, "double", rows=3)
    service = await opened()
    past = Policy(deadline=time.time() - 1)
    once = Once("key:1", "0" * 64)
    for policy in (past, Policy(priority=101), Policy(budget=1.0)):
        with pytest.raises(InvalidInput):
            await service.submit(order(folder, "double", policy=policy, once=once))
    assert await service.list() == [] and not (folder / "data" / "jobs").exists()
    assert (await service.submit(order(folder, "double", once=once))).how == "started"


@pytest.mark.parametrize(
    ("model", "url", "more", "code"),
    [
        (None, "/v1/x", {}, "missing_model"),
        ("slow", "/v1/x", {}, "unknown_model"),
        ("app.py:double", "/v1/x", {}, "unknown_model"),
        ("double", "/v1/y", {"endpoint": "/v1/x"}, "invalid_url"),
    ],
)
async def test_rows_that_do_not_fit_the_order(folder, opened, model, url, more, code):
    """A row that names no model, another one or another path is refused with its line; only this job's are named."""
    write(folder, model, rows=3, url=url)
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "double", **more))).id)
    assert (view.state, view.reason, view.problems_total) == ("failed", "invalid_dataset", 3)
    assert [(each.code, each.line) for each in view.problems] == [(code, 1), (code, 2), (code, 3)]
    assert str(folder) not in view.problems[0].message


async def test_too_many_rows(folder, opened):
    """A dataset with one row more than are taken is refused; one with as many runs."""
    write(folder, "double", rows=11)
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "double", rows_max=10))).id)
    assert (view.state, view.reason) == ("failed", "too_many_rows") and "10" in view.message
    view = await end_of(service, (await service.submit(order(folder, "double", rows_max=11))).id)
    assert (view.state, view.rows_ok) == ("completed", 11)


async def test_pages(folder, opened):
    """A list gives the newest first, by project and frontend, a page at a time and without problems."""
    write(folder, None, rows=1)
    service = await opened()
    mine, others = [], []
    for number in range(5):
        kept = {"project": "mine"} if number != 2 else {"project": "other"}
        submitted = await service.submit(order(folder, "double", **kept))
        (mine if number != 2 else others).append(submitted.id)
        await end_of(service, submitted.id)
    everything = [view.id for view in await service.list(JobQuery(project="mine", origin="openai"))]
    assert everything == mine[::-1]
    page = await service.list(JobQuery(project="mine", limit=2))
    assert [view.id for view in page] == everything[:2] and page[0].problems == []
    assert page[0].problems_total == 1
    rest = await service.list(JobQuery(project="mine", after=page[-1].id, limit=10))
    assert [view.id for view in rest] == everything[2:]
    assert await service.list(JobQuery(project="mine", origin="native")) == []
    with pytest.raises(UnknownName):
        await service.list(JobQuery(project="mine", after=others[0]))


async def test_cancel_answers_before_the_end(folder, opened):
    """A cancelled job says so at once and durably; its finished rows and the others end in the two files."""
    write(folder, "slow")
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    view = await service.cancel(job_id)
    assert view.state in ("cancelling", "cancelled") and view.cancelling is not None
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok + view.rows_failed) == ("cancelled", ROWS) and view.rows_ok
    assert len(lines(view.output)) == view.rows_ok
    message = "This request was not executed because the batch was cancelled."
    failed = lines(view.errors_output)
    assert len(failed) == view.rows_failed == view.errors["batch_cancelled"]
    assert (failed[0]["response"], failed[0]["error"]) == (None, {"code": "batch_cancelled", "message": message})


async def test_cancelled_before_any_row_was_read(folder, opened):
    """A job that is cancelled while its rows are being checked ends without files."""
    write(folder, "slow", rows=20_000)
    service = await opened()
    job_id = (await service.submit(order(folder, "slow"))).id
    view = await service.cancel(job_id)
    assert (view.state, view.output, view.errors_output) == ("cancelled", None, None)
    with pytest.raises(InvalidTransition):
        await service.cancel(job_id)
    with pytest.raises(InvalidTransition, match="submit it again"):
        await service.retry(job_id)


async def test_a_deadline_ends_a_running_job(folder, opened):
    """At its deadline a job expires: what has finished is kept, the rest are errors with OpenAI's words."""
    write(folder, "slow")
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    view = await service.amend(job_id, Amendment(deadline=time.time() + 0.3))
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok + view.rows_failed) == ("expired", ROWS) and view.rows_ok
    assert view.deadline <= view.cancelling <= view.finished
    message = "This request could not be executed before the completion window expired."
    failed = lines(view.errors_output)
    assert failed[0]["error"] == {"code": "batch_expired", "message": message} and len(failed) == view.rows_failed
    again = await service.retry(job_id)
    assert (again.deadline, again.cancelling, again.finished) == (None, None, None)
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok, view.rows_failed, view.errors) == ("completed", ROWS, 0, {})


async def test_a_deadline_ends_a_paused_job(folder, opened):
    """A paused job expires too, also when nobody owned the directory as its deadline passed."""
    write(folder, "slow")
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    await service.pause(job_id)
    await service.amend(job_id, Amendment(deadline=time.time() + 0.5))
    await service.close(at_once=True)
    await asyncio.to_thread(time.sleep, 0.6)
    service = await opened()
    while (view := await end_of(service, job_id)).state != "expired":
        assert view.state in ("paused", "cancelling")
        await asyncio.sleep(0.01)
    assert len(lines(view.output)) == view.rows_ok > 0 and len(lines(view.errors_output)) == view.rows_failed


async def test_an_engine_that_cannot_start(folder, opened):
    """With no row run, a job whose caller asked for it fails with the engine's words; otherwise it is paused."""
    write(folder, "missing", rows=3)
    service = await opened()
    job_order = order(folder, "missing", policy=Policy(on_engine_failure="fail"))
    view = await end_of(service, (await service.submit(job_order)).id)
    assert (view.state, view.reason) == ("failed", "engine_failed") and "missing" in view.message
    view = await end_of(service, (await service.submit(order(folder, "missing"))).id)
    assert (view.state, view.reason) == ("paused", "engine_failed")
    wait = await service.explain(view.id)
    assert len(wait.reasons) == 1 and "missing" in wait.reasons[0] and "resume it" in wait.reasons[0]


async def test_a_server_goes_on_with_its_jobs(folder, opened):
    """What was interrupted goes on by itself in a server that starts; what somebody paused does not."""
    write(folder, "slow")
    service = await opened()
    paused = await midway(service, order(folder, "slow"))
    await service.pause(paused)
    job_id = await midway(service, order(folder, "slow"))
    await service.close(at_once=True)
    service = await opened()
    assert (await service.show(job_id)).reason == "interrupted"
    await service.close(at_once=True)
    service = await opened(serving=True)
    while (view := await end_of(service, job_id)).state == "paused":
        await asyncio.sleep(0.01)
    assert (view.state, view.rows_ok) == ("completed", ROWS)
    assert (await service.show(paused)).state == "paused"


async def test_amendments_are_kept(folder, opened):
    """A priority, deadline or budget is changed for good, also of a job that runs; nothing of one that has ended."""
    write(folder, "slow", rows=50)
    service = await opened()
    models = [ModelSpec("slow", "function", f"{folder / 'app.py'}:slow", price=Price())]
    job_order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), models, origin=FRONTEND)
    job_id = await midway(service, job_order)
    far = time.time() + 1000
    view = await service.amend(job_id, Amendment(priority=5, deadline=far, budget=2.5))
    assert (view.priority, view.deadline) == (5, far)
    with pytest.raises(InvalidInput, match="not ahead"):
        await service.amend(job_id, Amendment(deadline=1.0))
    with pytest.raises(InvalidInput):
        await service.amend(job_id, Amendment())
    policy = read_spec((await service._record(job_id))["spec"]).policy
    assert (policy.priority, policy.budget) == (5, 2.5)
    await end_of(service, job_id)
    with pytest.raises(InvalidTransition):
        await service.amend(job_id, Amendment(priority=1))


async def test_published_results_never_change(folder, opened, monkeypatch):
    """Whoever has linked a job's results keeps those bytes when a retry publishes others."""
    broken = folder / "broken"
    broken.touch()
    monkeypatch.setenv("BROKEN", str(broken))
    write(folder, "fragile", rows=10)
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "fragile"))).id)
    assert (view.rows_ok, view.rows_failed) == (5, 5)
    for name, path in (("kept", view.output), ("kept.errors", view.errors_output)):
        os.link(path, folder / name)
    before = [(folder / name).read_bytes() for name in ("kept", "kept.errors")]
    broken.unlink()
    await service.retry(view.id)
    view = await end_of(service, view.id)
    assert (view.rows_ok, view.errors_output, len(lines(view.output))) == (10, None, 10)
    assert [(folder / name).read_bytes() for name in ("kept", "kept.errors")] == before


async def test_folders_that_no_job_has(folder, opened):
    """What a crash left of an order that was never stored is swept; a folder with work in it stays."""
    jobs = folder / "data" / "jobs"
    for name in ("job_orphan", "job_lost"):
        for part in ("dataset", "segments", "plan-0"):
            (jobs / name / part).mkdir(parents=True)
        (jobs / name / "job.json").write_text("{}")
    (jobs / "job_lost" / "dataset" / "seal.json").write_text("{}")
    await opened()
    assert [path.name for path in jobs.iterdir()] == ["job_lost"]


class HastyClock(SystemClock):
    """Does not sleep as long as it is asked to."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.02))


async def test_a_server_waits_for_room(folder, opened):
    """In a server a job that a full disk has stopped goes on by itself, and nobody has to ask."""
    write(folder, "slow", rows=50)
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    await service.pause(job_id)
    await service.close(at_once=True)
    ledger = open_ledger(folder / "data" / "batchmill.db")
    ledger.note(job_id, reason="storage_full")
    ledger.close()
    service = await opened(serving=True, clock=HastyClock())
    while (view := await end_of(service, job_id)).state == "paused":
        await asyncio.sleep(0.01)
    assert (view.state, view.rows_ok, view.reason) == ("completed", 50, None)


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.QUEUED])
async def test_a_server_that_starts_on_a_full_disk(folder, opened, state):
    """A job that ran when its server was killed goes on by itself once there is room, be it set down before or not."""
    write(folder, "slow", rows=50, padding=LONG)
    service = await opened()
    job_id = await midway(service, order(folder, "slow"))
    await service.pause(job_id)
    await service._commit_log.call(service._ledger.note, job_id, reason="interrupted")
    await service.close(at_once=True)
    ledger = open_ledger(folder / "data" / "batchmill.db")
    service = job_service(folder / "data", ledger, LocalExecutor(folder / "data" / "workers"), HastyClock())
    with no_file_may_grow():
        await service.recover(resume_server_jobs=True)
        while job_id not in service._stalled.stranded:
            await asyncio.sleep(0)
    if state is JobState.QUEUED:  # as where not even that it paused could be written down
        ledger.move(job_id, state)
    while (view := await end_of(service, job_id)).state != "completed":
        await asyncio.sleep(0.01)
    assert (view.rows_ok, view.reason, service._stalled.stranded) == (50, None, set())
    await service.close(at_once=True)


@contextlib.contextmanager
def no_file_may_grow():
    """As if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_an_order_on_a_full_disk(folder, opened):
    """An order that cannot be written down is refused as such, and no folder of it stays."""
    write(folder, "double", rows=3, padding=LONG)
    service = await opened()
    with no_file_may_grow(), pytest.raises(StorageFull):
        await service.submit(order(folder, "double"))
    assert await service.list() == [] and list((folder / "data" / "jobs").iterdir()) == []
    assert (await service.submit(order(folder, "double"))).how == "started"


async def test_what_was_unpacked_goes_with_the_job(folder, opened):
    """A job that is cancelled while its rows are unpacked, or refused for what they come to, leaves none of them; what
    a kill left of another is removed by the next owner."""
    (folder / "in.csv").write_text("n\n" + "1\n" * 5000)
    refused = DatasetSpec([str(folder / "in.csv")], unpacked_bytes_max=1000)
    endless = folder / "endless.csv.gz"
    endless.write_bytes(gzip.compress(b"n\n" + b"1\n" * 20_000_000, 1))
    result = msgspec.structs.replace(order(folder, "double"), dataset=refused, default_model=True)
    service = await opened()
    job = (await service.submit(result)).id
    ended = await end_of(service, job)
    assert (ended.state, ended.reason) == ("failed", "unpacked_too_large")
    assert "limits.unpacked_bytes_max" in ended.message
    assert list((service_home(folder) / job / "dataset").iterdir()) == []
    cut = msgspec.structs.replace(result, dataset=DatasetSpec([str(endless)], unpacked_ratio_max=10**9))
    job = (await service.submit(cut)).id
    home = service_home(folder) / job / "dataset"
    while not (home / "rows.jsonl").exists():
        await asyncio.sleep(0.01)
    await service.cancel(job)
    assert (await end_of(service, job)).state == "cancelled"
    assert list(home.iterdir()) == []
    paused = (await service.submit(cut)).id
    await service.pause(paused)
    left = service_home(folder) / paused / "dataset" / "rows.jsonl"
    left.write_bytes(b"{}")
    await service.close()
    await opened()
    assert not left.exists()


def service_home(folder):
    return next(folder.rglob("jobs"))


async def test_what_a_job_unpacks_counts_to_its_project(folder, opened):
    """A job ends where its project has no room for what its rows come to, and what it wrote goes; jobs that a command
    orders count nowhere. With nothing left no further job is taken."""
    quotas = ProjectQuotas(Quotas(disk=100_000))
    service = await opened(quotas=quotas)
    disk_quota = service._stalled._disk_quota
    (folder / "in.csv").write_text("n\n" + "1\n" * 20_000)
    result = msgspec.structs.replace(order(folder, "double"), dataset=DatasetSpec([str(folder / "in.csv")]))
    result = msgspec.structs.replace(result, default_model=True)
    job = (await service.submit(result)).id
    ended = await end_of(service, job)
    assert (ended.state, ended.reason) == ("failed", "quota_exceeded") and "quotas.disk" in ended.message
    assert (await disk_quota.usage("default"))[0] < 10_000
    write(folder, "double", rows=100)
    job = (await service.submit(order(folder, "double"))).id
    assert (await end_of(service, job)).state == "completed"
    has, most = await disk_quota.usage("default")
    with service._ledger.database.reader.begin() as db:
        packed = len(db.execute(sa.select(packed_jobs.c.files).where(packed_jobs.c.job == job)).scalar_one())
    assert has >= packed
    await service.close()
    quotas = ProjectQuotas(Quotas(disk=int(has)))
    service = await opened(quotas=quotas)
    with pytest.raises(OverQuota):
        await service.submit(order(folder, "double"))
    command = msgspec.structs.replace(result, origin=None, output=str(folder / "out.jsonl"))
    assert (await end_of(service, (await service.submit(command)).id)).state == "completed"


async def test_results_beyond_the_quota_pause_the_job(folder, opened):
    """A job whose results find no room is paused where it is, says why, and goes on by itself once there is room."""
    service = await opened(quotas=ProjectQuotas(Quotas(disk=20_000_000)))
    write(folder, "slow")
    job = await midway(service, order(folder, "slow"))
    disk_quota = service._stalled._disk_quota
    enough, disk_quota.quotas = disk_quota.quotas, ProjectQuotas(Quotas(disk=1))
    await asyncio.gather(*await service._maintenance.poll())  # as it does every few seconds
    view = await end_of(service, job)
    assert (view.state, view.reason) == ("paused", "disk_quota") and "quotas.disk" in view.message
    assert "it resumes by itself when space is free" in (await service.explain(job)).reasons[0]
    await asyncio.gather(*await service._maintenance.poll())
    assert (await service.show(job)).state == "paused"
    disk_quota.quotas = enough
    await asyncio.gather(*await service._maintenance.poll())
    view = await end_of(service, job)
    assert (view.state, view.rows_ok) == ("completed", ROWS)
