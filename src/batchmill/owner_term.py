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
from collections.abc import Callable

from batchmill.errors import StorageFailed, TermOver, Unavailable

_TIME = struct.Struct("d")
POLL_S = 0.05
PATIENCE_S = 30.0  # of a task whose term is over, for another renewal
_PREFIX = ",prefix="  # in a path: before the file of a `PrefixTerm`
_TASK = "task="  # in a path: before the file of a `TaskTerm`
_TASK_NOT_RENEWED = (
    "no renewal of the owner's term has reached this node in time, and another process may be the owner: nothing is "
    "written to the object store"
)
_NOT_RENEWED = (
    "the owner.json of [storage] was not renewed in time, and another database may have taken the prefix over: nothing "
    "is written or removed there until it is renewed; the log of the server says what is in the way"
)


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

    def write(self, until_s: float, refusal: str = "") -> None:
        """Args: until_s: as `now_s`. refusal: see `PrefixTerm`."""
        data = _TIME.pack(until_s) + refusal.encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))


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


class PrefixTerm(Term):
    """How long this process may change objects below the prefix of its object store: as long as it may act for the
    owner of its database, and the prefix surely belongs to that database. See `store.prefix_owner`.

    Args: until_s: as `now_s`; `math.inf`: there is no such prefix. clock: as `now_s`.
    """

    def __init__(self, owner: Term, until_s: float, clock: Callable[[], float] = now_s) -> None:
        self._owner, self._clock = owner, clock
        self.until_s, self.refusal = until_s, ""  # why it is over for good, unless the prefix is given back
        self._file: TermFile | None = None
        self._listeners: list[Callable[[StorageFailed], None]] = []

    @property
    def path(self) -> str:
        if self._file is None:
            self._file = TermFile()
            self._file.write(self.until_s, self.refusal)
        return f"{self._owner.path}{_PREFIX}{self._file.path}"

    def left_s(self) -> float:
        return min(self._owner.left_s(), self.until_s - self._clock())

    def check(self) -> None:
        """Raises: TermOver; StorageFailed once the prefix is another database's, Unavailable while it may be."""
        self._owner.check()
        if self.refusal:
            raise StorageFailed(self.refusal)
        if self.until_s <= self._clock():
            raise Unavailable(_NOT_RENEWED, code="store_unavailable")

    def renew(self, until_s: float, refusal: str = "") -> None:
        """Args: refusal: the prefix belongs to another database; nothing is changed there until it is renewed."""
        self.until_s, self.refusal = until_s, refusal
        if self._file is not None:
            self._file.write(until_s, refusal)

    def listen(self, listener: Callable[[StorageFailed], None]) -> None:
        """Have `listener` called by `announce`."""
        self._listeners.append(listener)

    def announce(self) -> None:
        """Call the listeners if the prefix belongs to another database."""
        for listener in self._listeners if self.refusal else ():
            listener(StorageFailed(self.refusal))


class _ReadPrefixTerm(PrefixTerm):
    """The `PrefixTerm` of another process, of which this one is a child."""

    def __init__(self, owner: Term, path: str) -> None:
        super().__init__(owner, 0.0)
        self._path = path

    @property
    def path(self) -> str:
        return f"{self._owner.path}{_PREFIX}{self._path}"

    def left_s(self) -> float:
        self._read()
        return super().left_s()

    def check(self) -> None:
        self._read()
        super().check()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise _over() from None
        (self.until_s,) = _TIME.unpack_from(data)
        self.refusal = data[_TIME.size :].decode(errors="replace")


class TaskTerm(ReadTerm):
    """The term of an owner on another machine, in a process of this one whose driver renews it there: it says how long
    objects may be changed.
    """

    @property
    def path(self) -> str:
        return f"{_TASK}{self._path}"

    def check(self) -> None:
        """Wait for a renewal, which may be late. Raises: Unavailable after PATIENCE_S."""
        ends_s = now_s() + PATIENCE_S
        while self.is_over():
            if now_s() >= ends_s:
                raise Unavailable(_TASK_NOT_RENEWED, code="store_unavailable")
            time.sleep(POLL_S)


def files_term_at(path: str) -> Term:
    """As `term_at`, for files of the data directory: they are the owner's, whosever the prefix is."""
    return term_at(path.partition(_PREFIX)[0])


def term_at(path: str) -> Term:
    """The term of the owner that this process works for. Args: path: see `Term.path`."""
    if path.startswith(_TASK):
        return TaskTerm(path.removeprefix(_TASK))
    path, _, prefix_path = path.partition(_PREFIX)
    owner = ReadTerm(path) if path else ENDLESS
    return _ReadPrefixTerm(owner, prefix_path) if prefix_path else owner
