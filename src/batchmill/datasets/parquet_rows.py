"""Reads Parquet: every record becomes a JSON object that keeps values exactly where JSON can.

See `function_runtime.arrow.values` for the JSON value of each type.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.inflate import Advance
from batchmill.datasets.orders import RefusedRow
from batchmill.datasets.sources import describe, open_file
from batchmill.errors import InvalidDataset
from batchmill.function_runtime.arrow.values import ArrowValues, UnsupportedType
from batchmill.function_runtime.installed import installed
from batchmill.object_store.urls import is_object_url
from batchmill.types import DatasetSpec
from batchmill.wire.rows.parquet_lines import lines_in

COLUMNS_MAX = 10_000
ROW_GROUPS_MAX = 1_000_000
BATCH_BYTES = 8 * 1024 * 1024  # of rows in memory at once, by the sizes in the file's metadata
BATCH_ROWS_MAX = 8192
BATCH_CELLS_MAX = 1_000_000  # of a batch, even if they are small
MEMORY_BYTES = 2 * 1024**3  # more than the process uses, while it reads a file: a page may claim to be 2 GiB long
BUFFERS_BYTES = 64 * 1024 * 1024  # of all columns together
READ_BYTES = 1024 * 1024
OBJECT_STREAMS = 8  # columns of an object that are read in turns, about
BUFFER_BYTES_MIN = 16 * 1024
THRIFT_STRING_BYTES_MAX = 100 * 1024 * 1024
THRIFT_ITEMS_MAX = 1_000_000

_values = ArrowValues(number=float)
_types = pa.types


def compute() -> Any:
    """pyarrow.compute: it takes half as long to import as all of pyarrow, and columns of numbers do not need it."""
    return installed("pyarrow.compute")


def columns(source: SourceFile, spec: DatasetSpec) -> list[str]:
    """The names of the columns. Raises: InvalidDataset (`invalid_parquet`, `schema_too_large`, `unsupported_type`)."""
    with opened(source.path) as file:
        return list(file.schema_arrow.names)


def keep_schema(source: SourceFile, path: Path) -> None:
    """Write the schema for the results. Raises: InvalidDataset when an earlier file has another schema."""
    with opened(source.path) as file:
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


def binary_columns(path: Path) -> set[str]:
    """The columns of a kept schema whose values are bytes, or structs that have `bytes`, as of the Hugging Face Hub."""
    found = set()
    for field in read_schema(path):
        kind = field.type
        if _types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if _types.is_binary(kind) or _types.is_large_binary(kind) or _types.is_fixed_size_binary(kind):
            found.add(field.name)
    return found


def rows_in(path: str) -> int:
    """The number of rows in the file's metadata. Raises: InvalidDataset where it cannot be read."""
    with opened(path) as file:
        return file.metadata.num_rows


def convert(source: SourceFile, spec: DatasetSpec, expected: list[str], advance: Advance) -> Iterator[Converted]:
    """Yield every record as a JSON object. Raises: InvalidDataset where the file cannot be read."""
    with opened(source.path) as file:
        dictionaries, size_bytes = _text_columns(file), buffer_bytes(file.metadata.num_columns)
    with bounded_memory(), opened(source.path, dictionaries, size_bytes) as file:
        rows_total, size, done = file.metadata.num_rows, describe(source.path).size_bytes, 0
        try:
            for batch in file.iter_batches(batch_size=batch_rows(file)):
                for piece in _pieces(batch):
                    yield converted(piece, done, spec.line_bytes_max)
                    done += piece.num_rows
                advance(size * batch.num_rows // max(1, rows_total))
        except (MemoryError, pa.ArrowMemoryError):
            raise InvalidDataset(
                f"{source.path} takes more than {MEMORY_BYTES:,} bytes of memory to read, after row {done:,}: write it "
                "with smaller pages, rows or columns",
                code="invalid_parquet",
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise broken(source.path, error) from None


@contextmanager
def bounded_memory() -> Iterator[None]:
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


def buffer_bytes(columns: int) -> int:
    """The bytes to read ahead of each column."""
    return max(BUFFER_BYTES_MIN, min(READ_BYTES, BUFFERS_BYTES // max(1, columns)))


def _text_columns(file: pq.ParquetFile) -> list[str]:
    """The columns of text and bytes. Read as dictionaries, they hold a repeated value in memory once."""
    kinds = (_types.is_string, _types.is_large_string, _types.is_binary, _types.is_large_binary)
    return [field.name for field in file.schema_arrow if any(is_kind(field.type) for is_kind in kinds)]


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into pieces of about BATCH_BYTES at most, once dictionaries are decoded."""
    sizes, pc = None, compute()
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


def opened(
    path: str, dictionaries: list[str] | None = None, buffer_bytes: int = READ_BYTES, source: Any = None
) -> pq.ParquetFile:
    """Open a Parquet file. Raises: InvalidDataset.

    Args:
        dictionaries: columns whose repeated values are in memory once.
        source: a file object to read `path` through.
    """
    try:
        file = pq.ParquetFile(
            _whole(path) if source is None else source,
            pre_buffer=False,
            buffer_size=buffer_bytes,
            read_dictionary=dictionaries,
            thrift_string_size_limit=THRIFT_STRING_BYTES_MAX,
            thrift_container_size_limit=THRIFT_ITEMS_MAX,
        )
    except (pa.ArrowException, OSError) as error:
        raise broken(path, error) from None
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
        try:
            _values.converter(field.type)
        except UnsupportedType as error:
            where = f"the column {field.name!r} of {path}"
            raise InvalidDataset(f"{where} has {error}", code="unsupported_type") from None
    return file


def _whole(path: str) -> Any:
    """What pyarrow reads a file through: it reads those of this machine best by itself."""
    return open_file(path, streams=OBJECT_STREAMS) if is_object_url(path) else path


def broken(path: str, error: Exception) -> InvalidDataset:
    return InvalidDataset(f"{path} cannot be read as Parquet: {error}", code="invalid_parquet")


def batch_rows(file: pq.ParquetFile) -> int:
    """The rows of a batch: about BATCH_BYTES of the row group with the longest rows."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    widest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    cells = BATCH_CELLS_MAX // max(1, file.metadata.num_columns)
    return max(1, min(BATCH_ROWS_MAX, cells, BATCH_BYTES // max(1, widest)))


def converted(batch: pa.RecordBatch, done: int, line_bytes_max: int) -> Converted:
    lines = lines_in(batch)
    refused = []
    for number, line in enumerate(lines):
        if len(line) > line_bytes_max:
            message = f"the record is longer than {line_bytes_max} bytes as JSON"
            refused.append(RefusedRow(number, done + number + 1, "line_too_long", message))
    lines.append(b"")
    return Converted(b"\n".join(lines), batch.num_rows, refused)


def lines_of(batch: pa.RecordBatch) -> bytes:
    """The rows of a batch as JSON objects, each on a line."""
    return b"".join([line + b"\n" for line in lines_in(batch)])


def stream_of(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
