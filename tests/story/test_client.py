"""The SDK against a real server: everything that can be done with jobs, blocking and with asyncio."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from pathlib import Path

import httpx2
import pandas as pd
import pytest
from fakes.running_server import RunningServer, running_server

from batchmill import AsyncClient, Client
from batchmill.errors import (
    BatchmillError,
    Conflict,
    Forbidden,
    Gone,
    InvalidInput,
    InvalidTransition,
    Unauthenticated,
    UnknownName,
)
from batchmill.states import JobState
from batchmill.types import Scope
from batchmill.wire.native import NewKey

WAIT_S = 60.0
CODE = '''
import asyncio
from pathlib import Path

HERE = Path(__file__).parent


def upper(text):
    if text == "fail" and not (HERE / "mended").exists():
        raise ValueError("told to fail")
    return text.upper()


async def gated(text):
    """Answers "now" at once and anything else once the file of that name is there."""
    while text != "now" and not (HERE / text).exists():
        await asyncio.sleep(0.01)
    return text
'''
CONFIG = """
[models.upper]
engine = "function"
source = "app.py:upper"
price = { input = 1.0, output = 2.0 }

[models.gated]
engine = "function"
source = "app.py:gated"

[models.far]
engine = "openai"
source = "gpt-x"
base_url = "http://127.0.0.1:9/v1"
adapters = { legal = "legal" }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "app.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with running_server(folder, CONFIG) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


def table(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def requests(path: Path, *texts: str, model: str | None = "upper") -> Path:
    rows = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/x",
            "body": {"text": text} | ({"model": model} if model else {}),
        }
        for n, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_job_from_its_file_to_its_results(client: Client, tmp_path):
    """A file goes out, the job is followed to its end, and every row is in the results or the errors."""
    job = client.submit(requests(tmp_path / "in.jsonl", "a", "fail", "c"), labels={"team": "blue"})
    states = [view.state for view in job.watch(0.1)]
    assert states[-1] == "completed" and job.view.rows_failed == 1 and job.view.labels == {"team": "blue"}
    assert [(row["custom_id"], row["response"]["body"]) for row in job.results()] == [("c0", "A"), ("c2", "C")]
    assert [row["error"]["code"] for row in job.errors()] == ["ValueError"]
    assert len(list(job.partial())) == 3
    assert job.view.origin == {"frontend": "native", "files": {job.view.input[0]: "in.jsonl"}}
    client.delete_file(job.view.input[0])


def test_answers_of_two_jobs_are_compared(client: Client, server, tmp_path):
    """The rows whose answers differ are found, by their number or by a column, in lines, Parquet and error files."""

    def ended(name: str, *texts: str, **options: str):
        job = client.submit(table(tmp_path / name, *texts), model="upper", **options)
        job.wait()
        return job

    left, right = ended("left.jsonl", "a", "b", "c"), ended("right.jsonl", "c", "fail", "a", output_format="parquet")
    assert list(client.diff(left, left.id)) == []
    with pytest.raises(InvalidInput, match="row 0 of the two jobs is not the same input.*by="):
        list(client.diff(left, right))
    one, other = client.diff(left.id, right, by="text")
    assert (one.row, one.left) == ("fail", None) and one.right["error"].startswith("ValueError: told to fail")
    assert (other.row, other.left, other.right) == ("b", {"output": "B", "error": None}, None)
    with pytest.raises(InvalidInput, match="no column 'nope'"):
        list(client.diff(left, right, by="nope"))
    for form in ("csv", "csv.zst", "jsonl.gz"):
        packed = ended("c.jsonl", "a", "b", "c", output_format=form)
        assert list(client.diff(left, packed)) == [], form
        one, other = client.diff(packed, right, by="text")
        assert (one.row, other.row, other.left) == ("fail", "b", {"output": "B", "error": None}), form
        assert [row["output"] for row in packed.rows(columns=["output"])] == ["A", "B", "C"], form
    with pytest.raises(UnknownName):
        list(client.diff(left, "job_nowhere"))

    async def compared() -> list[str]:
        wanted = [("a", "fail", "fail", "d"), ("a", "b-", "fail", "d")]
        async with AsyncClient(server.url) as client:
            jobs = [await client.submit(requests(tmp_path / "r.jsonl", *texts)) for texts in wanted]
            for job in jobs:
                await job.wait()
            return [each.row async for each in client.diff(*jobs)]

    assert asyncio.run(compared()) == ["c1"]


