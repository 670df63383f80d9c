"""JobService with real workers: what a caller may rely on."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from fakes.job_service import end_of

from batchmill.errors import DatasetDamaged, InvalidInput, InvalidTransition, UnknownName
from batchmill.jobs.service import JobService
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Once, Policy, Submitted

CODE = """
import os, signal, time
def double(n):
    return 2 * n
def fragile(n):
    if os.path.exists(os.environ.get("BROKEN", "/nowhere")) and n % 10 == 0:
        raise ValueError(f"no {n}")
    return n
def deadly(n):
    if n == 33:
        os.kill(os.getpid(), signal.SIGSEGV)
    return n
def slow(n):
    time.sleep(0.02)
    return n
"""
ROWS = 200


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def order(folder, function: str = "double", **more) -> JobOrder:
    model = ModelSpec(function, "function", f"{folder / 'app.py'}:{function}", workers=more.pop("workers", 1))
    output = more.pop("output", str(folder / "out.jsonl"))
    return JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=output, **more)


async def paused_midway(service: JobService, asked: JobOrder) -> str:
    """The id of a job that was paused after its first rows."""
    submitted = await service.submit(asked)
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    assert (await service.pause(submitted.id)).state == "paused"
    return submitted.id


def answers(folder, name: str = "out.jsonl") -> dict[str, object]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return {line["custom_id"]: line["response"] and line["response"]["body"] for line in lines}


async def test_runs_every_row(folder, opened):
    """A job ends with one result for each row, in input order."""
    service = await opened()
    submitted = await service.submit(order(folder))
    view = await end_of(service, submitted.id)
    assert (submitted.how, view.state, view.rows_ok, view.rows_failed) == ("started", "completed", ROWS, 0)
    assert list(answers(folder).items()) == [(f"r{n}", 2 * n) for n in range(ROWS)]
    assert (await service.verify(view.id)).broken == []


async def test_a_finished_job_is_not_run_twice(folder, opened):
    """The same order again is the finished job; with overwrite it is run anew."""
    service = await opened()
    first = await service.submit(order(folder))
    await end_of(service, first.id)
    again = await service.submit(order(folder))
    assert (again.id, again.how) == (first.id, "finished")
    anew = await service.submit(order(folder, overwrite=True))
    assert anew.id != first.id and (await end_of(service, anew.id)).state == "completed"


async def test_an_output_of_others_is_not_written_over(folder, opened):
    """A file that is there and not this job's is refused unless overwriting was asked for."""
    (folder / "out.jsonl").write_text("precious")
    service = await opened()
    with pytest.raises(InvalidInput, match="--overwrite"):
        await service.submit(order(folder))
    assert (folder / "out.jsonl").read_text() == "precious"


async def test_pause_and_resume(folder, opened, monkeypatch):
    """A paused job keeps its finished rows and goes on with the others, also for who looks at it just then.

    An order that is sent again after its end, because its reply was lost, runs no row again.
    """
    service = await opened()
    job_id = await paused_midway(service, order(folder, "slow"))
    paused, again = await service.show(job_id), order(folder, "slow", overwrite=True, once=Once("submit:1", ""))
    assert (paused.state, paused.reason) == ("paused", "asked") and 0 < paused.rows_ok < ROWS
    show = service.show

    async def resumed(job_id):
        monkeypatch.undo()
        assert (await service.submit(again)).how == "resumed"
        return await show(job_id)

    monkeypatch.setattr(service, "show", resumed)
    assert [view.rows_ok async for view in service.watch(job_id)][-1] == ROWS
    assert await service.submit(again) == Submitted(job_id, "finished")
    assert len(answers(folder)) == ROWS


