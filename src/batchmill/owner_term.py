"""Terms: how long a process may act as the owner of a database, or for it, before another process may be the owner.

An owner that is stopped, or cut off from its database, learns nothing of its successor, and goes on later. So a process
that changes what both see asks its term first. The clock of terms goes on while the machine is suspended, and all
processes of a machine read the same time.
"""

from __future__ import annotations

import math
import os
import struct
import time
import weakref
from abc import ABC, abstractmethod

from batchmill.errors import TermOver

_TIME = struct.Struct("d")
POLL_S = 0.05


def now_s() -> float:
    """Seconds since the machine started, those of its suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Term(ABC):
    """How long this process may begin what only an owner may do. Once it is over, it may go on again: nobody has become
    the owner then. Concurrency: any thread.
    """

    @property
    def path(self) -> str:
        """A file of this machine in which other processes read the same term, see `term_at`; empty: it has no end."""
        return ""

    @abstractmethod
    def left_s(self) -> float:
        """0 or less: it is over. `math.inf`: it has no end."""

    def is_over(self) -> bool:
        return self.left_s() <= 0

    def check(self) -> None:
        """Raises: TermOver when it is over."""
        if self.left_s() <= 0:
            raise _over()


def _over() -> TermOver:
    return TermOver("the database was not reached in time and may have another owner: nothing is stored until it is")


class EndlessTerm(Term):
    """Of an owner with a lock that ends with its process."""

    def left_s(self) -> float:
        return math.inf


ENDLESS = EndlessTerm()


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


class ReadTerm(Term):
    """The term of another process, of which this one is a child. It is over for good once that process has ended."""

    def __init__(self, path: str) -> None:
        """Args: path: of a `TermFile`."""
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    def left_s(self) -> float:
        """As `Term.left_s`. Raises: TermOver when the owner has ended: nothing is worth waiting for."""
        try:
            with open(self._path, "rb") as file:
                (until_s,) = _TIME.unpack(file.read(_TIME.size))
        except FileNotFoundError:
            raise _over() from None
        return until_s - now_s()


class PatientTerm(Term):
    """A term of which `check` waits as long as it is over: until the owner is surely the owner again, or has ended.

    For children whose work takes long, and is not to begin anew whenever the database is away for a few seconds.
    """

    def __init__(self, term: Term) -> None:
        self._term = term

    @property
    def path(self) -> str:
        return self._term.path

    def left_s(self) -> float:
        return self._term.left_s()

    def check(self) -> None:
        """Raises: TermOver when the owner has ended."""
        while self.is_over():
            time.sleep(POLL_S)


def term_at(path: str) -> Term:
    """The term of the owner that this process works for. Args: path: see `Term.path`."""
    return ReadTerm(path) if path else ENDLESS