def test_results_are_queried(client: Client, server, tmp_path):
    """A query reads results and input, of tables in every format and of OpenAI rows, and no other file."""
    pytest.importorskip("duckdb")
    query = "select i.text, r.output, r.error from input i join results r using (text) order by i.text"
    expected = [("a", "A", False), ("fail", None, True)]
    for form in ("jsonl", "parquet", "csv.gz"):
        job = client.submit(table(tmp_path / "in.jsonl", "a", "fail"), model="upper", output_format=form)
        job.wait()
        found = client.sql(job, query).to_pylist()
        assert [(row["text"], row["output"], row["error"] is not None) for row in found] == expected
    (tmp_path / "v1.[2].csv").write_text("text\na\nfail\n")
    job = client.submit(tmp_path / "v1.[2].csv", model="upper", output_format="jsonl")
    job.wait()
    assert [row["output"] for row in client.sql(job, query).to_pylist()] == ["A", None]
    (tmp_path / "secret.csv").write_text("a\n1\n")
    for wrong, message in (
        (f"select * from read_csv('{tmp_path}/secret.csv')", "Cannot access file"),
        ("select nope from results", "nope"),
        ("", "must be a SELECT"),
    ):
        with pytest.raises(InvalidInput, match=message):
            client.sql(job.id, wrong)

    async def answers() -> list[dict]:
        async with AsyncClient(server.url) as client:
            job = await client.submit(requests(tmp_path / "r.jsonl", "a", "fail", "c"))
            await job.wait()
            found = await client.sql(
                job.id,
                "select custom_id, output, i.body.text from results r join input i using (custom_id) order by all",
            )
            return found.to_pylist()

    assert [tuple(row.values()) for row in asyncio.run(answers())] == [
        ("c0", "A", "a"), ("c1", None, "fail"), ("c2", "C", "c"),
    ]  # fmt: skip


def test_some_rows_of_a_frame_first(client: Client):
    """`run` with `limit` or `sample` gives the rows that ran, under their labels; resumed, it gives all."""
    frame = pd.DataFrame({"text": ["a", "fail", "c", "d"]}, index=list("wxyz"))
    job = client.run(frame, model="upper", limit=2)
    assert job.is_sampled and job.view.outlook is not None
    assert job.to_pandas()["output"].dropna().to_dict() == {"w": "A"} and job.failures().index.tolist() == ["x"]
    drawn = client.run(frame, model="upper", sample=2, seed=1).to_pandas()
    assert len(drawn) == 2 and drawn["text"].to_dict() == frame["text"][drawn.index].to_dict()
    job.resume()
    job.wait()
    assert not job.is_sampled and job.to_pandas()["output"].dropna().to_dict() == {"w": "A", "y": "C", "z": "D"}
    assert job.failures().index.tolist() == ["x"]


def test_rows_are_read_as_those_of_a_table(client: Client, tmp_path):
    """The rows of OpenAI results and of tables come in the order of the input, as one wants them."""
    job = client.submit(requests(tmp_path / "in.jsonl", "a", "fail-", "fail", "d", "fail"))
    job.wait()
    rows = list(job.rows())
    assert [row["custom_id"] for row in rows] == ["c0", "c1", "c2", "c3", "c4"]
    assert rows[1] == {"custom_id": "c1", "output": "FAIL-", "error": None}
    assert rows[2] == {"custom_id": "c2", "output": None, "error": "ValueError: told to fail"}
    failed = list(job.rows(failed=True, join=True, columns=["error"]))
    assert [row["body"]["text"] for row in failed] == ["fail", "fail"] and list(failed[0])[-1] == "error"
    assert [row["url"] for row in job.rows(partial=True, join=True)] == ["/v1/x"] * 5
    with pytest.raises(InvalidInput, match="join adds"):
        next(job.rows(columns=["body"]))
    job = client.submit(table(tmp_path / "t.jsonl", "a", "fail"), model="upper")
    job.wait()
    assert list(job.rows(columns=["output"], join=True)) == [
        {"text": "a", "output": "A"},
        {"text": "fail", "output": None},
    ]
    with pytest.raises(InvalidInput, match="no column 'nope'; they have text, output, error"):
        list(job.rows(columns=["nope"]))
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    job = client.submit(packed, format="openai")
    job.wait()
    with pytest.raises(InvalidInput, match="compressed"):
        list(job.rows(join=True))


