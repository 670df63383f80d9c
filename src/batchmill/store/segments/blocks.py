"""Segments of small jobs: their blocks travel with the commit, and lie in the database with it.

A worker keeps every block until its owner has decided on the commit. If the owner dies first, it writes them to a
segment file, where the next owner finds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from batchmill.ports.storage import SegmentSource
from batchmill.store.objects import StoreObjects
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import SegmentHead
from batchmill.store.segments.objects import ObjectSource
from batchmill.types import SegmentPlace, SegmentRef

BLOCK_BYTES_MAX = 64 * 1024  # a longer block goes to a file: a socket takes such a message whole
CARRIED_BYTES_MAX = 1024 * 1024  # of one job and worker; what comes after goes to a file
CARRIED_DELAY_S = 0.005  # rows that end together travel in one commit
CARRIED = ".carried"  # what the names of segments that lie in the database end with


class CarriedSegment:
    """A `ports.storage.SegmentSink` whose commits carry its blocks, as long as they are few and short."""

    def __init__(self, head: SegmentHead, open_file: Callable[[int], SegmentFile], roll: int = 0) -> None:
        """Args: open_file: opens the file that takes what commits do not carry, given its number less one."""
        self._open_file = open_file
        self.roll = roll + 1
        self._name = f"{head.worker}-{self.roll:04d}{CARRIED}"
        self._size_bytes = 0
        self._pieces: dict[int, bytes] = {}  # offset -> blocks that are not acknowledged
        self._file: SegmentFile | None = None

    @property
    def commit_delay_s(self) -> float:
        return CARRIED_DELAY_S if self._file is None else self._file.commit_delay_s

    def append(self, blocks: bytes) -> SegmentRef:
        is_full = len(blocks) > BLOCK_BYTES_MAX or self._size_bytes + len(blocks) > CARRIED_BYTES_MAX
        if self._file is not None or is_full:
            return self._append_to_file(blocks)
        ref = SegmentRef(self._name, self._size_bytes, len(blocks))
        self._pieces[ref.offset] = blocks
        self._size_bytes += len(blocks)
        return ref

    def _append_to_file(self, blocks: bytes) -> SegmentRef:
        if self._file is None:
            self._file = self._open_file(self.roll)
        ref = self._file.append(blocks)
        self.roll = self._file.roll
        return ref

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def carried(self, ref: SegmentRef) -> bytes:
        if ref.segment != self._name:
            return b""
        return b"".join([self._pieces[offset] for offset in self._offsets(ref)])

    def acknowledge(self, ref: SegmentRef) -> None:
        if ref.segment == self._name:
            for offset in self._offsets(ref):
                del self._pieces[offset]

    def _offsets(self, ref: SegmentRef) -> list[int]:
        return [offset for offset in self._pieces if ref.offset <= offset < ref.offset + ref.length]

    @property
    def is_acknowledged(self) -> bool:
        """Whether the owner has decided on everything that was carried to it."""
        return not self._pieces

    def spill(self) -> None:
        """Write what is not acknowledged to a file, and close it. Raises: OSError."""
        for blocks in self._pieces.values():
            self._append_to_file(blocks)
        self._pieces.clear()
        self.close()

    def spill_refused(self, ref: SegmentRef) -> None:
        """Write the blocks of a commit that does not count to a file: its rows may have no other outcome.

        Other commits still carry theirs. Raises: OSError.
        """
        if ref.segment == self._name and (offsets := self._offsets(ref)):
            for offset in offsets:
                self._append_to_file(self._pieces.pop(offset))
            self.sync()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class CarriedSegments:
    """The carried segments of a worker that are open, or closed and not yet acknowledged."""

    def __init__(self) -> None:
        self._segments: dict[str, list[CarriedSegment]] = {}  # job -> its segments
        self._acknowledged = asyncio.Event()

    def open(self, head: SegmentHead, open_file: Callable[[int], SegmentFile], roll: int) -> CarriedSegment:
        segment = CarriedSegment(head, open_file, roll)
        known = [each for each in self._segments.get(head.job, ()) if not each.is_acknowledged]
        self._segments[head.job] = [*known, segment]
        return segment

    def acknowledge(self, job: str, ref: SegmentRef, *, is_open: bool) -> None:
        """The owner has decided on a commit. `is_open`: the job may get more blocks."""
        segments = self._segments.get(job, [])
        for segment in segments:
            segment.acknowledge(ref)
        if not is_open and all(segment.is_acknowledged for segment in segments):
            self._segments.pop(job, None)
        self._acknowledged.set()

    def forget(self, job: str) -> None:
        """The job gets no more blocks: forget it, unless something is not acknowledged."""
        if all(segment.is_acknowledged for segment in self._segments.get(job, ())):
            self._segments.pop(job, None)

    def spill_refused(self, job: str, ref: SegmentRef) -> None:
        """A commit does not count: write its blocks to a file. Raises: OSError."""
        for segment in self._segments.get(job, ()):
            segment.spill_refused(ref)

    def spill(self) -> None:
        """The owner has gone: write what is not acknowledged to files. Raises: OSError."""
        for segments in self._segments.values():
            for segment in segments:
                segment.spill()

    async def wait_acknowledged(self, timeout_s: float) -> None:
        """Return once everything is acknowledged, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(each.is_acknowledged for some in self._segments.values() for each in some):
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        except TimeoutError:
            return


class StoredSegments:
    """A `ports.storage.SegmentSource`: blocks from the database, and the files that there are besides."""

    def __init__(self, files: SegmentSource, blocks: Mapping[str, Sequence[tuple[int, bytes]]]) -> None:
        """Args: blocks: segment -> (offset, bytes) of what commits carried."""
        self._files = files
        self._stored = {name: _joined(pieces) for name, pieces in blocks.items()}

    def names(self, worker: str = "") -> list[str]:
        stored = [name for name in self._stored if not worker or name.startswith(f"{worker}-")]
        return sorted([*stored, *self._files.names(worker)])

    def size(self, name: str) -> int:
        return len(self._stored[name]) if name in self._stored else self._files.size(name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        if name in self._stored:
            return self._stored[name][offset : offset + length]
        return self._files.read(name, offset, length)

    def sync(self, name: str) -> None:
        if name not in self._stored:
            self._files.sync(name)

    def where(self, name: str) -> str:
        return f"{name} in the database" if name in self._stored else self._files.where(name)

    def close(self) -> None:
        self._files.close()


def _joined(pieces: Sequence[tuple[int, bytes]]) -> bytes:
    """Zeros stand where blocks never counted."""
    data = bytearray(max(offset + len(blocks) for offset, blocks in pieces))
    for offset, blocks in pieces:
        data[offset : offset + len(blocks)] = blocks
    return bytes(data)


def open_segments(place: SegmentPlace) -> SegmentSource:
    """The segments of a job, for reading. Close it."""
    if place.store:
        job_id = Path(place.folder).parent.name
        files = ObjectSource(StoreObjects(place.store), job_id, place.objects)
    else:
        files = SegmentFolder(Path(place.folder))
    return StoredSegments(files, place.blocks) if place.blocks else files
