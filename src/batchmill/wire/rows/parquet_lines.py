"""Rows of Parquet as JSON lines. A column of results whose values have no common type holds their JSON as text, and
says so in its field's metadata: the lines have the values themselves. It needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw

from batchmill.function_runtime.arrow.values import ArrowValues

JSON_TEXT = {b"batchmill": b"json"}  # the metadata of a field whose values are JSON text

_values = ArrowValues(number=lambda text: Raw(text.encode()))
_encode = msgspec.json.encode


def result_field(name: str, kind: pa.DataType, *, is_json: bool) -> pa.Field:
    """A field of results. Args: is_json: its values are JSON text."""
    return pa.field(name, kind, metadata=JSON_TEXT if is_json else None)


def input_field(field: pa.Field) -> pa.Field:
    """A field of the input in results: its text is text, also where an earlier job wrote it as JSON."""
    found = dict(field.metadata or {})
    return field.with_metadata({key: value for key, value in found.items() if key not in JSON_TEXT})


def lines_in(batch: pa.RecordBatch) -> list[bytes]:
    """The rows of a batch as JSON objects; text is text, whatever it holds."""
    return _lines(batch.schema.names, [_values.values(column) for column in batch.columns], batch.num_rows)


def result_lines(path: Path, rows_at_once: int) -> Iterator[bytes]:
    """The rows of a file of results as JSON objects."""
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        is_json = [(field.metadata or {}).items() >= JSON_TEXT.items() for field in schema]
        for batch in file.iter_batches(rows_at_once):
            cells = [
                _json_values(column) if known else _values.values(column)
                for column, known in zip(batch.columns, is_json, strict=True)
            ]
            yield from _lines(schema.names, cells, batch.num_rows)


def _json_values(column: pa.Array) -> list[Raw | None]:
    return [None if text is None else Raw(text.encode()) for text in column.to_pylist()]


def _lines(names: list[str], cells: Sequence[Sequence[Any]], rows: int) -> list[bytes]:
    records = zip(*cells, strict=True) if cells else ((),) * rows
    return [_encode(dict(zip(names, values, strict=True))) for values in records]
