"""A machine that is lost: its processes are killed, and what lay in its data directory is gone but for the database."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LOST_S = 60.0
POLL_S = 0.01
DATABASE = "batchmill.db"


def run_until(fired: Path, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command, and kill it once the file exists. Its workers end by themselves."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    ends = time.monotonic() + LOST_S
    while not fired.exists() and process.poll() is None and time.monotonic() < ends:
        time.sleep(POLL_S)
    process.kill()
    _, output = process.communicate()
    assert fired.exists(), output


def lose(data_dir: Path) -> None:
    """Delete the data directory but for the database, which is elsewhere where it matters."""
    for path in data_dir.iterdir():
        if path.name.startswith(DATABASE):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
