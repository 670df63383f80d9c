"""Results as frames: of Arrow, pandas or polars, in the shape of the frame that the rows came from.

The libraries are imported where a frame of theirs is asked for.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.wire.rows.forms import ERROR, OUTPUT

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

PANDAS, POLARS = "pandas", "polars"
MAGIC = b"PAR1"  # a Parquet file begins so
PURPOSE = "results as a frame"
BATCH_ROWS = 65_536  # decoded at once where not all rows are wanted


class FrameShape(Struct, frozen=True, eq=False):
    """What a frame was like before its rows ran: results get its types, and of pandas its labels and its index."""

    library: str = ""  # the top package of its class
    schema: Any = None  # a pyarrow.Schema; None: it is not known
    dtypes: list[Any] = []  # of the columns, of pandas and polars
    labels: list[Any] = []  # of the columns, of pandas
    index: Any = None  # of pandas


def read_results(path: str | os.PathLike[str]) -> pyarrow.Table:
    """A file of results as a table. Raises: InvalidInput where it cannot be read."""
    arrow, parquet = _arrow(), require("pyarrow.parquet", PURPOSE, InvalidInput)
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            return file.read()
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def read_failed(path: str | os.PathLike[str]) -> tuple[pyarrow.Table, int, Sequence[int]]:
    """The rows of a file of results that failed, how many rows it has, and which of them these are.

    No more than `BATCH_ROWS` other rows are in memory. Raises: InvalidInput where the file cannot be read.
    """
    arrow, parquet = _arrow(), require("pyarrow.parquet", PURPOSE, InvalidInput)
    failed, places, rows = [], array("Q"), 0
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            groups = range(file.num_row_groups) if ERROR in schema.names else ()
            for group in groups:
                if _may_fail(file.metadata.row_group(group)):
                    for batch in file.iter_batches(BATCH_ROWS, [group]):
                        found, numbers = failed_rows(arrow.Table.from_batches([batch]))
                        failed.append(found)
                        places.extend(rows + each for each in numbers)
                        rows += batch.num_rows
                else:
                    rows += file.metadata.row_group(group).num_rows
            return arrow.concat_tables([schema.empty_table(), *failed]), file.metadata.num_rows, places
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _may_fail(group: Any) -> bool:
    """Whether a row group may have a row with an error. Its statistics say so, where it has some."""
    columns = (group.column(at) for at in range(group.num_columns))
    errors = next((each for each in columns if each.path_in_schema == ERROR), None)
    known = None if errors is None else errors.statistics
    return known is None or not known.has_null_count or known.null_count < group.num_rows


def _unreadable(path: str | os.PathLike[str], error: Exception) -> InvalidInput:
    return InvalidInput(f"the results in {os.fspath(path)} cannot be read: {error}", code="no_file")


def is_parquet(path: Path) -> bool:
    """Whether there is a Parquet file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def table_of(rows: Sequence[dict[str, Any]]) -> pyarrow.Table:
    """Rows as a table. Answers that have no common type are JSON text."""
    arrow = _arrow()
    try:
        return arrow.Table.from_pylist(rows)
    except (arrow.ArrowException, TypeError):
        texts = [{**row, OUTPUT: _as_text(row.get(OUTPUT))} for row in rows]
        return arrow.Table.from_pylist(texts)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def with_types(table: pyarrow.Table, shape: FrameShape) -> pyarrow.Table:
    """The table with the types that the columns of the input had, where they can have them again."""
    if shape.schema is None:
        return table
    for at, field in enumerate(table.schema):
        known = shape.schema.get_field_index(field.name)
        if known >= 0 and shape.schema.field(known).type != field.type:
            column = _cast(table.column(at), shape.schema.field(known).type)
            table = table.set_column(at, field.with_type(column.type), column)  # the former column is freed
    return table


