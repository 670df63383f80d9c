"""Jobs of one caller: its own project's, by full ids, with results that can be fetched."""

from __future__ import annotations

import json

import pytest
from dialects.open_server import open_server

from batchmill.errors import UnknownName
from batchmill.states import JobState
from batchmill.types import Amendment, Caller, DatasetSpec, JobOrder, JobQuery, Scope

ANN, BOB = Caller("ann", Scope.SUBMIT), Caller("bob", Scope.ADMIN)


@pytest.fixture
async def running(tmp_path):
    async with open_server(tmp_path) as running:
        yield running


@pytest.fixture
def project_jobs(running):
    return running.services.jobs


def order(running, folder, numbers, model: str = "double") -> JobOrder:
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": model, "n": n}} for n in numbers]
    path = folder / f"{len(rows)}-{model}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = running.services.directory.specs(ANN)
    return JobOrder(DatasetSpec([str(path)], format="openai"), models, default_model=False, origin={"frontend": "test"})


async def ended(project_jobs, job_id: str):
    async for view in project_jobs.watch(ANN, job_id, 0.01):
        last = view
    assert JobState(last.state).is_at_rest, last
    return await project_jobs.show_with_results(ANN, job_id)


async def test_a_job_belongs_to_its_caller(running, project_jobs, tmp_path):
    """Whatever project an order names, the job is the caller's, and nobody else's."""
    job_order = order(running, tmp_path, range(3))
    job = (await project_jobs.submit(ANN, job_order)).id
    view, results = await ended(project_jobs, job)
    assert (view.project, view.rows_ok) == ("ann", 3) and results.output and results.errors is None
    record = await running.services.files.get("ann", results.output)
    assert running.services.files.path(record).read_bytes().count(b"\n") == 3
    assert await project_jobs.results_of(view) == (record, None)


async def test_the_results_of_a_job_that_has_just_ended_are_known(running, project_jobs, tmp_path):
    """The poll that first shows the end waits for nothing; one for another project finds nothing."""
    job = (await project_jobs.submit(ANN, order(running, tmp_path, range(1)))).id  # in one commit
    async for _ in running.services.jobs._jobs.watch(job, 0.01):
        pass
    found = project_jobs.show_recent(ANN, job)
    assert found is not None and project_jobs.show_recent(BOB, job) is None
    assert found == await project_jobs.show_with_results(ANN, job) and found[1].output is not None


async def test_others_jobs_are_unknown(running, project_jobs, tmp_path):
    """Every verb answers for another project's job, a prefix, and an id that never was, in the same words."""
    job = (await project_jobs.submit(ANN, order(running, tmp_path, range(1), "gated"))).id
    said = set()
    for job_id in (job, job[:-1], "job_0123456789abcdef0123", "", "../x"):
        for ask in (
            project_jobs.show,
            project_jobs.pause,
            project_jobs.resume,
            project_jobs.cancel,
            project_jobs.retry,
            project_jobs.explain,
            project_jobs.partial,
            project_jobs.verify,
        ):
            with pytest.raises(UnknownName) as unknown:
                await ask(BOB, job_id)
            said.add(unknown.value.message.replace(repr(job_id), "ID"))
        with pytest.raises(UnknownName):
            await project_jobs.amend(BOB, job_id, Amendment(priority=1))
        with pytest.raises(UnknownName):
            [view async for view in project_jobs.watch(BOB, job_id)]
    assert said == {"there is no job ID"}
    (tmp_path / "gate").touch()
    assert (await ended(project_jobs, job))[0].state == "completed"


async def test_a_list_holds_ones_own(running, project_jobs, tmp_path):
    """Only the caller's jobs are listed, and only they can be listed after."""
    mine = [(await project_jobs.submit(ANN, order(running, tmp_path, range(n)))).id for n in (1, 2)]
    assert [view.id for view in await project_jobs.list(ANN)] == mine[::-1]
    assert await project_jobs.list(BOB) == []
    assert [view.id for view in await project_jobs.list(ANN, JobQuery(after=mine[1]))] == mine[:1]
    with pytest.raises(UnknownName):
        await project_jobs.list(BOB, JobQuery(after=mine[0]))
    for job in mine:
        await ended(project_jobs, job)


async def test_steering(running, project_jobs, tmp_path):
    """The caller pauses, changes, resumes, explains and cancels its own job."""
    job = (await project_jobs.submit(ANN, order(running, tmp_path, range(3), "gated"))).id
    async for view in project_jobs.watch(ANN, job, 0.01):
        if view.state == "running":
            break
    assert (await project_jobs.pause(ANN, job)).state == "paused"
    assert (await project_jobs.explain(ANN, job)).reasons
    assert (await project_jobs.amend(ANN, job, Amendment(priority=7))).priority == 7
    await project_jobs.resume(ANN, job)
    cancelling = project_jobs.cancel(ANN, job)
    (tmp_path / "gate").touch()
    assert (await cancelling).state in ("cancelling", "cancelled")
    assert (await ended(project_jobs, job))[0].state == "cancelled"
