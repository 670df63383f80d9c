"""Segments in an object store: each sync of a worker becomes one object, named for its file and place in it.

The file on the worker's disk is the spool: its bytes are there within 50 ms, and what it holds beyond the objects is
put by the process that adopts it. Objects of one segment, one after the other, are the file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import itemgetter
from pathlib import Path

from batchmill import faults
from batchmill.errors import StorageFailed
from batchmill.ports import Objects
from batchmill.store.objects import StoreObjects
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import SegmentHead, Span, gaps_of, merged, sync_folder

COMMIT_DELAY_S = 1.0  # an object costs money
OBJECT_BYTES_MAX = 64 * 1024 * 1024
AT_ONCE = 4  # objects in memory while segments are fetched


def folder_of(job_id: str) -> str:
    """What the names of a job's segments begin with."""
    return f"jobs/{job_id}/segments/"


def object_name(folder: str, segment: str, offset: int, length: int) -> str:
    return f"{folder}{segment}/{offset:012d}-{length}"


class ObjectSegments:
    """The segments of one worker. Raises: InvalidConfig for a URL at which there can be no store."""

    def __init__(self, url: str, may_write: Callable[[], None]) -> None:
        """Args: may_write: see `ObjectStore`."""
        self._objects = StoreObjects(url, may_write)

    def segment(self, folder: Path, head: SegmentHead, roll: int, *, is_spool: bool) -> ObjectSegment:
        """Args: is_spool: nobody reads the files here, so a full one is removed once the store has it."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ObjectSegment(folder, head, roll, self._objects, is_spool=is_spool)


class ObjectSegment(SegmentFile):
    """A segment whose synced bytes are also objects. `sync` returns once they are."""

    commit_delay_s = COMMIT_DELAY_S

    def __init__(self, folder: Path, head: SegmentHead, roll: int, objects: Objects, *, is_spool: bool = False) -> None:
        super().__init__(folder, head, roll)
        self._objects, self._prefix, self._is_spool = objects, folder_of(head.job), is_spool
        self._put_bytes: dict[Path, int] = {}
        self._is_closing = False

    def close(self) -> None:
        """Sync and close. What is not yet an object was never committed: the process that adopts the file puts it."""
        self._is_closing = True
        super().close()

    def _synced(self, path: Path, size_bytes: int) -> None:
        if self._is_closing:
            return
        start, end = self._put_bytes.get(path, 0), size_bytes
        if end > start:
            faults.point("before_put")
            put_span(self._objects, self._prefix, path, (start, end))
            self._put_bytes[path] = end
            faults.point("after_put")

    def _finished(self, path: Path) -> None:
        if self._put_bytes.pop(path, 0) and self._is_spool and not self._is_closing:
            path.unlink(missing_ok=True)


def put_span(objects: Objects, folder: str, path: Path, span: Span) -> None:
    """Put these bytes of a segment."""
    start, end = span
    with open(path, "rb", buffering=0) as file:
        while start < end:
            data = os.pread(file.fileno(), min(OBJECT_BYTES_MAX, end - start), start)
            if not data:
                return
            objects.put(object_name(folder, path.name, start, len(data)), data)
            start += len(data)


class ObjectSource:
    """A `ports.SegmentSource` that reads the objects of a job themselves. It holds one of them in memory."""

    def __init__(self, objects: Objects, job_id: str) -> None:
        self._objects, self._prefix = objects, folder_of(job_id)
        self._spans = {name: sorted(spans) for name, spans in _list(objects, self._prefix, "").items()}
        self._held: tuple[str, bytes] = ("", b"")  # the object that was read last

    def names(self, worker: str = "") -> list[str]:
        return sorted(name for name in self._spans if not worker or name.startswith(f"{worker}-"))

    def size(self, name: str) -> int:
        return max(end for _, end in self._found(name))

    def read(self, name: str, offset: int, length: int) -> bytes:
        pieces, at, end = [], offset, min(offset + length, self.size(name))
        while at < end:
            start, stop = self._span_at(name, at)
            data = self._get(object_name(self._prefix, name, start, stop - start))
            pieces.append(data[at - start : min(end, stop) - start])
            at = min(end, stop)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def sync(self, name: str) -> None:
        return  # an object is durable

    def where(self, name: str) -> str:
        return f"{self._prefix}{name} in the object store"

    def close(self) -> None:
        self._held = ("", b"")

    def _found(self, name: str) -> list[Span]:
        if name not in self._spans:
            raise FileNotFoundError(f"{self.where(name)} does not exist")
        return self._spans[name]

    def _span_at(self, name: str, offset: int) -> Span:
        """The object that holds this byte."""
        spans = self._found(name)
        for span in reversed(spans[: bisect_right(spans, offset, key=itemgetter(0))]):
            if span[1] > offset:
                return span
        raise StorageFailed(f"{self.where(name)} has no byte {offset:,}: an object of it is missing")

    def _get(self, name: str) -> bytes:
        if self._held[0] != name:
            self._held = ("", b"")  # never two of them
            self._held = (name, self._objects.get(name))
        return self._held[1]


def settle(objects: Objects, folder: Path, job_id: str, worker: str = "") -> None:
    """Fetch what the files of `folder` lack, and put what no object has, of one worker or of all. No worker writes to
    `folder`.
    """
    prefix = folder_of(job_id)
    found = _list(objects, prefix, worker)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="objects-get") as threads:
        for segment, spans in found.items():
            _fetch(objects, prefix, folder / segment, spans, threads)
    with closing(SegmentFolder(folder)) as source:
        for name in source.names(worker):
            for span in list(gaps_of(source, name, merged(found.get(name, [])))):
                put_span(objects, prefix, folder / name, span)


def _list(objects: Objects, prefix: str, worker: str) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for name, size_bytes in objects.list(f"{prefix}{worker}-" if worker else prefix):
        segment, _, place = name.removeprefix(prefix).partition("/")
        offset, _, length = place.partition("-")
        if segment.endswith(".seg") and offset.isdecimal() and length == str(size_bytes):
            found[segment].append((int(offset), int(offset) + size_bytes))
    return found


def _fetch(objects: Objects, prefix: str, path: Path, spans: list[Span], threads: ThreadPoolExecutor) -> None:
    size = path.stat().st_size if path.exists() else 0
    missing = [(start, end) for start, end in sorted(spans) if end > size]
    if not missing:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for start, data in _bodies(objects, prefix, path.name, missing, threads):
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, start)
                view, start = view[written:], start + written
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _bodies(
    objects: Objects, prefix: str, segment: str, spans: list[Span], threads: ThreadPoolExecutor
) -> Iterator[tuple[int, bytes]]:
    for first in range(0, len(spans), AT_ONCE):
        some = spans[first : first + AT_ONCE]
        names = [object_name(prefix, segment, start, end - start) for start, end in some]
        for (start, _), data in zip(some, list(threads.map(objects.get, names)), strict=True):
            yield start, data
