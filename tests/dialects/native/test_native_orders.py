"""From what the API is asked for to an order: files and models by name, of the caller's own, and nothing else."""

import pytest
from dialects.native.native_kit import Kit
from msgspec.structs import replace

from batchmill.dialects.native.orders import Orders, Redactor
from batchmill.errors import Conflict, Forbidden, InvalidInput, UnknownName
from batchmill.services.project_jobs import ResultIds
from batchmill.types import Caller, JobView, LedgerReport, Once, OutputSchema, Problem, PromptTemplate, Scope, Wait
from batchmill.wire.native import NewJob, Work

CALLER = Caller("default", Scope.SUBMIT, "k1")
SMALL = Caller("small", Scope.SUBMIT)
ONCE = Once("key:1", "f")


@pytest.fixture
async def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.close()


async def order(kit, job, caller=CALLER):
    orders = Orders(kit.services)
    async with orders.inputs(caller, job) as records:
        return orders.job(caller, job, records, ONCE)


async def test_an_order_says_all_that_was_asked(kit):
    """Every field arrives where jobs are run; the frontend, the caller's key and the names of files are kept."""
    file_id = await kit.stored("rows.csv")
    job = NewJob(
        [file_id], ["f", "far"], prompt="{a}", system="s", url="/v1/x", params={"t": 0}, on_invalid="skip", dedupe=True,
        budget=2.0, priority=3, completion_s=60.0, labels={"a": "b"}, output_format="parquet",
        together=True, fail_on=["empty"], schema={"type": "integer"}, schema_attempts=1, field_prefix="p_",
    )  # fmt: skip
    made = await order(kit, job)
    assert made.dataset.paths == [str(kit.files.home / file_id)] and made.dataset.format == "csv"
    assert [model.name for model in made.models] == ["f", "far"] and made.default_model
    assert (made.prompt, made.system, made.url, made.params) == ("{a}", "s", "/v1/x", {"t": 0})
    policy = made.policy
    assert (policy.on_invalid, policy.dedupe, policy.budget, policy.priority) == ("skip", True, 2.0, 3)
    assert policy.deadline == kit.clock.now() + 60 and policy.on_engine_failure == "fail"
    assert made.labels == {"a": "b"} and made.output_format == "parquet" and made.once == ONCE and made.together
    assert made.replies.fail_on == ["empty"] and made.schema == OutputSchema('{"type":"integer"}', 1, "p_")
    assert made.origin == {
        "frontend": "native", "input_file_ids": [file_id], "files": {file_id: "rows.csv"}, "key": "k1",
    }  # fmt: skip


async def test_only_keys_that_may_send_a_template(kit):
    """Those that deploy code, and those of a project that the operator allows; others are told what to do."""
    job = NewJob([await kit.stored("rows.csv")], ["far"], template="{{ a }}")
    with pytest.raises(Forbidden, match="projects.default.templates") as refused:
        await order(kit, job)
    assert refused.value.code == "template_not_allowed"
    with pytest.raises(Forbidden):
        await order(kit, job, replace(CALLER, scope=Scope.ADMIN))
    assert (await order(kit, job, replace(CALLER, scope=Scope.DEPLOY))).template == PromptTemplate("{{ a }}")
    theirs = replace(job, files=[await kit.stored("rows.csv", "open")])
    assert (await order(kit, theirs, Caller("open", Scope.SUBMIT, "k2"))).template is not None
    async with Orders(kit.services).inputs(CALLER, work := Work(job.files, ["far"], template="{{ a }}")) as inputs:
        with pytest.raises(Forbidden):  # of a preview
            Orders(kit.services).work(CALLER, work, inputs)


async def test_rows_may_name_any_model_where_none_is_named(kit):
    """Without `models` all of the caller's are there, no row has a default, and lines of JSON are OpenAI rows."""
    made = await order(kit, NewJob([await kit.stored()]))
    assert [model.name for model in made.models] == ["f", "far"] and not made.default_model
    assert made.dataset.format == "openai"
    named = await order(kit, NewJob([await kit.stored()], ["f"]))
    assert named.dataset.format is None and named.default_model


async def test_a_caller_gets_no_more_names_than_are_its_own(kit):
    """A project that may use an adapter only gets its model with that name alone, and cannot name the model itself."""
    file_id = await kit.stored(project="small")
    made = await order(kit, NewJob([file_id]), SMALL)
    assert [(model.name, model.allowed) for model in made.models] == [("far", ["legal"])]
    with pytest.raises(UnknownName):
        await order(kit, NewJob([file_id], ["far"]), SMALL)


