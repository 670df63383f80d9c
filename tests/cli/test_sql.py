"""`batchmill sql`: queries over the results and the input of a job."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.client.queries import unique_names

pytest.importorskip("duckdb")

ROWS = [{"n": 1, "output": "a", "error": None}, {"n": 2, "output": None, "error": "boom: no"}]
REPLY = '{"id":"batch_req_x_%d","custom_id":"%s","response":{"status_code":200,"body":"%s"},"error":null}\n'


@pytest.fixture
def ended(app, view, place):
    """A job of a table that has ended, and its input."""
    (place / "in [1].jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (place / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    app.jobs.add(view(state="completed", input=[str(place / "in [1].jsonl")], output=str(place / "r.jsonl")))


def test_results_and_input_are_tables(call, ended, place):
    """A query reads both, and its rows are written in the format that one wants."""
    query = "select i.n, r.output from input i join results r using (n) order by i.n"
    printed = call("sql", "job_1", query)
    assert [json.loads(line) for line in printed.stdout.splitlines()] == [
        {"n": 1, "output": "a"}, {"n": 2, "output": None},
    ], printed.stderr  # fmt: skip
    assert call("sql", "job_1", query, "--output-format", "csv").stdout == "n,output\n1,a\n2,\n"
    assert call("sql", "job_1", query, "-o", "x.parquet").exit_code == 0
    assert pq.read_table(place / "x.parquet").to_pylist()[0] == {"n": 1, "output": "a"}
    assert "--overwrite" in call("sql", "job_1", query, "-o", "x.parquet").stderr


def test_columns_of_one_name_are_all_there(call, ended):
    """A join of results and input has most names twice: every value is printed, in every format."""
    query = "select * from results r join input i on r.n = i.n where r.n = 1"
    assert json.loads(call("sql", "job_1", query).stdout) == {"n": 1, "output": "a", "error": None, "n_1": 1}
    assert call("sql", "job_1", query, "--output-format", "csv").stdout == "n,output,error,n_1\n1,a,,1\n"
    assert unique_names(["a", "a", "a_1", "a"]) == ["a", "a_2", "a_1", "a_3"]


def test_texts_stay_as_they_are(call, app, view, place):
    """What looks like a date, a time or a UUID is text, also inside of other values, and in results that are CSV."""
    moment, uuid = "2026-01-02T03:04:05+02:00", "550E8400-E29B-41D4-A716-446655440000"
    row = {"d": "2026-01-02", "u": uuid, "n": {"date": moment, "l": [{"x": uuid, "y": 1}]}, "output": moment}
    (place / "t.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "d": None}) + "\n")
    (place / "t.csv").write_text(f"d,output\n2026-01-02,{moment}\n")
    for name, expected in (("t.jsonl", row), ("t.csv", {"d": "2026-01-02", "output": moment})):
        app.jobs.add(view(state="completed", input=[str(place / "t.jsonl")], output=str(place / name)))
        found = call("sql", "job_1", "select * from results")
        assert json.loads(found.stdout.splitlines()[0]) == expected, found.output
    assert json.loads(call("sql", "job_1", "select u from input limit 1").stdout) == {"u": uuid}
    assert json.loads(call("sql", "job_1", "select n.l[1].y as y from input limit 1").stdout) == {"y": 1}


def test_openai_and_parquet_results(app, call, view, place):
    """Results of OpenAI rows and of Parquet are tables too; an input that is gone is said."""
    (place / "o.jsonl").write_text(REPLY % (0, "a", "x") + REPLY % (1, "b", "y"))
    app.jobs.add(view(state="completed", input=[str(place / "gone")], output=str(place / "o.jsonl")))
    result = call("sql", "job_1", "select custom_id, output from results where output = 'y'")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"custom_id": "b", "output": "y"} and "no table input" in result.stderr
    pq.write_table(
        pa.table({"a": [1, 2], "output": [1.5, 2.5], "error": pa.array([None, None], pa.string())}), "p.parquet"
    )
    app.jobs.add(view(state="completed", output=str(place / "p.parquet")))
    assert json.loads(call("sql", "job_1", "select sum(output) as s from results").stdout) == {"s": 4.0}


def test_a_query_reads_nothing_else(call, ended, place):
    """A query reads and writes no other file, and its errors are told."""
    (place / "secret.csv").write_text("a,b\n1,2\n")
    for query, message in (
        ("select * from read_csv('secret.csv')", "Cannot access file"),
        ("copy results to 'x.csv'", "Cannot access file"),
        ("set enable_external_access = true", "DuckDB"),
        ("select nope from results", "nope"),
        ("selec", "DuckDB"),
        ("", "must be a SELECT"),
    ):
        refused = call("sql", "job_1", query)
        assert refused.exit_code == 2 and message in refused.stderr, refused.stderr
    assert not (place / "x.csv").exists()
