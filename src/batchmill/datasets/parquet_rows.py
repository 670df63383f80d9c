"""Reads Parquet: every record becomes a JSON object that keeps values exactly where JSON can.

Integers, floats, strings, booleans, nulls, lists, structs and maps with text keys are what they are in JSON; decimals
are numbers with their exact digits; dates, times and timestamps are ISO 8601 text (UTC where they have a zone);
durations count their own unit; binary is base64; NaN and infinity are null. The only module here that imports pyarrow.
"""

from __future__ import annotations

import os
import resource
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Raw

from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.inflate import Advance
from batchmill.datasets.orders import RefusedRow
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec

COLUMNS_MAX = 10_000
ROW_GROUPS_MAX = 1_000_000
BATCH_BYTES = 8 * 1024 * 1024  # of rows in memory at once, by the sizes in the file's metadata
BATCH_ROWS_MAX = 8192
BATCH_CELLS_MAX = 1_000_000  # of a batch, even if they are small
MEMORY_BYTES = 2 * 1024**3  # more than the process uses, while it reads a file: a page may claim to be 2 GiB long
BUFFERS_BYTES = 64 * 1024 * 1024  # of all columns together
READ_BYTES = 1024 * 1024
BUFFER_BYTES_MIN = 16 * 1024
THRIFT_STRING_BYTES_MAX = 100 * 1024 * 1024
THRIFT_ITEMS_MAX = 1_000_000

_encode = msgspec.json.encode
_types = pa.types


def columns(source: SourceFile, spec: DatasetSpec) -> list[str]:
    """The names of the columns. Raises: InvalidDataset (`invalid_parquet`, `schema_too_large`, `unsupported_type`)."""
    with _open(source.path) as file:
        return list(file.schema_arrow.names)


def keep_schema(source: SourceFile, path: Path) -> None:
    """Write the schema for the results. Raises: InvalidDataset when an earlier file has another schema."""
    with _open(source.path) as file:
        schema = file.schema_arrow.remove_metadata()
    if path.exists() and not read_schema(path).equals(schema):
        raise InvalidDataset(
            f"{source.path} has other columns or types than the first file: "
            "the files of a dataset must have the same columns in the same order",
            code="schema_mismatch",
        )
    with open(path, "wb") as file:
        file.write(schema.serialize())
        file.flush()
        os.fsync(file.fileno())


def read_schema(path: Path) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(path.read_bytes()))


def rows_in(path: str) -> int:
    """The number of rows in the file's metadata. Raises: InvalidDataset where it cannot be read."""
    with _open(path) as file:
        return file.metadata.num_rows


