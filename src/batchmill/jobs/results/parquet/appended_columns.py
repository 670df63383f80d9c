"""Results as Parquet whose input columns are the input's own bytes: only `output` and `error` are encoded.

The new file is the input without its footer, the column chunks of the results, and a footer of both. Every block of the
input is compared with its checksum on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from batchmill.datasets.column_rows import ColumnRows
from batchmill.datasets.verified_file import VerifiedFile
from batchmill.jobs.results.column_windows import ColumnIndex, ColumnWindows, OutputColumn, error_column
from batchmill.jobs.results.parquet import parquet_footer
from batchmill.jobs.results.parquet.parquet_footer import ARROW_SCHEMA, FOOTER_BYTES_MAX, MAGIC, Footer, Placed
from batchmill.jobs.results.parquet.result_parquet import ThreadSink, repeating
from batchmill.jobs.results.parquet.thrift_compact import NotThrift
from batchmill.part_files import PartFile
from batchmill.wire.rows.forms import ERROR, OUTPUT

GROUP_ROWS_MIN, GROUP_BYTES_MIN = 8192, 1024 * 1024  # of row groups on average: smaller ones are joined instead
GROUP_ROWS_MAX = 1024 * 1024 * 64  # that pyarrow writes
RESULT_BYTES_MAX = 128 * 1024 * 1024  # of a row group, in memory at once
WINDOW_ROWS = 65_536
SYNC_BYTES = 64 * 1024 * 1024
PIECES_BYTES = 64 * 1024 * 1024  # encoded while the input is copied

Count = Callable[[int, int, Sequence[bytes]], None]


class Source(Struct, frozen=True):
    """The input's files. `order`: (number of the file, number in it) of every row group; `rows`: of each."""

    files: list[Footer]
    order: list[tuple[int, int]]
    rows: list[int]
    results: pa.Schema
    arrow_schema: bytes  # of the new file, as it stores it

    def end(self, added: Placed) -> bytes:
        """The footer of the new file."""
        offsets = accumulate((file.start for file in self.files), initial=0)
        placed = [Placed(file, offset) for file, offset in zip(self.files, offsets, strict=False)]
        return parquet_footer.join(placed, self.order, added, {ARROW_SCHEMA: self.arrow_schema})


def source_of(rows: ColumnRows, index: ColumnIndex, schema: pa.Schema) -> Source | None:
    """What is needed to copy the input's bytes; None: they cannot be copied, or not with profit.

    Args: schema: of the new file.
    Raises: InputChanged.
    """
    groups = rows.row_groups()
    end = 0
    for count, *_ in groups:
        first, end = end, end + count
        if count > GROUP_ROWS_MAX or index.payload_bytes(first, end) > RESULT_BYTES_MAX:
            return None
    results = pa.schema([schema.field(OUTPUT), schema.field(ERROR)])
    try:
        files = list(_footers(rows))
        size = sum(file.start for file in files)
        if rows.rows < GROUP_ROWS_MIN * len(groups) and size < GROUP_BYTES_MIN * len(groups):
            return None
        if not all(file.is_plain() and file.is_written_like(files[0]) for file in files):
            return None
        _, whole = _empty_file(schema)
        order, counts = [(file, number) for _, file, number in groups], [count for count, *_ in groups]
        source = Source(files, order, counts, results, whole.metadata(ARROW_SCHEMA) or b"")
        return source if _keeps_types(source, rows.schema) else None
    except NotThrift:
        return None


def _footers(rows: ColumnRows) -> Iterator[Footer]:
    size = 0
    for number in range(len(rows.paths)):
        with rows.verified(number) as file:
            footer = parquet_footer.read_footer(file.size(), partial(_range, file))
            size += file.size() - footer.start
        if size > FOOTER_BYTES_MAX:
            raise NotThrift(f"footers of {size} bytes")
        yield footer


def _range(file: VerifiedFile, first: int, end: int) -> bytes:
    file.seek(first)
    return file.read(end - first)


def _empty_file(schema: pa.Schema) -> tuple[bytes, Footer]:
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, schema).close()
    data = sink.getvalue().to_pybytes()
    return data, parquet_footer.read_footer(len(data), lambda first, end: data[first:end])


def _keeps_types(source: Source, columns: pa.Schema) -> bool:
    """Whether a file with this footer has the input's types, and those that the results have in a file of their own."""
    data, footer = _empty_file(source.results)
    results = pq.read_schema(pa.BufferReader(data))
    try:
        end = msgspec.structs.replace(source, order=[]).end(Placed(footer, 0))
        found = pq.read_schema(pa.BufferReader(MAGIC + end))
    except (pa.ArrowException, OSError):
        return False
    return found.equals(pa.schema([*columns, *results]))


def write(part: PartFile, source: Source, windows: ColumnWindows, column: OutputColumn, count: Count) -> None:
    """One thread copies the input while the results are encoded. Raises: InputChanged, StorageFull."""
    with ThreadPoolExecutor(1) as thread:
        sink = _EndSink(part, thread, PIECES_BYTES, partial(_copy, part, source, windows.rows))
        file = pa.PythonFile(sink, mode="w")
        writer = pq.ParquetWriter(file, source.results, compression="zstd", use_dictionary=repeating(source.results))
        first = 0
        for rows in source.rows:
            table = pa.Table.from_batches(_results(windows, column, source.results, first, rows, count))
            writer.write_table(table, row_group_size=rows)
            first += rows
        sink.finish()
        copied, start = part.size_bytes - sink.tell(), sink.tell()
        sink.is_held = True
        writer.close()
    end = sink.held
    footer = parquet_footer.read_footer(start + len(end), lambda first, last: end[first - start : last - start])
    part.write(end[: footer.start - start])
    part.write(source.end(Placed(footer, copied)))


def _copy(part: PartFile, source: Source, rows: ColumnRows) -> None:
    """Copy the input. The disk writes meanwhile: `publish` has little left to wait for."""
    with ThreadPoolExecutor(1) as beside:
        syncing, synced = beside.submit(int), 0
        for number, footer in enumerate(source.files):
            with rows.verified(number) as file:
                for piece in file.pieces(footer.start):
                    part.write(piece)
                    part.flush()  # the next piece overwrites this one
                    if part.size_bytes - synced >= SYNC_BYTES:
                        syncing.result()
                        syncing, synced = beside.submit(part.sync), part.size_bytes
        syncing.result()


def _results(
    windows: ColumnWindows, column: OutputColumn, schema: pa.Schema, first: int, rows: int, count: Count
) -> Iterator[pa.RecordBatch]:
    """The results of a row group."""
    for start in range(first, first + rows, WINDOW_ROWS):
        step = min(WINDOW_ROWS, first + rows - start)
        errors = windows.errors(start, step)
        count(start, step, list(errors.values()))
        arrays = [windows.output(start, step, column), error_column(errors, step)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class _EndSink(ThreadSink):
    """Keeps what is written once `is_held`: the footer of the results alone, which no file has."""

    is_held = False
    held = b""

    def write(self, data: Any) -> int:
        if not self.is_held:
            return super().write(data)
        self.held += bytes(data)
        return len(data)

    def tell(self) -> int:
        return super().tell() + len(self.held)
