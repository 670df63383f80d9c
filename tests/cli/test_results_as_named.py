"""Results in the form that one wants: the format, the rows that failed, some columns, the input beside them."""

import csv
import datetime
import gzip
import io
import json

import pyarrow as pa
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
        ("x.csv.gz", "x.csv"),
        ("r.jsonl", "belongs to the job"),
        ("in.jsonl", "--overwrite"),
        ("none/x.csv", "No such file"),
    ):
        result = call("results", "job_1", "-o", output)
        assert result.exit_code == 2 and values in result.stderr, result.stderr
    assert sorted(each.name for each in place.iterdir()) == ["app.py", "in.jsonl", "r.jsonl"]


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


REPLY = (
    '{"id":"batch_req_8d3c_%d","custom_id":"%s","response":{"status_code":200,"request_id":"r","body":%s},'
    '"error":null}\n'
)
CHAT = '{"choices":[{"message":{"content":"%s"}}],"usage":{"prompt_tokens":3}}'
FAILED = (
    '{"id":"batch_req_8d3c_1","custom_id":"b","response":{"status_code":400,"request_id":"r","body":'
    '{"error":{"code":"too_long","message":"9 tokens"}}},"error":null}\n'
)
REQUEST = '{"custom_id": "%s", "method": "POST", "url": "/v1/chat/completions", "body": {"n": %d}}\n'


@pytest.fixture
def openai(app, view, place):
    """A job of three OpenAI rows that has ended; its second row failed and is in the error file."""
    (place / "in.jsonl").write_text("\n" + REQUEST % ("a", 1) + "\n" + REQUEST % ("b", 2) + REQUEST % ("c", 3))
    (place / "r.jsonl").write_text(
        REPLY % (0, "a", CHAT % "fox") + REPLY % (2, "c", '{"data":[{"embedding":[1,2.50]}]}')
    )
    (place / "r.errors.jsonl").write_text(FAILED)
    fields = {"input": [str(place / "in.jsonl")], "output": str(place / "r.jsonl"), "rows": 3, "rows_failed": 1}
    app.jobs.add(view(state="completed", errors_output=str(place / "r.errors.jsonl"), **fields))


