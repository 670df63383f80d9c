"""A byte for each row of a job, or for each position of a plan: in memory for some million, in a file for more.

No numpy: every owner loads this. Arrays for results are in `jobs/results/row_arrays.py`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from batchmill.part_files import full_disk_named

IN_MEMORY_ROWS = 16 * 1024 * 1024  # of a job with more rows, what is known of each is in a file
STEP_ROWS = 1024 * 1024  # handled at once
WINDOW_BYTES = 16 * 1024 * 1024  # of a file, read or written as a whole where enough of it is needed
SPARSE_BYTES = 512  # for each row that is needed: further apart, one by one is faster


def unnamed_file(folder: Path, size: int) -> FileIO:
    """Zeros in a file without a name: whatever ends the process, the file is gone. Raises: StorageFull.

    Its room is taken at once: a full disk must not be found later.
    """
    with full_disk_named(folder / "rows"), ExitStack() as unless_ready:
        file = unless_ready.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        os.posix_fallocate(file.fileno(), 0, size)
        unless_ready.pop_all()
        return file


def unnamed_pages(folder: Path, size: int) -> mmap.mmap:
    """As `unnamed_file`, mapped."""
    with unnamed_file(folder, size) as file:
        return mmap.mmap(file.fileno(), size)


class RowStates:
    """One byte for each of `rows` rows, at first 0. Close it.

    Raises: StorageFull, when it is made.
    Args: folder: of the job; the file is in it. in_memory_rows: rows up to which the bytes are in memory.
    """

    def __init__(self, folder: Path, rows: int, *, in_memory_rows: int = IN_MEMORY_ROWS) -> None:
        self._rows = rows
        self._place: _Memory | _File = _Memory(rows) if rows <= in_memory_rows else _File(folder, rows)

    def __len__(self) -> int:
        return self._rows

    def close(self) -> None:
        self._place.close()

    def read(self, lo: int, hi: int) -> bytes:
        """The states of the rows lo <= row < hi."""
        return self._place.read(lo, hi)

    def of(self, numbers: Sequence[int]) -> bytes:
        """The states of some rows, at most `STEP_ROWS` where they do not run on."""
        if isinstance(numbers, range):
            return self._place.read(numbers.start, numbers.stop)
        return self._place.of(numbers)

    def put(self, numbers: Sequence[int], values: bytes) -> None:
        """Set the state of each row; a row that comes twice has the last one."""
        if isinstance(numbers, range):
            self._place.write(numbers.start, values)
        else:
            self._place.put(numbers, values)

    def count(self, state: int) -> int:
        """How many rows have this state."""
        steps = range(0, self._rows, STEP_ROWS)
        return sum(self.read(lo, min(lo + STEP_ROWS, self._rows)).count(state) for lo in steps)


class _Memory:
    def __init__(self, rows: int) -> None:
        self._states = bytearray(rows)

    def close(self) -> None:
        self._states = bytearray()

    def read(self, lo: int, hi: int) -> bytes:
        return bytes(self._states[lo:hi])

    def of(self, numbers: Sequence[int]) -> bytes:
        return bytes(map(self._states.__getitem__, numbers))

    def write(self, lo: int, values: bytes) -> None:
        self._states[lo : lo + len(values)] = values

    def put(self, numbers: Sequence[int], values: bytes) -> None:
        for number, value in zip(numbers, values, strict=True):
            self._states[number] = value


class _File:
    """What is set of scattered rows is gathered up to `STEP_ROWS`: a million at once are found in few windows."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder, self._file = folder, unnamed_file(folder, rows)
        self._fd = self._file.fileno()
        self._numbers, self._values = array("I"), bytearray()  # set and not written

    def close(self) -> None:
        self._file.close()

    def read(self, lo: int, hi: int) -> bytes:
        self._flush()
        return self._read(lo, hi)

    def write(self, lo: int, values: bytes) -> None:
        self._flush()
        self._write(lo, values)

    def put(self, numbers: Sequence[int], values: bytes) -> None:
        assert len(numbers) == len(values), "a state for each row"
        self._numbers.extend(numbers)
        self._values += values
        if len(self._numbers) >= STEP_ROWS:
            self._flush()

    def of(self, numbers: Sequence[int]) -> bytes:
        self._flush()
        found = bytearray(len(numbers))
        for indexes in _by_window(numbers):
            lo, hi = _span(numbers, indexes)
            if _is_dense(lo, hi, indexes):
                data = self._read(lo, hi)
                for index in indexes:
                    found[index] = data[numbers[index] - lo]
            else:
                for index in indexes:
                    found[index : index + 1] = self._read(numbers[index], numbers[index] + 1)
        return bytes(found)

    def _flush(self) -> None:
        if not self._numbers:
            return
        numbers, values = self._numbers, self._values
        self._numbers, self._values = array("I"), bytearray()
        for indexes in _by_window(numbers):
            lo, hi = _span(numbers, indexes)
            if _is_dense(lo, hi, indexes):
                data = bytearray(self._read(lo, hi))
                for index in indexes:
                    data[numbers[index] - lo] = values[index]
                self._write(lo, data)
            else:
                for index in indexes:
                    self._write(numbers[index], values[index : index + 1])

    def _read(self, lo: int, hi: int) -> bytes:
        data = os.pread(self._fd, hi - lo, lo)
        assert len(data) == hi - lo, "the file has its whole size from the beginning"
        return data

    def _write(self, lo: int, data: bytes | bytearray) -> None:
        with full_disk_named(self._folder / "rows"):
            written = os.pwrite(self._fd, data, lo)
        assert written == len(data), "there is room for the whole file"


def _by_window(numbers: Sequence[int]) -> Iterable[array[int]]:
    """The indexes of some numbers, those of one window of a file together."""
    windows: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
    for index, number in enumerate(numbers):
        windows[number // WINDOW_BYTES].append(index)
    return windows.values()


def _span(numbers: Sequence[int], indexes: Sequence[int]) -> tuple[int, int]:
    return min(map(numbers.__getitem__, indexes)), max(map(numbers.__getitem__, indexes)) + 1


def _is_dense(lo: int, hi: int, indexes: Sequence[int]) -> bool:
    return hi - lo <= SPARSE_BYTES * len(indexes)
