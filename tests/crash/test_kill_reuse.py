"""Killed while results of an earlier job are indexed and taken over, the same command ends with every row once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from batchmill.faults import REUSE_POINTS

ROWS, KNOWN = 1200, 1100
COUNTING = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data directory with a finished job over the first rows."""
    home = tmp_path_factory.mktemp("reuse")
    (home / "app.py").write_text(COUNTING)
    for name, rows in (("known", KNOWN), ("in", ROWS)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(rows)))
    done = run(home, "known.jsonl", "-o", "known.out.jsonl")
    assert done.returncode == 0, done.stderr
    return home


def run(home, *words, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BATCHMILL_FAULT": fault, "CALLS": str(home / "calls")}
    main = [sys.executable, "-m", "batchmill", "--data-dir", str(home / "data"), "run", "--model"]
    command = [*main, "function:app.py:double", *words]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=100)


def index_of(home):
    """The index of the first job."""
    (job,) = [each for each in (home / "data" / "jobs").iterdir() if "known.jsonl" in (each / "job.json").read_text()]
    return job / "reuse" / "index.json"


@pytest.mark.parametrize("point", REUSE_POINTS)
def test_killed_while_results_are_taken_over(point, folder):
    """Whoever is killed, each row has one result, known rows call nothing, and the ledger is sound."""
    index_of(folder).unlink(missing_ok=True)
    (folder / "calls").unlink()
    words = ("in.jsonl", "--reuse", "-o", f"{point}.jsonl")
    run(folder, *words, fault=f"{point}:1:{folder / point}")
    assert (folder / point).exists()
    done = run(folder, *words)  # or the job went on with another child process, and is finished
    assert done.returncode == 0, done.stderr
    assert f"{KNOWN:,} took over" in done.stdout
    calls = [int(line) for line in (folder / "calls").read_text().split()]
    assert sorted(calls) == list(range(KNOWN, ROWS))
    lines = [json.loads(line) for line in (folder / f"{point}.jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == [2 * n for n in range(ROWS)]
    assert sum("reused_from" in line for line in lines) == KNOWN
    (job,) = {json.loads(line)["id"] for line in jobs(folder) if f"{point}.jsonl" in line}
    main = [sys.executable, "-m", "batchmill", "--data-dir", str(folder / "data")]
    verified = subprocess.run([*main, "ledger", "verify", job], capture_output=True, text=True, timeout=100)
    assert verified.returncode == 0 and "sound" in verified.stdout, verified.stdout
    removed = subprocess.run(
        [*main, "jobs", "rm", job], capture_output=True, text=True, timeout=100
    )  # for the next point
    assert removed.returncode == 0, removed.stderr


def jobs(folder):
    return [path.read_text() for path in (folder / "data" / "jobs").glob("*/job.json")]


@pytest.mark.parametrize("point", ["in_reuse_index", "after_reuse_index", "after_ending"])
def test_killed_while_answers_are_kept(point, tmp_path):
    """Whoever is killed before the segments of a job are removed, later jobs find its results; they went to a CSV."""
    (tmp_path / "in.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(50)))
    (tmp_path / "batchmill.toml").write_text("[retention]\nintermediate_s = 0\n")
    (tmp_path / "app.py").write_text(COUNTING.replace("2 * n", "2 * int(n)"))
    first = run(tmp_path, "in.csv", "--reuse", "-o", "first.csv")
    assert first.returncode == 0, first.stderr
    (job,) = (tmp_path / "data" / "jobs").iterdir()
    (tmp_path / "calls").unlink()
    (tmp_path / "other.csv").write_text("n\n-1\n")
    run(tmp_path, "other.csv", "-o", "other.out.csv", fault=f"{point}:1:{tmp_path / point}")
    assert (tmp_path / point).exists()
    (tmp_path / "calls").unlink(missing_ok=True)
    done = run(tmp_path, "in.csv", "--reuse", "-o", "second.csv")
    assert done.returncode == 0, done.stderr
    assert "50 took over" in done.stdout and not (tmp_path / "calls").exists()
    assert (job / "reuse" / "results").exists() and not (job / "segments").exists()
    rows = [line.split(",")[:2] for line in (tmp_path / "second.csv").read_text().splitlines()[1:]]
    assert rows == [[str(n), str(2 * n)] for n in range(50)]
