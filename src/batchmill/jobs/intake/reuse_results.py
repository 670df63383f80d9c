"""Reads results of earlier jobs at the places that their indexes name, and believes none whose checksum differs."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from batchmill.checksums import checksum
from batchmill.errors import BatchmillError
from batchmill.store.objects import StoreObjects
from batchmill.store.segments.objects import SPANS_AT_ONCE, ObjectSpans

FILES_OPEN_MAX = 64  # with results of all jobs together
GAP_BYTES = 16 * 1024  # between results that are read at once
STORE_GAP_BYTES = 256 * 1024  # of an object store: it sends these sooner than it answers a further request
SPAN_BYTES = 4 * 1024 * 1024  # read at once, and one result
SEGMENT = ".seg"  # how the name of a file with segments ends
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


class ResultFiles:
    """Files with results of many jobs, of which a bounded number is open. Close it.

    Args: store: URL of the object store with what segments are not here; empty: there is none.
    """

    def __init__(self, store: str = "") -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._spans = ObjectSpans(StoreObjects(store)) if store else None
        self._unread: dict[str, str] = {}  # job -> why its objects are asked for no more

    def lines(self, paths: Sequence[Path], places: np.ndarray) -> list[bytes | None]:
        """The results at some places [n, 4]; None for one that is not there any more as it was.

        Args: paths: of the files that the places name by number.
        """
        lines: list[bytes | None] = [None] * len(places)
        starts, where = places[:, 0], places[:, 1]
        for number in np.unique(where >> HALF).tolist():
            mine = np.flatnonzero(where >> HALF == np.uint64(number))
            mine = mine[np.argsort(starts[mine], kind="stable")]
            begins = starts[mine].astype(np.int64)
            ends = begins + (where[mine] & LOW).astype(np.int64)
            sums = (places[mine, 2] & LOW).astype(np.int64)
            wanted = _Wanted(mine, begins, ends, sums)
            path = paths[number]
            for span in _spans(wanted, GAP_BYTES):
                try:
                    data = self._bytes(path, span.start, span.end - span.start)
                except OSError:
                    break  # the file is gone, or was never here
                _take(data, span, wanted, lines)
            if self._spans is not None and path.suffix == SEGMENT:
                self._read_objects(self._spans, path, wanted.without(lines), lines)
        return lines

    def _read_objects(self, source: ObjectSpans, path: Path, wanted: _Wanted, lines: list[bytes | None]) -> None:
        job_id = path.parent.parent.name
        spans = [] if job_id in self._unread else _spans(wanted, STORE_GAP_BYTES)
        try:
            for first in range(0, len(spans), SPANS_AT_ONCE):
                some = spans[first : first + SPANS_AT_ONCE]
                read = source.read(job_id, path.name, [(span.start, span.end) for span in some])
                for span, data in zip(some, read, strict=True):
                    _take(data, span, wanted, lines)
        except BatchmillError as error:
            self._unread[job_id] = error.message

    def unread(self) -> list[str]:
        """What could not be read of an object store, and why."""
        return [f"the job {job_id}: {reason}" for job_id, reason in self._unread.items()]

    def _bytes(self, path: Path, offset: int, length: int) -> bytes:
        """Fewer bytes at the end of the file."""
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
        else:
            if len(self._open) >= FILES_OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
            fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, length, offset)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        if self._spans is not None:
            self._spans.close()


class _Wanted(NamedTuple):
    """Results of one file: their numbers in `lines`, their bounds, ascending, and their checksums."""

    numbers: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    sums: np.ndarray

    def without(self, lines: Sequence[bytes | None]) -> _Wanted:
        """Those that `lines` does not have."""
        left = np.fromiter((lines[number] is None for number in self.numbers.tolist()), bool, len(self.numbers))
        return _Wanted(*(each[left] for each in self))


class _Span(NamedTuple):
    """Bytes of a file that are read together, and the range of wanted results in them."""

    start: int
    end: int
    first: int
    stop: int


def _spans(wanted: _Wanted, gap_bytes: int) -> list[_Span]:
    """Results with less than a gap between them are read together."""
    begins, ends, spans, at = wanted.begins, wanted.ends, [], 0
    is_far = np.flatnonzero(begins[1:] - ends[:-1] > gap_bytes) + 1
    while at < len(begins):
        base = int(begins[at])
        stop = max(at + 1, int(np.searchsorted(ends, base + SPAN_BYTES, "right")))
        far = int(np.searchsorted(is_far, at, "right"))
        if far < len(is_far):
            stop = min(stop, int(is_far[far]))
        spans.append(_Span(base, int(ends[stop - 1]), at, stop))
        at = stop
    return spans


def _take(data: bytes, span: _Span, wanted: _Wanted, lines: list[bytes | None]) -> None:
    """Take the results of a span that are as they were written."""
    some = slice(span.first, span.stop)
    starts, stops = wanted.begins[some] - span.start, wanted.ends[some] - span.start
    whole = zip(*(each.tolist() for each in (wanted.numbers[some], wanted.sums[some], starts, stops)), strict=True)
    for number, total, start, stop in whole:
        line = data[start:stop]
        if checksum(line) == total and len(line) == stop - start:
            lines[number] = line
