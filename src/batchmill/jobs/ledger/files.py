"""The files of a job below the data directory, each written whole before it has its name."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

import msgspec

from batchmill.datasets import layout, sealing
from batchmill.errors import StorageFailed, StorageFull
from batchmill.object_store.urls import is_object_url, open_store, parse_url
from batchmill.store.media_copies import FOLDER as MEDIA
from batchmill.store.media_copies import prefix_of
from batchmill.store.segments.format import sync_folder
from batchmill.types import MediaBounds, SegmentPlace
from batchmill.wire.job_spec import JobSpec

RESULTS = "results"  # the folder of the results of small jobs
REUSE = "reuse"  # in the folder of a job
PARTIAL = "partial"  # the folder of results of unfinished jobs, which their readers remove
BUFFER_BYTES = 1024 * 1024  # small writes are gathered up to this size
MANIFEST_NAME = "manifest.json"  # of results in a folder
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

REMEMBERED_BYTES_MAX = 8 * 1024  # of a description; longer ones are read each time

_specs = msgspec.json.Decoder(JobSpec)


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class PartFile:
    """A file that is written under a temporary name. Without `publish`, it is removed.

    Raises: StorageFull from `write` and `publish` when the disk or the quota is full. Any other error of the file
    system is final: the part is not to be published. StorageFailed from `publish` if another process has begun the same
    file since: an owner that was stopped and replaced publishes neither its own bytes nor those of its successor.

    Args: digest: is updated with everything that is written.
    """

    def __init__(self, path: Path, mode: int = 0o666, digest: Digest | None = None) -> None:
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.size_bytes = 0
        self._digest = digest
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
        is_ours = self._is_in_place()
        os.close(self._fd)
        self._fd = -1
        if not is_ours:
            raise StorageFailed(f"{self.part} is another process's now, which writes {self.path} too")
        os.replace(self.part, self.path)
        sync_folder(self.path.parent)

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

    def publish(self) -> None:
        self.data = b"".join(self._pieces)

    def discard(self) -> None:
        self._pieces.clear()


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


def is_folder(output: str) -> bool:
    """Whether results are written as parts into a folder: its path or URL ends with a slash."""
    return output.endswith("/")


def result_exists(path: str) -> bool:
    """Whether a result file, an object, or the manifest of a folder is there.

    Raises: AuthRefused, Unavailable, InvalidInput.
    """
    if is_folder(path):
        path += MANIFEST_NAME
    if not is_object_url(path):
        return os.path.exists(path)
    url = parse_url(path)
    return open_store(url.root).find(url.key) is not None


class JobFiles:
    """The paths of a job.

    Args: scratch: where the files of a small job are while it is used; None: it is not small.
    """

    def __init__(self, data_dir: Path, job_id: str, scratch: Path | None = None) -> None:
        self.data_dir, self.scratch, self._job_id = data_dir, scratch, job_id
        self.home = (scratch or data_dir) / "jobs" / job_id

    @property
    def spec(self) -> Path:
        return self.home / "job.json"

    @property
    def ending(self) -> Path:
        """The record of a job that keeps only its results."""
        return self.home / "ending.json"

    @property
    def dataset(self) -> Path:
        return self.home / "dataset"

    @property
    def media(self) -> Path:
        """Copies of the files that cells name, where workers do not see these: see `store.media_copies`."""
        return self.home / MEDIA

    def media_bounds(self, spec: JobSpec) -> MediaBounds:
        copies = {"": "", "folder": str(self.media), "objects": prefix_of(spec.id)}[spec.dataset.media_copies]
        return MediaBounds(spec.dataset.media_bytes_max, spec.dataset.media_row_bytes_max, copies)

    @property
    def segments(self) -> Path:
        return self.data_dir / "jobs" / self._job_id / "segments"

    @property
    def reuse(self) -> Path:
        """The index of the results by their requests, after the first lookup, and what stays of them for later ones."""
        return self.data_dir / "jobs" / self._job_id / REUSE

    @property
    def segment_place(self) -> SegmentPlace:
        return SegmentPlace(str(self.segments))

    def plan(self, generation: int) -> Path:
        """The plan of a generation: the first runs every row, a later one those that failed."""
        return self.home / f"plan-{generation}"

    def output(self, name: str) -> Path:
        """Where the results stay if the caller names no place. Those of small jobs share a folder."""
        return self.home / name if self.scratch is None else self.data_dir / RESULTS / f"{self._job_id}.{name}"

    def partial(self, name: str) -> Path:
        """Where results that are asked for before the end are until they have been read."""
        return self.data_dir / PARTIAL / f"{self._job_id}.{name}"

    def write_spec(self, spec: JobSpec) -> None:
        """Create the job's folders and write `job.json`, durably. That of a small job is in the database alone."""
        if spec.is_small:
            return
        is_first = not self.home.parent.exists()
        for folder in (self.dataset, self.segments, self.plan(0)):
            folder.mkdir(parents=True, exist_ok=True)
        with PartFile(self.spec, 0o600) as file:
            file.write(msgspec.json.encode(spec))
            file.publish()
        sync_folder(self.home.parent)
        if is_first:
            sync_folder(self.data_dir)

    def remove(self) -> None:
        """Remove the folder of a job that was never stored."""
        shutil.rmtree(self.home, ignore_errors=True)

    def is_untouched(self) -> bool:
        """Whether nothing was read or run for this job."""
        traces = (self.dataset / "seal.json", self.plan(0) / "plan.json")
        return not any(path.exists() for path in traces) and not any(self.segments.glob("*"))

    def clear_unsealed(self) -> None:
        """Remove an unsealed dataset: sealing starts again, or not at all."""
        if not (self.dataset / "seal.json").exists():
            sealing.clear(self.dataset)

    def clear_refused(self) -> None:
        """Remove the dataset and the plan of a job that will run no row."""
        sealing.clear(self.dataset)
        for path in self.dataset.glob(layout.FETCHED):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.plan(0).glob("*"):
            path.unlink()
        shutil.rmtree(self.media, ignore_errors=True)

    def read_spec(self) -> JobSpec:
        return read_spec(self.spec.read_bytes())


def clear_unsealed(data_dir: Path, job_ids: Iterable[str]) -> None:
    """Remove what a kill left of datasets that were being unpacked."""
    for job_id in job_ids:
        JobFiles(data_dir, job_id).clear_unsealed()


def sweep_orphans(data_dir: Path, known: Container[str]) -> None:
    """Remove the folders of jobs that are not in the ledger, after a crash between the two steps.

    One with work in it stays, whatever the ledger says: a lost ledger is rebuilt from it.
    """
    for home in (data_dir / "jobs").glob("job_*"):
        files = JobFiles(data_dir, home.name)
        if home.name not in known and files.is_untouched():
            files.remove()


def read_spec(data: bytes) -> JobSpec:
    """Read `job.json`, which many requests about one job ask for. Nobody changes what its lists hold."""
    return _read_short(data) if len(data) <= REMEMBERED_BYTES_MAX else _specs.decode(data)


@functools.lru_cache(maxsize=256)
def _read_short(data: bytes) -> JobSpec:
    return _specs.decode(data)
