"""Killed at every point between two durable steps, the same command run again ends with every row exactly once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.faults import PART_POINTS, POINTS

ROWS = 3000
# A job passes these once: there is no second time to die at.
ONCE = ("after_describe", "after_create", "after_prepare", "before_publish", "after_publish")
PASSES = [(point, count) for point in POINTS for count in ((1,) if point in ONCE else (1, 2))]
COUNTING = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(COUNTING)
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    words = ["run", "in.jsonl", "--model", "function:app.py:double", "-o", "out.jsonl", "--workers", "2"]
    return [sys.executable, "-m", "batchmill", "--data-dir", str(tmp_path / "data"), *words]


def run(command: list[str], cwd, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BATCHMILL_FAULT": fault}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("point", "count"), PASSES)
def test_killed_at_a_point(point, count, command, tmp_path):
    """A run that is killed at the point, and the run after it, give each row exactly one result."""
    run(command, tmp_path, f"{point}:{count}:{tmp_path / 'fired'}")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fired").exists()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(ROWS)]
    assert [line["response"]["body"] for line in lines] == [2 * n for n in range(ROWS)]


@pytest.mark.parametrize(
    ("in_sample", "after_it"),
    [("after_prepare", "after_lease"), ("after_lease", "in_commit"), ("after_sync", "before_publish"),
     ("after_commit", "after_publish")],
)  # fmt: skip
def test_killed_in_a_sample_and_after_it(in_sample, after_it, command, tmp_path):
    """Whatever is killed in a sample, and in the run after it, each row has one result, and what was counted stays."""
    sample = [*command, "--sample", "700"]
    run(sample, tmp_path, f"{in_sample}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    looked = run([*sample, "--json"], tmp_path)
    assert looked.returncode == 0, looked.stderr
    view = json.loads(looked.stdout.splitlines()[-1])["job"]
    assert (view["state"], view["reason"], view["rows_ok"]) == ("paused", "sampled", 700)
    before = (tmp_path / "calls").read_text().split()
    run(command, tmp_path, f"{after_it}:1:{tmp_path / 'fired again'}")
    assert (tmp_path / "fired again").exists()
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["response"]["body"] for line in lines] == [2 * n for n in range(ROWS)]
    after = (tmp_path / "calls").read_text().split()[len(before) :]
    assert not set(after) & set(before) and len(set(before)) == 700


def test_what_was_written_is_not_run_again(command, tmp_path):
    """Rows whose outcome was in the kernel when everything died are found, not run a second time."""
    run(command, tmp_path, f"after_sync:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    assert run(command, tmp_path).returncode == 0
    calls = [int(line) for line in (tmp_path / "calls").read_text().splitlines()]
    repeated = len(calls) - len(set(calls))
    assert set(calls) == set(range(ROWS)) and repeated < ROWS / 2


@pytest.mark.parametrize("point", ["after_publish", *PART_POINTS])
def test_killed_while_parts_are_written(point, command, tmp_path):
    """Whatever is killed, a manifest names every row once as soon as there is one, and other parts go."""
    command = [word if word != "out.jsonl" else "out/" for word in command] + ["--part-rows", "1100"]
    run(command, tmp_path, f"{point}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    if (tmp_path / "out" / "manifest.json").exists():
        assert bodies_of_parts(tmp_path / "out") == [2 * n for n in range(ROWS)]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert bodies_of_parts(tmp_path / "out") == [2 * n for n in range(ROWS)]
    assert len(list((tmp_path / "out").iterdir())) == 1 + 3


def bodies_of_parts(folder: Path) -> list[int]:
    manifest = json.loads((folder / "manifest.json").read_text())
    lines = [line for part in manifest["parts"] for line in (folder / part["name"]).read_text().splitlines()]
    return [json.loads(line)["response"]["body"] for line in lines]
