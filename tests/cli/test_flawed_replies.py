"""Replies that are not what they seem, in a job of the real command line."""

import csv
import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside

from batchmill.cli.main import cli
from batchmill.cli.session import Session

REPLIES = {
    "whole": choice("yes"),
    "cut": choice("ye", "length"),
    "none": choice(""),
    "no": choice(None, refusal="I cannot"),
    "filtered": choice("y", "content_filter"),
}


def answer(body):
    return REPLIES[body["messages"][-1]["content"]]


@pytest.fixture
def service():
    with beside(AnsweringService(answer)) as fake:
        yield fake


@pytest.fixture
def run(service, tmp_path, monkeypatch):
    """`run(*flags)`: a job over a table with a row for each reply. Returns the result of the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in REPLIES))
    requests = [{"model": "m", "messages": [{"role": "user", "content": word}]} for word in REPLIES]
    rows = [{"custom_id": word, "method": "POST", "url": "/v1/chat/completions"} for word in REPLIES]
    lines = [json.dumps({**row, "body": body}) + "\n" for row, body in zip(rows, requests, strict=True)]
    (tmp_path / "openai.jsonl").write_text("".join(lines))

    def call(*flags, file="in.jsonl", output="out.jsonl"):
        prompt = () if file == "openai.jsonl" else ("--prompt", "{word}")
        where = ("--model", "openai:m", "--base-url", service.url, "--data-dir", "data", "-o", output)
        return CliRunner().invoke(cli, ["run", file, *where, *prompt, *flags], obj=Session())

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    return call


def job_of():
    """The only job of the data directory."""
    listed = CliRunner().invoke(cli, ["jobs", "--json", "--data-dir", "data"], obj=Session())
    return json.loads(listed.output)["job"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_flaws_are_counted_and_shown(run, tmp_path):
    """The rows are results; the summary counts each flaw, and the row names it."""
    result = run()
    assert result.exit_code == 0, result.output
    for kind in ("truncated", "filtered", "refused", "empty"):
        assert f"1  {kind}: " in result.output
    rows = {row["word"]: row for row in read(tmp_path / "out.jsonl")}
    assert {word: row.get("warnings") for word, row in rows.items()} == {
        "whole": None, "cut": "truncated", "none": "empty", "no": "refused", "filtered": "filtered",
    }  # fmt: skip
    assert rows["cut"]["output"] == "ye" and "warnings" not in rows["whole"]
    view = job_of()
    assert view["warnings"] == {"truncated": 1, "filtered": 1, "refused": 1, "empty": 1}


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_flaws_are_a_column_of_tables(run, tmp_path, output):
    """In a table they are a column, empty for whole replies."""
    assert run(output=output).exit_code == 0
    if output.endswith(".csv"):
        rows = list(csv.DictReader((tmp_path / output).read_text().splitlines()))
        assert [row["warnings"] for row in rows] == ["", "truncated", "empty", "refused", "filtered"]
    else:
        assert pq.read_table(tmp_path / output)["warnings"].to_pylist() == [
            None, "truncated", "empty", "refused", "filtered"
        ]  # fmt: skip


def test_a_job_may_fail_on_flaws(run, tmp_path, service):
    """Such rows are errors, the reply is kept beside the error, and `retry` runs them again."""
    result = run("--fail-on", "truncated,empty")
    assert result.exit_code == 3, result.output
    assert "1  reply_truncated: the reply ended at its limit" in result.output
    rows = {row["word"]: row for row in read(tmp_path / "out.jsonl")}
    assert rows["cut"]["output"] == "ye" and rows["cut"]["error"].startswith("reply_truncated: ")
    assert rows["none"]["error"].startswith("reply_empty: ") and rows["no"]["warnings"] == "refused"
    job = job_of()
    assert job["rows_failed"] == 2 and job["warnings"] == {"refused": 1, "filtered": 1}
    assert job["usage"] == {"input_tokens": 50, "cached_tokens": 0, "output_tokens": 25}
    calls = len(service.bodies)
    again = CliRunner().invoke(cli, ["retry", job["id"], "--data-dir", "data"], obj=Session())
    assert again.exit_code == 3, again.output
    assert len(service.bodies) == calls + 2


def test_an_openai_row_keeps_its_reply(run, tmp_path):
    """The line of the error file has the reply and the reason."""
    result = run("--fail-on", "truncated", file="openai.jsonl")
    assert result.exit_code == 3, result.output
    (line,) = read(tmp_path / "out.errors.jsonl")
    assert line["error"]["code"] == "reply_truncated" and line["response"]["status_code"] == 200
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "ye"


def test_an_unknown_flaw_is_refused(run):
    """The message names what there is."""
    result = run("--fail-on", "truncated,short")
    assert result.exit_code == 2 and "'short' is none of truncated, filtered" in result.output


def test_folded_rows_share_the_flaw(run, tmp_path):
    """A row with the same request names the same flaw; the reply is counted once."""
    (tmp_path / "same.jsonl").write_text('{"word":"cut"}\n' * 3)
    assert run("--dedupe", file="same.jsonl").exit_code == 0
    assert [row["warnings"] for row in read(tmp_path / "out.jsonl")] == ["truncated"] * 3
    assert job_of()["warnings"] == {"truncated": 1}


def test_a_rebuilt_ledger_counts_flaws(run):
    """The counts are in the segments too."""
    run()
    before = job_of()
    result = CliRunner().invoke(cli, ["ledger", "rebuild", before["id"], "--data-dir", "data"], obj=Session())
    assert result.exit_code == 0, result.output
    assert job_of()["warnings"] == before["warnings"] != {}


def test_a_retry_changes_what_failed(run, tmp_path, service):
    """--set is for the rows of the retry alone, and the job says so."""
    assert run("--fail-on", "truncated", "--param", "max_tokens=1").exit_code == 3
    job = job_of()["id"]
    where = ("--data-dir", "data")
    again = CliRunner().invoke(cli, ["retry", job, "--set", "max_tokens=2048", *where], obj=Session())
    assert again.exit_code == 3, again.output
    assert [body["max_tokens"] for body in service.bodies] == [1, 1, 1, 1, 1, 2048]
    shown = CliRunner().invoke(cli, ["show", job, *where], obj=Session()).output
    assert "retry 1   max_tokens=2048" in shown
    refused = CliRunner().invoke(cli, ["retry", job, "--set", "base_url=x", *where], obj=Session())
    assert refused.exit_code == 2 and "a retry cannot change 'base_url'; it can change" in refused.output
    for value in ("seed=999999999999999999999999999999", "max_tokens=-5", "max_tokens={}", "stop=[[[[]]]]", "top_p=2"):
        refused = CliRunner().invoke(cli, ["retry", job, "--set", value, *where], obj=Session())
        assert refused.exit_code == 2 and "a retry cannot do that" in refused.output, refused.output


def test_a_retry_of_openai_rows_changes_them(run, service):
    """The row's own field gives way."""
    assert run("--fail-on", "truncated", file="openai.jsonl").exit_code == 3
    again = ["retry", job_of()["id"], "--set", "temperature=0.5", "--data-dir", "data"]
    assert CliRunner().invoke(cli, again, obj=Session()).exit_code == 3
    assert [body.get("temperature") for body in service.bodies] == [None] * 5 + [0.5]
