"""Rows that take over results of earlier jobs: which they are, what they cost, and what is never taken."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.databases import open_ledger
from fakes.job_service import job_service
from msgspec.structs import replace

from batchmill.cli.jobs import summary
from batchmill.config.entries import ProjectEntry, RetentionEntry
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.intake.reuse_orders import target_keys
from batchmill.jobs.ledger.files import JobFiles
from batchmill.store import removals
from batchmill.store.removals import Removal
from batchmill.store.sql.tables import jobs
from batchmill.types import (
    DatasetSpec,
    JobOrder,
    JobView,
    ModelSpec,
    OutputSchema,
    Policy,
    Price,
    ReplyRules,
    ReuseCount,
)
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

CODE = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    if n == 13:
        raise ValueError("thirteen")
    return 2 * n
"""
CHAT = "/v1/chat/completions"
ALL = Policy(reuse="all")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(CODE)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    return tmp_path


@pytest.fixture
def projects():
    """In both, deterministic rows are reused."""
    return {"default": ProjectEntry(reuse=True), "north": ProjectEntry(reuse=True)}


@pytest.fixture
async def service(folder, projects):
    """A service that two projects use."""
    data_dir = folder / "data"
    data_dir.mkdir()
    executor = LocalExecutor(data_dir / "workers")
    ledger = open_ledger(data_dir / "batchmill.db")
    opened = job_service(data_dir, ledger, executor, SystemClock(), projects=projects)
    await opened.recover()
    yield opened
    await opened.close(at_once=True)


@pytest.fixture
async def chat():
    """A service that answers with the text of the last message, and how the answer ends if the text says so."""

    def answer(body):
        text = body["messages"][-1]["content"]
        return choice(text, "length" if "cut" in text else "stop")

    async with AnsweringService(answer) as fake:
        yield fake


def functions(folder: Path, rows, *, name: str = "in.jsonl", **more) -> JobOrder:
    """A table of numbers for the function, whose results lie with the job."""
    (folder / name).write_text("".join(json.dumps({"n": n}) + "\n" for n in rows))
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    fields = {"policy": ALL, "output": str(folder / f"{name}.out.jsonl"), "overwrite": True, **more}
    return JobOrder(DatasetSpec([str(folder / name)]), [model], **fields)


