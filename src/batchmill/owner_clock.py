"""How long a process may act for the owner of a database: the clock, and the file in which its children read the end.

The clock goes on while the machine is suspended, and all processes of a machine read the same time.
"""

from __future__ import annotations

import os
import struct
import time
import weakref

from batchmill.errors import DatabaseUnavailable

_TIME = struct.Struct("d")


def now_s() -> float:
    """Seconds since the machine started, those of its suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_over(left_s: float | None) -> bool:
    """Whether a term is over, so that another process may be the owner by now. Args: left_s: see `Database.owned_s`."""
    return left_s is not None and left_s <= 0


def check_left(left_s: float | None) -> None:
    """Args: left_s: see `Database.owned_s`. Raises: DatabaseUnavailable when the term is over."""
    if is_over(left_s):
        raise DatabaseUnavailable(
            "the database was not reached in time and may have another owner: nothing is stored until it is"
        )


class TermFile:
    """The end of this process's term, which its children read at `path`: also while this process is stopped."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("owner-term")
        weakref.finalize(self, os.close, self._fd)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.write(0.0)

    def write(self, until_s: float) -> None:
        """Args: until_s: as `now_s`."""
        os.pwrite(self._fd, _TIME.pack(until_s), 0)


def check_file(path: str) -> None:
    """Check the term of the owner that this process works for. Args: path: empty: the owner's term has no end.

    Raises: DatabaseUnavailable when it is over.
    """
    if not path:
        return
    try:
        with open(path, "rb") as file:
            (until_s,) = _TIME.unpack(file.read(_TIME.size))
    except FileNotFoundError:  # the owner has ended
        until_s = 0.0
    check_left(until_s - now_s())