async def test_partial_results_while_it_runs(folder, opened):
    """What is finished can be read while the rest runs."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    path = await service.partial(submitted.id)
    with open(path) as lines:
        found = [json.loads(line)["custom_id"] for line in lines]
    assert 0 < len(found) < ROWS and found == sorted(found, key=lambda name: int(name[1:]))
    await service.cancel(submitted.id)


async def test_partial_results_before_a_plan_are_none(folder, opened):
    """A job of which nothing is planned yet has no finished rows, which is no error."""
    service = await opened()
    submitted = await service.submit(order(folder))
    await end_of(service, submitted.id)
    shutil.rmtree(folder / "data" / "jobs" / submitted.id / "plan-0")
    path = Path(await service.partial(submitted.id))
    assert path.read_bytes() == b""


async def test_a_watch_shows_no_view_of_before_a_resume(folder, opened):
    """Who begins to watch while a paused job is being resumed sees it going on, never paused."""
    service = await opened()
    job_id = await paused_midway(service, order(folder, "slow"))
    views = service.watch(job_id, 0.05)
    resumed = asyncio.ensure_future(service.resume(job_id))
    first = asyncio.ensure_future(anext(views))
    await resumed
    assert (await first).state != "paused"
    await views.aclose()
    await service.cancel(job_id)


async def test_cancel_keeps_what_is_finished(folder, opened):
    """A cancelled job has its finished rows as results and the others as errors."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    view = await service.cancel(submitted.id)
    assert view.state == "cancelled" and view.rows_ok + view.rows_failed == ROWS and view.rows_ok > 0
    failed = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    assert len(failed) == view.rows_failed and failed[0]["error"]["code"] == "batch_cancelled"
    with pytest.raises(InvalidTransition, match="cancelled"):
        await service.cancel(submitted.id)


async def test_cancel_a_paused_job(folder, opened):
    """A paused job can be cancelled: its finished rows become its results."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    await service.pause(submitted.id)
    view = await service.cancel(submitted.id)
    assert view.state == "cancelled" and len(answers(folder)) == view.rows_ok > 0


async def test_retry_runs_only_what_failed(folder, opened, monkeypatch):
    """Retry runs the failed rows again; the results then hold them in their places."""
    broken = folder / "broken"
    broken.touch()
    monkeypatch.setenv("BROKEN", str(broken))
    service = await opened()
    submitted = await service.submit(order(folder, "fragile"))
    view = await end_of(service, submitted.id)
    assert (view.rows_ok, view.rows_failed, view.errors) == (ROWS * 9 // 10, ROWS // 10, {"ValueError": ROWS // 10})
    for _ in range(2):  # sent again, because its reply was lost, after the job has ended
        await service.retry(submitted.id, once=Once("retry:1", fingerprint=""))
        assert (await end_of(service, submitted.id)).generation == 1
    broken.unlink()
    await service.retry(submitted.id)
    view = await end_of(service, submitted.id)
    assert (view.state, view.rows_ok, view.rows_failed, view.errors) == ("completed", ROWS, 0, {})
    assert list(answers(folder).items()) == [(f"r{n}", n) for n in range(ROWS)]
    assert not (folder / "out.errors.jsonl").exists()
    with pytest.raises(InvalidTransition, match="no failed rows"):
        await service.retry(submitted.id)


async def test_a_deadly_row_ends_alone(folder, opened):
    """A row that kills its worker every time becomes an error; every other row has its result."""
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "deadly"))).id)
    assert (view.rows_ok, view.errors) == (ROWS - 1, {"worker_crashed": 1})


async def test_changed_input_is_refused_by_name(folder, opened):
    """An unfinished job is not resumed over another input; restart starts over."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    await service.pause(submitted.id)
    source = folder / "in.jsonl"
    source.write_text(source.read_text().replace('"n": 5}', '"n": 6}'))
    with pytest.raises(InvalidInput, match="in.jsonl changed") as refused:
        await service.submit(order(folder, "slow"))
    assert refused.value.code == "input_changed"
    anew = await service.submit(order(folder, "slow", restart=True))
    assert anew.how == "started" and anew.id != submitted.id


async def test_changed_code_is_refused_by_name(folder, opened):
    """An unfinished job is not resumed with another function."""
    service = await opened()
    submitted = await paused_midway(service, order(folder, "slow"))
    code = folder / "app.py"
    code.write_text(code.read_text() + "\n# other\n")
    with pytest.raises(InvalidInput, match="app.py:slow changed"):
        await service.submit(order(folder, "slow"))
    with pytest.raises(InvalidInput, match="app.py:slow changed"):
        await service.resume(submitted)


async def test_code_that_never_ran_may_be_mended(folder, opened):
    """A function that could not be loaded is mended, and the same order goes on."""
    code = folder / "app.py"
    whole = code.read_text()
    code.write_text("def double(n:\n")
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder))).id)
    assert (view.state, view.reason) == ("paused", "engine_failed")
    code.write_text(whole)
    submitted = await service.submit(order(folder))
    assert (submitted.id, submitted.how) == (view.id, "resumed")
    assert (await end_of(service, view.id)).rows_ok == ROWS


