"""A sample of a job that takes over results of an earlier one."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.optional import require

CODE = """
def f(text):
    with open("calls", "a") as calls:
        print(text, file=calls)
    return text.upper()
"""


def call(verb: str, rows: str, *words: str) -> Result:
    order = (verb, rows, "--model", "function:app.py:f", *words, "--data-dir", "data")
    return CliRunner().invoke(cli, order, obj=Session())


def summary(result: Result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_rows_that_are_taken_over_in_a_sample(tmp_path, monkeypatch, output):
    """They are shown with where they come from, no row is called twice, and no figure counts them as paid."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(CODE)
    for name, step in (("all.jsonl", 1), ("old.jsonl", 2)):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(0, 10, step)))
    assert call("run", "old.jsonl").exit_code == 0
    estimated = call("estimate", "all.jsonl", "--limit", "4", "--reuse")
    assert "5 of the rows of the whole job take over" in estimated.output, estimated.output
    looked = call("run", "all.jsonl", "--limit", "4", "--reuse", "-o", output)
    assert looked.exit_code == 0 and "T3" in looked.output and "T4" not in looked.output and "job_" in looked.output
    done = summary(call("run", "all.jsonl", "--reuse", "-o", output, "--json"))["job"]
    assert (done["state"], done["rows_ok"], done["rows_reused"]) == ("completed", 10, 5)
    assert sorted((tmp_path / "calls").read_text().split()) == [f"t{n}" for n in range(10)]
    if output.endswith("csv"):
        texts = [line.split(",")[1] for line in (tmp_path / output).read_text().splitlines()[1:]]
    else:
        read = require("pyarrow.parquet:read_table", "this test")
        texts = read(tmp_path / output).column("output").to_pylist()
    assert texts == [f"T{n}" for n in range(10)]
