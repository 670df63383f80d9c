"""Rows of a job that arrive as columns of an Arrow batch, and leave as a column of results. Needs pyarrow.

Functions of single rows see the values that JSON has (`arrow.values`). Functions of many rows get what their hints say:
numpy arrays, data frames, or Arrow itself; otherwise lists of those values. What a function gets is read-only.
"""

from __future__ import annotations

import importlib.util

from .. import installed as json_text
from ..installed import installed, loaded
from ..kept_results import texts_of
from ..values import DTYPES
from .values import ArrowValues, UnsupportedType

ARROW = "arrow"  # the layout of an `ask`, and of its results
OUTPUT, JSON = "output", "json"  # the column of results: typed values, or each one's JSON
TABLE, BATCH, ARRAY, CHUNKED, PANDAS, POLARS = "table", "batch", "array", "chunked", "pandas", "polars"
_ARROW_NAMES = {
    "BOOL": "bool_", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
_DUMP_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)


def is_available():
    """Whether this process can read Arrow batches; imports nothing."""
    return importlib.util.find_spec("pyarrow") is not None


def read_batch(data):
    """The record batch of an Arrow stream; its columns are views of `data`."""
    pa = installed("pyarrow")
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()


def _number(text):
    return json_text.load(text.encode())


def lists_of(batch):
    """{name: a list of JSON values} of every column."""
    values = ArrowValues(number=_number)
    return {name: values.values(column) for name, column in zip(batch.schema.names, batch.columns)}


def array_of(column, datatype):
    """A numpy array of a column, with one item for each row; None where some row does not fit the datatype."""
    pa = installed("pyarrow")
    if datatype in _ARROW_NAMES:
        try:
            column = _cast(column, getattr(pa, _ARROW_NAMES[datatype])())
        except pa.ArrowException:  # a value that the type cannot hold
            return None
        if column.null_count and not pa.types.is_floating(column.type):
            return None
    array = _matrix(column) if _is_list(column.type) else None
    if array is None:
        if _is_list(column.type) and datatype in DTYPES:  # lists of different lengths
            return None
        array = column.to_numpy(zero_copy_only=False)
    array.setflags(write=False)
    return array


def _is_list(kind):
    types = installed("pyarrow").types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _cast(column, kind):
    """The column, or the values of its lists, as another type. Raises: ArrowInvalid for a value that does not fit."""
    pa = installed("pyarrow")
    if not _is_list(column.type):
        return column.cast(kind)
    levels, inner = 0, column.type
    while _is_list(inner):
        levels, inner = levels + 1, inner.value_type
    for _ in range(levels):
        kind = pa.list_(kind)
    return column.cast(kind)


def _matrix(column):
    """An array of two or more axes for lists of equal length; None for others."""
    pc = installed("pyarrow.compute")
    if column.null_count or not len(column):
        return None
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1:
        return None
    items = column.flatten()
    inner = _matrix(items) if _is_list(items.type) else items.to_numpy(zero_copy_only=False)
    return None if inner is None else inner.reshape((len(column), lengths[0], *inner.shape[1:]))


def frame_of(pieces, kind):
    """A table of rows that come as dicts or as batches of one schema."""
    pa = installed("pyarrow")
    if isinstance(pieces[0], list):
        rows = [row for piece in pieces for row in piece]
        if kind in (PANDAS, POLARS):
            return installed(kind).DataFrame(rows)
        table = pa.Table.from_pylist(rows)
    else:
        table = pa.Table.from_batches(pieces)
    if kind == PANDAS:
        return table.to_pandas()
    if kind == POLARS:
        return installed(POLARS).from_arrow(table)
    return table if kind == TABLE else table.combine_chunks().to_batches()[0]


def series_of(pieces, kind):
    """One column of rows that come as lists or as arrays of one type."""
    pa = installed("pyarrow")
    if isinstance(pieces[0], list):
        items = [item for piece in pieces for item in piece]
        if kind in (PANDAS, POLARS):
            return installed(kind).Series(items)
        pieces = [pa.array(items)]
    chunked = pa.chunked_array(pieces)
    if kind == PANDAS:
        return chunked.to_pandas()
    if kind == POLARS:
        return installed(POLARS).from_arrow(chunked)
    return chunked if kind == CHUNKED else pa.concat_arrays(chunked.chunks)


def is_arrow(value):
    """Whether a value is an Arrow array or batch."""
    pa = loaded("pyarrow")
    return pa is not None and isinstance(value, (pa.Array, pa.RecordBatch))


def column_of_result(result, rows):
    """The result of one call as an Arrow array with a value for each row; None: it is no frame or series of these."""
    pa = loaded("pyarrow")
    if pa is None:
        return None
    try:
        array = _as_array(result, pa)
    except (pa.ArrowException, *_DUMP_ERRORS):  # objects of many types: they are taken one by one
        return None
    return array if array is not None and len(array) == rows else None


