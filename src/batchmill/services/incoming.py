"""Bytes that arrive piece by piece on their way to a file: threads write them, and a name appears only for a whole,
durable file. Knows nothing of records, projects or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batchmill.errors import BatchmillError, StorageFull, TooLarge
from batchmill.store.disk_room import Writing
from batchmill.store.segments import sync_folder

PIECE_BYTES = 1024 * 1024  # handed to a thread at once; twice as much is held at most
PIECE_BYTES_MIN = 64 * 1024
HELD_BYTES_MAX = 128 * 1024 * 1024  # by all files that arrive together, as far as PIECE_BYTES_MIN allows
PIECES_MAX = 256  # of a client that sends crumbs
WRITEBACK_BYTES = 8 * 1024 * 1024  # the kernel is told to begin writing, so that the last sync has little left to do
ROOM_BYTES = 64 * 1024 * 1024  # of the disk that an upload never takes: the jobs that run need it
COPY_BYTES = 64 * 1024 * 1024  # in one call of the kernel's
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

P = ParamSpec("P")
T = TypeVar("T")


class Disk:
    """Threads for calls of the file system: a slow disk holds up who waits for it, never the event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it in a thread. Raises: StorageFull when the disk or a quota is full."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise StorageFull("there is no room left on the server's disk; nothing of the file was kept") from error

    def close(self) -> None:
        """Take no more; what runs ends by itself, and a disk that never answers keeps nobody."""
        self._threads.shutdown(wait=False)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that goes on when its caller is cancelled: half of it done would be worse than all of it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is left to hear of it
        raise


def piece_bytes(files: int) -> int:
    """How much is handed over at once where so many files arrive."""
    return max(PIECE_BYTES_MIN, min(PIECE_BYTES, HELD_BYTES_MAX // (2 * files)))


class Incoming:
    """One file that arrives. Until `settle` it lies at `path`, a name nobody looks for.

    Raises, from `write` and `settle`: TooLarge beyond `bytes_max`, OverQuota, StorageFull.
    Concurrency: one task calls `write` and `settle`; `discard` may be called by any, at any time.
    """

    def __init__(
        self, disk: Disk, path: Path, *, bytes_max: int, room_bytes: int, piece_bytes: int,
        writing: Writing | None = None,
    ) -> None:  # fmt: skip
        """Args: `writing`, what is told of the bytes, and may refuse more; None: they count elsewhere."""
        self.size_bytes, self.writing = 0, writing
        self._piece_bytes = piece_bytes
        self._disk, self._bytes_max = disk, bytes_max
        self._file = _File(path, room_bytes)
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Append `data`. Waits while the disk is behind."""
        self._count(len(data))
        self._pieces.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= self._piece_bytes or len(self._pieces) >= PIECES_MAX:
            await self._hand_over()

    async def append_files(self, paths: Sequence[Path], size_bytes: int, *, with_md5: bool) -> str | None:
        """Append whole files, `size_bytes` in all. Returns the md5 of their bytes where it is wanted."""
        self._count(size_bytes)
        await self._hand_over()
        await self._written()
        digest = hashlib.md5(usedforsecurity=False) if with_md5 else None
        update = None if digest is None else digest.update
        copied = [await self._disk.run(self._file.append_file, path, update) for path in paths]
        if sum(copied) != size_bytes:
            raise BatchmillError(f"files of {size_bytes:,} bytes hold {sum(copied):,} on the disk", code="damaged_file")
        return None if digest is None else digest.hexdigest()

    async def settle(self, target: Path) -> None:
        """Make the file durable under its final name."""
        await self._hand_over()
        await self._written()
        await self._disk.run(self._file.settle, target)

    async def discard(self) -> None:
        """Drop the file unless it is settled. Safe to call twice, and while it is written."""
        if self.writing is not None:
            self.writing.end()
        self._pieces.clear()
        dropping = asyncio.ensure_future(self._disk.run(self._file.drop))
        if self._writing is not None:
            await asyncio.wait({self._writing, dropping})
            self._writing.exception()  # whoever discards has another reason, or has heard of this one
        await asyncio.shield(dropping)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self.size_bytes > self._bytes_max:
            raise TooLarge(f"the file is larger than the {self._bytes_max:,} bytes allowed", code="file_too_large")
        if self.writing is not None:
            self.writing.grew_to(self.size_bytes)

    async def _hand_over(self) -> None:
        await self._written()
        pieces, self._pieces, self._held_bytes = self._pieces, [], 0
        self._writing = asyncio.ensure_future(self._disk.run(self._file.append, pieces))

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)


class _File:
    """The file itself, used from threads. Once dropped or settled it takes nothing more."""

    def __init__(self, path: Path, room_bytes: int) -> None:
        self._path, self._room_bytes = path, room_bytes
        self._lock = threading.Lock()
        self._fd = -1
        self._ended = False
        self._size = self._pushed = 0

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
            self._push()

    def append_file(self, path: Path, update: Callable[[bytes], None] | None) -> int:
        with open(path, "rb", buffering=0) as source, self._lock:
            before = self._size
            while self._is_open() and (piece := _copy(source.fileno(), self._fd, update)):
                self._size += piece
                self._push()
            return self._size - before

    def settle(self, target: Path) -> None:
        with self._lock:
            if not self._is_open():
                raise StorageFull("the file was dropped before it was whole")
            self._check_room()
            os.fsync(self._fd)
            os.rename(self._path, target)
            self._close()
        sync_folder(target.parent)

    def drop(self) -> None:
        with self._lock:
            if self._fd >= 0:
                self._close()
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
            self._ended = True

    def _is_open(self) -> bool:
        if self._fd < 0 and not self._ended:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        return not self._ended

    def _push(self) -> None:
        """Have the kernel begin to write what it was given, and see whether the disk has room for more."""
        if self._size - self._pushed < WRITEBACK_BYTES:
            return
        os.posix_fadvise(self._fd, self._pushed, self._size - self._pushed, os.POSIX_FADV_DONTNEED)
        self._pushed = self._size
        self._check_room()

    def _check_room(self) -> None:
        disk = os.fstatvfs(self._fd)
        if disk.f_bavail * disk.f_frsize < self._room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _close(self) -> None:
        fd, self._fd, self._ended = self._fd, -1, True
        os.close(fd)


def _copy(source: int, target: int, update: Callable[[bytes], None] | None) -> int:
    """Copy the next bytes of one file to the end of another; 0 at its end. `update` sees them on the way."""
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
    """The files of a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def remove_others(folder: Path, wanted: Callable[[], set[str]]) -> None:
    """Remove the files of a folder that nobody wants."""
    names = names_in(folder)  # before `wanted` is looked at: what arrives meanwhile is not among them
    keep = set(wanted())
    unlink_all([folder / name for name in names if name not in keep])


def unlink_all(paths: Sequence[Path]) -> None:
    """Remove those that are there."""
    for path in paths:
        path.unlink(missing_ok=True)
