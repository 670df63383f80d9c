"""`function.log` of a function's process: what it prints, and the first tracebacks of each distinct error."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from batchmill.models.redaction import mask_known

LOG_BYTES_MAX = 32 * 1024 * 1024  # of one log file; one older file is kept
TRACEBACKS_MAX = 3  # of one distinct error
DISTINCT_ERRORS_MAX = 1000
TAIL_BYTES = 4096


class FunctionLog:
    """The process writes to the file by itself, so it is emptied in place: lines of that moment may be lost.

    Args:
        path: the file; it and the folder around it are made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._seen: dict[tuple[str, str], int] = {}

    @property
    def fd(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def is_full(self) -> bool:
        return self.size() >= LOG_BYTES_MAX

    def rotate(self) -> None:
        """Keep what is there as the older file and begin anew. Blocks: call it in a thread."""
        older = self.path.with_suffix(".log.1")
        with open(self.path, "rb") as file, open(older, "wb") as kept:
            file.seek(max(0, self.size() - LOG_BYTES_MAX))
            shutil.copyfileobj(file, kept)
        os.ftruncate(self._fd, 0)

    def traceback(self, code: str, trace: str, about: str) -> bool:
        """Write a traceback down, if this error from this place has not been seen often enough; whether it was."""
        key = code, _place(trace)
        times = self._seen.get(key, 0)
        if times >= TRACEBACKS_MAX or (times == 0 and len(self._seen) >= DISTINCT_ERRORS_MAX):
            return False
        self._seen[key] = times + 1
        text = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {about}:\n{mask_known(trace.rstrip())}\n"
        os.write(self._fd, text.encode("utf-8", "backslashreplace"))
        return True

    def tail(self, start: int = 0) -> str:
        """The last few lines written at or after byte `start`."""
        begin = max(start, self.size() - TAIL_BYTES)
        return mask_known(os.pread(self._fd, TAIL_BYTES, begin).decode("utf-8", "replace").strip())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _place(trace: str) -> str:
    """The last line of a traceback that names a file."""
    return next((line.strip() for line in reversed(trace.splitlines()) if line.lstrip().startswith("File ")), "")
