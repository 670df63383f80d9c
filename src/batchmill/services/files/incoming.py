"""Writes incoming bytes to a file in threads. A file gets its final name only once it is complete and durable.

Knows nothing of records, projects or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchmill.errors import BatchmillError, StorageFull, TooLarge
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import sync_folder
from batchmill.store.disk_room import Writing

PIECE_BYTES = 1024 * 1024  # written per thread call; at most twice as much is in memory
PIECE_BYTES_MIN = 64 * 1024
HELD_BYTES_MAX = 128 * 1024 * 1024  # in memory for all incoming files, as far as PIECE_BYTES_MIN allows
PIECES_MAX = 256  # per thread call, for a client that sends many small pieces
WRITEBACK_BYTES = 8 * 1024 * 1024  # after so many the kernel starts to write, so that the final fsync is short
FREE_BYTES_MIN = 64 * 1024 * 1024  # disk space that uploads leave for running jobs
COPY_BYTES = 64 * 1024 * 1024  # per system call
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Raises: StorageFull if the disk or a file system quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull("the server's disk is full: no part of the file was kept") from error


class Disk:
    """Threads for file system calls, so that a slow disk never blocks the event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread. Raises: StorageFull if the disk or a file system quota is full."""
        with full_disk():
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Accept no more calls. Running calls end by themselves; this does not wait for them."""
        self._threads.shutdown(wait=False)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await work that continues if its caller is cancelled, because it must not stop halfway."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nothing else reads the exception
        raise


