"""What a function's process has started: found by a mark in its environment, also after both their parents were killed.

Whoever holds a function's home holds it alone, so that all who bear the mark that lies there are left over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

VARIABLE = "BATCHMILL_FUNCTION"
FILE = "function.mark"
KILL_S = 5.0  # what is killed may take so long to be gone
LOOK_S = 0.01


class Family:
    """Everything that one process of a function starts, and whatever that starts.

    Args:
        home: the folder in which it is remembered.
    """

    def __init__(self, home: Path) -> None:
        self._file = home / FILE
        self.mark = secrets.token_hex(16)

    def begin(self) -> None:
        """End what an earlier one left, and remember this one. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            _end(self._file.read_text())
        self._file.write_text(self.mark)

    def end(self) -> None:
        """Kill what is left of it. Blocks."""
        _end(self.mark)
        self._file.unlink(missing_ok=True)


def _end(mark: str) -> None:
    until = time.monotonic() + KILL_S
    while mark and (pids := _marked(mark)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _marked(mark: str) -> list[int]:
    """Live processes of this user that bear the mark; none where nothing tells."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            if name.isdecimal() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:  # it has gone, or is another user's
            continue
    return found
