"""Reads results of earlier jobs at the places that their indexes name, and believes none whose checksum differs."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchmill.checksums import checksum

FILES_OPEN_MAX = 64  # with results of all jobs together
GAP_BYTES = 16 * 1024  # between results that are read at once
SPAN_BYTES = 4 * 1024 * 1024  # read at once, and one result
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


class ResultFiles:
    """Files with results of many jobs, of which a bounded number is open. Close it."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

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
            sums = (places[mine, 2] & LOW).tolist()
            self._read(paths[number], (mine.tolist(), begins, ends, sums), lines)
        return lines

    def _read(
        self, path: Path, wanted: tuple[list[int], np.ndarray, np.ndarray, list[int]], lines: list[bytes | None]
    ) -> None:
        """Read results of one file. Args: wanted: their numbers in `lines`, and their bounds, ascending; checksums."""
        numbers, begins, ends, sums = wanted
        is_far = np.flatnonzero(begins[1:] - ends[:-1] > GAP_BYTES) + 1
        at = 0
        while at < len(begins):
            base = int(begins[at])
            end = max(at + 1, int(np.searchsorted(ends, base + SPAN_BYTES, "right")))
            far = int(np.searchsorted(is_far, at, "right"))
            if far < len(is_far):
                end = min(end, int(is_far[far]))
            try:
                data = self._bytes(path, base, int(ends[end - 1]) - base)
            except OSError:
                return  # the file is gone
            bounds = zip((begins[at:end] - base).tolist(), (ends[at:end] - base).tolist(), strict=True)
            for number, total, (start, stop) in zip(numbers[at:end], sums[at:end], bounds, strict=True):
                line = data[start:stop]
                if checksum(line) == total and len(line) == stop - start:
                    lines[number] = line
            at = end

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
