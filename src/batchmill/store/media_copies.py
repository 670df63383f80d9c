"""Copies of the files that cells of media columns name, for workers that do not see these files.

A copy is named by the BLAKE3 of its content, so a job has equal contents once. With `[storage]` it is an object below
`jobs/ID/media/`, otherwise a file of the job's folder, which all nodes of a cluster see. It never changes, and goes
with what the job needs for its rows.

Files are shared by the jobs of a project: each has a further name below `media/PROJECT/`, which the next job with its
content links. So the kernel counts the jobs that have a file, even after a kill. Objects are not shared: they have one
name each, and no record says which jobs name them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import sync_folder
from batchmill.store.objects import StoreObjects

FOLDER, PART = "media", ".part"  # in the folder of a job; the ending of a file that is being written
SHARED = "media"  # in the data directory: a folder for each project
WRITES_MAX = 16  # at the same time
WAITING_BYTES_MAX = 64 * 1024 * 1024  # of contents that are being written, and one more
WAITING_MAX = 256  # of them
SEEN_BITS = 2**27  # 16 MiB, whatever the number of rows
SEEN_HASHES = 4
CHECKED_BYTES = 64 * 1024 * 1024  # written between two looks at the free disk space


def prefix_of(job_id: str) -> str:
    """What the names of a job's copies begin with in an object store."""
    return f"jobs/{job_id}/{FOLDER}/"


def path_of(folder: str, digest: str) -> str:
    """Where a copy is in the folder of a job: a folder of a million files is slow."""
    return os.path.join(folder, digest[:2], digest)


class Place(Protocol):
    """Where copies are written. Concurrency: any thread."""

    def has(self, digest: str, size_bytes: int) -> bool: ...

    def write(self, digest: str, data: bytes) -> None:
        """Write a copy that may be there: it has this content then."""

    def finish(self) -> None:
        """Make all durable."""


