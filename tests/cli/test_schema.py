"""Jobs with a schema over a service whose answers a test writes, from the command line."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session

FIELDS = "label: good|bad, score: float"
GOOD = '{"label":"good","score":0.5}'
ANSWERS = {  # of each text: one after another
    "fits": [GOOD],
    "fenced": [f"Sure:\n```json\n{GOOD}\n```"],
    "string": [json.dumps(GOOD)],
    "second": ['{"label":"ugly","score":1}', GOOD],
    "third": ["no JSON", '{"label":"good"}', GOOD],
    "never": ["{}"] * 10,
}


class Answers:
    """Gives each text its answers, the last one again and again."""

    def __init__(self, answers):
        self.answers, self.calls = answers, dict.fromkeys(answers, 0)

    def __call__(self, body):
        text = next(message["content"] for message in body["messages"] if message["role"] == "user")
        given = self.answers[text]
        found = given[min(self.calls[text], len(given) - 1)]
        self.calls[text] += 1
        return found if isinstance(found, dict) else choice(found)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """`job(answers, *flags)` runs a table with a row for each text. Returns (result of the command, the service)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    def run(answers, *flags, output="out.jsonl", file="in.jsonl"):
        if file == "in.jsonl":
            (tmp_path / file).write_text("".join(json.dumps({"text": text}) + "\n" for text in answers))
        prompt = ("--prompt", "{text}") if file == "in.jsonl" else ()
        with beside(AnsweringService(Answers(answers))) as service:
            model = () if "--model" in flags else ("--model", "openai:m")
            where = (*model, "--base-url", service.url, "--data-dir", "data", "-o", output)
            result = CliRunner().invoke(cli, ["run", file, *where, *prompt, *flags], obj=Session())
        return result, service

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def view():
    """The newest job."""
    listed = CliRunner().invoke(cli, ["jobs", "--json", "--data-dir", "data"], obj=Session())
    return json.loads(listed.output.splitlines()[0])["job"]


def test_fields_become_columns(job, tmp_path):
    """Answers that fit are columns, wherever the JSON was; others are asked for again, at most twice."""
    result, service = job(ANSWERS, "--fields", FIELDS)
    assert result.exit_code == 3, result.output
    rows = {row["text"]: row for row in read(tmp_path / "out.jsonl")}
    for text in ("fits", "fenced", "string"):
        assert rows[text] == {"text": text, "label": "good", "score": 0.5, "error": None}
    for text in ("second", "third"):
        assert rows[text] == {
            "text": text, "label": "good", "score": 0.5, "error": None, "warnings": "asked_again"
        }  # fmt: skip
    never = rows["never"]
    assert (never["label"], never["score"], never["output"]) == (None, None, "{}")
    assert never["error"].startswith("schema_mismatch: ") and '"label" is a required property' in never["error"]
    assert never["error"].endswith("(asked 3 times)")
    assert len(service.bodies) == 3 + 2 + 3 + 3
    assert view()["usage"] == {"input_tokens": 110, "cached_tokens": 0, "output_tokens": 55}
    assert view()["warnings"] == {"asked_again": 2} and view()["errors"] == {"schema_mismatch": 1}