def test_a_deleted_result_is_no_empty_one(client: Client, server: RunningServer, tmp_path):
    """Whoever asks for a result that was deleted is told so by every frontend, with who did it and when."""
    job = client.submit(requests(tmp_path / "in.jsonl", "a"))
    job.wait()
    output = job.view.output
    assert httpx2.delete(f"{server.url}/batchmill/v1/files/{output}").status_code == 204
    for path in (f"jobs/{job.id}/results", f"files/{output}", f"files/{output}/content"):
        reply = httpx2.get(f"{server.url}/batchmill/v1/{path}")
        assert reply.status_code == 410, path
        assert "was deleted by somebody without a key at 20" in reply.json()["error"]["message"]
    for path in (f"files/{output}", f"files/{output}/content"):
        assert httpx2.get(f"{server.url}/v1/{path}").status_code == 410
    with pytest.raises(Gone, match="was deleted by"):
        list(job.results())
    job.refresh()
    assert job.view.output == output


def test_failed_rows_run_again_and_only_those(client: Client, folder, tmp_path):
    """After the cause was mended `retry` makes the results whole; without failed rows there is nothing to retry."""
    job = client.submit(requests(tmp_path / "in.jsonl", "a", "fail"))
    assert job.wait(WAIT_S).rows_failed == 1
    (folder / "mended").touch()
    try:
        assert job.retry().generation == 1
        assert job.wait(WAIT_S).rows_ok == 2
    finally:
        (folder / "mended").unlink()
    assert [row["response"]["body"] for row in job.results()] == ["A", "FAIL"]
    with pytest.raises(UnknownName) as caught:
        list(job.errors())
    assert caught.value.code == "no_file"
    with pytest.raises(InvalidTransition):
        job.retry()


def test_rows_that_are_done_can_be_read_while_others_run(client: Client, folder, tmp_path):
    """Partial results stream what there is; pausing, amending, explaining and resuming fit in between."""
    job = client.submit(table(tmp_path / "in.jsonl", "now", "gate-1", "now"), model="gated", priority=-5)
    for view in job.watch(0.1):
        if view.rows_ok == 2:
            break
    assert sorted(row["text"] for row in job.partial()) == ["now", "now"]
    with pytest.raises(InvalidTransition) as caught:
        list(job.results())
    assert "2 of 3 rows are done" in caught.value.message
    assert job.amend(priority=7, deadline=4e9).priority == 7 and job.view.deadline == 4e9
    assert job.explain().job == job.id
    (folder / "gate-1").touch()
    assert job.wait(WAIT_S).state == "completed"
    assert [row["output"] for row in job.results()] == ["now", "gate-1", "now"]


def test_a_cancelled_job_keeps_what_was_done(client: Client, folder, tmp_path):
    """Finished rows are in the results, the others in the error file with a code that says why."""
    job = client.submit(requests(tmp_path / "in.jsonl", "now", "gate-2", model="gated"))
    for view in job.watch(0.1):
        if view.rows_ok == 1:
            break
    job.cancel()
    (folder / "gate-2").touch()  # rows in flight may end
    assert job.wait(WAIT_S).state == "cancelled"
    result = [row["custom_id"] for row in job.results()] + [row["custom_id"] for row in _errors(job)]
    assert sorted(result) == ["c0", "c1"]


def _errors(job):
    return job.errors() if job.view.errors_output else []


def test_a_paused_job_says_why_and_goes_on(client: Client, folder, tmp_path):
    """`wait` ends at a pause, `explain` names it, `resume` goes on from there."""
    job = client.submit(table(tmp_path / "in.jsonl", "now", "gate-3"), model="gated")
    for view in job.watch(0.1):
        if view.rows_ok == 1:
            break
    pausing = threading.Thread(target=job.pause)
    pausing.start()
    while not any("being paused" in reason for reason in job.explain().reasons):
        time.sleep(0.05)
    (folder / "gate-3").touch()
    pausing.join()
    assert job.wait(WAIT_S).state == "paused"
    assert any("it is paused" in reason for reason in job.explain().reasons)
    job.resume()
    assert job.wait(WAIT_S).state == "completed" and len(list(job.results())) == 2


