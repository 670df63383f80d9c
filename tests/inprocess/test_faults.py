"""A cell that is interrupted and a kernel that dies: the same call again, and each row has exactly one outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROWS = 100
CELL = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import batchmill
import pandas as pd

frame = pd.DataFrame({{"n": range({ROWS})}}, index=["same"] * {ROWS})
job = batchmill.run(frame, model={f"function:{Path(__file__).with_name('functions.py')}:counted"!r}, progress=True)
found = job.to_pandas()
assert found["output"].tolist() == [2 * n for n in range({ROWS})] and set(found.index) == {{"same"}}
print(job.how)
"""


class Kernel:
    """A process that runs the cell, over one data directory."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._environ = {**os.environ, "INPROCESS_PLACE": str(place), "BATCHMILL_DATA_DIR": str(place / "data")}

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CELL], env=self._environ, cwd=self._place, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def until_blocked(self, kernel: subprocess.Popen[str]) -> None:
        """Wait until a row says that it waits."""
        while not (self._place / "blocked").exists():
            assert kernel.poll() is None, kernel.communicate()
            time.sleep(0.001)
        (self._place / "blocked").unlink()

    def let_go(self) -> None:
        (self._place / "go").touch()

    def calls(self) -> list[int]:
        return sorted(map(int, (self._place / "calls").read_text().split()))


@pytest.fixture
def cell(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def until_said(kernel: subprocess.Popen[str], text: str) -> None:
    """Read what a kernel shows until it says `text`."""
    assert kernel.stderr is not None
    said = ""
    while text not in said:
        piece = kernel.stderr.read(1)
        assert piece, said
        said += piece


def test_an_interrupt_pauses_and_the_same_call_resumes(cell: Kernel):
    """Finished rows and those in flight are stored: no row is called twice."""
    kernel = cell.start()
    cell.until_blocked(kernel)
    kernel.send_signal(signal.SIGINT)
    until_said(kernel, "pausing")
    cell.let_go()
    _, errors = kernel.communicate()
    assert kernel.returncode != 0 and "KeyboardInterrupt" in errors
    output, errors = cell.start().communicate()
    assert output.strip() in ("resumed", "finished"), errors
    assert cell.calls() == list(range(ROWS))


def test_a_second_interrupt_and_a_kill(cell: Kernel):
    """Neither waits for rows in flight, which are called again; what is stored is not."""
    kernel = cell.start()
    cell.until_blocked(kernel)
    kernel.send_signal(signal.SIGINT)
    until_said(kernel, "pausing")
    kernel.send_signal(signal.SIGINT)
    _, errors = kernel.communicate()
    assert kernel.returncode != 0 and "KeyboardInterrupt" in errors
    killed = cell.start()
    cell.until_blocked(killed)
    killed.kill()
    killed.communicate()
    cell.let_go()
    output, errors = cell.start().communicate()
    assert output.strip() == "resumed", errors
    assert set(cell.calls()) == set(range(ROWS))