async def test_a_paused_job_keeps_its_output(folder, opened):
    """Another job cannot take the output of a job that is only paused."""
    service = await opened()
    await paused_midway(service, order(folder, "slow"))
    with pytest.raises(InvalidInput, match="unfinished job"):
        await service.submit(order(folder, "double", overwrite=True))


async def test_a_retry_does_not_write_over_a_later_job(folder, opened, monkeypatch):
    """A job whose output another has written since is not retried into it."""
    broken = folder / "broken"
    broken.touch()
    monkeypatch.setenv("BROKEN", str(broken))
    service = await opened()
    first = await end_of(service, (await service.submit(order(folder, "fragile"))).id)
    (folder / "out.jsonl").unlink()
    (folder / "out.errors.jsonl").unlink()
    await end_of(service, (await service.submit(order(folder, "double"))).id)
    with pytest.raises(InvalidInput, match="since"):
        await service.retry(first.id)


async def test_files_of_others_beside_the_output_are_safe(folder, opened):
    """Neither an error file that is there nor an input of any name is written over or removed."""
    (folder / "out.errors.jsonl").write_text("precious")
    service = await opened()
    with pytest.raises(InvalidInput, match="out.errors.jsonl exists"):
        await service.submit(order(folder))
    (folder / "in.jsonl").rename(folder / "it.errors.jsonl")
    (folder / "in.jsonl").symlink_to(folder / "it.errors.jsonl")
    with pytest.raises(InvalidInput, match="is an input"):
        await service.submit(order(folder, output=str(folder / "it.jsonl"), overwrite=True))
    assert (folder / "out.errors.jsonl").read_text() == "precious"


async def test_results_that_are_gone_are_written_again(folder, opened):
    """A finished job whose output was deleted writes it again without running a row."""
    service = await opened()
    first = await end_of(service, (await service.submit(order(folder))).id)
    (folder / "out.jsonl").unlink()
    (folder / "app.py").touch()
    submitted = await service.submit(order(folder))
    assert (submitted.id, submitted.how) == (first.id, "resumed")
    assert (await end_of(service, first.id)).state == "completed" and len(answers(folder)) == ROWS


async def test_a_job_returns_to_a_worker_that_served_it(folder, opened):
    """A job that is paused and resumed while another keeps its worker busy goes on in that worker."""
    service = await opened()
    first = await service.submit(order(folder, "slow"))
    second = await paused_midway(service, order(folder, "slow", output=str(folder / "two.jsonl")))
    await service.resume(second)
    assert {(await end_of(service, each)).rows_ok for each in (first.id, second)} == {ROWS}


async def test_cancel_without_the_input(folder, opened):
    """A paused job whose input has changed can still be cancelled."""
    service = await opened()
    submitted = await paused_midway(service, order(folder, "slow"))
    source = folder / "in.jsonl"
    source.write_text(source.read_text().replace('"n": 5}', '"n": 6}'))
    view = await service.cancel(submitted)
    assert view.state == "cancelled" and "were not written" in view.message


async def test_a_job_of_other_input_is_another_job(folder, opened):
    """Without an output of its own each input has its job, whichever came last."""
    service = await opened()
    first = await service.submit(order(folder, output=None))
    await end_of(service, first.id)
    other = folder / "other.jsonl"
    other.write_text((folder / "in.jsonl").read_text().replace('"n": 5}', '"n": 6}'))
    again = msgspec.structs.replace(order(folder, output=None), dataset=DatasetSpec([str(other)]))
    await end_of(service, (await service.submit(again)).id)
    assert (await service.submit(order(folder, output=None))).id == first.id


async def test_a_copy_of_the_input_is_the_same_input(folder, opened):
    """The bytes of the input count, not its time stamp."""
    service = await opened()
    first = await service.submit(order(folder))
    await end_of(service, first.id)
    shutil.copyfile(folder / "in.jsonl", folder / "again.jsonl")
    (folder / "again.jsonl").replace(folder / "in.jsonl")
    assert (await service.submit(order(folder))).how == "finished"


