"""Two commands on one data directory, as two people at two terminals would start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CODE = """
import time
from pathlib import Path
QUICK = Path(__file__).with_name("quick")
def patient(n):
    time.sleep(0.001 if QUICK.exists() else 0.5)
    return n
def slow(n):
    time.sleep(0.01)
    return n
def slower(n):
    time.sleep(0.02)
    return n
def slowest(n):
    time.sleep(0.06)
    return n
"""
ROWS = 300
TIMEOUT_S = 90


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(CODE)
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Command:
    """A `batchmill` process whose JSON lines are read as they come."""

    def __init__(self, folder: Path, *words: str, fault: str = "") -> None:
        line = [sys.executable, "-m", "batchmill", "--json", "--data-dir", str(folder / "data"), *words]
        self._process = subprocess.Popen(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "BATCHMILL_FAULT": fault},
        )  # fmt: skip
        self.messages: list[dict] = []
        self._running = threading.Event()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                self.messages.append(message)
                if message.get("job", {}).get("rows_ok"):
                    self._running.set()
        self._running.set()

    def wait_until_rows_are_done(self) -> None:
        assert self._running.wait(TIMEOUT_S)

    def send(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said."""
        assert self._process.stderr is not None
        with self._process.stderr as words:
            said = words.read()
        code = self._process.wait(TIMEOUT_S)
        self._reading.join()
        return code, said

    @property
    def job(self) -> dict:
        return self.messages[-1]["job"]


def run(folder: Path, function: str, output: str, *words: str, fault: str = "") -> Command:
    line = ["run", "in.jsonl", "--model", f"function:app.py:{function}", "-o", output, *words]
    return Command(folder, *line, fault=fault)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_a_second_run_joins_and_outlives_the_first(folder):
    """A second run uses the owner of the data directory, and takes over when the owner has finished its own job."""
    first = run(folder, "slow", "one.jsonl")
    first.wait_until_rows_are_done()
    second = run(folder, "slower", "two.jsonl")
    assert first.end()[0] == 0
    code, said = second.end()
    assert (code, "Traceback" in said) == (0, False), said
    assert ids(folder / "one.jsonl") == ids(folder / "two.jsonl") == [f"r{n}" for n in range(ROWS)]


def test_the_same_run_twice_is_one_job(folder):
    """The same command beside a running one joins its job: every row runs once, both see the end."""
    first = run(folder, "slow", "one.jsonl")
    first.wait_until_rows_are_done()
    second = run(folder, "slow", "one.jsonl")
    assert first.end()[0] == 0 and second.end()[0] == 0
    assert second.job["id"] == first.job["id"]
    assert ids(folder / "one.jsonl") == [f"r{n}" for n in range(ROWS)]


@pytest.mark.parametrize("flag", ["--restart", "--overwrite"])
def test_an_order_whose_reply_is_lost_with_the_owner(folder, flag):
    """It is sent again, to the next owner, which knows the job that it has become: it is not begun twice."""
    first = run(folder, "patient", "one.jsonl", fault=f"after_create:2:{folder / 'fired'}")
    first.wait_until_rows_are_done()
    second = run(folder, "slow", "two.jsonl", flag)
    code, said = second.end()
    assert code == 0, said
    assert (folder / "fired").exists() and first.end()[0] == -signal.SIGKILL
    listed = Command(folder, "jobs")
    assert listed.end()[0] == 0
    found = {message["job"]["id"]: message["job"]["state"] for message in listed.messages}
    assert found == {first.job["id"]: "paused", second.job["id"]: "completed"}


def test_the_whole_run_beside_a_sample_of_it(folder):
    """A command for all rows, or for other rows, that joins a sample goes on after it, and not with its exit code."""
    sample = run(folder, "patient", "one.jsonl", "--limit", "20")
    sample.wait_until_rows_are_done()
    whole, more = run(folder, "patient", "one.jsonl"), run(folder, "patient", "one.jsonl", "--limit", "30")
    whole.wait_until_rows_are_done()
    (folder / "quick").touch()
    ends = [each.end() for each in (sample, whole, more)]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert whole.job["state"] == "completed" and whole.job["id"] == sample.job["id"], ends
    assert ids(folder / "one.jsonl") == [f"r{n}" for n in range(ROWS)]


def test_other_commands_beside_a_run(folder):
    """Jobs are listed, shown, paused and resumed beside the command that runs them."""
    running = run(folder, "patient", "one.jsonl")
    running.wait_until_rows_are_done()
    job = running.messages[-1]["job"]["id"]
    shown = Command(folder, "show", job[:8])
    assert shown.end()[0] == 0
    assert Command(folder, "pause", job).end()[0] == 0
    assert running.end()[0] == 4 and running.job["state"] == "paused"
    (folder / "quick").touch()
    resumed = Command(folder, "resume", job)
    assert resumed.end()[0] == 0
    assert ids(folder / "one.jsonl") == [f"r{n}" for n in range(ROWS)]


def test_an_interrupt_pauses_and_the_same_command_goes_on(folder):
    """Ctrl-C pauses cleanly with exit code 130; the same command again finishes the job."""
    first = run(folder, "slower", "one.jsonl")
    first.wait_until_rows_are_done()
    first.send(signal.SIGINT)
    code, said = first.end()
    assert code == 130 and "Traceback" not in said, said
    again = run(folder, "slower", "one.jsonl")
    assert again.end()[0] == 0 and again.job["id"] == first.job["id"]
    assert ids(folder / "one.jsonl") == [f"r{n}" for n in range(ROWS)]


def test_the_guest_of_a_killed_owner_goes_on(folder):
    """When the owner is killed, a command that had joined it becomes the owner and finishes its own job."""
    owner = run(folder, "slowest", "one.jsonl")
    owner.wait_until_rows_are_done()
    guest = run(folder, "slower", "two.jsonl")
    guest.wait_until_rows_are_done()
    owner.send(signal.SIGKILL)
    assert owner.end()[0] == -signal.SIGKILL
    code, said = guest.end()
    assert code == 0, said
    assert ids(folder / "two.jsonl") == [f"r{n}" for n in range(ROWS)]


def test_two_commands_that_race_for_the_lock(folder):
    """Two commands that start at once, beside the socket of an owner that was killed, both do what they were asked."""
    (folder / "data").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "data" / "control.sock"))
    first, second = run(folder, "slow", "one.jsonl"), run(folder, "slow", "one.jsonl")
    ends = [first.end(), second.end()]
    assert [code for code, _ in ends] == [0, 0], ends
    assert first.job["id"] == second.job["id"]
    assert ids(folder / "one.jsonl") == [f"r{n}" for n in range(ROWS)]
