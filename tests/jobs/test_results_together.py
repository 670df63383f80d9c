"""Results of OpenAI rows in one file: every row in its place, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from fakes.job_service import end_of
from finished_job import FinishedJob, quiet, write_requests
from msgspec.structs import replace

from batchmill.jobs.intake import orders
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.streaming_results import StreamingGather
from batchmill.states import JobState
from batchmill.store.segments.files import SegmentFolder
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec, Policy, RowError
from batchmill.wire.rows.forms import OpenAIForm

ROWS = 24
TOGETHER = OpenAIForm(together=True)
CODE = """
import os, time
def odd(n):
    if n % 3 == 0:
        raise ValueError(f"no {n}")
    return n
def slow(n):
    time.sleep(0.01)
    return n
"""


def make_job(folder: Path, contents: list[str], *, keys: bool = False) -> FinishedJob:
    return FinishedJob(folder / "job", write_requests(folder / "in.jsonl", contents), TOGETHER, keys=keys)


@pytest.mark.parametrize("way", ["streaming", "gathering"])
def test_errors_stand_in_their_place(tmp_path, way):
    """Blocks of ok rows and of errors, in any order, become one file in the order of the input."""
    job, failed = make_job(tmp_path, ["hi"] * ROWS), {0, 7, 8, ROWS - 1}
    positions = random.Random(3).sample(range(ROWS), ROWS)
    blocks = [positions[start : start + 5] for start in range(0, ROWS, 5)]
    refs = []
    for block in blocks:
        good, bad = [p for p in block if p not in failed], [p for p in block if p in failed]
        refs.append(job.commit(*[job.block(part, kind) for part, kind in ((bad, True), (good, False)) if part]))
    output = tmp_path / "out.jsonl"
    if way == "streaming":
        copy = StreamingGather(SegmentFolder(job.segments), output, TOGETHER, ROWS)
        for ref in refs:
            copy.offer([ref])
        manifest = copy.finish()
    else:
        manifest = gather(job.order(output), quiet)
    assert output.read_bytes() == b"".join(job.line(number, number in failed) for number in range(ROWS))
    assert (manifest.errors, manifest.ok, manifest.failed, manifest.output.rows) == (None, ROWS - 4, 4, ROWS)
    assert not output.with_name("out.errors.jsonl").exists()


def test_a_follower_of_an_error_stands_in_its_place(tmp_path):
    """Rows that share an answer, or an error, come where they came in the input."""
    job = make_job(tmp_path, ["a", "b", "a", "b"], keys=True)
    job.run_all(failed=[1])
    gather(job.order(tmp_path / "out.jsonl"), quiet)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["c0", "c1", "c2", "c3"]
    assert [each["error"] and each["error"]["code"] for each in found] == [None, "went_wrong", None, "went_wrong"]


def test_rows_that_never_ran_stand_in_their_place(tmp_path):
    """Of a job that ended early the rows that did not run are errors among the others."""
    job = make_job(tmp_path, ["hi"] * 6)
    job.commit(job.block([1, 4]))
    manifest = gather(job.order(tmp_path / "out.jsonl", unrun=RowError("batch_cancelled", "it was cancelled")), quiet)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == [f"c{number}" for number in range(6)]
    assert [each["response"] is not None for each in found] == [False, True, False, False, True, False]
    assert found[0] == {
        "id": "batch_req_0", "custom_id": "c0", "response": None,
        "error": {"code": "batch_cancelled", "message": "it was cancelled"},
    }  # fmt: skip
    assert (manifest.unrun, manifest.errors) == (4, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(CODE)
    return tmp_path


def order(folder: Path, function: str, lines: list[bytes], **more) -> JobOrder:
    (folder / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    models = [ModelSpec("m", "function", f"{folder / 'app.py'}:{function}")]
    return JobOrder(DatasetSpec([str(folder / "in.jsonl")], format="openai"), models, together=True, **more)


def row(number: int) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "url": "/v1/x", "body": {"n": number}}).encode()


def received(view: JobView) -> list[dict]:
    assert view.output is not None
    assert view.errors_output is None
    return [json.loads(line) for line in Path(view.output).read_text().splitlines()]


async def test_a_job_of_all_kinds_of_rows(folder, opened):
    """Rows that ran, that raised and that were refused are in one file, in the order of the input."""
    lines = [row(number) for number in range(9)]
    lines[4] = b'{"custom_id":7,"url":"/v1/x","body":{"n":4}}'
    service = await opened()
    job_order = order(folder, "odd", lines, policy=Policy(on_invalid="skip"), output=str(folder / "out.jsonl"))
    view = await end_of(service, (await service.submit(job_order)).id)
    found = received(view)
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2", "r3", 7, "r5", "r6", "r7", "r8"]
    codes = {at: each["error"]["code"] for at, each in enumerate(found) if each["error"] is not None}
    assert codes == {0: "ValueError", 3: "ValueError", 4: "invalid_custom_id", 6: "ValueError"}
    assert (view.rows_ok, view.rows_failed) == (5, 4)
    assert not (folder / "out.errors.jsonl").exists()


async def test_a_cancelled_job_has_all_its_rows(folder, opened):
    """A job that is cancelled midway leaves one file with every row."""
    service = await opened()
    job_order = order(folder, "slow", [row(number) for number in range(2000)], origin={"frontend": "openai"})
    job = (await service.submit(job_order)).id
    async with asyncio.timeout(60):
        while not (await service.show(job)).rows_ok:
            await asyncio.sleep(0.02)
    await service.cancel(job)
    view = await end_of(service, job)
    found = received(view)
    assert (view.state, len(found)) == (JobState.CANCELLED, 2000)
    assert [each["custom_id"] for each in found] == [f"r{number}" for number in range(2000)]
    assert {each["error"]["code"] for each in found if each["error"]} == {"batch_cancelled"}
    assert view.rows_ok == sum(each["error"] is None for each in found) > 0


async def test_a_retry_mends_the_one_file(folder, opened):
    """Rows that failed and run again take the place of their errors."""
    service = await opened()
    job_order = order(folder, "odd", [row(number) for number in range(6)], output=str(folder / "out.jsonl"))
    job = (await service.submit(job_order)).id
    assert sum(each["error"] is not None for each in received(await end_of(service, job))) == 2
    (folder / "app.py").write_text(CODE.replace("n % 3 == 0", "n == 3"))
    await service.retry(job)
    found = received(await end_of(service, job))
    assert [each["custom_id"] for each in found if each["error"]] == ["r3"]


def test_it_is_another_job(folder):
    """Together and apart are two jobs; apart is the job that it was before there was another way."""
    together = order(folder, "odd", [row(0)])
    apart = replace(together, together=False)
    specs = [orders.describe(each, 0.0) for each in (together, apart)]
    assert specs[0].identity != specs[1].identity
    assert [spec.form.errors_apart for spec in specs] == [False, True]
    assert orders.outputs("/x/out.jsonl", specs[0].form) == ["/x/out.jsonl"]
    again = orders.new_id_form(specs[0], "job_2")
    assert again.form == OpenAIForm("batch_req_2_", together=True)


def test_jobs_of_before_are_known():
    """What a command was called before there were results together is what it is called now."""
    models = [ModelSpec("m", "http", "gpt", base_url="http://h/v1")]
    job_order = JobOrder(DatasetSpec(["/d/in.jsonl"], format="openai"), models, output="/d/out.jsonl")
    before = "20227e3f84ab67afb99b1e146adfb1d216c53906c0255e234cd4c3ef64f8c9d9"
    assert orders.identity(job_order, OpenAIForm("batch_req_1_")) == before