def rows_of(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_openai_rows_as_a_table(call, openai, place):
    """OpenAI results become a table of all rows in the order of the input: the text of each reply, and each cause."""
    assert call("results", "job_1", "-o", "x.csv").exit_code == 0
    assert (place / "x.csv").read_text() == ('custom_id,output,error\na,fox,\nb,,too_long: 9 tokens\nc,"[1,2.50]",\n')
    assert call("results", "job_1", "-o", "x.parquet", "--columns", "output,id").exit_code == 0
    assert pq.read_table(place / "x.parquet").to_pylist()[1] == {"output": None, "id": "batch_req_8d3c_1"}
    assert call("results", "job_1", "--failed", "-o", "f.csv").exit_code == 0
    assert (place / "f.csv").read_text() == "custom_id,output,error\nb,,too_long: 9 tokens\n"
    plain = call("results", "job_1", "-o", "-")
    assert plain.stdout == (place / "r.jsonl").read_text()  # without a wish, the lines are as they are


def test_requests_stand_beside_replies(app, call, openai, place):
    """--join finds the request of every row by its number, in the order of the input, also of rows so far."""
    rows = rows_of(call("results", "job_1", "--join"))
    assert [list(row) for row in rows] == [["custom_id", "method", "url", "body", "output", "error"]] * 3
    assert [row["body"]["n"] for row in rows] == [1, 2, 3]
    chosen = rows_of(call("results", "job_1", "--join", "--columns", "error,custom_id"))
    assert list(chosen[0]) == ["method", "url", "body", "error", "custom_id"]
    assert [row["body"] for row in rows_of(call("results", "job_1", "--join", "--failed"))] == [{"n": 2}]
    app.partial = (REPLY % (2, "c", "1")).encode()
    partial = call("results", "job_1", "--partial", "--join", "--columns", "output")
    assert rows_of(partial)[0]["body"] == {"n": 3} and "1 of 3 rows are finished" in partial.stderr
    (place / "in.jsonl").write_text(REQUEST % ("a", 1) + REQUEST % ("x", 2))
    changed = call("results", "job_1", "--join")
    assert changed.exit_code == 2 and 'custom_id "x", its result "b"' in changed.stderr
    (place / "in.jsonl").write_text(REQUEST % ("a", 1))
    assert "no row 1" in call("results", "job_1", "--join", "-o", "j.csv").stderr and not (place / "j.csv").exists()
    (place / "in.jsonl").unlink()
    assert "not there any more" in call("results", "job_1", "--join").stderr


def test_compressed_requests_are_read(app, call, openai, view, place):
    """The input may be several files, some compressed."""
    lines = (place / "in.jsonl").read_bytes()
    (place / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines))
    (place / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (place / "r.jsonl").write_text(REPLY % (0, "a", "1") + REPLY % (5, "c", "2"))
    inputs = [str(place / "a.jsonl"), str(place / "b.jsonl.gz")]
    app.jobs.add(view(state="completed", input=inputs, output=str(place / "r.jsonl")))
    assert [row["body"]["n"] for row in rows_of(call("results", "job_1", "--join"))] == [1, 3]


def test_some_columns(call, ended, place):
    """--columns gives these columns in this order; --join of a table adds those of the input before them."""
    ended("r.jsonl", LINES + '{"a":"3","late":1.50,"output":2,"error":null}\n')
    assert rows_of(call("results", "job_1", "--columns", "output, a"))[0] == {"output": "x\ny", "a": "1"}
    printed = call("results", "job_1", "--columns", "late,output", "--output-format", "csv")
    assert printed.stdout == 'late,output\n,"x\ny"\n,\n1.50,2\n'
    joined = rows_of(call("results", "job_1", "--columns", "error", "--join", "--failed"))
    assert joined == [{"a": "2", "error": "boom: no"}]
    for flags, message in (
        (["--columns", "nope"], "no column 'nope'; they have a, late, output, error"),
        (["--columns", "a,,b"], "one comma"),
        (["--columns", "a,a"], "a twice"),
        (["-o", "x.csv", "--output-format", "parquet"], "named as csv"),
        (["--csv-safe"], "name the output .csv"),
        (["--json", "--columns", "a"], "leave out"),
    ):
        refused = call("results", "job_1", *flags)
        assert refused.exit_code == 2 and message in refused.stderr, refused.stderr


def test_columns_of_openai_rows(call, openai):
    """A column of the request needs --join, and the message says so."""
    refused = call("results", "job_1", "--columns", "body")
    assert refused.exit_code == 2 and "join adds those of the request" in refused.stderr
    assert rows_of(call("results", "job_1", "--columns", "response"))[0]["response"]["status_code"] == 200


def test_parquet_columns_keep_their_types(app, call, view, place):
    """A choice of the columns and rows of Parquet results has the types that they had."""
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    columns = {"at": [moment, None, moment], "n": pa.array([1, 2, 3], pa.int8()), "a.b": ["x", "y", "z"]}
    vectors = pa.array([[1.5], None, [2.5]], pa.list_(pa.float32()))
    table = pa.table(columns | {"output": vectors, "error": [None, "e: f", None]})
    pq.write_table(table, place / "r.parquet")
    app.jobs.add(view(state="completed", output=str(place / "r.parquet"), rows_failed=1))
    assert call("results", "job_1", "--columns", "output,at,a.b", "-o", "x.parquet").exit_code == 0
    assert pq.read_table(place / "x.parquet").equals(table.select(["output", "at", "a.b"]))
    assert call("results", "job_1", "--columns", "n", "--failed", "-o", "y.parquet").exit_code == 0
    assert pq.read_table(place / "y.parquet").equals(table.select(["n"]).slice(1, 1))
    assert "they have at, n, a.b, output, error" in call("results", "job_1", "--columns", "a", "-o", "z.parquet").stderr


def test_no_cell_begins_a_formula(call, ended, place):
    """With --csv-safe an apostrophe stands before whatever a spreadsheet would run; numbers stay numbers."""
    cells = [
        "=1+1",
        "+cmd|x",
        "@SUM(A1)",
        "-2+3",
        " =1",
        "\t=1",
        "\rx",
        "\u200b=x",
        "\uff1d1",
        "plain",
        "-5",
        "-1.5e3",
        "a=b",
    ]
    rows = [{"=name": cell, "output": -7, "error": None} for cell in cells]
    ended("r.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for flags, marked in ((["--csv-safe"], 9), ([], 0)):
        text = call("results", "job_1", "--output-format", "csv", *flags).stdout_bytes.decode()
        header, *records = csv.reader(io.StringIO(text, newline=""))
        assert header[0] == ("'=name" if flags else "=name")
        assert [record[0] for record in records] == [f"'{cell}" for cell in cells[:marked]] + cells[marked:]
        assert {record[1] for record in records} == {"-7"}


def test_a_file_that_exists_is_replaced_only_when_told(call, ended, place):
    """Results replace a file only with --overwrite."""
    ended("r.jsonl", LINES)
    (place / "x.csv").write_text("mine")
    assert "x.csv exists" in call("results", "job_1", "-o", "x.csv").stderr and (place / "x.csv").read_text() == "mine"
    assert call("results", "job_1", "-o", "x.csv", "--overwrite").exit_code == 0
    assert (place / "x.csv").read_text() == CSV


ADDED = ["label", "response", "output", "error", "warnings", "folded_from"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_that_results_add(app, call, ended, place, kind):
    """The fields of a schema and the warnings are no input: they are left out by name, and keep their place."""
    more = {"label": "x", "response": "{}", "error": None}
    rows = [{"a": "1", **more, "warnings": "truncated"}, {"a": "2", **more, "warnings": None}]
    ended("r.jsonl", "".join(json.dumps(row) + "\n" for row in rows), added_columns=ADDED)
    if kind == "parquet":
        assert call("results", "job_1", "-o", "r.parquet").exit_code == 0
        assert pq.read_table(place / "r.parquet").to_pylist() == rows
        assert pq.read_schema(place / "r.parquet").names == list(rows[0])
        app.jobs.add(replace(app.jobs.views["job_1"][-1], output=str(place / "r.parquet")))
    joined = call("results", "job_1", "--join", "--columns", "label")
    assert [json.loads(line) for line in joined.stdout.splitlines()] == [{"a": n, "label": "x"} for n in "12"]
    assert call("results", "job_1", "--join", "--columns", "label", "-o", "j.parquet").exit_code == 0
    assert pq.read_schema(place / "j.parquet").names == ["a", "label"]
    assert call("results", "job_1", "--failed").stdout == ""


def test_a_folder_that_takes_no_file(call, ended):
    """It is named, before anything is read."""
    ended("r.jsonl", LINES)
    result = call("results", "job_1", "-o", "/proc/x.csv")
    assert (result.exit_code, result.stderr) == (
        2,
        "batchmill: nothing can be written to /proc: No such file or directory\n",
    )