def piece_bytes(files: int) -> int:
    """Return the bytes to write per thread call while so many files arrive."""
    return max(PIECE_BYTES_MIN, min(PIECE_BYTES, HELD_BYTES_MAX // (2 * files)))


class Incoming:
    """One incoming file. Until `settle` it is at `path`, a temporary name.

    Raises, from `write` and `settle`: TooLarge beyond `bytes_max`, OverQuota, StorageFull.
    Concurrency: one task calls `write` and `settle`; any task may call `discard` at any time.
    """

    def __init__(
        self, disk: Disk, path: Path, *, bytes_max: int, free_bytes_min: int, piece_bytes: int,
        writing: Writing | None = None,
    ) -> None:  # fmt: skip
        """Args: `writing`: counts the bytes against a quota and may refuse more; None: they count elsewhere."""
        self.size_bytes, self.writing = 0, writing
        self._piece_bytes = piece_bytes
        self._disk, self._bytes_max = disk, bytes_max
        self._file = _File(path, free_bytes_min)
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._is_settled = False

    async def write(self, data: bytes) -> None:
        """Append `data`. Waits while earlier bytes are being written."""
        self._count(len(data))
        self._pieces.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= self._piece_bytes or len(self._pieces) >= PIECES_MAX:
            await self._hand_over()

    async def append_files(self, paths: Sequence[Path], size_bytes: int, *, with_md5: bool) -> str | None:
        """Append whole files of `size_bytes` in total. Returns the md5 of their bytes, if `with_md5`."""
        self._count(size_bytes)
        await self._hand_over()
        await self._wait_for_write()
        digest = hashlib.md5(usedforsecurity=False) if with_md5 else None
        update = None if digest is None else digest.update
        copied = [await self._disk.run(self._file.append_file, path, update) for path in paths]
        if sum(copied) != size_bytes:
            raise BatchmillError(f"files of {size_bytes:,} bytes have {sum(copied):,} on the disk", code="damaged_file")
        return None if digest is None else digest.hexdigest()

    def take_short(self, bytes_max: int) -> bytes | None:
        """The bytes of a file of which none is on the disk, to be stored in another way; None: it has more, or some
        are."""
        if self._writing is not None or self.size_bytes > bytes_max or self._file.has_begun:
            return None
        self._is_settled = True
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        return b"".join(pieces)

    async def settle(self, target: Path) -> None:
        """Make the file durable under its final name."""
        await self._wait_for_write()
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        await self._disk.run(self._file.settle, pieces, target)
        self._is_settled = True

    async def discard(self) -> None:
        """Remove the file unless it is settled. Safe to call twice, and during a write."""
        if self.writing is not None:
            self.writing.end()
        self._pieces.clear()
        if self._is_settled:
            return
        dropping = asyncio.ensure_future(self._disk.run(self._file.drop))
        if self._writing is not None:
            await asyncio.wait({self._writing, dropping})
            self._writing.exception()  # the caller already knows of an error, or discards for another reason
        await asyncio.shield(dropping)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self.size_bytes > self._bytes_max:
            raise TooLarge(f"the file is larger than the {self._bytes_max:,} bytes allowed", code="file_too_large")
        if self.writing is not None:
            self.writing.grew_to(self.size_bytes)

    async def _hand_over(self) -> None:
        await self._wait_for_write()
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        self._writing = asyncio.ensure_future(self._disk.run(self._file.append, pieces))

    async def _wait_for_write(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)


class _File:
    """The file on disk, used from threads. Once dropped or settled it ignores further bytes."""

    def __init__(self, path: Path, free_bytes_min: int) -> None:
        self._path, self._free_bytes_min = path, free_bytes_min
        self._lock = threading.Lock()
        self._fd = -1
        self._ended = False
        self._size = self._submitted = 0

    def append(self, pieces: list[bytes]) -> None:
        with self._lock:
            if not self._is_open():
                return
            views = [memoryview(piece) for piece in pieces if piece]
            while views:
                written = os.writev(self._fd, views)
                self._size += written
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if written:
                    views[0] = views[0][written:]
            self._start_writeback()

    def append_file(self, path: Path, update: Callable[[bytes], None] | None) -> int:
        with open(path, "rb", buffering=0) as source, self._lock:
            before = self._size
            while self._is_open() and (piece := _copy(source.fileno(), self._fd, update)):
                self._size += piece
                self._start_writeback()
            return self._size - before

    def settle(self, pieces: list[bytes], target: Path) -> None:
        self.append(pieces)
        with self._lock:
            if not self._is_open():
                raise StorageFull("the file was dropped before it was complete")
            self._check_free_space()
            os.fsync(self._fd)
            os.rename(self._path, target)  # both are named after a new id
            self._close()
        sync_folder(target.parent)

    @property
    def has_begun(self) -> bool:
        return self._fd >= 0 or self._ended

    def drop(self) -> None:
        with self._lock:
            if self._fd >= 0:
                self._close()
                discard(self._path)
            self._ended = True

    def _is_open(self) -> bool:
        if self._fd < 0 and not self._ended:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        return not self._ended

    def _start_writeback(self) -> None:
        """Tell the kernel to start writing, and check that the disk has space for more."""
        if self._size - self._submitted < WRITEBACK_BYTES:
            return
        os.posix_fadvise(self._fd, self._submitted, self._size - self._submitted, os.POSIX_FADV_DONTNEED)
        self._submitted = self._size
        self._check_free_space()

    def _check_free_space(self) -> None:
        check_free_space(self._fd, self._free_bytes_min)

    def _close(self) -> None:
        fd, self._fd, self._ended = self._fd, -1, True
        os.close(fd)


def check_free_space(place: int | Path, free_bytes_min: int) -> None:
    """Raises: StorageFull where less is free on the disk of a path or a descriptor."""
    disk = os.statvfs(place)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < free_bytes_min:
        raise StorageFull(
            f"the server's disk is full: {free_bytes:,} bytes are free, and the last {free_bytes_min:,} are for "
            "running jobs; no part of the file was kept"
        )


def _copy(source: int, target: int, update: Callable[[bytes], None] | None) -> int:
    """Copy the next bytes of one file to the end of another. Returns 0 at the end. `update` gets the bytes."""
    if update is not None:
        data = os.read(source, PIECE_BYTES)
        update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        return len(data)
    try:
        return os.copy_file_range(source, target, COPY_BYTES)
    except OSError as error:
        if error.errno not in NO_COPY:
            raise
        return os.sendfile(target, source, None, COPY_BYTES)


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def remove_others(owned: OwnedFiles, folder: Path, names_to_keep: Callable[[], set[str]]) -> None:
    """Remove the files of a folder whose names are not in `names_to_keep()`."""
    names = names_in(folder)  # before `names_to_keep`, so that files that arrive meanwhile are not in the list
    keep = set(names_to_keep())
    owned.remove(*(folder / name for name in names if name not in keep))


def discard_all(paths: Sequence[Path]) -> None:
    """As `discard`."""
    for path in paths:
        discard(path)


def same_files(path: Path, others: Sequence[Path]) -> list[Path]:
    """Those of `others` that are hard links to the file at `path`."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        info = path.stat()
        for other in others:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(info, other.stat()):
                    found.append(other)
    return found


def remove_same(owned: OwnedFiles, path: Path, others: Sequence[Path]) -> None:
    """Remove those of `others` that are hard links to the file at `path`, durably."""
    for other in same_files(path, others):
        owned.remove_durably([other])
