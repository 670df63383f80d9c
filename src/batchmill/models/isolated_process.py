"""Which process of this machine is the one that bubblewrap has started, in a namespace where it has another number."""

from __future__ import annotations

import json
import os
from pathlib import Path

TOLD_BYTES_MAX = 4096


class Inside:
    """What bubblewrap says of itself through a pipe (`--info-fd`)."""

    def __init__(self) -> None:
        self._fd = -1
        self._first = self._pid = 0  # of bubblewrap's own, which only collects the dead; of its one child

    def open(self) -> int:
        """The end for bubblewrap; whoever passes it on closes it."""
        self._fd, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return theirs

    def pid(self) -> int:
        """The process itself, once it was started; 0: nothing tells."""
        if self._first == 0 and self._fd >= 0:
            try:
                self._first = int(json.loads(os.read(self._fd, TOLD_BYTES_MAX))["child-pid"])
            except (BlockingIOError, ValueError, KeyError):  # it has not come that far, or has ended before
                return 0
            self.close()
        if self._pid == 0 and self._first:
            self._pid = _child_of(self._first)
        return self._pid

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _child_of(pid: int) -> int:
    try:
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(told[0]) if told else 0
    except FileNotFoundError:  # it has ended, or the kernel does not tell: then every process is asked whose it is
        return next((each for each in _pids() if _parent_of(each) == pid), 0)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