@pytest.mark.parametrize("output_format", ["csv", "parquet", "jsonl.gz", "csv.zst"])
def test_results_of_a_table_are_written_as_asked(client: Client, tmp_path, output_format):
    """A table comes back as CSV, Parquet or packed, whole under its name; read as lines it is refused."""
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    job = client.submit(tmp_path / "in.csv", model="upper", output_format=output_format)
    assert job.wait(WAIT_S).state == "completed"
    target = tmp_path / f"out.{output_format}"
    job.download(target)
    begins = {"csv": b"text,output", "parquet": b"PAR1", "jsonl.gz": b"\x1f\x8b", "csv.zst": b"\x28\xb5\x2f\xfd"}
    assert target.read_bytes().startswith(begins[output_format])
    with pytest.raises(InvalidInput, match="download them"):
        list(job.results())
    assert client.file(job.view.output).filename == f"{job.id}_output.{output_format}"


def test_results_of_failed_rows_are_there(client: Client, tmp_path):
    """A table whose rows all failed has them in its results; OpenAI rows have none there, and an error file."""
    job = client.submit(table(tmp_path / "t.jsonl", "fail", "fail"), model="upper")
    assert job.wait(WAIT_S).rows_failed == 2
    assert [row["error"] for row in job.results()] == ["ValueError: told to fail"] * 2
    job = client.submit(requests(tmp_path / "r.jsonl", "fail"))
    assert job.wait(WAIT_S).rows_failed == 1
    assert list(job.results()) == [] and len(list(job.errors())) == 1


def test_several_files_are_one_dataset(client: Client, tmp_path):
    """Paths, uploaded files and open files go together, in their order; two formats do not."""
    first = client.upload(table(tmp_path / "a.jsonl", "a"))
    with table(tmp_path / "c.jsonl", "c").open("rb") as third:
        job = client.submit([first, table(tmp_path / "b.jsonl", "b"), third], model="upper")
    assert job.wait(WAIT_S).state == "completed"
    assert [row["output"] for row in job.results()] == ["A", "B", "C"]
    (tmp_path / "d.csv").write_text("text\nd\n")
    with pytest.raises(InvalidInput) as caught:
        client.submit([first, tmp_path / "d.csv"], model="upper")
    assert caught.value.code == "format_mismatch"


def test_looking_costs_nothing(client: Client, tmp_path):
    """validate, plan and estimate say what they see, run nothing and leave no file."""
    before = [file.id for file in client.files()]
    path = requests(tmp_path / "in.jsonl", "a", "b")
    with path.open("a") as file:
        file.write("no json\n")
    report = client.validate(path)
    assert [(each.code, each.line) for each in report.problems] == [("invalid_json", 3)]
    assert client.plan(path).plan is None
    plan = client.plan(path, on_invalid="skip").plan
    assert plan is not None and plan.rows == 3 and plan.rejected == 1
    good = requests(tmp_path / "good.jsonl", "a")
    estimate = client.estimate(good, model="upper").estimate
    assert estimate is not None and estimate.rows == 1
    assert [file.id for file in client.files()] == before


def test_models_are_listed_with_their_adapters(client: Client):
    """Names, engines, adapters and prices are what the configuration says; where they lie is not told."""
    models = {model.name: model for model in client.models()}
    assert list(models) == ["upper", "gated", "far"] and models["far"].adapters == ["legal"]
    assert models["upper"].price is not None and models["upper"].price.output == 2.0
    assert models["far"].pool is None  # no row of it ever ran


def test_models_say_how_their_workers_are(client: Client, tmp_path):
    """A model that has run is loaded: its workers are counted."""
    client.submit(requests(tmp_path / "in.jsonl", "a")).wait(WAIT_S)
    pool = next(model.pool for model in client.models() if model.name == "upper")
    assert pool is not None and pool.workers == 1