@pytest.mark.parametrize(
    ("filename", "format_"),
    [
        ("a.csv", "csv"), ("A.CSV.GZ", "csv"), ("a.parquet", "parquet"), ("a.jsonl.zst", None), ("a", None),
        ("a.csv.txt", None), (".csv", None),
    ],
)  # fmt: skip
async def test_a_name_says_what_a_file_holds(kit, filename, format_):
    """Files are stored without a name: the one they were uploaded under decides, unless the order says it."""
    file_id = await kit.stored(filename)
    assert (await order(kit, NewJob([file_id], ["f"]))).dataset.format == format_
    assert (await order(kit, NewJob([file_id], ["f"], format="jsonl"))).dataset.format == "jsonl"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"models": ["f", "f"]}, "duplicate_model"),
        ({"models": ["legal"]}, "adapter_as_model"),
        ({"prompt": "{a}"}, "no_model"),
        ({"models": ["f"], "deadline": 1.0}, "invalid_deadline"),
        ({"models": ["f"], "deadline": 4e9, "completion_s": 1.0}, "invalid_input"),
    ],
)
async def test_what_does_not_fit_is_refused(kit, fields, code):
    """Each contradiction of an order has its code."""
    with pytest.raises(InvalidInput) as caught:
        await order(kit, NewJob([await kit.stored()], **fields))
    assert caught.value.code == code


async def test_files_are_the_callers_own_and_fit_together(kit):
    """A file of another project is unknown; one of another purpose, one named twice and two formats are refused."""
    mine, theirs = await kit.stored(), await kit.stored(project="small")
    tuning, table = await kit.stored(purpose="fine-tune"), await kit.stored("t.csv")
    for files, kind, code in (
        ([mine, theirs], UnknownName, "unknown_file"),
        ([tuning], InvalidInput, "wrong_purpose"),
        ([mine, mine], InvalidInput, "duplicate_file"),
        ([mine, table], InvalidInput, "format_mismatch"),
    ):
        with pytest.raises(kind) as caught:
            await order(kit, NewJob(files, ["f"]))
        assert caught.value.code == code


async def test_a_file_cannot_go_while_its_order_is_made(kit):
    """Between the look at a file and the job that reads it nobody deletes the file."""
    file_id = await kit.stored()
    async with Orders(kit.services).inputs(CALLER, Work([file_id])):
        with pytest.raises(Conflict):
            await kit.files.delete("default", file_id, "ada")
    await kit.files.delete("default", file_id, "ada")


def test_views_name_files_and_no_places(tmp_path):
    """Ids stand for paths in every text of a view, and of the frontend only what clients are meant to see is told."""
    files, shown = tmp_path / "files", Redactor(tmp_path)
    origin = {"frontend": "native", "key": "k1", "files": {"file-1": "a.jsonl"}, "input_file_ids": ["file-1"]}
    text = f"{files}/file-1 changed; see {tmp_path}/jobs/job_1/results.jsonl"
    view = JobView(
        "job_1", "paused", origin=origin, input=[f"{files}/file-1"], output=f"{tmp_path}/jobs/job_1/results.jsonl",
        message=text, notes=[text], problems=[Problem("c", text, 1, f"{files}/file-1")], error_samples={"c": text},
    )  # fmt: skip
    seen = shown.job(view, ResultIds("file-2", None))
    assert str(tmp_path) not in str(seen)
    assert seen.input == ["file-1"] and seen.output == "file-2" and seen.problems[0].path == "file-1"
    assert seen.message == "file-1 changed; see job_1/results.jsonl"
    assert seen.origin == {"frontend": "native", "files": {"file-1": "a.jsonl"}}
    assert shown.job(replace(view, origin={"frontend": "openai", "key": "k"})).origin == {"frontend": "openai"}
    assert shown.job(replace(view, origin=None)).origin == {"frontend": "cli"}
    assert str(tmp_path) not in str(shown.wait(Wait("job_1", "paused", [text])))
    report = LedgerReport("job_1", 1, 1, 1, 1, 1, damaged=[text], broken=[text])
    assert str(tmp_path) not in str(shown.ledger(report))
