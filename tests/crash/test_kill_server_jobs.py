"""A server killed between two durable steps of a job of its own: the order that comes again is the same job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.faults import POINTS

TESTS = Path(__file__).parents[1]
# Rows of a job that is sealed before it is stored, of one that lies in the database too, and of one with a folder.
SHORT, SMALL, LARGE = 20, 500, 1200


def run(folder, fault: str = "") -> list[str]:
    environment = {**os.environ, "BATCHMILL_FAULT": fault, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-P", "-m", "fakes.order_server", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 or fault, done.stderr
    return done.stdout.split()


# What no such job comes by: the results of a short one are stored with the commit of its last rows.
NEVER = {
    ("after_sync", SMALL), ("after_sync", SHORT), ("after_lease", SHORT), ("before_publish", SHORT),
    ("after_publish", SHORT),
}  # fmt: skip
CASES = [(point, rows) for point in POINTS for rows in (SHORT, SMALL, LARGE) if (point, rows) not in NEVER]
CASES += [("in_end", SHORT), ("after_files_synced", SHORT)]  # results that are not synced at the end
# The job is not stored yet: its client has had no reply.
UNSTORED = {*(("after_describe", rows) for rows in (SHORT, SMALL, LARGE)), ("after_prepare", SHORT)}


@pytest.mark.parametrize(("point", "count"), CASES)
def test_an_order_that_comes_again_after_a_kill(point, count, tmp_path):
    """Whenever the server dies, the same order after it is one job with every row once, and no other folder stays."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": "double", "n": n}}
        for n in range(count)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, f"{point}:1:{tmp_path / 'fired'}")
    assert (tmp_path / "fired").exists()
    how, jobs, state, rows_ok, output = run(tmp_path)
    assert how == ("started" if (point, count) in UNSTORED else "repeated")
    assert (jobs, state, rows_ok) == ("1", "completed", str(count))
    homes = list((tmp_path / "data" / "jobs").glob("*"))
    assert len(homes) <= 1 if count != LARGE else len(homes) == 1
    with open(output) as file:
        lines = [json.loads(line) for line in file]
    assert [(line["custom_id"], line["response"]["body"]) for line in lines] == [(f"r{n}", 2 * n) for n in range(count)]
