"""Reads rows of a dataset that was sealed as Parquet files, as columns or as JSON lines; every byte is verified.

Reading forwards is cheap. A step back within a row group reads that group again from its start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from batchmill.datasets import layout, parquet_rows
from batchmill.datasets.layout import damaged, faults
from batchmill.datasets.sealed import load_seal
from batchmill.datasets.sources import Access, open_source
from batchmill.datasets.verified_file import VerifiedFile, block_count
from batchmill.errors import DatasetDamaged, InputChanged
from batchmill.types import Seal

FILES_OPEN_MAX = 8
READERS_MAX = 2  # of different columns: those that a function takes, and all of a row that failed
SLICE_ROWS_MAX = 16_384
SLICE_BYTES = 8 * 1024 * 1024  # of Arrow memory
LINES_AT_ONCE = 1024  # rows whose values are Python objects at once

Names = tuple[str, ...] | None  # of columns; None: all


class _Reader(Struct):
    """Reads one row group, batch after batch."""

    group: int
    batches: Iterator[pa.RecordBatch]
    batch: pa.RecordBatch
    first: int  # number of the first row of `batch`


class _File(Struct):
    """An open file, and the rows of a batch: to know them takes a look at every row group."""

    file: pq.ParquetFile
    batch_rows: int


class ColumnRows:
    """The rows of a sealed dataset by number, with the methods of `SealedRows`, and as record batches.

    Raises: DatasetDamaged where its own files are not what was written.
    Concurrency: one thread at a time.
    """

    def __init__(self, home: Path, seal: Seal | None = None, access: Access | None = None) -> None:
        """Args: access: as in `sources.open_source`."""
        self._seal = load_seal(home) if seal is None else seal
        self._home, self._access = home, access
        self.rows, self.is_remote = self._seal.rows, self._seal.is_remote
        try:
            groups, self._checksums = array("Q"), array("I")
            groups.frombytes((home / layout.ROW_GROUPS).read_bytes())
            self._checksums.frombytes((home / layout.CHECKSUMS).read_bytes())
            self.schema = parquet_rows.read_schema(home / layout.SCHEMA)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise damaged(home, faults(home) or [str(error)]) from None
        self.columns = self.schema.names
        self._first_rows, self._file_of, self._number_of = groups[::3], groups[1::3], groups[2::3]
        counts = [block_count(file.size_bytes) for file in self._seal.files]
        self._first_blocks = list(accumulate(counts, initial=0))
        is_whole = len(groups) % 3 == 0 and groups and self._first_rows[-1] == self.rows
        if not is_whole or self._first_blocks[-1] != len(self._checksums):
            raise damaged(home, faults(home) or [f"{layout.ROW_GROUPS} does not fit {self.rows} rows"])
        self.paths = [file.path for file in self._seal.files]
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._readers: OrderedDict[Names, _Reader] = OrderedDict()

    def row_groups(self) -> list[tuple[int, int, int]]:
        """(rows, number of the file, number in the file) of every row group that has rows, in the order of the rows."""
        rows = [end - first for first, end in pairwise(self._first_rows)]
        return list(zip(rows, self._file_of, self._number_of, strict=False))

    def read(self, first: int, last: int) -> list[bytes]:
        """Rows first <= n < last as JSON objects. Raises: InputChanged."""
        return self.read_lines(first, last).split(b"\n")[:-1]

    def read_lines(self, first: int, last: int, until: int | None = None) -> bytes:
        """Rows first <= n < last as JSON objects, each on a line. A column is fetched as its chunks lie, whatever
        `until` is. Raises: InputChanged.
        """
        starts = range(first, last, LINES_AT_ONCE)
        batches = (self.batch(start, min(start + LINES_AT_ONCE, last)) for start in starts)
        return b"".join(map(parquet_rows.lines_of, batches))

    def read_many(self, numbers: Sequence[int]) -> list[bytes]:
        """Rows in any order as JSON objects; fast for ascending ones. Raises: InputChanged."""
        lines: dict[int, bytes] = {}
        for first, last in runs_of(sorted(set(numbers))):
            lines.update(zip(range(first, last), self.read(first, last), strict=True))
        return [lines[number] for number in numbers]

    def read_columns(self, numbers: Sequence[int], names: Names) -> tuple[memoryview, int]:
        """An Arrow stream of one batch, of at most about SLICE_BYTES, and its rows. Raises: InputChanged."""
        numbers = numbers[:SLICE_ROWS_MAX]
        batch = self.batch_of(numbers, names)
        while batch.nbytes > SLICE_BYTES and batch.num_rows > 1:
            rows = batch.num_rows * SLICE_BYTES // batch.nbytes
            batch = batch.slice(0, min(max(1, rows), batch.num_rows - 1))
        return memoryview(parquet_rows.stream_of(batch)), batch.num_rows

    @staticmethod
    def cut_columns(data: bytes | memoryview, first: int, last: int) -> memoryview:
        """See `sealed.ColumnDataset`."""
        batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
        return memoryview(parquet_rows.stream_of(batch.slice(first, last - first)))

    def batch_of(self, numbers: Sequence[int], names: Names) -> pa.RecordBatch:
        """Rows with ascending numbers as one batch. Raises: InputChanged."""
        runs = [(numbers.start, numbers.stop)] if isinstance(numbers, range) else runs_of(numbers)
        return _joined([self.batch(first, last, names) for first, last in runs])

    def batch(self, first: int, last: int, names: Names = None) -> pa.RecordBatch:
        """Columns of the rows first <= n < last. Raises: InputChanged."""
        return _joined(list(self.batches(first, last, names)))

    def batches(self, first: int, last: int, names: Names = None) -> Iterator[pa.RecordBatch]:
        """As `batch`, in the pieces in which they are read."""
        assert 0 <= first < last <= self.rows, (first, last, self.rows)
        while first < last:
            reader = self._reader(first, names)
            start = first - reader.first
            piece = reader.batch.slice(start, min(last - first, reader.batch.num_rows - start))
            yield piece
            first += piece.num_rows

    def close(self) -> None:
        """Release files and memory; safe to call twice."""
        self._readers.clear()
        for opened in self._files.values():
            opened.file.close(force=True)
        self._files.clear()

    def _reader(self, row: int, names: Names) -> _Reader:
        """A reader whose batch has this row."""
        group = bisect_right(self._first_rows, row) - 1
        reader = self._readers.get(names)
        try:
            if reader is None or reader.group != group or row < reader.first:
                self._readers.pop(names, None)
                reader = self._readers[names] = self._begin(group, names)
                if len(self._readers) > READERS_MAX:
                    self._readers.popitem(last=False)
            while row >= reader.first + reader.batch.num_rows:
                reader.first += reader.batch.num_rows
                reader.batch = next(reader.batches)
        except StopIteration:
            raise self._changed(group, f"row {row} is not there") from None
        except (pa.ArrowException, OSError) as error:
            raise self._changed(group, str(error)) from None
        return reader

    def _begin(self, group: int, names: Names) -> _Reader:
        opened = self._open(self._file_of[group])
        columns = None if names is None else list(names)
        batches = opened.file.iter_batches(opened.batch_rows, row_groups=[self._number_of[group]], columns=columns)
        return _Reader(group, batches, next(batches), self._first_rows[group])

    def _open(self, number: int) -> _File:
        if number in self._files:
            self._files.move_to_end(number)
            return self._files[number]
        path, size = self.paths[number], parquet_rows.buffer_bytes(len(self.schema))
        file = parquet_rows.opened(path, buffer_bytes=size, source=self.verified(number))
        opened = self._files[number] = _File(file, parquet_rows.batch_rows(file))
        if len(self._files) > FILES_OPEN_MAX:
            self._files.popitem(last=False)[1].file.close(force=True)
            self._readers.clear()
        return opened

    def verified(self, number: int) -> VerifiedFile:
        """Open a file that still has its size. Its time and inode may differ: the checksums decide.

        Raises: InputChanged.
        """
        sealed = self._seal.files[number]
        try:
            source = open_source(sealed, self._access, streams=len(self.columns))
        except OSError as error:
            raise self._differs(number, error.strerror or "it cannot be opened") from None
        if (size := source.size_bytes) != sealed.size_bytes:
            source.close()
            raise self._differs(number, f"it has {size:,} bytes instead of {sealed.size_bytes:,}")
        checksums = self._checksums[self._first_blocks[number] : self._first_blocks[number + 1]]
        return VerifiedFile(source, checksums, lambda start, end: self._differs(number, f"bytes {start:,} to {end:,}"))

    def _changed(self, group: int, message: str) -> InputChanged:
        return self._differs(self._file_of[group], message)

    def _differs(self, number: int, message: str) -> InputChanged | DatasetDamaged:
        if index_faults := faults(self._home):
            return damaged(self._home, index_faults)
        return InputChanged(
            f"{self._seal.files[number].path} changed since it was sealed ({message}); restore it, or start over "
            "with --restart"
        )


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
