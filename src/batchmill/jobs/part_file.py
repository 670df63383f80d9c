"""A file that appears under its name only when it is whole and on disk: written as NAME.part, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from batchmill.errors import StorageFull
from batchmill.store.segments import sync_folder

BUFFER_BYTES = 1024 * 1024  # small writes are gathered up to this size
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartFile:
    """Bytes on their way to `path`. Left without `publish`, nothing of it stays.

    Raises: StorageFull from `write` and `publish` when the disk or the quota is full. Any other error of the file
    system is final: the part is not to be published.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.size_bytes = 0
        self._digest = hashlib.sha256()
        self._buffer: list[bytes | memoryview] = []
        self._buffered = 0
        with suppress(FileNotFoundError):
            self.part.unlink()  # what a crash left: it is written anew, with the same bytes
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.part, flags, mode)

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; the caller leaves its bytes as they are."""
        size = len(data)
        if not size:
            return 0
        self._buffer.append(data)
        self._buffered += size
        self.size_bytes += size
        if self._buffered >= BUFFER_BYTES:
            self.flush()
        return size

    def flush(self) -> None:
        """Hand everything written so far to the kernel."""
        data: bytes | memoryview = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._buffered = 0
        self._digest.update(data)
        view = memoryview(data)
        with full_disk_named(self.part):
            while view:
                view = view[os.write(self._fd, view) :]

    def publish(self) -> str:
        """Make the file durable under its name. Returns its sha256."""
        self.flush()
        with full_disk_named(self.part):
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Drop the part unless it was published. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with suppress(FileNotFoundError):
                self.part.unlink()

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def remove_files(paths: Sequence[Path]) -> None:
    """Remove those of `paths` that are there, durably. They lie in one folder."""
    gone = 0
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
            gone += 1
    if gone:
        sync_folder(paths[0].parent)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raises: StorageFull where the file system says that it is full while `path` is being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = f"there is no room to write {path}: {error.strerror}; free some, then resume the job"
        raise StorageFull(message) from error
