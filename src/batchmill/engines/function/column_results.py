"""Checks results that a function's process returns as a column. User code can write to that memory: all is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from batchmill.datasets.parquet_rows import compute
from batchmill.engines.function.row_results import SHALLOW_BYTES_MAX, BlockResults, failed, rows_without
from batchmill.function_runtime.arrow.rows import JSON, OUTPUT
from batchmill.function_runtime.arrow.values import ArrowValues, UnsupportedType
from batchmill.models import redaction
from batchmill.types import ColumnBlock, ColumnResultBlock, Outcome, Row, Usage
from batchmill.wire.calls import CallError
from batchmill.wire.json_bytes import DEPTH_MAX, decode, is_too_deep
from batchmill.wire.rows.forms import usage_of

BLOCK_BYTES = 8 * 1024 * 1024  # of one block of results, about

_values = ArrowValues(number=float)
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class _Flaw(Exception):
    """The column is not what it should be; the text says why."""


def read_column(
    block: ColumnBlock, rows: range | list[int], data: bytes, errors: dict[int, CallError]
) -> BlockResults:  # fmt: skip
    """The results of some rows of a block.

    Args:
        rows: by index in the block.
        data: an Arrow stream with a value for each row that is not in `errors`; empty if there are none.
        errors: by index in the block.

    Raises: ValueError if errors belong to other rows.
    """
    places = rows_without(errors, rows)
    if not len(places):
        return BlockResults([], _failed(block, errors))
    try:
        name, column = _open(data, len(places))
        column, usage = _read_texts(column) if name == JSON else (column, _usage_of(column))
        masked = _masked(column) if redaction.known() else column
    except (_Flaw, UnsupportedType) as flaw:
        error = CallError("bad_return", f"the function's process returned {flaw}")
        return BlockResults([], _failed(block, dict.fromkeys(rows, error)))
    done = []
    step = max(1, BLOCK_BYTES * len(places) // max(1, len(data)))
    for start in range(0, len(places), step):
        some = places[start : start + step]
        if masked is not column or len(some) < len(places):
            data = _stream(name, masked.slice(start, len(some)))
        positions, numbers = _select(block.positions, some), _select(block.numbers, some)
        done.append(ColumnResultBlock(data, positions, numbers, block.lease, usage if start == 0 else Usage()))
    return BlockResults(done, _failed(block, errors))


def _open(data: bytes, rows: int) -> tuple[str, pa.Array]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            batch = reader.read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise _Flaw(f"no column of results: {error}") from None
    if batch.num_rows != rows or batch.num_columns != 1 or batch.schema.names[0] not in (OUTPUT, JSON):
        raise _Flaw(f"{batch.num_rows} results in the columns {batch.schema.names} for {rows} rows")
    name, column = batch.schema.names[0], batch.column(0)
    if name == JSON and not (pa.types.is_binary(column.type) and column.null_count == 0):
        raise _Flaw(f"JSON of the type {column.type}")
    _values.converter(column.type)
    return name, column


def _read_texts(column: pa.Array) -> tuple[pa.Array, Usage]:
    """The column, and the tokens that its results report, as replies of models do."""
    texts = column.to_pylist()
    whole = b",".join(texts)
    try:
        are_values = len(_raws.decode(b"[" + whole + b"]")) == len(texts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        are_values = False
    if not are_values or b"\n" in whole:
        raise _Flaw("results that are not JSON")
    if any(len(text) > SHALLOW_BYTES_MAX and is_too_deep(text, DEPTH_MAX) for text in texts):
        raise _Flaw(f"a value nested deeper than {DEPTH_MAX} levels")
    total = Usage()
    for text in texts if b'"usage"' in whole else ():
        if b'"usage"' in text and text[:1] == b"{":
            total = _with(total, decode(text))
    return column, total


def _usage_of(column: pa.Array) -> Usage:
    total = Usage()
    if pa.types.is_struct(column.type) and column.type.get_field_index("usage") >= 0:
        for usage in _values.values(column.field("usage")):
            total = _with(total, {"usage": usage})
    return total


def _with(total: Usage, reply: dict[str, Any]) -> Usage:
    usage = usage_of(reply)
    return total if usage is None else total + usage


def _masked(array: pa.Array) -> pa.Array:
    """The values without known secrets; the same array if it had none."""
    kind, types = array.type, pa.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return _masked_texts(array)
    if types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        plain = array.dictionary_decode() if types.is_dictionary(kind) else array.storage
        masked = _masked(plain)
        return array if masked is plain else masked
    if types.is_struct(kind):
        fields = [array.field(number) for number in range(kind.num_fields)]
        inner = list(map(_masked, fields))
        if all(new is old for new, old in zip(inner, fields, strict=True)):
            return array
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=array.is_null())
    if types.is_nested(kind):
        lists = array.cast(_entries(kind)) if types.is_map(kind) else array
        flat = lists.flatten()
        masked = _masked(flat)
        return array if masked is flat else pa.array(_regrouped(lists, masked, is_map=types.is_map(kind)), kind)
    return array


def _entries(kind: pa.MapType) -> pa.DataType:
    return pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))


def _regrouped(lists: pa.Array, flat: pa.Array, *, is_map: bool) -> list[Any]:
    """The lists with the values of `flat`; the entries of a map as pairs."""
    items = flat.to_pylist()
    values = iter([(item["key"], item["value"]) for item in items] if is_map else items)
    lengths = compute().list_value_length(lists).to_pylist()
    return [None if length is None else [next(values) for _ in range(length)] for length in lengths]


def _masked_texts(array: pa.Array) -> pa.Array:
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    values = array.cast(pa.binary()).to_pylist() if is_text else array.to_pylist()
    found = [value for value in values if value is not None]
    masked = redaction.mask_lines(found)
    if masked == found:
        return array
    new = iter(masked)
    renewed = pa.array([None if value is None else next(new) for value in values], pa.binary())
    return renewed.cast(array.type)


def _stream(name: str, column: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([column], [name])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _select(numbers: Sequence[int], places: range | list[int]) -> Sequence[int]:
    if isinstance(places, range):
        return numbers[places.start : places.stop]
    return [numbers[place] for place in places]


def _failed(block: ColumnBlock, errors: dict[int, CallError]) -> list[Outcome]:
    """The outcomes of rows that failed; their columns are added when results are gathered."""
    return [
        failed(Row(block.positions[at], block.numbers[at], b"{}", block.form, block.lease), errors[at])
        for at in sorted(errors)
    ]