def test_the_service_is_told(job):
    """The request asks for the schema; the next one has the answer and what was wrong with it."""
    _, service = job({"third": ANSWERS["third"]}, "--fields", FIELDS)
    first, second, third = service.bodies
    described = first["response_format"]["json_schema"]
    assert first["response_format"]["type"] == "json_schema" and described["strict"] is True
    assert described["schema"]["properties"]["score"] == {"type": "number"}
    roles = [message["role"] for message in third["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert second["messages"][1]["content"] == "no JSON" and "it is not JSON" in second["messages"][2]["content"]
    assert '"score" is a required property' in third["messages"][4]["content"]
    assert len({headers["Idempotency-Key"] for headers in service.headers}) == 3


@pytest.mark.parametrize("attempts", [0, 1, 5])
def test_how_often_is_asked(job, attempts):
    """--schema-attempts bounds the calls."""
    _, service = job({"never": ["{}"]}, "--fields", FIELDS, "--schema-attempts", str(attempts))
    assert len(service.bodies) == attempts + 1


def test_a_truncated_answer_is_not_asked_for_again(job, tmp_path):
    """The next one would be as long: the error says what to change. A refusal is final too."""
    answers = {"cut": [choice('{"label":"go', "length")], "no": [choice(None, refusal="I cannot")]}
    result, service = job(answers, "--fields", FIELDS)
    assert result.exit_code == 3 and len(service.bodies) == 2
    cut, no = read(tmp_path / "out.jsonl")
    assert (
        cut["error"].startswith("reply_truncated: ")
        and "raise max_tokens; it is not JSON: it ends too early" in cut["error"]
    )
    assert no["error"].startswith("reply_refused: the model refused")
    assert view()["errors"] == {"reply_truncated": 1, "reply_refused": 1}


def test_fail_on_goes_first(job):
    """The error says what the reply was, where the job fails on that."""
    result, _ = job({"cut": [choice('{"label":"go', "length")]}, "--fields", FIELDS, "--fail-on", "truncated")
    assert result.exit_code == 3 and view()["errors"] == {"reply_truncated": 1}


def test_a_job_says_which_columns_it_adds(job, tmp_path):
    """So that `results` and `diff` tell them from those of the input."""
    answers = {"fits": ANSWERS["fits"], "second": ANSWERS["second"]}
    for output in ("one.jsonl", "two.parquet"):
        result, _ = job(answers, "--fields", FIELDS, output=output)
        assert result.exit_code == 0, result.output
    added = ["label", "score", "output", "error", "warnings", "answered_by", "folded_from", "reused_from"]
    assert view()["added_columns"] == added
    listed = CliRunner().invoke(cli, ["jobs", "--json", "--data-dir", "data"], obj=Session()).output.splitlines()
    ids = [json.loads(line)["job"]["id"] for line in listed]
    for one in ids:
        command = ["results", one, "--join", "--columns", "score", "--data-dir", "data"]
        found = CliRunner().invoke(cli, command, obj=Session())
        assert [json.loads(line) for line in found.stdout.splitlines()] == [
            {"text": text, "score": 0.5} for text in answers
        ]
    same = CliRunner().invoke(cli, ["diff", *ids, "--data-dir", "data"], obj=Session())
    assert same.exit_code == 0, same.output


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_tables_have_a_column_for_each_field(job, tmp_path, output):
    """CSV and Parquet hold them, typed in Parquet."""
    result, _ = job({"fits": ANSWERS["fits"], "second": ANSWERS["second"]}, "--fields", FIELDS, output=output)
    assert result.exit_code == 0, result.output
    if output.endswith(".csv"):
        rows = list(csv.DictReader((tmp_path / output).read_text().splitlines()))
        assert [(row["label"], row["score"]) for row in rows] == [("good", "0.5")] * 2
    else:
        table = pq.read_table(tmp_path / output)
        assert table["score"].to_pylist() == [0.5, 0.5] and str(table.schema.field("score").type) == "double"


def test_an_openai_row_has_the_json_alone(job, tmp_path):
    """The reply is kept byte for byte where it is the JSON, and else its text is replaced by it."""
    request = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {"custom_id": text, **request, "body": {"model": "m", "messages": [{"role": "user", "content": text}]}}
        for text in ("fits", "fenced", "never")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, _ = job(ANSWERS, "--fields", FIELDS, file="rows.jsonl")
    assert result.exit_code == 3, result.output
    contents = [
        line["response"]["body"]["choices"][0]["message"]["content"] for line in read(tmp_path / "out.jsonl")
    ]  # fmt: skip
    assert [json.loads(content) for content in contents] == [json.loads(GOOD)] * 2
    (failed,) = read(tmp_path / "out.errors.jsonl")
    assert failed["error"]["code"] == "schema_mismatch"
    assert failed["response"]["body"]["choices"][0]["message"]["content"] == "{}"


def test_messages_answer_with_a_tool(job, tmp_path):
    """Rows of Anthropic's API get a tool that must be called; what does not fit is asked for again."""
    (tmp_path / "batchmill.toml").write_text(
        '[models.claude]\nengine = "openai"\nsource = "m"\npaths = ["/v1/messages"]\n'
    )
    request = {"method": "POST", "url": "/v1/messages"}
    lines = [
        {"custom_id": text, **request, "body": {"max_tokens": 9, "messages": [{"role": "user", "content": text}]}}
        for text in ("fits", "second", "never")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--model", "claude", "--fields", FIELDS)
    result, service = job(ANSWERS, *flags, file="rows.jsonl")
    assert result.exit_code == 3 and len(service.bodies) == 6, result.output
    assert all(body["tool_choice"]["name"] == body["tools"][0]["name"] for body in service.bodies)
    answered = [line["response"]["body"]["content"][0]["input"] for line in read(tmp_path / "out.jsonl")]
    assert answered == [json.loads(GOOD)] * 2
    (failed,) = read(tmp_path / "out.errors.jsonl")
    assert failed["error"]["code"] == "schema_mismatch"
    assert view()["usage"]["output_tokens"] == 6 * 5


def test_a_file_holds_any_schema(job, tmp_path):
    """A schema whose values are no objects becomes `output`."""
    (tmp_path / "s.json").write_text('{\n  "type": "array", "items": {"type": "integer"}\n}')
    result, service = job({"list": ["[1, 2]"], "text": ["two", "[3]"]}, "--schema", "s.json")
    assert result.exit_code == 0, result.output
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [[1, 2], [3]]
    assert service.bodies[0]["response_format"]["json_schema"]["strict"] is True


def test_prefix(job, tmp_path):
    """A field that is a column of the input is refused before anything runs; a prefix is the way out."""
    answers = {"x": ['{"text":"y"}']}
    result, service = job(answers, "--fields", "text: str")
    assert result.exit_code != 0 and "--field-prefix" in result.output and not service.bodies
    result, _ = job(answers, "--fields", "text: str", "--field-prefix", "found_")
    assert result.exit_code == 0, result.output
    assert read(tmp_path / "out.jsonl") == [{"text": "x", "found_text": "y", "error": None}]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not JSON"),
        ("7", "is not a JSON object"),
        ('{"type": "nope"}', "/type"),
        ('{"$ref": "http://127.0.0.1:9/x"}', "cannot fetch"),
        ('{"$ref": "file:///etc/passwd"}', "cannot fetch"),
        ('{"pattern": "(a"}', "regex"),
        ('{"type": "string", "enum": []}', "no value fits the schema"),
        ('{"type": "object", "properties": {"a": false}, "required": ["a"]}', "no value fits the schema"),
        ('{"type": "object", "properties": {"error": {}}}', "the name of a column of the results"),
        ("[" * 1000 + "]" * 1000, "nested deeper"),
    ],
)
def test_bad_schemas(job, tmp_path, document, message):
    """A schema that is none, or that refers outside, or that no value fits, runs nothing."""
    (tmp_path / "s.json").write_text(document)
    result, service = job({"x": ["1"]}, "--schema", "s.json")
    assert result.exit_code not in (0, 3) and message in result.output, result.output
    assert not service.bodies


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("label", "NAME: TYPE"),
        ("label: colour", "'colour'"),
        ("a: str, a: int", "named twice"),
        ("a: x||y", "empty or repeat"),
        ("a b: str", "NAME: TYPE"),
        ("", "NAME: TYPE"),
    ],
)
def test_bad_fields(job, fields, message):
    """The message names the field and what there is."""
    result, _ = job({"x": ["1"]}, "--fields", fields)
    assert result.exit_code not in (0, 3) and message in result.output


