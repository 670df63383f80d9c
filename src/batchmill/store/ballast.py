"""A file that holds room on the disk, so that some is left to write down why a job stops when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BALLAST_BYTES = 4 * 1024 * 1024


class Ballast:
    def __init__(self, path: Path) -> None:
        self._path = path

    def reserve(self) -> None:
        """Take the room. Where there is none, there is no ballast: the next owner tries again."""
        if self._path.exists() and self._path.stat().st_size == BALLAST_BYTES:
            return
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BALLAST_BYTES)
        except OSError:
            self.release()
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give the room back."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