async def test_a_damaged_seal_is_named(folder, opened, tmp_path):
    """Whether the input is the one that was sealed cannot be known: the way out is said."""
    service = await opened()
    first = await service.submit(order(folder))
    await end_of(service, first.id)
    [seal] = tmp_path.rglob(f"{first.id}/dataset/seal.json")
    seal.write_bytes(b"")
    with pytest.raises(DatasetDamaged, match=f"ledger rebuild {first.id}"):
        await service.submit(order(folder))


async def test_a_refused_dataset_runs_no_row(folder, opened):
    """With a bad row nothing runs, and the job says where; with skip the bad row is an error result."""
    source = folder / "in.jsonl"
    source.write_text(source.read_text() + "{nonsense\n")
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder))).id)
    assert (view.state, view.rows_ok, view.problems_total) == ("failed", 0, 1)
    assert (view.problems[0].code, view.problems[0].line) == ("invalid_json", ROWS + 1)
    view = await end_of(service, (await service.submit(order(folder, policy=Policy(on_invalid="skip")))).id)
    assert (view.state, view.rows_ok, view.errors) == ("completed", ROWS, {"invalid_json": 1})
    assert (view.rows_failed, view.rows_rejected) == (1, 1)


async def test_identical_rows_run_once_when_asked(folder, opened):
    """With dedupe one of identical rows runs, and each has its result."""
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n % 3}} for n in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, policy=Policy(dedupe=True)))).id)
    assert (view.rows_ok, view.rows_folded) == (30, 27)
    assert answers(folder) == {f"r{n}": 2 * (n % 3) for n in range(30)}
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line.get("folded_from") for line in lines[:4]] == [None, None, None, "r0"]


async def test_two_jobs_share_the_workers(folder, opened):
    """Two jobs of one model run beside each other and both end."""
    service = await opened()
    first = await service.submit(order(folder, "slow"))
    second = await service.submit(order(folder, "slow", output=str(folder / "two.jsonl")))
    assert second.id != first.id
    assert {(await end_of(service, each.id)).rows_ok for each in (first, second)} == {ROWS}


async def test_one_output_for_one_job(folder, opened):
    """Two different jobs cannot write to one file at a time."""
    service = await opened()
    await service.submit(order(folder, "slow"))
    with pytest.raises(InvalidInput, match="unfinished job"):
        await service.submit(order(folder, "double"))


async def test_an_owner_that_died_leaves_a_paused_job(folder, opened):
    """What a dead owner left running is paused for the next one, and rebuilt ledgers lose nothing."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    async for view in service.watch(submitted.id, 0.05):
        if view.rows_ok:
            break
    await service.close(at_once=True)
    (folder / "data" / "batchmill.db").unlink()
    heir = await opened()
    with pytest.raises(UnknownName):
        await heir.show(submitted.id)
    report = await heir.rebuild(submitted.id)
    assert report.adopted > 0 and report.broken == []
    assert (await heir.show(submitted.id)).state == "paused"
    await heir.resume(submitted.id)
    assert (await end_of(heir, submitted.id)).rows_ok == ROWS


async def test_a_pause_of_an_interrupted_job_lasts(folder, opened):
    """A job that is paused after its owner ended stays so for those who follow it; others are resumed for them."""
    service = await opened()
    submitted = await service.submit(order(folder, "slow"))
    await service.close(at_once=True)
    heir = await opened()
    assert (await heir.show(submitted.id)).reason == "interrupted"
    assert (await heir.pause(submitted.id)).reason == "asked"
    await heir.resume_interrupted(submitted.id)
    assert [view.state async for view in heir.watch(submitted.id)] == ["paused"]
    with pytest.raises(InvalidTransition):
        await heir.pause(submitted.id)


async def test_an_interrupted_job_is_resumed_once(folder, opened):
    """Two who follow it ask for that: the second one finds what became of it."""
    service = await opened()
    submitted = await service.submit(order(folder))
    await service.close(at_once=True)
    heir = await opened()
    await heir.resume_interrupted(submitted.id)
    assert (await end_of(heir, submitted.id)).state == "completed"
    await heir.resume_interrupted(submitted.id)


async def test_a_function_that_cannot_be_loaded(folder, opened):
    """A model that cannot start pauses the job with the reason; nothing is lost."""
    service = await opened()
    view = await end_of(service, (await service.submit(order(folder, "missing"))).id)
    assert (view.state, view.reason) == ("paused", "engine_failed") and "missing" in view.message