def _as_array(result, pa):
    pandas, polars = loaded(PANDAS), loaded(POLARS)
    if pandas is not None and isinstance(result, pandas.DataFrame):
        result = pa.Table.from_pandas(result, preserve_index=False)  # its columns of text may have several chunks
    elif pandas is not None and isinstance(result, pandas.Series):
        result = pa.Array.from_pandas(result)
    elif polars is not None and isinstance(result, (polars.DataFrame, polars.Series)):
        result = result.to_arrow()
    if isinstance(result, pa.Table):
        batches = result.combine_chunks().to_batches()
        result = batches[0] if batches else pa.RecordBatch.from_pylist([], result.schema)
    if isinstance(result, pa.RecordBatch):
        return result.to_struct_array()
    if isinstance(result, pa.ChunkedArray):
        return pa.concat_arrays(result.chunks) if result.num_chunks else pa.array([], result.type)
    return result if isinstance(result, pa.Array) else None


def items_of(array):
    """The values of an Arrow array, one for each row, as JSON has them."""
    return ArrowValues(number=_number).values(array)


def copied(array):
    """The array in memory of its own."""
    pa = installed("pyarrow")
    return pa.concat_arrays([array, array.slice(0, 0)])


class ArrowWriter:
    """Writes results as an Arrow stream of one column."""

    is_arrow = True

    def write(self, values, errors, rows):
        """The results of rows, without those in `errors`. Rows without a JSON form get an error."""
        kept = [value for row, value in zip(rows, values) if row not in errors] if errors else values
        array = _typed(kept)
        if array is not None:
            return _stream(OUTPUT, array)
        _, texts = texts_of(values, errors, rows)
        return _stream(JSON, installed("pyarrow").array(texts, "binary")) if texts else b""

    def write_pieces(self, pieces):
        """Results that are arrays, in the order of their rows; None if they do not go into one column."""
        pa = installed("pyarrow")
        try:
            arrays = [_piece(columns) for *_, columns in pieces]
            if len({each.type for each in arrays}) > 1:
                return None
            ArrowValues(number=_number).converter(arrays[0].type)
            return _stream(OUTPUT, arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays))
        except (pa.ArrowException, UnsupportedType, *_DUMP_ERRORS):
            return None


def _typed(values):
    """An array of values of one simple type; None: they have no type of their own, and are written as JSON."""
    pa, kinds = installed("pyarrow"), set(map(type, values)) - {type(None)}
    try:
        if kinds == {float}:
            return _finite(pa.array(values, pa.float64(), from_pandas=True))
        if kinds == {int}:
            return pa.array(values, pa.int64())
        if kinds == {str}:
            return pa.array(values, pa.string())
        if kinds == {bool}:
            return pa.array(values, pa.bool_())
        if kinds == {list}:
            inner = {type(each) for value in values if value is not None for each in value}
            if inner == {float}:
                array = pa.array(values, pa.list_(pa.float64()))
                return array if _is_finite(array.flatten()) else None
            if inner == {int}:
                return pa.array(values, pa.list_(pa.int64()))
    except (pa.ArrowException, *_DUMP_ERRORS):  # too large for a number of 64 bits, or text that is not UTF-8
        pass
    return None


def _is_finite(array):
    pc = installed("pyarrow.compute")
    return pc.all(pc.is_finite(array)).as_py() is not False


def _finite(array):
    """The numbers with null for infinity, as JSON has it."""
    pa, pc = installed("pyarrow"), installed("pyarrow.compute")
    return array if _is_finite(array) else pc.if_else(pc.is_finite(array), array, pa.scalar(None, array.type))


def _piece(columns):
    """{name: numpy array} or an Arrow array as one Arrow array."""
    pa = installed("pyarrow")
    if is_arrow(columns):
        return columns.dictionary_decode() if pa.types.is_dictionary(columns.type) else columns
    arrays = [_nested(each) for each in columns.values()]
    return arrays[0] if list(columns) == [OUTPUT] else pa.StructArray.from_arrays(arrays, list(columns))


def _nested(array):
    """A numpy array whose first axis is the row."""
    pa, numpy = installed("pyarrow"), loaded("numpy")
    array = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.dtype == numpy.float16:
        array = array.astype(numpy.float32)
    values = pa.array(array.reshape(-1))
    for length in reversed(array.shape[1:]):
        count = len(values) // length if length else 0
        values = pa.ListArray.from_arrays(pa.array(numpy.arange(count + 1, dtype=numpy.int32) * length), values)
    return values


def _stream(name, array):
    pa = installed("pyarrow")
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([array], [name])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
