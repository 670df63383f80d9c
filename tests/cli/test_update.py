"""The same command over finished results: it says what has changed, and does it with --update."""

import json

import pytest
from click.testing import CliRunner

from batchmill.cli.main import cli
from batchmill.cli.session import Session

CODE = """
def double(n):
    with open("calls", "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(rows, *flags)`: the command over rows with these numbers. Returns its result and the numbers it called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(CODE)

    def call(rows, *flags, model="double"):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in rows))
        (tmp_path / "calls").unlink(missing_ok=True)
        words = ["run", "in.jsonl", "--model", f"function:app.py:{model}", "-o", "out.jsonl", "--data-dir", "data"]
        done = CliRunner().invoke(cli, [*words, *flags], obj=Session())
        calls = tmp_path / "calls"
        return done, sorted(map(int, calls.read_text().split())) if calls.exists() else []

    return call


def outputs(tmp_path):
    return [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_changed_input_is_updated_on_request(run, tmp_path):
    """Nothing runs and nothing is written over until the command says --update; then new rows alone run."""
    assert run(range(5))[1] == [0, 1, 2, 3, 4]
    refused, calls = run(range(1, 8))
    assert refused.exit_code == 2 and calls == []
    assert "with --update: 3 rows to run, 4 to take over" in refused.output and "--overwrite runs all" in refused.output
    assert outputs(tmp_path) == [0, 2, 4, 6, 8]
    updated, calls = run(range(1, 8), "--update")
    assert updated.exit_code == 0 and calls == [5, 6, 7], updated.output
    assert outputs(tmp_path) == [2 * n for n in range(1, 8)]
    again, calls = run(range(1, 8), "--update")
    assert again.exit_code == 0 and calls == [] and "finished already" in again.output
    shrunk, calls = run([5, 1], "--update")  # of both earlier jobs
    assert shrunk.exit_code == 0 and calls == [] and outputs(tmp_path) == [10, 2]


def test_a_finished_job_with_failed_rows_names_the_way_to_run_them(run, tmp_path):
    """The same command runs nothing: it says how failed rows and how all rows run again."""
    (tmp_path / "app.py").write_text("def odd(n):\n    assert n % 2, n\n    return n\n")
    assert run(range(3), model="odd")[0].exit_code == 3
    for flags in ((), ("--update",)):
        again, _ = run(range(3), *flags, model="odd")
        assert "finished already; batchmill retry job_" in again.output, again.output
        assert "runs its failed rows, --overwrite runs it again" in again.output


def test_what_update_cannot_do_is_refused_by_name(run, tmp_path):
    """Contradictions are errors of the command; results of somebody else are never written over."""
    for flags, word in ((("--update", "--no-reuse"), "--no-reuse"), (("--update", "--overwrite"), "--overwrite")):
        refused, _ = run([1], *flags)
        assert refused.exit_code == 2 and word in refused.output
    (tmp_path / "out.jsonl").write_text("mine\n")
    refused, calls = run([1])
    assert refused.exit_code == 2 and calls == [] and "exists and is not this job's" in refused.output
    (tmp_path / "other.jsonl").write_text("")
    done = CliRunner().invoke(cli, ["run", "in.jsonl", "--model", "function:app.py:double", "--update"], obj=Session())
    assert done.exit_code == 2 and "-o FILE" in done.output
