"""Results in the form that a file's name says, and the rows that failed."""

import json

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

ROWS = [{"a": "1", "output": "x\ny", "error": None}, {"a": "2", "output": None, "error": "boom: no"}]
CSV = 'a,output,error\n1,"x\ny",\n2,,boom: no\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture
def ended(app, view, place):
    """A job that has ended, with results in a file of this name and text."""

    def add(name, text, **fields):
        (place / name).write_text(text)
        app.jobs.add(view(state="completed", output=str(place / name), rows=2, rows_ok=1, rows_failed=1, **fields))

    return add


@pytest.mark.parametrize(("name", "text"), [("r.csv", CSV), ("r.jsonl", LINES)])
def test_a_table_is_written_as_its_name_says(call, ended, place, name, text):
    """Results of a table come out as Parquet, CSV or JSON lines, whatever the job wrote them as."""
    ended(name, text)
    for output in ("x.parquet", "x.csv", "x.jsonl"):
        assert call("results", "job_1", "-o", output).exit_code == 0
    assert pq.read_table(place / "x.parquet").to_pylist() == ROWS
    assert (place / "x.csv").read_text() == CSV
    assert [json.loads(line) for line in (place / "x.jsonl").read_text().splitlines()] == ROWS
    assert sorted(each.name for each in place.glob(".batchmill-results-*")) == []


def test_parquet_is_read_back(app, call, ended, place):
    """Results in Parquet come out as CSV and JSON lines."""
    ended("r.csv", CSV)
    call("results", "job_1", "-o", "r.parquet")
    app.jobs.add(replace(app.jobs.views["job_1"][-1], output=str(place / "r.parquet")))
    for output in ("y.csv", "y.jsonl"):
        assert call("results", "job_1", "-o", output).exit_code == 0
    assert (place / "y.csv").read_text() == CSV and (place / "y.jsonl").read_text().splitlines()[1] == json.dumps(
        ROWS[1], separators=(",", ":")
    )


def test_what_cannot_be_written_is_refused_by_name(call, ended, place):
    """A name that says what results cannot be is refused, and nothing is written."""
    ended("r.jsonl", '{"id":"1","custom_id":"a","response":{"status_code":200},"error":null}\n')
    for output, values in (
        ("x.xlsx", "as xlsx"),
        ("x.parquet", "not a table"),
        ("x.csv", "not a table"),
        ("x.csv.gz", "x.csv"),
    ):
        result = call("results", "job_1", "-o", output)
        assert result.exit_code == 2 and values in result.stderr and not (place / output).exists()


def test_rows_that_failed(call, ended, place):
    """--failed prints the rows that failed, of tables, of OpenAI results and of an error file, as the name says."""
    ended("r.csv", CSV)
    assert [json.loads(line) for line in call("results", "job_1", "--failed").stdout.splitlines()] == ROWS[1:]
    assert call("results", "job_1", "--failed", "-o", "f.parquet").exit_code == 0
    assert pq.read_table(place / "f.parquet").to_pylist() == ROWS[1:]
    refused = call("results", "job_1", "--errors")
    assert refused.exit_code == 2 and "--failed prints those" in refused.stderr


def test_failed_openai_rows(app, call, view, place):
    """Lines of OpenAI results that failed are found beside the others, and in a file of their own."""
    bad = '{"custom_id":"b","response":{"status_code":500},"error":null}\n'
    (place / "r.jsonl").write_text('{"custom_id":"a","response":{"status_code":200},"error":null}\n' + bad)
    (place / "e.jsonl").write_text(bad)
    values = {"state": "completed", "output": str(place / "r.jsonl"), "rows_failed": 1}
    app.jobs.add(view(**values))
    app.jobs.add(view(id="other", errors_output=str(place / "e.jsonl"), **values))
    app.jobs.add(view(id="good", **(values | {"rows_failed": 0})))
    assert call("results", "job_1", "--failed").stdout == call("results", "other", "--failed").stdout == bad
    assert "no row of the job good failed" in call("results", "good", "--failed").stderr
