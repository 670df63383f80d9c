"""Files that are written whole before they have their names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

from batchmill.errors import StorageFailed, StorageFull
from batchmill.owner_term import ENDLESS, Term

BUFFER_BYTES = 1024 * 1024  # small writes are gathered up to this size
SYNCED_MAX = 10_000  # folders that a process remembers
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of folders of the automounter and of squashfs, say, which keep nothing
_OTHERS = 0o077
_UNSYNCED = stat.S_ISVTX  # of a private folder, for which it has no meaning: its name may not be durable yet
_synced: set[str] = set()  # folders that others may use, but for umasks, whose names this process has made durable


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class PartFile:
    """A file that is written under a temporary name. Without `publish`, it is removed.

    Raises: StorageFull from `write` and `publish` when the disk or the quota is full. Any other error of the file
    system is final: the part is not to be published. StorageFailed from `publish` if another process has begun the same
    file since: an owner that was stopped and replaced publishes neither its own bytes nor those of its successor.

    Args: digest: is updated with everything that is written. term: checked before it begins, and before it is
    published; it raises what these then raise.
    """

    def __init__(self, path: Path, mode: int = 0o666, digest: Digest | None = None, term: Term = ENDLESS) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.size_bytes = 0
        self._digest, self._term = digest, term
        self._buffer: list[bytes | memoryview] = []
        self._buffered = 0
        term.check()
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
        if self._digest is not None:
            self._digest.update(data)
        view = memoryview(data)
        with full_disk_named(self.part):
            while view:
                view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Make what was flushed durable, in any thread."""
        with full_disk_named(self.part):
            os.fdatasync(self._fd)

    def publish(self) -> None:
        """Make the file durable under its name."""
        self.flush()
        with full_disk_named(self.part):
            os.fsync(self._fd)
        self._term.check()
        try:
            self.check()
        finally:
            os.close(self._fd)
            self._fd = -1
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)

    def check(self) -> None:
        """Raises: StorageFailed if another process has begun the same file since."""
        if not self._is_in_place():
            raise StorageFailed(f"{self.part} is another process's now, which writes {self.path} too")

    def discard(self) -> None:
        """Drop the part unless it was published. Safe to call twice."""
        if self._fd >= 0:
            is_ours = self._is_in_place()
            os.close(self._fd)
            self._fd = -1
            if is_ours:
                with suppress(FileNotFoundError):
                    self.part.unlink()

    def _is_in_place(self) -> bool:
        """Whether the part's name still means the file that this object writes."""
        try:
            there = os.stat(self.part, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class HeldFile:
    """As `PartFile`, in memory: a transaction stores it, see `store.file_log`."""

    def __init__(self, path: Path) -> None:
        self.path, self.size_bytes, self.data = path, 0, b""
        self._pieces: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; the caller leaves its bytes as they are."""
        self._pieces.append(data)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """There is nothing to hand to the kernel."""

    def check(self) -> None:
        """No other process writes it."""

    def publish(self) -> None:
        self.data = b"".join(self._pieces)

    def discard(self) -> None:
        self._pieces.clear()


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, mode: int = 0o700, parents_mode: int | None = None) -> None:
    """Make a folder and its missing parents, unless they are there, and make their names durable.

    A process may be killed before it has synced the name of the last folder that it made, which the next one then does.

    Args: parents_mode: None: as the folder's. Raises: OSError; NotADirectoryError where something else has the name.
    """
    missing, present = [], folder
    while not present.exists():
        missing.append(present)
        present = present.parent
    last_mode = mode if parents_mode is None else parents_mode
    _keep_name(present, last_mode if missing else mode)
    for each in reversed(missing):
        own_mode = mode if each == folder else last_mode
        try:
            each.mkdir(own_mode | (0 if own_mode & _OTHERS else _UNSYNCED))
        except FileExistsError:  # another process was faster
            _keep_name(each, own_mode)
        else:
            _sync_name(each, own_mode)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _keep_name(folder: Path, mode: int) -> None:
    """Make the name of a folder durable if this user's process that made it may not have come to do so.

    Args: mode: that process's, which its umask may have made private.
    """
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    mode |= found.st_mode
    if str(folder) not in _synced if mode & _OTHERS else mode & _UNSYNCED:
        _sync_name(folder, mode)


def _sync_name(folder: Path, mode: int) -> None:
    try:
        sync_folder(folder.parent)
    except PermissionError:  # who owns the parent may let this user write there, and not read
        pass
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    if mode & _OTHERS:
        if len(_synced) >= SYNCED_MAX:
            _synced.clear()
        _synced.add(str(folder))
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if mode & _UNSYNCED and not mode & _OTHERS:
        with suppress(OSError):  # the next user syncs it again
            folder.chmod(mode & ~_UNSYNCED)


def sync_tree(folder: Path) -> None:
    """Make all files and folders below a folder durable, and its own name."""
    for path, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(each := os.path.join(path, name)):
                sync_file(Path(each))
        sync_folder(Path(path))
    sync_folder(folder.parent)


def link_over(source: Path | str, target: Path | str) -> None:
    """Link a file to another name, in place of what has that name, which is never without a file meanwhile.

    Raises: OSError; FileNotFoundError where `source` is not there.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        part = Path(f"{target}.part")
        part.unlink(missing_ok=True)
        os.link(source, part, follow_symlinks=False)
        os.replace(part, target)
        part.unlink(missing_ok=True)  # it stays where both names were of one file already


def remove_files(paths: Sequence[Path]) -> None:
    """Remove the existing ones of `paths`, durably. They are all in one folder."""
    gone = 0
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
            gone += 1
    if gone:
        sync_folder(paths[0].parent)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raises: StorageFull naming `path` if the file system is full while it is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = f"there is no room to write {path}: {error.strerror}; free some, then resume the job"
        raise StorageFull(message) from error
