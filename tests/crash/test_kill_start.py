"""A run that ends while its first processes start: none of them stays, and the same command run again does the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from batchmill.faults import START_POINTS

ROWS = 10
MARK = "BATCHMILL_TEST_MARK"
END_S = 60.0


class Command:
    """The command `run` in a folder with its input; its processes can be found by their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        (folder / "app.py").write_text("def double(n):\n    return 2 * n\n")
        rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "bad.jsonl").write_text("no json\n")

    def start(
        self, source: str = "in.jsonl", model: str = "function:app.py:double", *, fault: str = "", workers: int = 1
    ):
        words = [source, "--model", model, "-o", f"out-{source}", "--workers", str(workers)]
        return subprocess.Popen(
            [sys.executable, "-m", "batchmill", "--data-dir", "data", "run", *words], cwd=self.folder, text=True,
            env={**os.environ, "BATCHMILL_FAULT": fault, MARK: self._mark}, stderr=subprocess.PIPE,
        )  # fmt: skip

    def results(self) -> list[int]:
        """The results, in the order of the rows."""
        lines = [json.loads(line) for line in (self.folder / "out-in.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(ROWS)]
        return [line["response"]["body"] for line in lines]

    def processes(self, command: int) -> list[str]:
        """What runs with this command's environment, and its child processes, which know its process id."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
                is_child = b"batchmill.children.child" in words and str(command).encode() in words
                if is_child or f"{MARK}={self._mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append(b" ".join(words).decode())
            except OSError:
                continue  # it has ended
        return found

    def wait_for_none(self, command: int) -> None:
        deadline = time.monotonic() + END_S
        while left := self.processes(command):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what it said."""
    _, said = process.communicate(timeout=100)
    return process.returncode, said


@pytest.mark.parametrize("point", START_POINTS)
def test_killed_at_a_point(point, command):
    """The processes of a killed run end by themselves, and the next run does the job."""
    process = command.start(fault=f"{point}:1:{command.folder / 'fired'}")
    assert ended(process)[0] == -signal.SIGKILL and (command.folder / "fired").exists()
    command.wait_for_none(process.pid)
    assert ended(command.start())[0] == 0
    assert command.results() == [2 * n for n in range(ROWS)]


def test_interrupted_while_they_start(command):
    """Ctrl-C, whenever it comes after the first process is there, ends the command and all of them."""
    process = command.start()
    while len(command.processes(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code in (0, 4, 130), said  # it was done already, its job was paused, or it had none
    command.wait_for_none(process.pid)  # a process that was killed takes a moment to go
    assert ended(command.start())[0] == 0
    assert command.results() == [2 * n for n in range(ROWS)]


@pytest.mark.parametrize(
    ("source", "model", "reason"),
    [
        ("bad.jsonl", "function:app.py:double", "bad.jsonl"),
        ("in.jsonl", "function:missing.py:double", "missing.py"),
        ("in.jsonl", "function:app.py:triple", "triple"),
    ],
)
def test_a_refused_job_leaves_no_process(source, model, reason, command):
    """A job whose input, file or function is refused says so, and the processes that were started for it end."""
    process = command.start(source, model)
    code, said = ended(process)
    assert code != 0 and reason in said
    command.wait_for_none(process.pid)


def test_two_at_once(command):
    """Of two commands that start at once one becomes the owner and the other joins it: both show the same results."""
    both = [command.start(), command.start()]
    assert [ended(process)[0] for process in both] == [0, 0]
    assert command.results() == [2 * n for n in range(ROWS)]
    for process in both:
        command.wait_for_none(process.pid)


def test_several_workers(command):
    """With more workers than are started ahead, all rows run, and nothing stays."""
    process = command.start(workers=3)
    assert ended(process)[0] == 0
    assert command.results() == [2 * n for n in range(ROWS)]
    command.wait_for_none(process.pid)
