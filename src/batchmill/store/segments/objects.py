"""Segments in an object store: each sync of a worker becomes one object, named for its file and place in it.

The file on the worker's disk is the spool: its bytes are there within 50 ms, and what it holds beyond the objects is
put by the process that adopts it. Objects of one segment, one after the other, are the file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol

from batchmill import faults
from batchmill.errors import StorageFailed
from batchmill.object_store.urls import ObjectInfo
from batchmill.owner_term import Term
from batchmill.part_files import make_folder, sync_folder
from batchmill.ports.storage import Objects
from batchmill.store.objects import StoreObjects
from batchmill.store.segments.files import SegmentFile, SegmentFolder
from batchmill.store.segments.format import SegmentHead, Span, gaps_of, merged
from batchmill.types import SegmentObject

COMMIT_DELAY_S = 1.0  # an object costs money
OBJECT_BYTES_MAX = 64 * 1024 * 1024
AT_ONCE = 4  # objects in memory while segments are fetched
READ_BYTES = 8 * 1024 * 1024  # of an object, in one request
SPANS_AT_ONCE, JOBS_LISTED_MAX = 8, 16
KEPT_BYTES = 64 * 1024 * 1024  # that were read: workers write many segments at once


def folder_of(job_id: str) -> str:
    """What the names of a job's segments begin with."""
    return f"jobs/{job_id}/segments/"


def object_name(folder: str, segment: str, offset: int, length: int) -> str:
    return f"{folder}{segment}/{offset:012d}-{length}"


class ObjectSegments:
    """The segments of one worker. Raises: InvalidConfig for a URL at which there can be no store."""

    def __init__(self, url: str, term: Term) -> None:
        """Args: term: see `ObjectStore`."""
        self._objects = StoreObjects(url, term)

    def segment(self, folder: Path, head: SegmentHead, roll: int, *, is_spool: bool) -> ObjectSegment:
        """Args: is_spool: nobody reads the files here, so a full one is removed once the store has it."""
        make_folder(folder)
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


class ObjectRanges(Protocol):
    """`StoreObjects`, for those who read parts of objects as they were seen. Raises: StorageFailed, InputChanged."""

    def get_range(self, info: ObjectInfo, start: int, end: int) -> memoryview: ...

    def infos(self, prefix: str) -> Iterable[ObjectInfo]: ...


class _Piece(NamedTuple):
    """Bytes of a segment that were read together."""

    start: int  # counted in the segment
    data: memoryview


