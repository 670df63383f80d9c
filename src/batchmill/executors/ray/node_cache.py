"""NodeCache: a folder of a node, with copies of objects of the owner's store. All workers of the node share it.

A copy is named by what the names of its objects begin with, which are never written twice, so it never changes. Who
uses one holds a shared lock on its file in `locks`, which the kernel releases with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from batchmill.errors import ModelFailed
from batchmill.executors.ray.frames import Left, LeftSegment
from batchmill.ports.storage import Objects
from batchmill.store import folder_objects
from batchmill.wire.messages import StoredFile

WORK = ".work"  # ending of what is being fetched
LEFT_S = 3600.0  # after which what a dead worker left, and nobody collected, is removed
LEFT_BYTES_MAX = 64 * 1024 * 1024  # of a dead worker's segments: more than it writes between two commits
LOG_BYTES_MAX = 64 * 1024
RETRY_S = 0.05  # at most, until a lock that others have is tried again
SUSPECT_BYTES_MAX = 64  # a position
SEGMENTS, LOCK = "segments", "lock"  # in the folder of a worker
NEW = "new-"  # what the name of a task's folder begins with until it is locked


class NodeCache:
    """
    Args:
        folder: of this store: see `cache_folder`.
        cache_bytes: copies that nobody uses are removed beyond so many bytes, the least recently used first.

    Concurrency: any number of processes and threads.
    """

    def __init__(self, folder: Path, objects: Objects, cache_bytes: int) -> None:
        self._folder, self._objects, self._cache_bytes = folder, objects, cache_bytes
        for name in ("locks", "copies", "workers", "tasks"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    def hold(self, file: StoredFile) -> tuple[Path, int]:
        """Bring a file or folder. Returns where it is, and a descriptor: it stays until that is closed.

        Raises: StorageFailed, OSError.
        """
        place, lock = self._place(file), self._lock(file)
        while True:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if _is_at(fd, lock) and place.exists():
                    os.utime(fd)
                    return place, fd
                is_mine = _lock_alone(fd)
                if is_mine and _is_at(fd, lock) and not place.exists():
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, str(file.bytes).encode(), 0)
                    folder_objects.get(self._objects, file.object, place, _work(self._copy(lock)))
                    self._trim(lock)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if not is_mine:
                time.sleep(random.uniform(0, RETRY_S))

    def _lock(self, file: StoredFile) -> Path:
        return self._folder / "locks" / hashlib.sha256(file.object.encode()).hexdigest()[:32]

    def _copy(self, lock: Path) -> Path:
        return self._folder / "copies" / lock.name

    def _place(self, file: StoredFile) -> Path:
        """Its path in the data directory stays visible, for messages that name a job by it."""
        key = PurePosixPath(file.object).parent
        assert not key.is_absolute() and ".." not in key.parts, "the owner names objects"
        return self._copy(self._lock(file)) / key

    def _trim(self, kept: Path) -> None:
        """Remove copies that nobody uses until the rest fits."""
        found = []
        for lock in (self._folder / "locks").iterdir():
            with contextlib.suppress(OSError, ValueError):  # another process may remove it
                found.append((lock.stat().st_mtime, int(lock.read_text() or 0), lock))
        excess = sum(size for _, size, _ in found) - self._cache_bytes
        for _, size, lock in sorted(found):
            if excess <= 0:
                return
            if lock != kept and self._remove(lock):
                excess -= size

    def _remove(self, lock: Path) -> bool:
        """Remove a copy, unless it is used."""
        with contextlib.suppress(OSError), _locked(lock) as is_mine:
            if is_mine:
                shutil.rmtree(self._copy(lock), ignore_errors=True)
                shutil.rmtree(_work(self._copy(lock)), ignore_errors=True)
                lock.unlink()
                return True
        return False

    # -- what workers write -------------------------------------------------------------------------------------------

    def enter(self, worker: str) -> tuple[Path, int]:
        """Make the folder of a worker. Returns it, and a descriptor: it is the worker's until that is closed."""
        self._sweep()
        home = home_of(self._folder, worker)
        return home, _made(home)

    def enter_task(self) -> tuple[Path, int]:
        """As `enter`, for a task. Nobody collects what it leaves: the next one on the node removes it."""
        self._sweep()
        home = self._folder / "tasks" / uuid.uuid4().hex
        made = home.with_name(NEW + home.name)
        fd = _made(made)
        made.rename(home)
        return home, fd

    def _sweep(self) -> None:
        """Remove what tasks left, and workers that died long ago, with their node's Ray or with their owner."""
        for home in (*(self._folder / "workers").iterdir(), *(self._folder / "tasks").iterdir()):
            with contextlib.suppress(OSError):
                is_task = home.parent.name == "tasks" and not home.name.startswith(NEW)
                if not is_task and _age_s(home) < LEFT_S:
                    continue
                with _locked(home / LOCK) as is_mine:
                    if is_mine:
                        shutil.rmtree(home, ignore_errors=True)


def _made(home: Path) -> int:
    """Make a folder. Returns: what holds its lock."""
    home.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _age_s(home: Path) -> float:
    return time.time() - max(each.stat().st_mtime for each in (home, *home.iterdir()))


def _lock_alone(fd: int) -> bool:
    """Lock for one alone, if nobody else has the lock: who has it may use the copy for as long as its job runs."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def collect(folder: Path, worker: str, sizes: Mapping[str, Mapping[str, int]]) -> Left:
    """Take what a dead worker left, beyond the bytes of its segments that the owner has, and remove its folder.

    Of more than LEFT_BYTES_MAX the rest is lost: its rows run again.
    """
    home = home_of(folder, worker)
    segments, room = [], LEFT_BYTES_MAX
    for job, known in sizes.items():
        for path in sorted((home / SEGMENTS / job).glob(f"{worker}-*.seg")):
            offset = known.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(room)
            if data:
                segments.append(LeftSegment(job, path.name, offset, data))
                room -= len(data)
    suspect, log = home / f"{worker}.suspect", home / f"{worker}.log"
    left = Left(segments, _tail(suspect, SUSPECT_BYTES_MAX), _tail(log, LOG_BYTES_MAX) or b"")
    shutil.rmtree(home, ignore_errors=True)
    return left


def _tail(path: Path, size_max: int) -> bytes | None:
    """The end of a file; None: there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_max))
            return file.read(size_max)
    except FileNotFoundError:
        return None


def home_of(folder: Path, worker: str) -> Path:
    return folder / "workers" / worker


def cache_folder(cache: str, url: str) -> Path:
    """The folder of a store in `cluster.cache`, made if it is missing. Raises: ModelFailed."""
    folder = Path(cache).expanduser() / hashlib.sha256(url.encode()).hexdigest()[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ModelFailed(
            f"the folder {folder} of this node cannot be made: {error.strerror}; set cluster.cache to a path that can",
            code="no_node_cache",
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ModelFailed(
            f"the folder {folder} of this node must belong to the user that Ray runs as, and be open to nobody else "
            "(chmod 700); or set cluster.cache to another path",
            code="no_node_cache",
        )
    return folder


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[bool]:
    """Whether nobody else had the lock of a file, which this process has then. Raises: FileNotFoundError."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _is_at(fd, lock)
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file still has its name: the process that removed it had the lock then."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _work(copy: Path) -> Path:
    return copy.with_name(copy.name + WORK)


__all__ = ["LOCK", "NEW", "SEGMENTS", "NodeCache", "cache_folder", "collect", "home_of"]
