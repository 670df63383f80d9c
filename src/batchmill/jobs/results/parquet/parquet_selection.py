"""Copies rows and columns of Parquet results: the columns keep their types. It needs pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.wire.rows.result_rows import ERROR, RowShape

BATCH_ROWS = 8192
GROUP_BYTES = 64 * 1024 * 1024  # of Arrow memory in a row group, about


def copy_selected(source: Path, target: Path, shape: RowShape, *, only_failed: bool) -> int:
    """Write the wanted rows and columns to a new file. Returns: the number of rows. Raises: InvalidInput."""
    rows = 0
    with pq.ParquetFile(source) as file:
        schema = file.schema_arrow.remove_metadata()
        names = shape.names(shape.ordered(schema.names), openai=False)
        wanted = pa.schema([schema.field(name) for name in names])
        read = list(dict.fromkeys([*names, *([ERROR] if only_failed else [])]))
        waiting: list[pa.RecordBatch] = []
        with pq.ParquetWriter(target, wanted, compression="zstd") as writer:
            for batch in file.iter_batches(BATCH_ROWS, columns=read):
                if only_failed:
                    batch = batch.filter(batch.column(batch.schema.names.index(ERROR)).is_valid())
                waiting.append(batch.select(names).cast(wanted))
                rows += batch.num_rows
                if sum(each.nbytes for each in waiting) >= GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(waiting, wanted))
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, wanted))
    return rows
