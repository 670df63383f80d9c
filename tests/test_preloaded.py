"""The starts of commands that the tests share."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from fakes.preloaded import PreloadedPopen

BATCHMILL = (sys.executable, "-m", "batchmill")


def test_a_server_that_nobody_waits_for_harms_no_later_command(tmp_path: Path):
    """A test that is interrupted leaves its server to the collector of garbage: later tests start theirs."""
    serve = [*BATCHMILL, "serve", "--port", "0", "--data-dir", str(tmp_path)]
    left = PreloadedPopen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = left.pid
    left.itself = left  # as the traceback of an interrupted test does
    with warnings.catch_warnings(action="ignore"):  # that it still runs
        del left
        gc.collect()
    assert subprocess.run([*BATCHMILL, "--version"], capture_output=True, check=False).returncode == 0
    (kept,) = [each for each in subprocess._active if each.pid == pid]
    kept.send_signal(signal.SIGKILL)
    assert kept.wait(30) == -signal.SIGKILL
