"""Sorts records that are more than memory should hold: sorted runs in unnamed files, merged with bounded buffers.

Memory is that of one run, or of the buffers of the merge: it does not grow with the records.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from batchmill.datasets.layout import PIECE_ROWS

STEP_ROWS = 1024 * 1024  # records of a block, where nothing is merged
BUFFERS = 2  # the buffers of all runs of a merge hold this part of the records of one run
SAMPLE_ROWS = 4096  # that say whether a column has many equal values
VALUE_BYTES = 8

Record = tuple[int, ...]


class ExternalSort:
    """Records of u64 columns, sorted by the first column, then by the second, and so on. No two may be equal.

    Records that differ in the last column alone are added in its order: a row number.
    Its files have no names: whatever ends the process, nothing is left. Raises: OSError where the disk is full.

    Args:
        folder: the file system of the runs. Up to `piece_rows` records need none.
        columns: of a record.
        rows_max: records that may come.
        piece_rows: records that are sorted in memory.
    """

    def __init__(self, folder: Path, columns: int, rows_max: int, *, piece_rows: int = PIECE_ROWS) -> None:
        self._folder, self._columns, self._piece_rows = folder, columns, piece_rows
        self._piece = np.empty((min(piece_rows, rows_max), columns), np.uint64)  # the kernel gives what is written to
        self._used = 0
        self._file: BinaryIO | None = None
        self._runs: list[_Run] = []
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def add(self, *columns: np.ndarray) -> None:
        """Add records. Args: columns: [n] u64 each."""
        rows, at = len(columns[0]), 0
        while at < rows:
            if self._used == len(self._piece):
                self._end_run()
            count = min(rows - at, len(self._piece) - self._used)
            for number, column in enumerate(columns):
                self._piece[self._used : self._used + count, number] = column[at : at + count]
            self._used, at = self._used + count, at + count

    def blocks(self) -> Iterator[np.ndarray]:
        """All records in order, in blocks [n, columns] with n > 0. Call it once; nothing can be added any more."""
        if self._file is None:
            records = in_order(self._piece[: self._used])
            for start in range(0, self._used, STEP_ROWS):
                yield records[start : start + STEP_ROWS]
            return
        self._end_run()
        self._piece = np.empty((0, self._columns), np.uint64)
        if all(run.last < later.first for run, later in zip(self._runs, self._runs[1:], strict=False)):
            for run in self._runs:
                yield from run.blocks()
        else:
            yield from _merged(self._runs, self._piece_rows // BUFFERS)

    def close(self) -> None:
        """Release memory and files. Safe to call twice."""
        self._piece = np.empty((0, self._columns), np.uint64)
        self._runs = []
        if self._file is not None:
            self._file.close()

    def _end_run(self) -> None:
        """Write what is in memory as a run."""
        if not self._used:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - `close` does
        records = in_order(self._piece[: self._used])
        data = memoryview(records).cast("B")
        while data:
            data = data[self._file.write(data) :]
        self._runs.append(_Run(self._file.fileno(), self._end, records))
        self._end += len(records)
        self._used = 0


def in_order(records: np.ndarray) -> np.ndarray:
    """The records [n, columns] in ascending order; the same array where they are."""
    if _ascends(records):
        return records
    first = np.ascontiguousarray(records[:, 0])
    if _repeats(first):
        return records.take(_stable_order(records), axis=0)
    order = np.argsort(first)
    first = first.take(order)
    same = np.zeros(len(first) + 1, bool)
    same[1:-1] = first[1:] == first[:-1]
    tied = np.flatnonzero(same[1:] | same[:-1])
    if len(tied):
        some = np.sort(order[tied])
        order[tied] = some[_stable_order(records[some])]
    return records.take(order, axis=0)


def _repeats(values: np.ndarray) -> bool:
    """Whether many values are equal, by a sample of them."""
    sample = np.sort(values[:: len(values) // SAMPLE_ROWS + 1])
    return 8 * np.count_nonzero(sample[1:] == sample[:-1]) > len(sample)


def _stable_order(records: np.ndarray) -> np.ndarray:
    """The indexes that sort records which come in the order of their last column."""
    columns = records.T[:-1] if records.shape[1] > 1 else records.T
    return np.lexsort([np.ascontiguousarray(column) for column in columns[::-1]])


def _ascends(records: np.ndarray) -> bool:
    """Whether each record is greater than the one before it."""
    before, after = records[:-1], records[1:]
    for at in range(records.shape[1]):
        left, right = before[:, at], after[:, at]
        if np.any(left > right):
            return False
        same = left == right
        if not same.any():
            return True
        before, after = before[same], after[same]
    return len(before) == 0


class _Run:
    """A sorted run in a file, and the records of it that were read and not yet taken."""

    def __init__(self, fd: int, start: int, records: np.ndarray) -> None:
        self._fd, self._next, self._end = fd, start, start + len(records)
        self._columns = records.shape[1]
        self.first: Record = tuple(records[0].tolist())
        self.last: Record = tuple(records[-1].tolist())
        self.buffer = np.empty((0, self._columns), np.uint64)

    @property
    def has_more(self) -> bool:
        """Whether records are left in the file."""
        return self._next < self._end

    def fill(self, rows: int) -> None:
        """Read until the buffer has so many records, or the run ends."""
        count = min(rows - len(self.buffer), self._end - self._next)
        if count > 0:
            more = self._read(count)
            self.buffer = np.concatenate((self.buffer, more)) if len(self.buffer) else more

    def take(self, limit: Record | None) -> np.ndarray:
        """Remove and return the buffered records up to `limit`; None: all."""
        count = len(self.buffer) if limit is None else _count_until(self.buffer, limit)
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def blocks(self) -> Iterator[np.ndarray]:
        """All records, without the buffer."""
        while self.has_more:
            yield self._read(min(STEP_ROWS, self._end - self._next))

    def _read(self, count: int) -> np.ndarray:
        size = self._columns * VALUE_BYTES
        data = os.pread(self._fd, count * size, self._next * size)
        assert len(data) == count * size, "the file has what was written to it"
        self._next += count
        return np.frombuffer(data, np.uint64).reshape(count, self._columns)


def _count_until(records: np.ndarray, limit: Record) -> int:
    """How many of the sorted records are not above `limit`."""
    lo, hi = 0, len(records)
    for at, value in enumerate(limit):
        column = records[lo:hi, at]
        value = np.uint64(value)
        lo, hi = lo + int(np.searchsorted(column, value)), lo + int(np.searchsorted(column, value, side="right"))
        if lo == hi:
            return lo
    return hi


def _merged(runs: list[_Run], buffered: int) -> Iterator[np.ndarray]:
    """The records of all runs in order. Args: buffered: records in memory.

    Whatever is not above the last buffered record of a run that has more can be sorted and passed on.
    """
    rows = max(1, buffered // len(runs))
    while runs:
        for run in runs:
            run.fill(rows)
        limit = min((tuple(run.buffer[-1].tolist()) for run in runs if run.has_more), default=None)
        taken = [some for run in runs if len(some := run.take(limit))]
        yield taken[0] if len(taken) == 1 else in_order(np.concatenate(taken))
        runs = [run for run in runs if run.has_more or len(run.buffer)]


class RowCursor:
    """Ascending records of one column whose upper half is a row number, taken row by row."""

    def __init__(self, blocks: Iterator[np.ndarray]) -> None:
        self._blocks = blocks
        self._left = np.empty(0, np.uint64)

    def until(self, row: int) -> np.ndarray:
        """The records [n] of the rows before `row` that were not taken yet."""
        taken = []
        limit = np.uint64(row << 32)
        while True:
            count = int(np.searchsorted(self._left, limit))
            taken.append(self._left[:count])
            self._left = self._left[count:]
            if len(self._left) or (block := next(self._blocks, None)) is None:
                return np.concatenate(taken)
            self._left = block[:, 0]
