"""Data of a Python program as a dataset: tables become Parquet, rows become JSON lines.

A table is what hands out an Arrow stream (`__arrow_c_stream__`): a frame of pandas or polars, a table of Arrow, a
relation of DuckDB. The libraries of frames are never imported here: their objects say what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchmill.client.frame_shapes import PANDAS, POLARS, FrameShape
from batchmill.errors import InvalidInput
from batchmill.optional import require

if TYPE_CHECKING:
    import pyarrow

PARQUET, JSONL = ".parquet", ".jsonl"
GROUP_ROWS = 65_536  # of a row group
HUB_BATCH_ROWS = 10_000  # of a dataset of Hugging Face
BUFFER_BYTES = 1024 * 1024
COLUMNS_SHOWN = 5  # in a message


class Written(Struct, frozen=True, eq=False):
    """Data as a file of one suffix, and the shape of the frame that it came from; None: it was rows."""

    suffix: str
    shape: FrameShape | None = None


def is_data(source: object) -> bool:
    """Whether `source` is data in memory, not the name of a file, an open file or several of these."""
    if isinstance(source, str | bytes | Path) or hasattr(source, "__fspath__") or hasattr(source, "read"):
        return False
    return not isinstance(source, list | tuple) or not source or not _is_named(source[0])


def _is_named(source: object) -> bool:
    is_file = isinstance(source, str) or hasattr(source, "__fspath__") or hasattr(source, "read")
    return is_file or (hasattr(source, "id") and hasattr(source, "filename"))


def write_data(data: object, path: Path) -> Written:
    """Write data to a file, in the order of its rows.

    Raises: InvalidInput for what is neither a table nor rows, or what Arrow and JSON cannot express.
    """
    if _is_hub_dataset(data):  # several splits are a mapping as well
        return _write_hub_dataset(data, path)
    if isinstance(data, Mapping):
        return _write_table(_of_columns(data), path, FrameShape())
    if _is_pandas(data):
        table, shape = _of_pandas(data)
        return _write_table(table, path, shape)
    if hasattr(data, "to_frame"):
        raise _refused(data, "give a frame, such as its to_frame()")
    if hasattr(data, "__arrow_c_stream__"):
        return _write_stream(data, path)
    if hasattr(data, "collect") and hasattr(data, "sink_parquet"):
        raise _refused(data, "call its collect() first")
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | bytearray):
        return _write_rows(data, path)
    raise _refused(data, "give a path, a frame, a table of Arrow, a dict of columns, or an iterable of dicts")


def _refused(data: object, way_out: str) -> InvalidInput:
    return InvalidInput(f"{type(data).__name__} is no dataset: {way_out}", code="invalid_source")


def _arrow() -> Any:
    return require("pyarrow", "a data frame", InvalidInput)


# -- tables -----------------------------------------------------------------------------------------------------------


def _of_columns(data: Mapping[Any, Any]) -> pyarrow.Table:
    for name, values in data.items():
        if not isinstance(name, str):
            raise InvalidInput(f"a column is called {name!r}: give columns names of text", code="invalid_column")
        if isinstance(values, str | bytes | bytearray | Mapping | Set):
            raise InvalidInput(
                f"the column {name!r} is a {type(values).__name__}: give a list, with one value for each row",
                code="invalid_frame",
            )
    try:
        return _arrow().table({name: _arrow().array(values) for name, values in data.items()})
    except (_arrow().ArrowException, TypeError) as error:
        raise InvalidInput(f"these columns are no table: {error}", code="invalid_frame") from None


def _is_pandas(data: object) -> bool:
    kind = type(data)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == PANDAS


def _of_pandas(data: Any) -> tuple[pyarrow.Table, FrameShape]:
    """A frame of pandas as a table of its columns, which get names of text. Its index stays behind."""
    arrow = _arrow()
    if data.columns.nlevels > 1:
        raise InvalidInput(
            f"the columns have {data.columns.nlevels} levels: give each column one name, such as "
            "frame.columns = ['_'.join(map(str, names)) for names in frame.columns]",
            code="invalid_column",
        )
    labels = list(data.columns)
    named = data.set_axis(list(map(str, labels)), axis=1)
    _check_names(list(named.columns), len(data))
    try:
        table = arrow.Table.from_pandas(named, preserve_index=False)
    except (arrow.ArrowException, TypeError, OverflowError) as error:
        cause = "; ".join(str(each) for each in reversed(error.args))
        raise InvalidInput(
            f"the frame is no table of Arrow: {cause}. Give each column values of one type", code="invalid_frame"
        ) from None
    return table, FrameShape(PANDAS, table.schema, list(data.dtypes), labels, data.index)


def _check_names(names: list[str], rows: int) -> None:
    """Raises: InvalidInput."""
    if not names:
        raise InvalidInput(f"the table has {rows:,} rows and no column", code="invalid_frame")
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1] if len(set(names)) < len(names) else []
    if repeated:
        shown = ", ".join(map(repr, repeated[:COLUMNS_SHOWN]))
        raise InvalidInput(f"two columns are called {shown}: rename one", code="duplicate_column")


def _write_stream(data: Any, path: Path) -> Written:
    """What hands out an Arrow stream. A table is written as such; a stream of unknown length, batch by batch."""
    arrow = _arrow()
    kind = type(data).__module__.partition(".")[0]
    try:
        reader = arrow.RecordBatchReader.from_stream(data)
    except (arrow.ArrowException, TypeError) as error:
        raise _refused(data, f"its Arrow stream holds no table: {error}") from None
    dtypes = list(data.schema.values()) if kind == POLARS else []
    if "Object" in map(str, dtypes):  # its stream has addresses of this process
        raise InvalidInput("a column of polars' type Object has no form in Parquet: cast it", code="invalid_frame")
    shape = FrameShape(kind, reader.schema, dtypes)
    _check_names(reader.schema.names, 0)
    return _write_batches(reader, reader.schema, path, shape)


def _write_table(table: pyarrow.Table, path: Path, shape: FrameShape) -> Written:
    _check_names(table.schema.names, table.num_rows)
    return _write_batches(table.to_batches(), table.schema, path, shape)


def _write_batches(
    batches: Iterable[pyarrow.RecordBatch], schema: pyarrow.Schema, path: Path, shape: FrameShape
) -> Written:
    """Write batches in row groups of one length, so that the same rows make the same bytes."""
    arrow, parquet = _arrow(), require("pyarrow.parquet", "a data frame", InvalidInput)
    schema = _plain(schema)
    rows, waiting, total = 0, [], 0
    try:
        with parquet.ParquetWriter(path, schema, compression="lz4") as writer:
            for batch in batches:
                waiting.append(batch)
                rows += batch.num_rows
                total += batch.num_rows
                if rows >= GROUP_ROWS:
                    table, first = _plain_table(waiting, schema), 0
                    while rows - first >= GROUP_ROWS:
                        writer.write_table(table.slice(first, GROUP_ROWS).combine_chunks(), GROUP_ROWS)
                        first += GROUP_ROWS
                    waiting, rows = table.slice(first).to_batches(), rows - first
            if rows:
                writer.write_table(_plain_table(waiting, schema).combine_chunks(), GROUP_ROWS)
    except (arrow.ArrowException, TypeError) as error:
        raise InvalidInput(f"the table cannot be stored as Parquet: {error}", code="invalid_frame") from None
    if not total:
        raise InvalidInput("the data has no rows: there is nothing to run", code="empty_data")
    return Written(PARQUET, shape)


def _plain(schema: pyarrow.Schema) -> pyarrow.Schema:
    """The schema as it is stored: without what a library wrote into it, categories as their values."""
    arrow = _arrow()
    return arrow.schema([_stored_field(each).remove_metadata() for each in schema])


def _stored_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    arrow = _arrow()
    views = {arrow.string_view(): arrow.large_string(), arrow.binary_view(): arrow.large_binary()}
    if arrow.types.is_dictionary(kind):
        return _stored_type(kind.value_type)
    if arrow.types.is_list(kind):
        return arrow.list_(_stored_field(kind.value_field))
    if arrow.types.is_large_list(kind):
        return arrow.large_list(_stored_field(kind.value_field))
    if arrow.types.is_struct(kind):
        return arrow.struct([_stored_field(field) for field in kind])
    return views.get(kind, kind)


def _stored_field(field: pyarrow.Field) -> pyarrow.Field:
    return field.with_type(_stored_type(field.type))


def _plain_table(batches: list[pyarrow.RecordBatch], schema: pyarrow.Schema) -> pyarrow.Table:
    table = _arrow().Table.from_batches(batches)
    if table.schema.equals(schema, check_metadata=True):
        return table
    columns = [_plain_column(column, field.type) for column, field in zip(table.columns, schema, strict=True)]
    return _arrow().table(columns, schema=schema)


def _plain_column(column: pyarrow.ChunkedArray, kind: pyarrow.DataType) -> pyarrow.ChunkedArray:
    if column.type == kind:
        return column
    arrow = _arrow()
    if not arrow.types.is_dictionary(column.type):
        return column.cast(kind)
    chunks = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
    return arrow.chunked_array(chunks, kind)


def _is_hub_dataset(data: object) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "with_format")


def _write_hub_dataset(data: Any, path: Path) -> Written:
    """A dataset of Hugging Face, also one that streams."""
    if not hasattr(data, "iter"):
        raise _refused(data, f"give one of its splits, such as data[{next(iter(data), 'train')!r}]")
    view = getattr(data, "format", None) or {}  # none of one that streams
    if view.get("type") == "custom":
        raise InvalidInput(
            "the rows of this dataset are made by with_transform, which is no part of it: use its map(...)",
            code="invalid_source",
        )
    tables = data.with_format("arrow", **({"columns": view["columns"]} if view else {})).iter(batch_size=HUB_BATCH_ROWS)
    first = next(tables, None)
    if first is None:
        raise InvalidInput("the data has no rows: there is nothing to run", code="empty_data")

    def batches() -> Iterator[pyarrow.RecordBatch]:
        yield from first.to_batches()
        for table in tables:
            yield from table.to_batches()

    _check_names(first.schema.names, first.num_rows)
    return _write_batches(batches(), first.schema, path, FrameShape("datasets", first.schema))


# -- rows -------------------------------------------------------------------------------------------------------------


def _write_rows(rows: Iterable[Any], path: Path) -> Written:
    """Rows as JSON lines: dicts, or objects with fields."""
    encoder = msgspec.json.Encoder(enc_hook=_plain_value)
    count, buffer = 0, bytearray()
    with path.open("wb") as file:
        for row in rows:
            try:
                encoder.encode_into(_members(row, count), buffer, len(buffer))
            except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise InvalidInput(f"row {count} cannot be written as JSON: {error}", code="invalid_row") from None
            buffer += b"\n"
            count += 1
            if len(buffer) >= BUFFER_BYTES:
                file.write(buffer)
                buffer.clear()
        file.write(buffer)
    if not count:
        raise InvalidInput("the data has no rows: there is nothing to run", code="empty_data")
    return Written(JSONL)


def _members(row: Any, number: int) -> Any:
    if isinstance(row, Mapping):
        return row if isinstance(row, dict) else dict(row)
    if not isinstance(row, type) and (isinstance(row, Struct) or dataclasses.is_dataclass(row)):
        return row
    if hasattr(row, "model_dump"):  # of pydantic
        return row.model_dump()
    if hasattr(row, "_asdict"):  # a named tuple
        return row._asdict()
    raise InvalidInput(
        f"row {number} is a {type(row).__name__}: give dicts of columns, such as {{'text': …}}", code="invalid_row"
    )


def _plain_value(value: Any) -> object:
    """What JSON has no form for: numbers and arrays of numpy, timestamps of pandas."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None  # NaT is no time
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
