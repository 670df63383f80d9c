"""`retry --model` and `--adapter`: what failed goes to another model, in a job of the real command line."""

import csv
import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.errors import StorageFailed
from batchmill.jobs.ledger.ledger import Ledger

WHERE = ("--data-dir", "data")
MODELS = """
[models.small]
engine = "openai"
source = "s-small"
base_url = "{url}"
price = {{ input = 100000.0, output = 100000.0 }}
adapters = {{ tuned = "tuned" }}

[models.large]
engine = "openai"
source = "s-large"
base_url = "{url}"
price = {{ input = 1000000.0, output = 1000000.0 }}

[models.free]
engine = "openai"
source = "s-free"
base_url = "{url}"

[models.code]
engine = "function"
source = "app.py:label"
"""


def answer(body):
    """The small model cannot answer `hard`; nobody answers `never`."""
    text, model = body["messages"][-1]["content"], body["model"]
    is_whole = text == "easy" or (text == "hard" and model != "s-small")
    return choice(f"{text} by {model}", "stop" if is_whole else "length")


@pytest.fixture
def service():
    with beside(AnsweringService(answer)) as fake:
        yield fake


@pytest.fixture
def failed(service, tmp_path, monkeypatch):
    """`failed(output)`: the id of a job in which two of three rows failed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "batchmill.toml").write_text(MODELS.format(url=service.url))
    (tmp_path / "app.py").write_text("def label(word): return word\n")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in ("easy", "hard", "never")))
    rows = [
        {
            "custom_id": word,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "small", "messages": [{"role": "user", "content": word}]},
        }
        for word in ("easy", "hard", "never")
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(output="out.jsonl", *flags, file="in.jsonl"):
        prompt = ("--prompt", "{word}") if file == "in.jsonl" else ()
        command = ["run", file, "--model", "small", "-o", output, "--fail-on", "truncated", *prompt, *flags, *WHERE]
        result = CliRunner().invoke(cli, command, obj=Session())
        assert result.exit_code == 3, result.output
        return job_of()["id"]

    return run


def call(*arguments):
    return CliRunner().invoke(cli, [*arguments, *WHERE], obj=Session())


def job_of():
    return json.loads(call("jobs", "--json").output)["job"]


def test_another_model_answers_what_failed(failed, service, tmp_path):
    """Only the failed rows go there, at its price; rows, `show` and `jobs` say so, and a later retry goes back."""
    job = failed()
    before = job_of()
    again = call("retry", job, "--model", "large", "--set", "max_tokens=9")
    assert again.exit_code == 3, again.output
    assert [body["model"] for body in service.bodies] == ["s-small"] * 3 + ["s-large"] * 2
    assert [body.get("max_tokens") for body in service.bodies] == [None] * 3 + [9] * 2
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["output"] for row in rows] == ["easy by s-small", "hard by s-large", "never by s-large"]
    assert [row.get("answered_by") for row in rows] == [None, "large", "large"]
    view = job_of()
    assert view["cost"] - before["cost"] == pytest.approx(2 * 15 * 1.0)
    assert view["model"] == "small, large" and set(view["prices"]) == {"small", "large"}
    assert view["retries"] == [{"params": {"max_tokens": 9}, "model": "large", "adapter": None, "generation": 1}]
    assert "retry 1   model large, max_tokens=9" in call("show", job).output
    assert json.loads(call("jobs", "--model", "large", "--json").output)["job"]["id"] == job
    assert call("retry", job).exit_code == 3
    assert service.bodies[-1]["model"] == "s-small" and "max_tokens" not in service.bodies[-1]
    assert call("ledger", "verify", job).exit_code == 0


def test_a_model_by_its_engine_and_source_is_taken(failed):
    """As `run` takes it; here the job's budget asks for its price, and nothing goes to its service."""
    refused = call("retry", failed("out.jsonl", "--budget", "999999999"), "--model", "openai:s-other")
    assert refused.exit_code == 2
    assert "s-other" in refused.output and "price" in refused.output and "adapter" not in refused.output


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_tables_name_the_model_in_a_column(failed, tmp_path, output):
    """The column is there once a retry has named a model, and not before; it is empty for rows of the job's own."""
    job = failed(output)
    assert "answered_by" not in columns(tmp_path / output)
    assert call("retry", job, "--model", "large").exit_code == 3
    assert columns(tmp_path / output)["answered_by"] in (["", "large", "large"], [None, "large", "large"])


