"""`calls.log` of a version: what its processes print and what its calls raise, each line with whose call it was.

Every worker of the version appends to the one file, a whole line at a time, as `function_runtime.printing` does. One
that finds it full keeps it as the older file, whose first line says how many there have been.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.function_runtime.printing import CALL, TEXT_CHARS_MAX
from batchmill.models.redaction import mask_known

FILE, OLDER = "calls.log", "calls.log.1"
BYTES_MAX = 32 * 1024 * 1024  # of the file; one older file is kept
TRACES_PER_S_MAX = 50  # of one worker; those beyond are counted
TRACE = "traceback"


class Entry(Struct, frozen=True):
    """One line. `project` None: it was of no call, or of several projects."""

    at: float  # seconds since the epoch
    stream: str  # stdout, stderr, traceback
    text: str
    stage: str = CALL  # start: before the function was ready
    project: str | None = None
    requests: list[str] = []  # ids of requests; of rows of a job the job's, and the row's number where it is known


class LogHeader(Struct, frozen=True):
    """The first line of an older file: how often the file has been kept."""

    generation: int


class CallLog:
    """One worker's hand on the file.

    Args:
        folder: the version's own.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._older = folder / FILE, folder / OLDER
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._second = self._written = self._left_out = 0

    def write(self, text: str, project: str, request: str) -> None:
        """Append what a call raised, unless there is too much of that now."""
        now = time.time()
        if int(now) != self._second:
            self._second, self._written = int(now), 0
        if self._written >= TRACES_PER_S_MAX:
            self._left_out += 1
            return
        self._written += 1
        message = f"({self._left_out} more were left out)\n" if self._left_out else ""
        entry = Entry(now, TRACE, message + mask_known(text[-TEXT_CHARS_MAX:]), CALL, project or None, [request])
        try:
            os.write(self.fd, msgspec.json.encode(entry) + b"\n")
        except OSError:  # the disk is full: what the call itself is told is worth more than its trace here
            self._left_out += 1
        else:
            self._left_out = 0

    def is_full(self) -> bool:
        return os.fstat(self.fd).st_size >= BYTES_MAX

    def rotate(self) -> None:
        """Keep what is there as the older file; lines of that moment may be lost. Blocks: call it in a thread.

        Raises: OSError, and nothing is lost, unless the disk is full: then what is there goes.
        """
        fd = os.dup(self.fd)  # which may be closed meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_size >= BYTES_MAX:
                return  # another worker has done it
            self._keep(fd)
        except BlockingIOError:
            return  # another one is at it
        finally:
            os.close(fd)

    def _keep(self, fd: int) -> None:
        part = self._older.with_suffix(".part")
        try:
            with open(self._path, "rb") as file, open(part, "wb", opener=_private) as kept:
                kept.write(msgspec.json.encode(LogHeader(generation_of(self._older) + 1)) + b"\n")
                shutil.copyfileobj(file, kept)
                kept.flush()
                os.fsync(kept.fileno())
            part.replace(self._older)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        os.ftruncate(fd, 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def generation_of(older: Path) -> int:
    """How often the file has been kept; 0: never, or nobody can tell."""
    try:
        with older.open("rb") as file:
            return msgspec.json.decode(file.readline(1024), type=LogHeader).generation
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
