"""Jobs whose workers run on a real Ray cluster that loses actors, nodes and its head."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray_support import free_port, ray_nodes, ray_python

WRONG_CLOCK = Path(__file__).parent.parent / "fakes" / "wrong_clock"
ROWS = 400
# Row 200 tells which process has it, and waits until it may go on. Whoever runs it again goes on at once.
APP = """
import os
from pathlib import Path

HERE = Path(__file__).parent

def double(n):
    if n == 200 and not (HERE / "seen").exists():
        (HERE / "seen").touch()
        with open(HERE / "reached", "w") as reached:
            reached.write(str(os.getppid()))
        with open(HERE / "go") as go:
            go.read()
    return 2 * n
"""


class Job:
    """`batchmill run` over a function that stops at one row."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        (folder / "app.py").write_text(APP)
        (folder / "in.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(ROWS)))
        for name in ("reached", "go"):
            os.mkfifo(folder / name)
        (folder / "batchmill.toml").write_text(
            f'data_dir = "data"\n[cluster]\naddress = "{address}"\npython = "{ray_python()}"\nexecutor = "ray"\n'
            "trusted_network = true\n"
        )
        self.process = subprocess.Popen(
            [*self._command, "run", "in.jsonl", "--model", "function:app.py:double", "--workers", "2", "--output",
             "out.jsonl"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    _command = [sys.executable, "-P", "-m", "batchmill"]

    def reached(self) -> int:
        """Wait for the row. Returns the process id of its worker."""
        return int((self.folder / "reached").read_text())

    def waits_for(self, text: str) -> None:
        """Return once it says this."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}")

    def says(self, *command: str) -> str:
        """What a command prints. It ends with 0."""
        done = subprocess.run([*self._command, *command], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ends_whole(self) -> None:
        """It completes with exactly one right result a row, and a sound ledger."""
        output, _ = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, output
        results = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        assert [each["output"] for each in results] == [2 * n for n in range(ROWS)]
        self.says("ledger", "verify", json.loads(self.says("jobs", "--json").splitlines()[0])["job"]["id"])


@pytest.mark.timeout(180)
def test_an_actor_and_a_node_are_lost(tmp_path):
    """A killed actor, and then a removed node, cost no row: each has one outcome, and the ledger is sound."""
    with ray_nodes(0, 1, 1) as nodes:
        job = Job(tmp_path, nodes.address)
        os.kill(job.reached(), signal.SIGKILL)
        nodes.does("remove 1")
        job.ends_whole()


@pytest.mark.timeout(180)
def test_the_head_is_lost(tmp_path):
    """A job waits while its cluster is away, says so, and goes on by itself on the next cluster at the address."""
    port = free_port()
    with ray_nodes(2, port=port) as nodes:
        job = Job(tmp_path, nodes.address)
        job.reached()
    with ray_nodes(2, port=port):
        job.ends_whole()


@pytest.mark.timeout(180)
def test_a_node_joins_late(tmp_path):
    """A job that no node has room for says so, and goes on by itself once one has: here one whose clock is an hour
    ahead, and another one that is an hour behind after the first is gone.
    """
    with ray_nodes(0) as nodes:
        job = Job(tmp_path, nodes.address)
        job.waits_for("needs 1 CPU; no node of the cluster has more than 0 CPUs")
        nodes.add(1, PYTHONPATH=str(WRONG_CLOCK), CLOCK_OFF_S="3600")
        job.reached()
        nodes.add(1, PYTHONPATH=str(WRONG_CLOCK), CLOCK_OFF_S="-3600")
        nodes.does("remove 1")
        job.ends_whole()
