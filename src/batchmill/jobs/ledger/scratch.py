"""Scratch: the folder in which small jobs of an owner are unpacked for those who need their files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.errors import TermOver
from batchmill.jobs.ledger import packed
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.ledger.packed import FOLDER_MODE
from batchmill.owned_files import OwnedFiles
from batchmill.part_files import full_disk_named
from batchmill.store.sql.database import Database
from batchmill.wire.job_spec import JobSpec

THREADS = 2  # that seal and plan small jobs; half of them for one project
MEMORY = Path("/dev/shm")
LOCK, BEGUN = "lock", "lock.new"  # held by the owner of a scratch folder; until it is
ON_DISK = "scratch"  # in the data directory: the folder of what memory has no room for
BEGINNING_S = 60.0  # a folder without a lock is being made for no longer than this

T = TypeVar("T")


class Scratch:
    """The folder in which small jobs are unpacked while they are used. One for each owner.

    It is in memory where the machine has `/dev/shm`: files on a disk take ten times as long to make and to remove.
    """

    def __init__(self, data_dir: Path, database: Database) -> None:
        self._data_dir, self._database = data_dir, database
        self._owned = OwnedFiles(database.term)  # of what lies in the data directory: a successor has the same names
        self._folder: tuple[Path, int] | None = None  # and the descriptor of its lock
        self._users: Counter[str] = Counter()  # job -> those who work on it
        self._locks: dict[str, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="small-jobs")
        self._slots = FairSemaphore(THREADS)

    @property
    def home(self) -> Path:
        """The folder, which the first small job makes."""
        if self._folder is None:
            with contextlib.suppress(TermOver):
                self._owned.remove_tree(self._data_dir / ON_DISK)  # of an earlier owner
            self._folder = _make_folder(self._data_dir)
            (self._folder[0] / "jobs").mkdir(mode=FOLDER_MODE)
        return self._folder[0]

    async def run(self, work: Callable[[], T], project: str) -> T:
        """Run bounded work on a small job in a thread; threads are shared fairly between projects."""
        async with self._slots.slot(project):
            return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def files(self, spec: JobSpec) -> JobFiles:
        """The files of a job; those of a small one exist only within `use`."""
        return JobFiles(self._data_dir, spec.id, self.home if spec.is_small else None)

    @asynccontextmanager
    async def use(self, spec: JobSpec, *, is_new: bool = False) -> AsyncIterator[JobFiles]:
        """Have the files of a job. Anybody may use them at the same time. `is_new`: it has none yet."""
        files = self.files(spec)
        if not spec.is_small:
            yield files
            return
        self._users[spec.id] += 1
        try:
            async with self._locks.setdefault(spec.id, asyncio.Lock()):
                if not files.home.exists():
                    data = None if is_new else await self._database.read(packed.read, spec.id)
                    self._unpack(files, data)
            yield files
        finally:
            self._users[spec.id] -= 1
            if not self._users[spec.id]:
                del self._users[spec.id], self._locks[spec.id]
                self._remove(files.home)  # few files: no thread

    def _unpack(self, files: JobFiles, data: bytes | None) -> None:
        """Make the folder of a job, whole or not at all. Where memory is full, it lies in the data directory."""
        self._remove(files.home)
        partial = files.home.with_name(f"{files.home.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            packed.unpack(partial, data)
            os.rename(partial, files.home)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno != errno.ENOSPC:
                raise
            elsewhere = self._data_dir / ON_DISK / files.home.name
            elsewhere.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self._owned.remove_tree(elsewhere)
            with full_disk_named(elsewhere):
                packed.unpack(elsewhere, data)
                os.symlink(elsewhere, files.home)

    def _remove(self, home: Path) -> None:
        if home.is_symlink():
            with contextlib.suppress(TermOver):
                self._owned.remove_tree(Path(os.readlink(home)))
            home.unlink()
        else:
            shutil.rmtree(home, ignore_errors=True)

    async def store(self, spec: JobSpec) -> None:
        """Store the files of a small job, which have changed."""
        if spec.is_small:
            data = await asyncio.to_thread(lambda: packed.pack(packed.folders_of(self.files(spec))))
            await self._database.write(packed.store, spec.id, data)

    def close(self) -> None:
        self._threads.shutdown()
        if self._folder is not None:
            (home, lock), self._folder = self._folder, None
            shutil.rmtree(home, ignore_errors=True)
            os.close(lock)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Wait for a thread. It cannot be interrupted: a caller that is cancelled meanwhile waits for its end, too."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # raised below
            break
    if cancelled is not None:
        work.exception()
        raise cancelled
    return work.result()


def _make_folder(data_dir: Path) -> tuple[Path, int]:
    """A new folder that only this user can read, and its lock. Removes those whose owners have died."""
    _sweep(data_dir)
    try:
        home = Path(tempfile.mkdtemp(prefix=_prefix(), dir=MEMORY))
    except OSError:  # there is no such place, or it is full
        home = Path(tempfile.mkdtemp(prefix=_prefix(), dir=data_dir))
    # Another owner that starts may have found the lock free, and remove the folder: it has no lock before it is held.
    lock = os.open(home / BEGUN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(home / BEGUN, home / LOCK)
    return home, lock


def _prefix() -> str:
    return f"batchmill-{os.getuid()}-"


def _sweep(data_dir: Path) -> None:
    for parent in (MEMORY, data_dir):
        for home in parent.glob(f"{_prefix()}*"):
            with contextlib.suppress(OSError):  # another user's, or another sweep has removed it
                if os.lstat(home).st_uid == os.getuid() and not _is_used(home):
                    shutil.rmtree(home)  # nobody takes the lock of a folder that has an owner's


def _is_used(home: Path) -> bool:
    try:
        lock = os.open(home / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - os.lstat(home).st_mtime < BEGINNING_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
