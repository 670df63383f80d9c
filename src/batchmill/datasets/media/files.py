"""Reads files that cells name: regular files of a bounded size."""

from __future__ import annotations

import os
import stat

from batchmill.errors import InvalidRow


def read_file(path: str, bytes_max: int) -> bytes:
    """The content of a file, and one byte more than `bytes_max` of a longer one. Raises: InvalidRow."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidRow(f"{path!r} cannot be read: {cause}", code="media_missing") from None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidRow(f"{path!r} is no regular file", code="media_missing")
        try:
            before, data, after = os.fstat(fd), file.read(bytes_max + 1), os.fstat(fd)
        except OSError as error:
            raise InvalidRow(f"{path!r} cannot be read: {error.strerror}", code="media_missing") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InvalidRow(f"{path!r} changed while it was read: run it as a new job", code="media_changed")
    return data