def chats(folder: Path, url: str, texts, *, name: str = "chat.jsonl", body=None, **more) -> JobOrder:
    """OpenAI rows for the chat service."""
    asked = [{"model": "m", "messages": [{"role": "user", "content": text}], **(body or {})} for text in texts]
    rows = [{"custom_id": f"{name}-{at}", "method": "POST", "url": CHAT, "body": each} for at, each in enumerate(asked)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ModelSpec("m", "http", "m", base_url=url, api_key="env:OPENAI_API_KEY", price=Price(1000.0, output=1000.0))
    fields = {"policy": ALL, "output": str(folder / f"{name}.out.jsonl"), "overwrite": True, **more}
    return JobOrder(DatasetSpec([str(folder / name)]), [model], **fields)


async def run(service, order: JobOrder) -> JobView:
    submitted = await service.submit(order)
    view = [each async for each in service.watch(submitted.id, 0.02)][-1]
    assert view.state == "completed", view
    return view


def calls(folder: Path) -> list[int]:
    """The numbers that the function was called with since the last look, ascending."""
    path = folder / "calls"
    found = sorted(map(int, path.read_text().split())) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def lines(view: JobView) -> list[dict]:
    return [json.loads(line) for line in Path(view.output).read_text().splitlines()]


async def is_sound(service, view: JobView) -> bool:
    return (await service.verify(view.id)).broken == []


async def test_a_grown_dataset_runs_its_new_rows(folder, service):
    """Rows of an earlier job call nothing; each says whose result it has; the ledger is sound."""
    first = await run(service, functions(folder, range(2000)))
    assert len(calls(folder)) == 2000 and first.rows_reused == 0
    rows = [5000, *range(1500), *range(6000, 6100)]
    grown = await run(service, functions(folder, rows, name="grown.jsonl"))
    assert calls(folder) == [13, 5000, *range(6000, 6100)]
    assert (grown.rows, grown.rows_ok, grown.rows_failed, grown.rows_reused) == (1601, 1600, 1, 1499)
    found = lines(grown)
    assert [line["output"] for line in found] == [None if n == 13 else 2 * n for n in rows]
    assert found[1]["reused_from"] == f"{first.id}/0" and "reused_from" not in found[0]
    assert await is_sound(service, grown)


async def test_failed_rows_run_again(folder, service):
    """A row that failed is not taken over, nor is one that follows it in the same job."""
    await run(service, functions(folder, [13, 14]))
    calls(folder)
    again = await run(service, functions(folder, [13, 14], name="again.jsonl"))
    assert calls(folder) == [13] and again.rows_reused == 1


async def test_other_code_reuses_nothing(folder, service):
    """Results of other code of the function are not taken over."""
    await run(service, functions(folder, range(10)))
    (folder / "app.py").write_text(CODE.replace("2 * n", "3 * n"))
    calls(folder)
    again = await run(service, functions(folder, range(10), name="again.jsonl"))
    assert len(calls(folder)) == 10 and again.rows_reused == 0


@pytest.mark.parametrize("changed", ["base", "adapter"])
@pytest.mark.once
def test_other_weights_in_a_folder_are_another_target(tmp_path, changed):
    """Of a model or an adapter; nothing is known of a folder that another job had."""
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_bytes(b"1")
    model = ModelSpec("m", "llm", str(tmp_path / "base"), adapters={"a": str(tmp_path / "adapter")})
    spec = JobSpec("job_1", DatasetSpec(["in.jsonl"]), [model], OpenAIForm(), Policy(), None, "", {}, 0.0)
    before = target_keys(spec, is_current=True)
    assert before == target_keys(spec, is_current=True) and "" not in before
    assert target_keys(spec) == ["", ""]
    (tmp_path / changed / "weights.bin").write_bytes(b"22")
    after = target_keys(spec, is_current=True)
    assert [one == other for one, other in zip(before, after, strict=True)] == [changed == "adapter", False]


async def test_removed_jobs_are_not_taken_from(folder, service):
    """A job that took results over has its own copies, which may be taken in turn; of removed jobs nothing is."""
    first = await run(service, functions(folder, range(10)))
    second = await run(service, functions(folder, range(10), name="second.jsonl"))
    assert second.rows_reused == 10 and lines(second)[3]["reused_from"] == f"{first.id}/3"
    await service.remove(first.id)
    calls(folder)
    third = await run(service, functions(folder, range(10), name="third.jsonl"))
    assert lines(third)[3]["reused_from"] == f"{second.id}/3" and calls(folder) == []
    for view in (second, third):
        await service.remove(view.id)
    fourth = await run(service, functions(folder, range(10), name="fourth.jsonl"))
    assert fourth.rows_reused == 0 and len(calls(folder)) == 10


async def test_projects_do_not_share(folder, service, chat):
    """The same requests of two projects run in both; within each they are reused, without a token or a cent."""
    texts = [f"text {n}" for n in range(20)]
    body = {"temperature": 0}
    of_project = {"policy": Policy(), "body": body}
    for project in ("default", "north"):
        view = await run(service, chats(folder, chat.url, texts, name=f"{project}.l", project=project, **of_project))
        assert view.rows_reused == 0 and view.usage.input_tokens == 200 and view.cost > 0
    assert len(chat.bodies) == 40
    for project in ("default", "north"):
        order = chats(folder, chat.url, texts, name=f"again-{project}.jsonl", project=project, **of_project)
        view = await run(service, order)
        assert view.rows_reused == 20 and view.usage.input_tokens == 0 and not view.cost
        line = lines(view)[7]
        assert line["custom_id"] == f"again-{project}.jsonl-7"
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "text 7"
        assert set(line["response"]["body"]["usage"].values()) == {0}
    assert len(chat.bodies) == 40


async def test_a_project_reuses_deterministic_requests_alone(folder, service, chat):
    """Unless a job asks for more, and no request is reused where its job says so."""
    texts = ["one", "two"]
    for policy, reused in ((Policy(), 0), (Policy(), 0), (ALL, 2), (Policy(reuse="none"), 0)):
        view = await run(service, chats(folder, chat.url, texts, name=f"{os.urandom(4).hex()}.jsonl", policy=policy))
        assert view.rows_reused == reused, policy
    zero = {"temperature": 0}
    for reused in (0, 2):
        view = await run(service, chats(folder, chat.url, texts, name=f"zero-{reused}", body=zero, policy=Policy()))
        assert view.rows_reused == reused


async def test_every_field_of_a_request_counts(folder, service, chat):
    """Another parameter, another schema or another model is another request; blanks and the order of fields are not."""
    base = {"max_tokens": 5, "top_p": 0.5}
    await run(service, chats(folder, chat.url, ["{}"], body=base))
    same = chats(folder, chat.url, ["{}"], name="same.jsonl", body={"top_p": 0.5, "max_tokens": 5})
    path = Path(same.dataset.paths[0])
    path.write_text(path.read_text().replace('":', '" : '))
    assert (await run(service, same)).rows_reused == 1
    other = chats(folder, chat.url, ["{}"], name="other.jsonl", body={**base, "max_tokens": 6})
    assert (await run(service, other)).rows_reused == 0
    schema = OutputSchema('{"type":"object"}')
    assert (await run(service, replace(same, schema=schema, restart=True))).rows_reused == 0
    assert (await run(service, replace(same, schema=schema, output=str(folder / "twice.jsonl")))).rows_reused == 1
    fields = ['"a":{"type":"string"}', '"b":{"type":"string"}']
    for order_of_fields, reused in ((fields, 0), (fields[::-1], 0), (fields, 1)):
        document = '{"type":"object","properties":{' + ",".join(order_of_fields) + "}}"
        ordered = replace(same, schema=OutputSchema(document), output=str(folder / f"{os.urandom(4).hex()}.jsonl"))
        assert (await run(service, ordered)).rows_reused == reused, document
    renamed = replace(same.models[0], source="m2")
    assert (await run(service, replace(same, models=[renamed], output=None))).rows_reused == 0


async def test_replies_with_a_flaw_run_again(folder, service, chat):
    """A truncated reply is a result of its own job, and no other's; those beside it are."""
    texts = ["whole", "cut", "also whole"]
    for order in (chats(folder, chat.url, texts), chats(folder, chat.url, texts, name="again.jsonl")):
        view = await run(service, order)
    assert view.rows_reused == 2 and view.warnings == {"truncated": 1}
    strict = chats(folder, chat.url, texts, name="strict.jsonl", replies=ReplyRules(["truncated"]))
    view = await run(service, strict)
    assert (view.rows_reused, view.rows_failed) == (2, 1)


async def test_tables_take_over_their_answers(folder, service, chat):
    """Rows of a table get the answers of rows of another one, with their own columns; a changed prompt runs all."""
    model = chats(folder, chat.url, []).models[0]
    for name, extra in (("a", 1), ("b", 2)):
        rows = [{"word": f"w{n}", "extra": extra} for n in range(5)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = JobOrder(DatasetSpec([str(folder / "a.jsonl")]), [model], prompt="say {word}", policy=ALL)
    first = await run(service, order)
    other = replace(order, dataset=DatasetSpec([str(folder / "b.jsonl")]), output=str(folder / "b.csv"))
    view = await run(service, other)
    assert view.rows_reused == 5
    assert Path(view.output).read_text().splitlines()[:2] == [
        "word,extra,output,error,reused_from", f"w0,2,say w0,,{first.id}/0",
    ]  # fmt: skip
    changed = replace(other, prompt="tell {word}", output=str(folder / "c.csv"))
    assert (await run(service, changed)).rows_reused == 0


async def test_followers_share_what_their_leader_took(folder, service, chat):
    """Of equal rows one takes the result over, and the others are folded into it as ever."""
    zero = {"temperature": 0}
    await run(service, chats(folder, chat.url, ["a", "b"], body=zero))
    view = await run(service, chats(folder, chat.url, ["a", "a", "b", "a"], name="more.jsonl", body=zero))
    assert (view.rows_ok, view.rows_reused, view.rows_folded) == (4, 2, 2)
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines(view)]
    assert texts == ["a", "a", "b", "a"] and "reused_from" not in lines(view)[1]


async def test_a_damaged_index_is_written_anew(folder, service):
    """An index is never trusted: what is not as it was written is made from the results again."""
    first = await run(service, functions(folder, range(100)))
    again = await run(service, functions(folder, range(100), name="again.jsonl"))
    assert again.rows_reused == 99
    home = JobFiles(folder / "data", first.id).reuse
    for name in ("0.records", "0.table", "index.json"):
        data = bytearray((home / name).read_bytes())
        data[len(data) // 2] ^= 0xFF
        (home / name).write_bytes(data)
        assert (await service.count_reused(*planned(folder, again))).rows == 99, name


async def test_the_newest_jobs_are_looked_at(folder, service, projects):
    """As many as the project says; whoever counts is told that there are more."""
    for name in ("a", "b", "c"):
        await run(service, functions(folder, [ord(name)], name=f"{name}.jsonl"))
    view = await run(service, functions(folder, [*map(ord, "abc")], name="all.jsonl"))
    assert view.rows_reused == 3
    projects["default"] = ProjectEntry(reuse_jobs_max=3)
    assert await service.count_reused(*planned(folder, view)) == ReuseCount(3)
    projects["default"] = ProjectEntry(reuse_jobs_max=2)
    counted = await service.count_reused(*planned(folder, view))
    assert counted.rows == 2 and "only the newest 2 ended jobs" in counted.note
    assert "projects.default.reuse_jobs_max" in counted.note
    bounded = await run(service, functions(folder, [*map(ord, "abcd")], name="more.jsonl"))
    assert bounded.reuse_note == counted.note and not view.reuse_note
    assert any("took over" in line and counted.note in line for line in summary.lines(bounded))


def planned(folder: Path, view: JobView) -> tuple:
    """A job as `count_reused` takes it."""
    files = JobFiles(folder / "data", view.id)
    return files.read_spec(), str(files.dataset), str(files.plan(0))


async def test_a_damaged_result_is_not_taken(folder, service):
    """A result whose bytes have changed since it was indexed runs again."""
    first = await run(service, functions(folder, range(100)))
    await service.remove((await run(service, functions(folder, range(100), name="b.jsonl"))).id)
    (segment,) = JobFiles(folder / "data", first.id).segments.glob("*.seg")
    data = segment.read_bytes()
    assert data.count(b'"output":84') == 1
    segment.write_bytes(data.replace(b'"output":84', b'"output":85'))
    calls(folder)
    view = await run(service, functions(folder, range(100), name="c.jsonl"))
    assert calls(folder) == [13, 42] and lines(view)[42]["output"] == 84


async def test_an_older_result_is_taken_where_the_newest_is_gone(folder, service):
    """Of two jobs with the same rows the newer one has lost a result, and then all of them."""
    plain = Policy(reuse="none")
    first = await run(service, functions(folder, range(10), policy=plain))
    second = await run(service, functions(folder, range(10), name="b.jsonl", policy=plain))
    third = await run(service, functions(folder, range(10), name="c.jsonl"))
    assert {line["reused_from"].split("/")[0] for line in lines(third)} == {second.id}
    await service.remove(third.id)
    (segment,) = JobFiles(folder / "data", second.id).segments.glob("*.seg")
    segment.write_bytes(segment.read_bytes().replace(b'"output":14', b'"output":15'))
    calls(folder)
    fourth = await run(service, functions(folder, range(10), name="d.jsonl"))
    assert calls(folder) == [] and [line["output"] for line in lines(fourth)] == [2 * n for n in range(10)]
    sources = [line["reused_from"] for line in lines(fourth)]
    assert sources == [f"{first.id if n == 7 else second.id}/{n}" for n in range(10)]
    await service.remove(fourth.id)
    segment.unlink()
    fifth = await run(service, functions(folder, range(10), name="e.jsonl"))
    assert fifth.rows_reused == 10 and {line["reused_from"].split("/")[0] for line in lines(fifth)} == {first.id}
    assert await is_sound(service, fifth)


async def test_two_jobs_take_results_over_at_once(folder, service):
    """Both look in the same index, which neither finds written, and in the other's project nothing is found."""
    first = await run(service, functions(folder, range(100), policy=Policy(reuse="none")))
    shutil.rmtree(JobFiles(folder / "data", first.id).reuse, ignore_errors=True)
    calls(folder)
    orders = [functions(folder, range(100), name=f"{name}.jsonl") for name in "abc"]
    orders[2] = replace(orders[2], project="north")
    views = await asyncio.gather(*(run(service, order) for order in orders))
    assert [view.rows_reused for view in views] == [99, 99, 0]
    assert calls(folder) == sorted([13, 13, *range(100)])
    for view in views:
        assert [line["output"] for line in lines(view)] == [None if n == 13 else 2 * n for n in range(100)]
        assert await is_sound(service, view)


async def test_results_grow_old(folder):
    """Results that were made longer ago than the project allows are not taken, nor are younger copies of them."""
    (folder / "data").mkdir()
    ledger = open_ledger(folder / "data" / "batchmill.db")
    executor = LocalExecutor(folder / "data" / "workers")
    projects = {"default": ProjectEntry(reuse_age_s=1000)}
    service = job_service(folder / "data", ledger, executor, SystemClock(), projects=projects)
    try:
        first = await run(service, functions(folder, range(10)))
        await ledger.database.write(_set_finished, first.id, SystemClock().now() - 900)
        assert (await run(service, functions(folder, range(10), name="b.jsonl"))).rows_reused == 10
        projects["default"] = ProjectEntry(reuse_age_s=800)
        assert (await run(service, functions(folder, range(10), name="c.jsonl"))).rows_reused == 0
    finally:
        await service.close(at_once=True)


async def test_published_results_are_taken_once_segments_are_gone(folder):
    """Retention removes segments and indexes what was published; a line that has changed since is not taken."""
    (folder / "data").mkdir()
    ledger = open_ledger(folder / "data" / "batchmill.db")
    executor = LocalExecutor(folder / "data" / "workers")
    retention = RetentionEntry(intermediate_s=0.0, retry_s=0.0)
    service = job_service(folder / "data", ledger, executor, SystemClock(), retention=retention)
    try:
        first = await run(service, functions(folder, range(20)))  # row 13 fails
        taking = await run(service, functions(folder, range(5), name="b.jsonl"))
        await service.remove(taking.id)
        await service.retention.sweep()
        assert not JobFiles(folder / "data", first.id).segments.exists()
        output = Path(first.output)
        output.write_text(output.read_text().replace('"output":14', '"output":15'))
        calls(folder)
        view = await run(service, functions(folder, [19, *range(10)], name="c.jsonl"))
        assert view.rows_reused == 10 and calls(folder) == [7]
        assert [line["output"] for line in lines(view)] == [38, *(2 * n for n in range(10))]
        assert lines(view)[0]["reused_from"] == f"{first.id}/19"
    finally:
        await service.close(at_once=True)


def _set_finished(db, job_id, at):
    db.execute(jobs.update().where(jobs.c.id == job_id).values(finished=at))


async def test_jobs_without_reuse_are_taken_from(folder, service):
    """An earlier job need not have known that its results would be wanted: its rows are read again for the index."""
    plain = replace(functions(folder, range(50)), policy=Policy(reuse="none"))
    first = await run(service, plain)
    assert not (JobFiles(folder / "data", first.id).dataset / "requests.json").exists()
    assert (await run(service, functions(folder, range(50), name="b.jsonl"))).rows_reused == 49
    (folder / "in.jsonl").write_text("")  # its index is there, and knows its results
    assert (await run(service, functions(folder, range(50), name="c.jsonl"))).rows_reused == 49


@pytest.fixture
async def sweeping(folder, projects):
    """A service whose segments go at the first sweep."""
    (folder / "data").mkdir()
    ledger = open_ledger(folder / "data" / "batchmill.db")
    executor = LocalExecutor(folder / "data" / "workers")
    retention = RetentionEntry(intermediate_s=0.0, retry_s=0.0)
    opened = job_service(folder / "data", ledger, executor, SystemClock(), projects=projects, retention=retention)
    yield opened
    await opened.close(at_once=True)


def tables(folder: Path, url: str, numbers, *, name: str, **more) -> JobOrder:
    """A table with a prompt, whose results go to a CSV file."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"word": f"w{n}", "name": name}) + "\n" for n in numbers))
    model = chats(folder, url, []).models[0]
    fields = {"policy": ALL, "output": str(folder / f"{name}.csv"), "prompt": "say {word}", **more}
    return JobOrder(DatasetSpec([str(folder / f"{name}.jsonl")]), [model], **fields)


async def test_answers_in_other_files_stay_reusable(folder, sweeping, projects, chat):
    """Of a job that knew nothing of reuse its answers stay, without the columns of its input, until they are too old.

    What a function of one's own returned does not stay, unless it was asked for.
    """
    plain = Policy(reuse="none")
    first = await run(sweeping, tables(folder, chat.url, range(20), name="first", policy=plain))
    own = await run(sweeping, functions(folder, range(5), policy=plain))
    await sweeping.retention.sweep()
    files = JobFiles(folder / "data", first.id)
    kept = (files.reuse / "results").read_bytes()
    assert not files.segments.exists() and not JobFiles(folder / "data", own.id).reuse.exists()
    assert kept.count(b"\n") == 20 and b"say w7" in kept and b"first" not in kept
    Path(first.output).unlink()
    sent = len(chat.bodies)
    view = await run(sweeping, tables(folder, chat.url, range(15, 25), name="grown"))
    assert view.rows_reused == 5 and len(chat.bodies) == sent + 5
    rows = Path(view.output).read_text().splitlines()
    assert rows[1] == f"w15,grown,say w15,,{first.id}/15" and rows[6] == "w20,grown,say w20,,"
    assert await is_sound(sweeping, view)
    projects["default"] = ProjectEntry(reuse_age_s=1e-6)
    await sweeping.retention.sweep()
    assert not files.reuse.exists() and not JobFiles(folder / "data", view.id).reuse.exists()


async def test_kept_answers_are_never_trusted_blindly(folder, sweeping, chat):
    """A changed answer is asked for again, as are those of a damaged part of an index, and those after a cut."""
    first = await run(sweeping, tables(folder, chat.url, range(20), name="first"))
    await sweeping.retention.sweep()
    results = JobFiles(folder / "data", first.id).reuse / "results"
    data = results.read_bytes()
    sent = len(chat.bodies)
    for name, wrong, reused in (
        ("a", data.replace(b"say w7", b"say w8"), 19), ("b", data[: len(data) // 2], 10), ("c", b"", 0)
    ):  # fmt: skip
        results.write_bytes(wrong)
        view = await run(sweeping, tables(folder, chat.url, range(20), name=name))
        assert view.rows_reused == reused and len(chat.bodies) == sent + 20 - reused, name
        sent += 20 - reused
        assert f"w7,{name},say w7," in Path(view.output).read_text()
        await sweeping.remove(view.id)
    results.write_bytes(data)
    records = results.with_name("0.records")
    sound = bytearray(records.read_bytes())
    sound[40] ^= 1
    records.write_bytes(sound)
    view = await run(sweeping, tables(folder, chat.url, range(20), name="d"))
    assert view.rows_reused == 0 and await is_sound(sweeping, view)


async def test_deleted_results_do_not_stay(folder, sweeping, chat):
    """Neither those that were deleted before their segments went, nor those that were deleted later."""
    views = [await run(sweeping, tables(folder, chat.url, range(n, n + 5), name=f"{n}")) for n in (0, 100, 200)]
    homes = [JobFiles(folder / "data", view.id).reuse for view in views]
    await _delete_results(sweeping, views[0])
    await sweeping.retention.sweep()
    assert [(home / "results").exists() for home in homes] == [False, True, True]
    await _delete_results(sweeping, views[1])
    await sweeping.retention.sweep()
    assert [home.exists() for home in homes] == [False, False, True]


async def _delete_results(service, view):
    gone = Removal(f"file-{view.id}", view.project, view.id, "the key k", view.finished)
    await service._ledger.database.write(removals.insert, gone)
