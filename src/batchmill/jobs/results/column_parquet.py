"""Results as Parquet of a job whose dataset is columns: the input's own columns, `output` and `error`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.files import PartFile
from batchmill.jobs.results.column_windows import ColumnIndex, ColumnWindows, OutputColumn
from batchmill.jobs.results.result_columns import ERROR, OUTPUT
from batchmill.jobs.results.result_parquet import GROUP_BYTES, GROUP_ROWS, PartSink
from batchmill.jobs.results.results import ResultFile

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
        writer = pq.ParquetWriter(
            pa.PythonFile(PartSink(part), mode="w"), schema, compression="zstd", use_dictionary=_repeating(schema)
        )
        group: list[pa.RecordBatch] = []
        size = 0
        for window in windows.windows():
            count(window.first, window.batch.num_rows, list(window.errors.values()))
            results = [windows.output(window, column), window.error_column()]
            group.append(pa.RecordBatch.from_arrays([*window.batch.columns, *results], schema=schema))
            size += group[-1].nbytes
            if size >= GROUP_BYTES or sum(each.num_rows for each in group) >= GROUP_ROWS:
                rows, size = rows + _write_group(writer, group), 0
        rows += _write_group(writer, group)
        writer.close()
        part.flush()
        with pq.ParquetFile(part.part) as written:
            if written.metadata.num_rows != rows:
                raise LedgerBroken(f"{part.part} holds {written.metadata.num_rows} rows instead of {rows}")
        digest = part.publish()
        return ResultFile(str(output), rows, part.size_bytes, digest)
    finally:
        part.discard()


def _write_group(writer: pq.ParquetWriter, batches: list[pa.RecordBatch]) -> int:
    """Write the batches as one row group and forget them. Returns: their rows."""
    if not batches:
        return 0
    table = pa.Table.from_batches(batches)
    writer.write_table(table, row_group_size=table.num_rows)
    batches.clear()
    return table.num_rows


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values are likely to repeat: a dictionary of floats costs time and is given up."""
    return [field.name for field in schema if not (_types.is_floating(field.type) or _types.is_nested(field.type))]