BAD = [
    ({"model": "uper"}, UnknownName, "model_not_found"),
    ({"model": "legal"}, InvalidInput, "adapter_as_model"),
    ({"models": ["upper", "upper"]}, InvalidInput, "duplicate_model"),
    ({"model": "upper", "deadline": 1.0}, InvalidInput, "invalid_deadline"),
    ({"model": "upper", "deadline": 4e9, "completion_s": 1.0}, InvalidInput, "invalid_input"),
    ({"model": "gated", "budget": 1.0}, InvalidInput, "unknown_price"),
    ({"model": "upper", "output_format": "csv"}, InvalidInput, "invalid_output"),
    ({"model": "upper", "prompt": "{text}"}, InvalidInput, "prompt_without_table"),
]


@pytest.mark.parametrize(("options", "kind", "code"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_run_leaves_nothing(client: Client, tmp_path, options, kind, code):
    """A refused order has a code, and neither a job nor an upload is left of it."""
    files, jobs = [each.id for each in client.files()], [each.id for each in client.jobs()]
    with pytest.raises(kind) as caught:
        client.submit(requests(tmp_path / "in.jsonl", "a"), **options)
    assert caught.value.code == code and caught.value.request_id
    assert [each.id for each in client.files()] == files and [each.id for each in client.jobs()] == jobs


@pytest.mark.parametrize("name", ["file-" + "0" * 24, "../../etc/passwd", "a/b", "x" * 64])
def test_ids_of_nothing_are_unknown(client: Client, name):
    """Names that are not ids of ours are 404s, whatever they would be as a path."""
    for ask in (client.file, client.delete_file, client.job, lambda each: list(client.read_file(each))):
        with pytest.raises(UnknownName):
            ask(name)


def test_a_table_needs_to_be_told_its_model(client: Client, tmp_path):
    """The rows of a CSV file name no model: the refusal lists those there are."""
    (tmp_path / "in.csv").write_text("text\na\n")
    with pytest.raises(InvalidInput, match="upper, gated, far") as caught:
        client.submit(tmp_path / "in.csv")
    assert caught.value.code == "no_model"


def test_a_file_that_a_job_reads_stays(client: Client, folder, tmp_path):
    """Deleting the input of a job that has not ended is refused; afterwards it goes."""
    job = client.submit(table(tmp_path / "in.jsonl", "gate-4"), model="gated")
    with pytest.raises(Conflict) as caught:
        client.delete_file(job.view.input[0])
    assert caught.value.code == "file_in_use"
    (folder / "gate-4").touch()
    job.wait(WAIT_S)
    client.delete_file(job.view.input[0])
    with pytest.raises(UnknownName):
        client.file(job.view.input[0])


def test_jobs_are_found_by_state_and_label(client: Client, tmp_path):
    """Listing turns pages and filters by state and label."""
    ids = [client.submit(requests(tmp_path / f"{n}.jsonl", "a"), labels={"run": str(n)}).id for n in range(3)]
    for job_id in ids:
        client.job(job_id).wait(WAIT_S)
    assert [view.id for view in client.jobs(label="run=1")] == [ids[1]]
    assert {*ids} <= {view.id for view in client.jobs(state="completed", label="run")}
    assert list(client.jobs(state="failed", label="run")) == []


def test_pages_of_jobs_are_whole(server: RunningServer, client: Client):
    """Pages of one job each hold every job once, newest first; a filter changes which, not the order."""
    every = [view.id for view in client.jobs()]
    for extra in ({}, {"state": "completed"}):
        seen, after = [], None
        while True:
            query = {"limit": "1", **extra} | ({} if after is None else {"after": after})
            page = httpx2.get(f"{server.url}/batchmill/v1/jobs", params=query).json()
            seen += [view["id"] for view in page["jobs"]]
            after = page["after"]
            if after is None:
                break
        wanted = every if not extra else [view.id for view in client.jobs(state="completed")]
        assert seen == wanted


def test_no_reply_tells_where_the_server_keeps_things(server: RunningServer, client: Client, folder, tmp_path):
    """Ids stand for files everywhere: in views, events, problems, reports and refusals."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a"}\n')
    job = client.submit(path)
    job.wait(WAIT_S)
    base = f"{server.url}/batchmill/v1"
    seen_requests = [
        f"{base}/jobs/{job.id}",
        f"{base}/jobs",
        f"{base}/jobs/{job.id}/wait",
        f"{base}/jobs/{job.id}/events",
    ]
    texts = [httpx2.get(url).text for url in seen_requests]
    empty = client.upload(_empty(tmp_path))
    texts.append(httpx2.post(f"{base}/jobs", json={"files": [empty.id], "models": ["upper"]}).text)
    file = client.upload(path)
    texts.append(httpx2.post(f"{base}/previews/validate", json={"files": [file.id]}).text)
    assert job.view.problems and "empty" in texts[-2]
    for text in texts:
        assert str(folder) not in text and "/files/" not in text


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty.jsonl").touch()
    return tmp_path / "empty.jsonl"


def test_an_order_that_comes_twice_is_one_job(server: RunningServer, client: Client, tmp_path):
    """The same Idempotency-Key and body is the same job; with another body it is refused."""
    file = client.upload(requests(tmp_path / "in.jsonl", "a"))
    url, headers = f"{server.url}/batchmill/v1/jobs", {"idempotency-key": "k-1"}
    first, again = (httpx2.post(url, json={"files": [file.id]}, headers=headers) for _ in range(2))
    assert (first.status_code, first.json()["how"]) == (201, "started")
    assert again.json()["how"] == "repeated" and again.json()["job"]["id"] == first.json()["job"]["id"]
    other = httpx2.post(url, json={"files": [file.id], "dedupe": True}, headers=headers)
    assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_key_reused"


def test_results_have_ranges(server: RunningServer, client: Client, tmp_path):
    """A download can be taken up at any byte, and is not where the file is another."""
    job = client.submit(requests(tmp_path / "in.jsonl", "a", "b"))
    job.wait(WAIT_S)
    url = f"{server.url}/batchmill/v1/jobs/{job.id}/results"
    whole = httpx2.get(url)
    part = httpx2.get(url, headers={"range": "bytes=10-19", "if-range": whole.headers["etag"]})
    assert part.status_code == 206 and part.content == whole.content[10:20]
    other = httpx2.get(url, headers={"range": "bytes=10-19", "if-range": '"other"'})
    assert other.status_code == 200 and other.content == whole.content
    grows = httpx2.get(url, params={"partial": "true"}, headers={"range": "bytes=1-"})
    assert grows.status_code == 400


def test_partial_results_leave_no_file(server: RunningServer, client: Client, tmp_path):
    """What is gathered for a reader is gone from the job's folder, also when the reader leaves early."""
    job = client.submit(requests(tmp_path / "in.jsonl", *["a"] * 2000))
    job.wait(WAIT_S)
    rows = job.partial()
    next(rows)
    rows.close()
    assert list((server.data_dir / "partial").glob("*")) == []


async def test_many_jobs_at_once_with_asyncio(server: RunningServer, tmp_path):
    """Jobs are submitted and waited for together, and each has its own results."""
    async with AsyncClient(server.url) as client:

        async def run(number: int) -> list[str]:
            path = requests(tmp_path / f"{number}.jsonl", f"text {number}")
            job = await client.submit(path, completion_s=3600)
            assert (await job.wait(WAIT_S)).state == JobState.COMPLETED
            return [row["response"]["body"] async for row in job.results()]

        assert await asyncio.gather(*map(run, range(5))) == [[f"TEXT {number}"] for number in range(5)]
        assert len([view async for view in client.jobs()]) >= 5
        assert [model.name for model in await client.models()] == ["upper", "gated", "far"]


async def test_everything_else_with_asyncio(server: RunningServer, tmp_path):
    """Files, previews, partial results, downloads, amendments and refusals, without blocking."""
    async with AsyncClient(server.url) as client:
        with requests(tmp_path / "in.jsonl", "a", "fail").open("rb") as file:
            info = await client.upload(file, filename="in.jsonl", expires_s=3600)
        assert b"".join([piece async for piece in client.read_file(info.id)]) == (tmp_path / "in.jsonl").read_bytes()
        assert (await client.validate(info)).problems == []
        plan, estimate = (await client.plan(info)).plan, (await client.estimate(info)).estimate
        assert plan is not None and plan.rows == 2 and estimate is not None
        job = await client.submit(info)
        assert [view async for view in job.watch(0.1)][-1].state == "completed"
        assert len([row async for row in job.partial()]) == 2 and len([row async for row in job.errors()]) == 1
        await job.download(tmp_path / "out.jsonl")
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
        for steer in (job.pause, job.resume, job.cancel, lambda: job.amend(priority=1)):
            with pytest.raises(InvalidTransition):
                await steer()
        assert (await job.explain()).reasons == [] and (await job.verify()).broken == []
        assert (await client.job(job.id)).id == job.id and (await job.refresh()).state == "completed"
        await client.delete_file(info.id)
        with pytest.raises(BatchmillError):
            await client.file(info.id)


def test_a_restart_of_the_server_is_waited_for(tmp_path):
    """A job that is being waited for goes on over a restart of its server, and so does the waiting."""
    (tmp_path / "app.py").write_text(CODE)
    with running_server(tmp_path, CONFIG) as server, Client(server.url) as client:
        job = client.submit(table(tmp_path / "in.jsonl", "now", "gate-5"), model="gated")
        for view in job.watch(0.1):
            if view.rows_ok == 1:
                break
        ended = []
        waiting = threading.Thread(target=lambda: ended.append(job.wait(WAIT_S)))
        waiting.start()
        server.kill()
        server.start()
        (tmp_path / "gate-5").touch()
        waiting.join()
        assert ended[0].state == "completed" and len(list(job.results())) == 2


def test_a_project_sees_only_its_own(tmp_path):
    """Keys of two projects: jobs, files, models and keys of the other are as if they were not there."""
    (tmp_path / "app.py").write_text(CODE)
    with running_server(tmp_path, CONFIG) as server:
        with Client(server.url) as first:
            admin = first.create_key(NewKey("root", Scope.ADMIN)).key
            with pytest.raises(Unauthenticated):
                first.models()
        with Client(server.url, admin) as ours:
            few = ours.create_key(NewKey("few", Scope.SUBMIT, models=["gated", "legal"])).key
            reader = ours.create_key(NewKey("look", Scope.READ))
            job = ours.submit(requests(tmp_path / "in.jsonl", "a"))
            assert job.wait(WAIT_S).state == "completed"
            with pytest.raises(Forbidden):
                ours.create_key(NewKey("beyond", Scope.ADMIN, project="other"))
            with Client(server.url, few) as client:
                assert {model.name: model.adapters for model in client.models()} == {"gated": [], "far": ["legal"]}
                for options in ({"model": "upper"}, {"model": "far"}):
                    with pytest.raises(UnknownName) as caught:
                        client.submit(requests(tmp_path / "x.jsonl", "a"), **options)
                    assert caught.value.code == "model_not_found"
                refused = client.submit(requests(tmp_path / "y.jsonl", "a", model="upper"))
                assert refused.wait(WAIT_S).state == "failed"
                with pytest.raises(Forbidden):
                    client.keys()
            with Client(server.url, reader.key) as client:
                assert client.job(job.id).view.state == "completed" and len(list(client.job(job.id).results())) == 1
                for ask in (client.job(job.id).retry, lambda: client.upload(tmp_path / "in.jsonl")):
                    with pytest.raises(Forbidden):
                        ask()
            ours.revoke_key(reader.record.id)
            with Client(server.url, reader.key) as client, pytest.raises(Unauthenticated):
                client.models()


def test_a_look_ends_with_who_looks(server: RunningServer, client: Client, tmp_path):
    """A client that leaves while its dataset is read stops the reading: nothing of it is left on the disk."""
    file = client.upload(requests(tmp_path / "in.jsonl", *["a" * 200] * 20_000))
    body = json.dumps({"files": [file.id], "models": ["upper"]}).encode()
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(
            f"{server.url}/batchmill/v1/previews/estimate", content=body, timeout=httpx2.Timeout(5, read=0.05),
            headers={"content-type": "application/json"},
        )  # fmt: skip
    assert client.validate(requests(tmp_path / "small.jsonl", "a")).rejected == 0  # whoever comes next has a turn
    for _ in range(100):
        if not list(server.data_dir.glob("preview-*")):
            return
        client.models()
    raise AssertionError("the folder of a look that was left is still there")