class ObjectSource:
    """A `ports.storage.SegmentSource` that reads the needed bytes of objects that others have listed. Those who read a
    segment from its beginning to its end ask for none of them twice.

    It keeps the last bytes that were read of each segment, READ_BYTES at most, and KEPT_BYTES of all.
    """

    def __init__(self, objects: ObjectRanges, job_id: str, known: Mapping[str, Sequence[SegmentObject]]) -> None:
        self._objects, self._prefix, self._known = objects, folder_of(job_id), known
        self._kept: OrderedDict[str, _Piece] = OrderedDict()  # by segment, the last used last

    def names(self, worker: str = "") -> list[str]:
        return sorted(name for name in self._known if not worker or name.startswith(f"{worker}-"))

    def size(self, name: str) -> int:
        return max(each.end for each in self._found(name))

    def read(self, name: str, offset: int, length: int) -> bytes:
        pieces, at, end = [], offset, min(offset + length, self.size(name))
        while at < end:
            piece = self._piece_at(name, at, end)
            pieces.append(piece.data[at - piece.start : end - piece.start])
            at += len(pieces[-1])
        return b"".join(pieces)

    def sync(self, name: str) -> None:
        return  # an object is durable

    def where(self, name: str) -> str:
        return f"{self._prefix}{name} in the object store"

    def close(self) -> None:
        self._kept.clear()

    def _found(self, name: str) -> Sequence[SegmentObject]:
        if name not in self._known:
            raise FileNotFoundError(f"{self.where(name)} does not exist")
        return self._known[name]

    def _piece_at(self, name: str, offset: int, end: int) -> _Piece:
        """Bytes with the one at `offset`: up to `end`, or further as far as others are needed."""
        piece = self._kept.pop(name, None)
        if piece is None or not piece.start <= offset < piece.start + len(piece.data):
            found = self._object_at(name, offset)
            stop = min(max(end, found.needed_end), found.end, offset + READ_BYTES)
            key = object_name(self._prefix, name, found.start, found.end - found.start)
            info = ObjectInfo(key, found.end - found.start, found.etag, found.version)
            piece = _Piece(offset, self._objects.get_range(info, offset - found.start, stop - found.start))
        self._kept[name] = piece
        while len(self._kept) > 1 and sum(len(each.data) for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return piece

    def _object_at(self, name: str, offset: int) -> SegmentObject:
        """The object that holds this byte."""
        if (found := _object_at(self._found(name), offset)) is None:
            raise StorageFailed(f"{self.where(name)} has no byte {offset:,}: an object of it is missing")
        return found


def _object_at(known: Sequence[SegmentObject], offset: int) -> SegmentObject | None:
    """Of objects in order, one that holds this byte."""
    before = known[: bisect_right(known, offset, key=attrgetter("start"))]
    return next((each for each in reversed(before) if each.end > offset), None)


class ObjectSpans:
    """Reads spans of the segments of many jobs from their objects, several requests at once. Close it.

    It knows the objects of the jobs that were read last, `JOBS_LISTED_MAX` at most.
    """

    def __init__(self, objects: ObjectRanges) -> None:
        self._objects = objects
        self._threads = ThreadPoolExecutor(SPANS_AT_ONCE, thread_name_prefix="spans-get")
        self._listed: OrderedDict[str, dict[str, list[SegmentObject]]] = OrderedDict()

    def read(self, job_id: str, segment: str, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, ascending; of one that no object holds to its end, those before the gap.

        Raises: StorageFailed, InputChanged.
        """
        known = self._known(job_id).get(segment, [])
        pieces = [_pieces_of(known, start, end) for start, end in spans]
        prefix = folder_of(job_id)

        def get(piece: _Part) -> memoryview:
            held, start, end = piece
            key = object_name(prefix, segment, held.start, held.end - held.start)
            info = ObjectInfo(key, held.end - held.start, held.etag, held.version)
            return self._objects.get_range(info, start - held.start, end - held.start)

        found = self._threads.map(get, [piece for some in pieces for piece in some])
        return [b"".join(islice(found, len(some))) for some in pieces]

    def _known(self, job_id: str) -> Mapping[str, Sequence[SegmentObject]]:
        if job_id not in self._listed:
            self._listed[job_id] = list_objects(self._objects, job_id)
            if len(self._listed) > JOBS_LISTED_MAX:
                self._listed.popitem(last=False)
        self._listed.move_to_end(job_id)
        return self._listed[job_id]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


_Part = tuple[SegmentObject, int, int]  # an object, and the bytes of the segment that are read from it


def _pieces_of(known: Sequence[SegmentObject], start: int, end: int) -> list[_Part]:
    pieces: list[_Part] = []
    while start < end and (held := _object_at(known, start)) is not None:
        stop = min(end, held.end)
        pieces.append((held, start, stop))
        start = stop
    return pieces


def list_objects(objects: ObjectRanges, job_id: str) -> dict[str, list[SegmentObject]]:
    """The objects of all segments of a job, in order. All of their bytes are needed."""
    prefix, found = folder_of(job_id), defaultdict(list)
    for info in objects.infos(prefix):
        if (place := _place_of(info.key.removeprefix(prefix), info.size_bytes)) is not None:
            segment, (start, end) = place
            found[segment].append(SegmentObject(start, end, end, info.etag, info.version))
    return {segment: sorted(each, key=attrgetter("start", "end")) for segment, each in found.items()}


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
        if (place := _place_of(name.removeprefix(prefix), size_bytes)) is not None:
            found[place[0]].append(place[1])
    return found


def _place_of(name: str, size_bytes: int) -> tuple[str, Span] | None:
    """The segment and the bytes of it that an object of this name holds; None: it holds something else."""
    segment, _, place = name.partition("/")
    offset, _, length = place.partition("-")
    if segment.endswith(".seg") and offset.isdecimal() and length == str(size_bytes):
        return segment, (int(offset), int(offset) + size_bytes)
    return None


def _fetch(objects: Objects, prefix: str, path: Path, spans: list[Span], threads: ThreadPoolExecutor) -> None:
    size = path.stat().st_size if path.exists() else 0
    missing = [(start, end) for start, end in sorted(spans) if end > size]
    if not missing:
        return
    make_folder(path.parent)
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