def test_kill_9_between_an_answer_and_the_next(tmp_path):
    """The row runs again from its first call: one result, and every answer that was read is in the spend."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("fits", "second")))
    asked, may_answer = threading.Event(), threading.Event()

    def answer(body):
        first, *others = body["messages"]
        if others and not may_answer.is_set():
            asked.set()
            may_answer.wait(60)
        return choice(GOOD if others or first["content"] == "fits" else "{}")

    with beside(AnsweringService(answer)) as service:
        command = [
            sys.executable, "-P", "-m", "batchmill", "run", "in.jsonl", "--model", "openai:m", "--base-url",
            service.url, "--data-dir", "data", "-o", "out.jsonl", "--prompt", "{text}", "--fields", FIELDS,
        ]  # fmt: skip
        options = {"cwd": tmp_path, "env": {**os.environ, "OPENAI_API_KEY": "k"}}
        first = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, **options)
        assert asked.wait(60)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        may_answer.set()
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "out.jsonl")
    assert [(row["text"], row["label"], row.get("warnings")) for row in rows] == [
        ("fits", "good", None), ("second", "good", "asked_again"),
    ]  # fmt: skip
    found = json.loads(batchmill(tmp_path, "jobs", "--json").splitlines()[0])["job"]
    read_answers = 3 if len(service.bodies) == 3 else 4  # the worker lived to read the third call, or the row ran again
    assert found["usage"]["output_tokens"] == 5 * read_answers
    batchmill(tmp_path, "ledger", "verify", found["id"])
    batchmill(tmp_path, "ledger", "rebuild", found["id"])
    assert json.loads(batchmill(tmp_path, "jobs", "--json").splitlines()[0])["job"]["usage"] == found["usage"]


def batchmill(folder, *arguments):
    result = CliRunner().invoke(cli, [*arguments, "--data-dir", str(folder / "data")], obj=Session())
    assert result.exit_code == 0, result.output
    return result.output


def test_a_budget_pays_every_answer(job, tmp_path):
    """The maximum cost of all answers is reserved before the first call: the budget is never exceeded."""
    (tmp_path / "batchmill.toml").write_text(
        '[models.priced]\nengine = "openai"\nsource = "m"\nprice = { input = 1000, output = 100000 }\n'
    )
    flags = ("--fields", FIELDS, "--param", "max_tokens=5", "--model", "priced", "--budget")
    result, service = job({"never": ["{}"]}, *flags, "2.5")
    assert result.exit_code == 4 and "budget" in result.output and not service.bodies, result.output
    result, service = job({"never": ["{}"]}, *flags, "40", output="second.jsonl")
    assert result.exit_code == 3 and len(service.bodies) == 3, result.output
    assert view()["cost"] == pytest.approx(3 * (10 * 1000 + 5 * 100000) / 1e6)


def test_results_as_parquet_have_the_types_of_the_schema(job, tmp_path):
    """Also where the results of the job are JSON lines: a float that was answered with 1 is one, with or without
    failed rows, and so is one that was never answered."""
    job({"whole": ['{"label":"good","score":1}'], "never": ["{}"] * 10}, "--fields", FIELDS)
    listed = view()
    where = ("--data-dir", "data")
    shown = CliRunner().invoke(cli, ["show", listed["id"], "--json", *where], obj=Session()).output
    assert listed["schema"] is None and json.loads(shown)["job"]["schema"]["document"]
    for flags in ((), ("--failed",), ("--columns", "score,text")):
        command = ["results", listed["id"], "-o", "x.parquet", "--overwrite", *flags, *where]
        result = CliRunner().invoke(cli, command, obj=Session())
        assert result.exit_code == 0, result.output
        assert str(pq.read_schema(tmp_path / "x.parquet").field("score").type) == "double"