class Seen:
    """Which contents were seen before, in memory that does not grow: it may say so of one that was not (a Bloom filter
    of the digests, which are hashes already).
    """

    def __init__(self, bits: int = SEEN_BITS) -> None:
        self._bits, self._table = bits, bytearray(bits // 8)

    def add(self, digest: str) -> bool:
        """Whether a content may have been added before."""
        raw, was_seen = bytes.fromhex(digest), True
        for start in range(0, 8 * SEEN_HASHES, 8):
            at = int.from_bytes(raw[start : start + 8]) % self._bits
            was_seen &= bool(self._table[at >> 3] & 1 << (at & 7))
            self._table[at >> 3] |= 1 << (at & 7)
        return was_seen


class MediaCopies(AbstractContextManager["MediaCopies"]):
    """Writes the copies of one job, several at once. What it raises, it raises from any of its calls. Call `finish`."""

    def __init__(self, place: Place) -> None:
        self._place, self._seen = place, Seen()
        self._threads = ThreadPoolExecutor(WRITES_MAX, thread_name_prefix="media-copies")
        self._waiting: deque[tuple[Future[None], str, int]] = deque()
        self._digests: set[str] = set()  # of those that wait
        self._waiting_bytes = 0
        self.size_bytes = 0  # of all copies of the job, about

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def keep(self, digest: str, data: bytes) -> None:
        """Write a content, unless the job has it; return before it is durable. Raises: StorageFailed, OSError."""
        if digest in self._digests:
            return
        if (was_seen := self._seen.add(digest)) and self._place.has(digest, len(data)):
            return
        while self._waiting and (
            len(self._waiting) >= WAITING_MAX or self._waiting_bytes + len(data) > WAITING_BYTES_MAX
        ):
            self._wait_for_oldest()
        self.size_bytes += 0 if was_seen else len(data)
        self._digests.add(digest)
        self._waiting_bytes += len(data)
        self._waiting.append((self._threads.submit(self._place.write, digest, data), digest, len(data)))

    def finish(self) -> None:
        """Return once everything that was kept is durable. Raises: StorageFailed, OSError."""
        while self._waiting:
            self._wait_for_oldest()
        self._place.finish()

    def _wait_for_oldest(self) -> None:
        writing, digest, size_bytes = self._waiting[0]
        writing.result()
        self._waiting.popleft()
        self._digests.discard(digest)
        self._waiting_bytes -= size_bytes


class ObjectCopies:
    """Copies as objects. `prefix`: see `prefix_of`."""

    def __init__(self, objects: StoreObjects, prefix: str) -> None:
        self._objects, self._prefix = objects, prefix
        self._is_again = next(iter(objects.infos(prefix)), None) is not None  # of an attempt that was cut off

    def has(self, digest: str, size_bytes: int) -> bool:
        found = self._objects.find(self._prefix + digest)
        return found is not None and found.size_bytes == size_bytes

    def write(self, digest: str, data: bytes) -> None:
        if not (self._is_again and self.has(digest, len(data))):
            self._objects.put(self._prefix + digest, data)

    def finish(self) -> None:
        """An object is durable once it was put."""


class SharedCopies:
    """The further names of the files that jobs of a project have. Concurrency: any thread, of any process."""

    def __init__(self, home: Path, owned: OwnedFiles = OwnedFiles()) -> None:
        self._home, self._owned = home, owned

    def link(self, digest: str, data: bytes, path: Path) -> bool:
        """Give the file with a content to a job, at `path`. False: no job has it, or it cannot be linked."""
        shared = Path(path_of(str(self._home), digest))
        try:
            if shared.stat().st_size == len(data) and shared.read_bytes() == data:
                self._owned.link_new(shared, path)
                return True
        except OSError as error:
            if error.errno != errno.EMLINK:
                return False
        with contextlib.suppress(OSError):  # it is damaged, or has as many names as a file may have
            self._owned.remove(shared)  # the next copy takes its place
        return False

    def add(self, digest: str, path: Path) -> None:
        """Share the file of a job. Where a file can have one name only, nothing is shared."""
        shared = Path(path_of(str(self._home), digest))
        with contextlib.suppress(OSError):
            shared.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._owned.link_new(path, shared)


def shared_home(data_dir: Path, project: str) -> Path:
    return data_dir / SHARED / project


def remove_copies(folder: Path, shared: Path, owned: OwnedFiles) -> None:
    """Remove the files of a job, and the further names of those that no other job has. What a kill leaves of these
    names goes with `sweep_shared`. Raises: TermOver.
    """
    for part in list(folder.iterdir()) if folder.is_dir() else ():
        digests = os.listdir(part)
        owned.remove_tree(part)
        for digest in digests:
            _drop_unused(Path(path_of(str(shared), digest)), owned)
    owned.remove_tree(folder)


def sweep_shared(data_dir: Path, owned: OwnedFiles) -> None:
    """Remove all further names of files that no job has. Raises: TermOver."""
    for path in (data_dir / SHARED).glob("*/*/*"):
        _drop_unused(path, owned)


def _drop_unused(path: Path, owned: OwnedFiles) -> None:
    """A job that links the file meanwhile keeps it, by the name that it has then."""
    with contextlib.suppress(OSError):
        if path.stat().st_nlink == 1:
            owned.remove(path)


class FolderCopies:
    """Copies as files. Args: shared: those of the project's jobs. check_room: raises if the disk is full."""

    def __init__(
        self, folder: Path, shared: SharedCopies, check_room: Callable[[], None], owned: OwnedFiles = OwnedFiles()
    ) -> None:
        self._folder, self._shared, self._check_room, self._owned = folder, shared, check_room, owned
        self._unchecked = CHECKED_BYTES
        owned.remove(*folder.glob(f"*/*{PART}"))  # of an attempt that was cut off

    def has(self, digest: str, size_bytes: int) -> bool:
        try:
            return os.stat(path_of(str(self._folder), digest)).st_size == size_bytes
        except FileNotFoundError:
            return False

    def write(self, digest: str, data: bytes) -> None:
        if self.has(digest, len(data)):
            return
        path = Path(path_of(str(self._folder), digest))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # `finish` makes it durable
        if self._shared.link(digest, data, path):
            return
        self._unchecked += len(data)
        if self._unchecked >= CHECKED_BYTES:
            self._unchecked = 0
            self._check_room()
        part = path.with_name(f"{uuid.uuid4().hex}{PART}")
        try:
            with open(part, "xb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._owned.move(part, path)
        except BaseException:
            discard(part)
            raise
        self._shared.add(digest, path)

    def finish(self) -> None:
        if self._folder.is_dir():
            for folder in (*self._folder.iterdir(), self._folder, self._folder.parent):
                sync_folder(folder)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