def convert(source: SourceFile, spec: DatasetSpec, expected: list[str], advance: Advance) -> Iterator[Converted]:
    """Yield every record as a JSON object. Raises: InvalidDataset where the file cannot be read."""
    with _open(source.path) as file:
        dictionaries, column_bytes = _text_columns(file), BUFFERS_BYTES // max(1, file.metadata.num_columns)
    buffer_bytes = max(BUFFER_BYTES_MIN, min(READ_BYTES, column_bytes))
    with _bounded_memory(), _open(source.path, dictionaries, buffer_bytes) as file:
        rows_total, size, done = file.metadata.num_rows, os.path.getsize(source.path), 0
        try:
            for batch in file.iter_batches(batch_size=_batch_rows(file)):
                for piece in _pieces(batch):
                    yield _converted(piece, done, spec.line_bytes_max)
                    done += piece.num_rows
                advance(size * batch.num_rows // max(1, rows_total))
        except (MemoryError, pa.ArrowMemoryError):
            raise InvalidDataset(
                f"{source.path} takes more than {MEMORY_BYTES:,} bytes of memory to read, after row {done:,}: write it "
                "with smaller pages, rows or columns",
                code="invalid_parquet",
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise _broken(source.path, error) from None


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Limit the memory of the process to MEMORY_BYTES more than it uses now; reading more fails."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    limit = used + MEMORY_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _text_columns(file: pq.ParquetFile) -> list[str]:
    """The columns of text and bytes. Read as dictionaries, they hold a repeated value in memory once."""
    kinds = (_types.is_string, _types.is_large_string, _types.is_binary, _types.is_large_binary)
    return [field.name for field in file.schema_arrow if any(is_kind(field.type) for is_kind in kinds)]


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into pieces of about BATCH_BYTES at most, once dictionaries are decoded."""
    sizes = None
    for column in batch.columns:
        if _types.is_dictionary(column.type):
            lengths = pc.fill_null(pc.take(pc.binary_length(column.dictionary), column.indices), 0).cast(pa.int64())
            sizes = lengths if sizes is None else pc.add(sizes, lengths)
    if sizes is None or pc.sum(sizes).as_py() <= BATCH_BYTES:
        yield batch
        return
    start = piece_bytes = 0
    for at, size in enumerate(sizes.to_pylist()):
        if piece_bytes and piece_bytes + size > BATCH_BYTES:
            yield batch.slice(start, at - start)
            start, piece_bytes = at, 0
        piece_bytes += size
    yield batch.slice(start)


def _open(path: str, dictionaries: list[str] | None = None, buffer_bytes: int = READ_BYTES) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(
            path,
            pre_buffer=False,
            buffer_size=buffer_bytes,
            read_dictionary=dictionaries,
            thrift_string_size_limit=THRIFT_STRING_BYTES_MAX,
            thrift_container_size_limit=THRIFT_ITEMS_MAX,
        )
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from None
    schema = file.schema_arrow
    if len(schema) > COLUMNS_MAX or file.num_row_groups > ROW_GROUPS_MAX:
        raise InvalidDataset(
            f"{path} has {len(schema)} columns and {file.num_row_groups} row groups; the most are {COLUMNS_MAX} and "
            f"{ROW_GROUPS_MAX}",
            code="schema_too_large",
        )
    for number, field in enumerate(schema):
        if schema.get_field_index(field.name) != number:
            raise InvalidDataset(f"{path} has a column {field.name!r} twice", code="invalid_header")
        _converter(field.type, f"the column {field.name!r} of {path}")
    return file


def _broken(path: str, error: Exception) -> InvalidDataset:
    return InvalidDataset(f"{path} cannot be read as Parquet: {error}", code="invalid_parquet")


def _batch_rows(file: pq.ParquetFile) -> int:
    """The rows of a batch: about BATCH_BYTES of the row group with the longest rows."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    widest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    cells = BATCH_CELLS_MAX // max(1, file.metadata.num_columns)
    return max(1, min(BATCH_ROWS_MAX, cells, BATCH_BYTES // max(1, widest)))


def _converted(batch: pa.RecordBatch, done: int, line_bytes_max: int) -> Converted:
    names = batch.schema.names
    cells = [_converter(column.type, "")(column) for column in batch.columns]
    refused = []
    lines = []
    records = zip(*cells, strict=True) if cells else ((),) * batch.num_rows
    for number, values in enumerate(records):
        line = _encode(dict(zip(names, values, strict=True)))
        if len(line) > line_bytes_max:
            message = f"the record is longer than {line_bytes_max} bytes as JSON"
            refused.append(RefusedRow(number, done + number + 1, "line_too_long", message))
        lines.append(line)
    lines.append(b"")
    return Converted(b"\n".join(lines), batch.num_rows, refused)


Convert = Callable[[pa.Array], list[Any]]


def _converter(kind: pa.DataType, where: str) -> Convert:
    """The function that converts arrays of a type to JSON values. Raises: InvalidDataset (`unsupported_type`)."""
    if isinstance(kind, pa.BaseExtensionType):
        inner = _converter(kind.storage_type, where)
        return lambda array: inner(array.storage)
    if _types.is_dictionary(kind):
        inner = _converter(kind.value_type, where)
        return lambda array: inner(array.dictionary_decode())
    if _types.is_struct(kind):
        return _struct(kind, where)
    if _types.is_map(kind):
        return _map(kind, where)
    if _types.is_list(kind) or _types.is_large_list(kind) or _types.is_fixed_size_list(kind):
        return _list(kind, where)
    for matches, convert_leaf in _LEAVES:
        if matches(kind):
            return convert_leaf
    raise InvalidDataset(f"{where} has the type {kind}, which JSON cannot express", code="unsupported_type")


def _struct(kind: pa.StructType, where: str) -> Convert:
    names = [field.name for field in kind]
    inner = [_converter(field.type, where) for field in kind]

    def convert_struct(array: pa.StructArray) -> list[Any]:
        fields = [convert_field(array.field(number)) for number, convert_field in enumerate(inner)]
        valid = array.is_valid().to_pylist()
        values = zip(*fields, strict=True) if fields else ((),) * len(array)
        return [dict(zip(names, value, strict=True)) if ok else None for ok, value in zip(valid, values, strict=True)]

    return convert_struct


def _list(kind: pa.ListType, where: str) -> Convert:
    inner = _converter(kind.value_type, where)

    def convert_list(array: pa.ListArray) -> list[Any]:
        values = iter(inner(array.flatten()))
        lengths = pc.list_value_length(array).to_pylist()
        return [None if length is None else [next(values) for _ in range(length)] for length in lengths]

    return convert_list


def _map(kind: pa.MapType, where: str) -> Convert:
    if not (_types.is_string(kind.key_type) or _types.is_large_string(kind.key_type)):
        raise InvalidDataset(f"{where} is a map whose keys are {kind.key_type}, not text", code="unsupported_type")
    inner = _converter(kind.item_type, where)

    def convert_map(array: pa.MapArray) -> list[Any]:
        entries = array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        pairs = entries.flatten()
        members = zip(pairs.field(0).to_pylist(), inner(pairs.field(1)), strict=True)
        lengths = pc.list_value_length(entries).to_pylist()
        return [None if length is None else dict(next(members) for _ in range(length)) for length in lengths]

    return convert_map


def _values(array: pa.Array) -> list[Any]:
    return array.to_pylist()


def _timestamps(array: pa.TimestampArray) -> list[Any]:
    """ISO 8601 with as many digits as the unit has. %S includes the fraction; times with a zone become UTC."""
    zoned = array.type.tz is not None
    naive = array.cast(pa.timestamp(array.type.unit, "UTC")).cast(pa.int64()).cast(pa.timestamp(array.type.unit))
    return pc.strftime(naive, format="%Y-%m-%dT%H:%M:%SZ" if zoned else "%Y-%m-%dT%H:%M:%S").to_pylist()


def _texts(array: pa.Array) -> list[Any]:
    return array.cast(pa.string()).to_pylist()


def _numbers_as_written(array: pa.Array) -> list[Any]:
    return [None if text is None else Raw(text.encode()) for text in array.cast(pa.string()).to_pylist()]


def _base64(array: pa.Array) -> list[Any]:
    return [None if value is None else b64encode(value).decode() for value in array.to_pylist()]


def _counts(array: pa.Array) -> list[Any]:
    return array.cast(pa.int64()).to_pylist()


def _halves(array: pa.Array) -> list[Any]:
    return array.cast(pa.float32()).to_pylist()


def _is_binary(kind: pa.DataType) -> bool:
    return _types.is_binary(kind) or _types.is_large_binary(kind) or _types.is_fixed_size_binary(kind)


def _is_plain(kind: pa.DataType) -> bool:
    return (
        _types.is_integer(kind)
        or _types.is_float32(kind)
        or _types.is_float64(kind)
        or _types.is_boolean(kind)
        or _types.is_null(kind)
        or _types.is_string(kind)
        or _types.is_large_string(kind)
    )


_LEAVES: tuple[tuple[Callable[[pa.DataType], bool], Convert], ...] = (
    (_is_plain, _values),
    (_types.is_float16, _halves),
    (_types.is_timestamp, _timestamps),
    (_types.is_date, _texts),
    (_types.is_time, _texts),
    (_types.is_duration, _counts),
    (_types.is_decimal, _numbers_as_written),
    (_is_binary, _base64),
)


def values(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Yield every row of a file as Python values; `rows` are read at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(rows):
            yield from batch.to_pylist()