def _cast(column: pyarrow.ChunkedArray, wanted: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """A column as another type; of a type that Arrow cannot make of it, as it was stored."""
    try:
        return column.cast(wanted)
    except _arrow().ArrowException:
        return column


def failed_rows(table: pyarrow.Table) -> tuple[pyarrow.Table, list[int]]:
    """The rows that failed, and their numbers."""
    compute = require("pyarrow.compute", PURPOSE, InvalidInput)
    if ERROR not in table.column_names:
        return table.slice(0, 0), []
    numbers = compute.indices_nonzero(compute.is_valid(table.column(ERROR)))
    return table.take(numbers), numbers.to_pylist()


def failures_of(table: pyarrow.Table, shape: FrameShape, rows: Sequence[int] | None = None) -> Any:
    """The rows that failed, as a frame of the library of the shape.

    Args:
        table: as the results are stored: Arrow takes no rows of some types that `with_types` gives (views of text).
        rows: as of `to_pandas`.
    """
    failed, numbers = failed_rows(table)
    return failed_frame(failed, shape, numbers if rows is None else [rows[at] for at in numbers])


def failed_frame(failed: pyarrow.Table, shape: FrameShape, numbers: Sequence[int]) -> Any:
    """Rows that failed as a frame of the library of the shape. Args: numbers: of these rows."""
    failed = with_types(failed, shape)
    if shape.library == PANDAS:
        return to_pandas(failed, shape, numbers)
    return to_polars(failed, shape) if shape.library == POLARS else failed


def to_pandas(table: pyarrow.Table, shape: FrameShape, rows: Sequence[int] | None = None) -> pandas.DataFrame:
    """The table as a frame of pandas. Args: rows: the numbers of its rows; None: all."""
    pandas = require("pandas", "results as a frame of pandas", InvalidInput)
    schema = shape.schema
    known = [] if schema is None else schema.names
    inputs = [name for name in table.column_names if name in known]
    added = [name for name in table.column_names if name not in inputs]
    own, answers = table.select(inputs), table.select(added)
    del table  # each column of Arrow is freed as soon as that of pandas is there
    if not inputs:
        return _answers(pandas, answers)
    if schema is not None and shape.library == PANDAS:
        own = own.replace_schema_metadata({b"pandas": schema.metadata[b"pandas"]})
    frame = pandas.concat([own.to_pandas(self_destruct=True), _answers(pandas, answers)], axis=1)
    if shape.library == PANDAS:
        for name, dtype in zip(known, shape.dtypes, strict=True):
            if name in inputs and frame[name].dtype != dtype:
                frame[name] = _as_dtype(frame[name], dtype)
        labels = dict(zip(known, shape.labels, strict=True))
        frame.columns = [labels.get(name, name) for name in frame.columns]
        frame.index = shape.index if rows is None else shape.index[list(rows)]
    return frame


def _as_dtype(column: Any, dtype: Any) -> Any:
    """A column of pandas with the type that it had; with that of Arrow, where its values cannot have it again."""
    try:
        return column.astype(dtype)
    except (TypeError, ValueError):
        return column


def _answers(pandas: Any, table: pyarrow.Table) -> pandas.DataFrame:
    """Columns of answers. Whole numbers and booleans stay what they are where rows failed: a missing one is NA."""
    arrow = _arrow()
    nullable = {arrow.int64(): pandas.Int64Dtype(), arrow.bool_(): pandas.BooleanDtype()}
    frames, rows = [], table.num_rows
    for name in table.column_names:
        column, table = table.select([name]), table.drop_columns([name])
        has_nulls = column.column(0).null_count > 0
        frames.append(column.to_pandas(types_mapper=nullable.get if has_nulls else None))
    return pandas.concat(frames, axis=1) if frames else pandas.DataFrame(index=range(rows))


def to_polars(table: pyarrow.Table, shape: FrameShape) -> polars.DataFrame:
    """The table as a frame of polars."""
    polars = require("polars", "results as a frame of polars", InvalidInput)
    frame = polars.from_arrow(table)
    if shape.library != POLARS or shape.schema is None:
        return frame
    types = dict(zip(shape.schema.names, shape.dtypes, strict=True))
    changed = {name: types[name] for name, dtype in frame.schema.items() if types.get(name, dtype) != dtype}
    return frame.cast(changed) if changed else frame


def _arrow() -> Any:
    return require("pyarrow", PURPOSE, InvalidInput)
