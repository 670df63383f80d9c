"""SIGKILL at random, from outside: the whole command under fire, judged by its output and by the endpoint's log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILL_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"
ROWS, KILLS, CALLS_BETWEEN = 3000, 6, 400


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What is left after 3,000 rows and six kills, one each time 400 more calls were answered."""
    folder = tmp_path_factory.mktemp("kill")
    flags = [
        "--rows",
        ROWS,
        "--kills",
        KILLS,
        "--every-calls",
        CALLS_BETWEEN,
        "--in-flight",
        64,
        "--keep",
        folder / "run",
    ]
    command = [sys.executable, KILL_SCRIPT, "--json", *flags]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "BENCHMARK_DATA": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_run_was_under_fire(audit: dict):
    """The story was one of kills: the owner among the victims, and every kill took place."""
    assert sum(audit["kills"].values()) == KILLS
    assert "owner" in audit["kills"] and len(audit["kills"]) > 1
    assert audit["starts"] == audit["kills"]["owner"] + 1


def test_no_row_is_lost_or_doubled(audit: dict):
    """Every row has exactly one result, in the file's order, and none failed for a kill's sake."""
    names = ("rows_lost", "rows_twice", "rows_out_of_order", "rows_failed")
    assert {name: audit[name] for name in names} == dict.fromkeys(names, 0)


def test_no_answered_call_is_repeated(audit: dict):
    """No call is made again whose outcome stood in a segment when a process was killed."""
    assert audit["calls_repeated_wrongly"] == 0 < audit["rows_recorded"]
    assert audit["calls"] == ROWS + audit["calls_repeated"]


def test_the_ledger_is_sound(audit: dict):
    """After all of it the ledger and the segments agree."""
    assert audit["ledger_broken"] == []


def test_no_process_is_left(audit: dict):
    """Nothing of the run outlives it, and a killed worker never ends the run."""
    assert audit["processes_left"] == 0
    assert audit["unexpected_ends"] == []
