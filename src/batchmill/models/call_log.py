"""`calls.log` of a version: what its processes print and its calls raise, with the call of each line.

Every worker of the version appends whole lines to the same file, like `function_runtime.printing`. A worker that finds
the file full moves it to the older file, whose first line counts the rotations.
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
BYTES_MAX = 32 * 1024 * 1024  # of the file; there is one older file
TRACES_PER_S_MAX = 50  # of one worker; further ones are only counted
TRACE = "traceback"


class Entry(Struct, frozen=True):
    """One line. `project` is None for a line of no call, or of calls of several projects."""

    at: float  # seconds since the epoch
    stream: str  # stdout, stderr, traceback
    text: str
    stage: str = CALL  # start: before the function was ready
    project: str | None = None
    requests: list[str] = []  # ids of requests; for rows of a job its id, and the row number if known


class LogHeader(Struct, frozen=True):
    """The first line of an older file: the number of rotations."""

    generation: int


class CallLog:
    """The log file as one worker writes it.

    Args:
        folder: of the version.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._older = folder / FILE, folder / OLDER
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._second = self._written = self._left_out = 0

    def write(self, text: str, project: str, request: str) -> None:
        """Append the traceback of a call, up to `TRACES_PER_S_MAX` a second."""
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
        except OSError:  # the disk is full: the call still gets its error
            self._left_out += 1
        else:
            self._left_out = 0

    def is_full(self) -> bool:
        return os.fstat(self.fd).st_size >= BYTES_MAX

    def rotate(self) -> None:
        """Move the content to the older file. Lines written meanwhile may be lost. Blocks: call it in a thread.

        Raises: OSError; the content stays. On a full disk the content is dropped instead.
        """
        descriptor = os.dup(self.fd)  # `self.fd` may be closed meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_size >= BYTES_MAX:
                return  # another worker has done it
            self._move_to_older(descriptor)
        except BlockingIOError:
            return  # another worker is doing it
        finally:
            os.close(descriptor)

    def _move_to_older(self, fd: int) -> None:
        temporary = self._older.with_suffix(".part")
        try:
            with open(self._path, "rb") as file, open(temporary, "wb", opener=_private) as older_file:
                older_file.write(msgspec.json.encode(LogHeader(generation_of(self._older) + 1)) + b"\n")
                shutil.copyfileobj(file, older_file)
                older_file.flush()
                os.fsync(older_file.fileno())
            temporary.replace(self._older)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        os.ftruncate(fd, 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def generation_of(older: Path) -> int:
    """The number of rotations; 0 if there were none or the older file is unreadable."""
    try:
        with older.open("rb") as file:
            return msgspec.json.decode(file.readline(1024), type=LogHeader).generation
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