def columns(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pydict()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_rows_that_name_their_model_go_there_too(failed, service):
    """OpenAI rows have a model of their own, which gives way; an adapter of the job's model needs no --model."""
    job = failed(file="requests.jsonl")
    assert call("retry", job, "--adapter", "tuned").exit_code == 3
    assert [body["model"] for body in service.bodies[3:]] == ["tuned", "tuned"]
    assert call("retry", job, "--model", "large").exit_code == 3
    assert service.bodies[-1]["model"] == "s-large"


def test_the_same_command_goes_on_with_what_retries_named(failed, service, tmp_path):
    """A job that lost its results and is run by the same command again keeps the models of its retries."""
    job = failed()
    assert call("retry", job, "--model", "large").exit_code == 3
    (tmp_path / "out.jsonl").unlink()
    calls = len(service.bodies)
    assert failed() == job
    assert len(service.bodies) == calls
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row.get("answered_by") for row in rows] == [None, "large", "large"]
    assert job_of()["model"] == "small, large"


def test_what_cannot_be_is_refused(failed, service):
    """The message names the value; the job stays as it was, and nothing is called."""
    job = failed("out.jsonl", "--budget", "1000")
    calls, before = len(service.bodies), job_of()
    for change, words in (
        (("--model", "code"), "requests to language models, and 'code' is a function"),
        (("--model", "nobody"), "nobody"),
        (("--adapter", "nobody"), "no model of the job has an adapter 'nobody'"),
        (("--model", "large", "--adapter", "tuned"), "large has no adapter 'tuned'; it has none"),
        (("--model", "free"), "--budget needs a price of every model: give models.free.price"),
        (("--model", "large", "--set", "base_url=x"), "a retry cannot change 'base_url'"),
    ):
        refused = call("retry", job, *change)
        assert refused.exit_code == 2 and words in refused.output, refused.output
    assert len(service.bodies) == calls and job_of() == before


def test_a_retry_that_is_not_stored_changes_nothing(failed, service, monkeypatch):
    """Who dies before the ledger has the retry, after all files are written, leaves the job as it was."""
    job = failed()
    before = job_of()

    def killed(*_, **__):
        raise StorageFailed("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "open_generation", killed)
        assert call("retry", job, "--model", "large", "--set", "max_tokens=9").exit_code == 1
    assert job_of() == before and len(service.bodies) == 3
    assert call("retry", job).exit_code == 3
    assert [(body["model"], body.get("max_tokens")) for body in service.bodies[3:]] == [("s-small", None)] * 2


def test_functions_have_no_other_model(tmp_path, monkeypatch):
    """Rows of a function stay with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("def label(word): raise ValueError(word)\n")
    (tmp_path / "in.jsonl").write_text('{"word":"a"}\n')
    assert call("run", "in.jsonl", "--model", "function:app.py:label", "-o", "out.jsonl").exit_code == 3
    refused = call("retry", job_of()["id"], "--model", "openai:m")
    assert refused.exit_code == 2 and "only rows that are requests to language models" in refused.output


def test_the_budget_is_spent_at_the_new_price(failed, service):
    """Rows whose most the budget does not bear at the price of the new model do not run: the job pauses."""
    job = failed("out.jsonl", "--budget", "50", "--param", "max_tokens=5")
    spent, calls = job_of()["cost"], len(service.bodies)
    assert spent == pytest.approx(3 * 15 * 0.1)
    assert call("retry", job, "--model", "large").exit_code == 4
    view = job_of()
    assert (view["state"], view["reason"]) == ("paused", "budget") and view["cost"] <= 50
    assert len(service.bodies) - calls <= 1
