"""Segments as files of a folder: the sink of a worker, and the source that owner and children read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

from batchmill.errors import BatchmillError
from batchmill.part_files import sync_folder
from batchmill.store.segments.format import SegmentHead, head_bytes
from batchmill.types import SegmentRef

SEGMENT_BYTES_MAX = 128 * 1024 * 1024  # a worker begins another file beyond this
SEGMENTS_OPEN_MAX = 64  # by one source
COMMIT_DELAY_S = 0.5  # a sync costs the disk more than a second's rows


class _OpenFile:
    """One file of a segment, with the sizes that are written and synced."""

    def __init__(self, path: Path) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self.fd, self.path = os.open(path, flags, 0o600), path
        self.size_bytes = self.synced_bytes = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view)
            self.size_bytes += written
            view = view[written:]

    def sync(self) -> None:
        size_bytes = self.size_bytes  # another thread may append meanwhile
        os.fdatasync(self.fd)
        self.synced_bytes = size_bytes

    def drop_unsynced(self) -> None:
        """After a failed sync the file's contents are unknown: blocks after the last good sync must not be found."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, self.synced_bytes)

    def close(self) -> None:
        os.close(self.fd)


class SegmentFile:
    """A `ports.storage.SegmentSink`: appends go to the kernel at once, to the disk with `sync`.

    An error of the file system is final: no byte after it is ever referenced, and nothing more can be appended.

    Args:
        roll: the number of the last file that this worker has written for this job; 0 for none.
    """

    commit_delay_s = COMMIT_DELAY_S

    def __init__(self, folder: Path, head: SegmentHead, roll: int = 0) -> None:
        self.folder, self.head = folder, head
        self.roll = roll
        self._file: _OpenFile | None = None
        self._full: list[_OpenFile] = []  # files that are not yet synced
        self._writing = threading.Lock()  # held while bytes are appended or truncated
        self._syncing = threading.Lock()  # held during a sync; the next sync also covers its bytes
        self._broken: OSError | None = None

    def append(self, blocks: bytes) -> SegmentRef:
        with self._writing:
            self._raise_if_broken()
            try:
                file = self._file
                if file is None or file.size_bytes >= SEGMENT_BYTES_MAX:
                    file = self._begin()
                offset = file.size_bytes
                file.write(blocks)
            except OSError as error:
                self._broken = error
                raise
            return SegmentRef(self.name, offset, len(blocks))

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise OSError(self._broken.errno, f"{self._broken.strerror} (earlier)")

    @property
    def name(self) -> str:
        return f"{self.head.worker}-{self.roll:04d}.seg"

    def sync(self) -> None:
        """Sync earlier appends to disk. May run in a thread while another thread appends."""
        with self._syncing:
            self._raise_if_broken()
            with self._writing:
                full, self._full, last = self._full, [], self._file
            files = [*full, last] if last is not None else full
            try:
                while files:
                    files[0].sync()
                    self._synced(files[0].path, files[0].synced_bytes)
                    if (done := files.pop(0)) is not last:
                        done.close()
                        self._finished(done.path)
            except OSError as error:
                with self._writing:
                    self._broken = error
                    for file in files:
                        file.drop_unsynced()
                for file in files:
                    if file is not last:
                        file.close()
                raise
            except BatchmillError:  # of `_synced`: the bytes are here, and stay due
                with self._writing:
                    self._full = [*(file for file in files if file is not last), *self._full]
                raise

    def _synced(self, path: Path, size_bytes: int) -> None:
        """So many bytes of a file are on the disk."""

    def _finished(self, path: Path) -> None:
        """A file is full, and was synced."""

    def carried(self, ref: SegmentRef) -> bytes:
        return b""  # `sync` has brought them to the disk

    def acknowledge(self, ref: SegmentRef) -> None:
        """Nothing is kept until then."""

    def close(self) -> None:
        """Sync and close. Raises: OSError if that fails."""
        try:
            if self._broken is None:
                self.sync()
        finally:
            for file in [*self._full, self._file]:
                if file is not None:
                    file.close()
            self._full, self._file = [], None

    def _begin(self) -> _OpenFile:
        self.roll += 1
        file = _OpenFile(self.folder / self.name)
        if self._file is not None:
            self._full.append(self._file)
        self._file = file
        file.write(head_bytes(self.head))
        sync_folder(self.folder)
        return file


class SegmentFolder:
    """A `ports.storage.SegmentSource`: the segments in a folder, through a bounded number of open files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def names(self, worker: str = "") -> list[str]:
        return sorted(path.name for path in self._folder.glob(f"{worker or '*'}-*.seg"))

    def size(self, name: str) -> int:
        return os.fstat(self._descriptor(name)).st_size

    def read(self, name: str, offset: int, length: int) -> bytes:
        fd = self._descriptor(name)
        data = os.pread(fd, length, offset)
        while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
            data += more
        return data

    def sync(self, name: str) -> None:
        os.fdatasync(self._descriptor(name))

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= SEGMENTS_OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        self._open[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[name]
