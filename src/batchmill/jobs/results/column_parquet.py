"""Results as Parquet of a job whose dataset is columns: the input's own columns, `output` and `error`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.files import PartFile
from batchmill.jobs.results.column_windows import ColumnIndex, ColumnWindows, OutputColumn
from batchmill.jobs.results.result_columns import ERROR, OUTPUT
from batchmill.jobs.results.result_parquet import GROUP_ROWS, PartSink
from batchmill.jobs.results.results import ResultFile

GROUP_BYTES = 24 * 1024 * 1024  # of Arrow memory in a row group, about: one is read while another is encoded
PIECES_BYTES = 4 * 1024 * 1024

_types = pa.types


def write(
    output: Path, index: ColumnIndex, windows: ColumnWindows, count: Callable[[int, int, Sequence[bytes]], None]
) -> ResultFile:  # fmt: skip
    """Write and publish the results.

    Args: count: called for every window with its first row, its rows and its error lines.
    Raises: LedgerBroken, InputChanged, StorageFull.
    """
    column = OutputColumn(index, windows.reader)
    schema = pa.schema([*windows.schema, pa.field(OUTPUT, column.type), pa.field(ERROR, pa.string())])
    part = PartFile(output)
    rows = 0
    try:
        # One thread encodes a row group while the next one is read, another writes and hashes what is encoded.
        with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(1) as writing_thread:
            sink = _Sink(part, writing_thread)
            writer = pq.ParquetWriter(
                pa.PythonFile(sink, mode="w"), schema, compression="zstd", use_dictionary=_repeating(schema)
            )
            writing: Future[None] | None = None
            for table in _groups(windows, column, schema, count):
                if writing is not None:
                    writing.result()
                writing = beside.submit(writer.write_table, table, row_group_size=table.num_rows)
                rows += table.num_rows
            if writing is not None:
                writing.result()
            writer.close()
            sink.finish()
        part.flush()
        with pq.ParquetFile(part.part) as written:
            if written.metadata.num_rows != rows:
                raise LedgerBroken(f"{part.part} holds {written.metadata.num_rows} rows instead of {rows}")
        part.publish()
        return ResultFile(str(output), rows, part.size_bytes)
    finally:
        part.discard()


class _Sink(PartSink):
    """Writes in another thread; what comes meanwhile waits, PIECES_BYTES at most."""

    def __init__(self, file: PartFile, thread: ThreadPoolExecutor) -> None:
        super().__init__(file)
        self._thread, self._writing = thread, thread.submit(int)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._size_bytes = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)  # Arrow's buffer is gone after the call
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        self._size_bytes += len(piece)
        if self._waiting_bytes >= PIECES_BYTES:
            self._hand_over()
        return len(piece)

    def tell(self) -> int:
        return self._size_bytes

    def finish(self) -> None:
        """Return once everything was written. Raises: the error of a write."""
        self._hand_over()
        self._writing.result()

    def _hand_over(self) -> None:
        self._writing.result()
        self._writing = self._thread.submit(self._write_all, self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _write_all(self, pieces: list[bytes]) -> int:
        return sum(map(self._file.write, pieces))


def _groups(
    windows: ColumnWindows, column: OutputColumn, schema: pa.Schema, count: Callable[[int, int, Sequence[bytes]], None]
) -> Iterator[pa.Table]:
    """The joined rows, in tables that become row groups."""
    batches: list[pa.RecordBatch] = []
    size = rows = 0
    for window in windows.windows():
        count(window.first, window.batch.num_rows, list(window.errors.values()))
        results = [windows.output(window, column), window.error_column()]
        batches.append(pa.RecordBatch.from_arrays([*window.batch.columns, *results], schema=schema))
        size, rows = size + batches[-1].nbytes, rows + batches[-1].num_rows
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            yield pa.Table.from_batches(batches)
            batches, size, rows = [], 0, 0
    if batches:
        yield pa.Table.from_batches(batches)


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values are likely to repeat: a dictionary of floats costs time and is given up."""
    return [field.name for field in schema if not (_types.is_floating(field.type) or _types.is_nested(field.type))]
