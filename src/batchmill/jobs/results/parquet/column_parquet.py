"""Results as Parquet of a job whose dataset is columns: the input's own columns, `output` and `error`.

Where the input's row groups are large enough, its bytes are copied and only the results are encoded
(`appended_columns`). Otherwise all columns are encoded in larger row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.errors import LedgerBroken
from batchmill.jobs.results.column_windows import ColumnIndex, ColumnWindows, OutputColumn, error_column
from batchmill.jobs.results.parquet import appended_columns
from batchmill.jobs.results.parquet.result_parquet import GROUP_ROWS, ThreadSink, repeating
from batchmill.jobs.results.results import ResultFile
from batchmill.part_files import Digest, PartFile
from batchmill.wire.rows.forms import ERROR
from batchmill.wire.rows.parquet_lines import input_field

GROUP_BYTES = 24 * 1024 * 1024  # of Arrow memory in a row group, about: one is read while another is encoded
PIECES_BYTES = 4 * 1024 * 1024  # encoded and not yet written

Count = Callable[[int, int, Sequence[bytes]], None]


def write(output: Path, index: ColumnIndex, windows: ColumnWindows, count: Count) -> ResultFile:
    """Write and publish the results.

    Args: count: called for every window with its first row, its rows and its error lines.
    Raises: LedgerBroken, InputChanged, StorageFull.
    """
    column = OutputColumn(index, windows.reader)
    schema = _schema(windows, column)
    part = PartFile(output)
    try:
        source = appended_columns.source_of(windows.rows, index, schema)
        if source is not None:
            appended_columns.write(part, source, windows, column, count)
        else:
            _encode(part, windows, column, schema, count)
        return _published(part, index.rows)
    finally:
        part.discard()


def write_part(
    output: Path, index: ColumnIndex, windows: ColumnWindows, count: Count, *,
    rows: int, known: tuple[bytes, str | None], digest: Digest,
) -> ResultFile:  # fmt: skip
    """As `write`, of the rows of the windows alone.

    Args: rows: of the windows. known: as in `OutputColumn`. digest: is updated with the bytes of the file.
    """
    column = OutputColumn(index, windows.reader, known)
    part = PartFile(output, digest=digest)
    try:
        _encode(part, windows, column, _schema(windows, column), count)
        return _published(part, rows)
    finally:
        part.discard()


def _schema(windows: ColumnWindows, column: OutputColumn) -> pa.Schema:
    return pa.schema([*map(input_field, windows.schema), column.field, pa.field(ERROR, pa.string())])


def _published(part: PartFile, rows: int) -> ResultFile:
    part.flush()
    with pq.ParquetFile(part.part) as written:
        if written.metadata.num_rows != rows:
            raise LedgerBroken(f"{part.part} holds {written.metadata.num_rows} rows instead of {rows}")
    part.publish()
    return ResultFile(str(part.path), rows, part.size_bytes)


def _encode(part: PartFile, windows: ColumnWindows, column: OutputColumn, schema: pa.Schema, count: Count) -> None:
    """One thread encodes a row group while the next one is read, another writes what is encoded."""
    with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(1) as writing_thread:
        sink = ThreadSink(part, writing_thread, PIECES_BYTES)
        file = pa.PythonFile(sink, mode="w")
        writer = pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=repeating(schema))
        writing: Future[None] | None = None
        for table in _groups(windows, column, schema, count):
            if writing is not None:
                writing.result()
            writing = beside.submit(writer.write_table, table, row_group_size=table.num_rows)
        if writing is not None:
            writing.result()
        writer.close()
        sink.finish()


def _groups(windows: ColumnWindows, column: OutputColumn, schema: pa.Schema, count: Count) -> Iterator[pa.Table]:
    """The joined rows, in tables that become row groups."""
    batches: list[pa.RecordBatch] = []
    size = rows = 0
    for window in windows.windows():
        first, window_rows = window.first, window.batch.num_rows
        count(first, window_rows, list(window.errors.values()))
        results = [windows.output(first, window_rows, column), error_column(window.errors, window_rows)]
        batches.append(pa.RecordBatch.from_arrays([*window.batch.columns, *results], schema=schema))
        size, rows = size + batches[-1].nbytes, rows + window_rows
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            yield pa.Table.from_batches(batches)
            batches, size, rows = [], 0, 0
    if batches:
        yield pa.Table.from_batches(batches)
