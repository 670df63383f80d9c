"""How long a process may act for the owner of a database: the clock, and the file in which its children read the end.

The clock goes on while the machine is suspended, and all processes of a machine read the same time.
"""

from __future__ import annotations

import os
import struct
import time
import weakref

from batchmill.errors import TermOver

_TIME = struct.Struct("d")
POLL_S = 0.05


def now_s() -> float:
    """Seconds since the machine started, those of its suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_over(left_s: float | None) -> bool:
    """Whether a term is over, so that another process may be the owner by now. Args: left_s: see `Database.owned_s`."""
    return left_s is not None and left_s <= 0


def check_left(left_s: float | None) -> None:
    """Args: left_s: see `Database.owned_s`. Raises: TermOver when the term is over."""
    if is_over(left_s):
        raise TermOver("the database was not reached in time and may have another owner: nothing is stored until it is")


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


def read_left(path: str) -> float | None:
    """How much is left of the term of the owner that this process works for. Args: path: empty: it has no end.

    Raises: TermOver when the owner has ended.
    """
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            (until_s,) = _TIME.unpack(file.read(_TIME.size))
    except FileNotFoundError:
        check_left(0.0)
        raise
    return until_s - now_s()


def check_file(path: str) -> None:
    """Raises: TermOver when the term is over. Args: as of `read_left`."""
    check_left(read_left(path))


def wait_for_term(path: str) -> None:
    """Wait as long as the term is over: until the owner is surely the owner again, or ends this process with itself.

    For children whose work takes long, and is not to begin anew whenever the database is away for a few seconds.

    Args, Raises: as of `read_left`.
    """
    while is_over(read_left(path)):
        time.sleep(POLL_S)
