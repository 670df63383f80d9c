"""Seals Parquet files where they lie, for jobs whose rows all go to one function in the order of the files.

Every value is decoded once. What such a dataset cannot hold (a row longer than the limit, a batch that unpacks to more
than memory should hold) is left to the conversion to JSON lines.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill.datasets import layout, parquet_rows
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.orders import SizeLimits
from batchmill.datasets.sources import describe
from batchmill.datasets.verified_file import checksum_blocks
from batchmill.errors import InvalidDataset
from batchmill.types import DatasetSpec, SealedFile

Sealed = tuple[int, list[bytes]]  # rows, and the digest of every 8 MiB
BATCH_BYTES_MAX = 4 * parquet_rows.BATCH_BYTES  # of Arrow memory: a dictionary may unpack to far more than it takes
ESCAPED_BYTES = 6  # of a character of text in JSON, at most
NUMBER_BYTES = 96  # of a number, a date or a boolean in JSON: a decimal has 76 digits at most
BASE64_BYTES = 2  # of a byte, at most

_types = pa.types


class _NeedsConversion(Exception):
    """The dataset can only be read as JSON lines."""


def seal_columns(
    sources: list[SourceFile], spec: DatasetSpec, home: Path, progress: Callable[[float], None], limits: SizeLimits
) -> Sealed | None:
    """Check every value and write the index; None: the rows must be converted to lines.

    Raises: InvalidDataset where a file cannot be read, OverQuota, StorageFull.
    """
    limits.check_rows(sum(parquet_rows.rows_in(source.path) for source in sources))
    is_refused = Event()
    with ThreadPoolExecutor(1) as beside:
        hashing = beside.submit(_checksums, [describe(source.path) for source in sources], is_refused)
        try:
            groups = _check_files(sources, spec, home, progress)
        except _NeedsConversion:
            is_refused.set()
            return None
        except BaseException:
            is_refused.set()
            raise
        digests, checksums = hashing.result()
    limits.add(len(groups) * groups.itemsize + len(checksums) * checksums.itemsize, groups[-3])
    (home / layout.ROW_GROUPS).write_bytes(groups.tobytes())
    (home / layout.CHECKSUMS).write_bytes(checksums.tobytes())
    (home / layout.REJECTED).touch()
    return groups[-3], digests


def _checksums(files: list[SealedFile], is_refused: Event) -> tuple[list[bytes], array[int]]:
    """The digests and checksums of the files; incomplete once they are refused."""
    digests, checksums = [], array("I")
    for file in files:
        for digest, blocks in checksum_blocks(file):
            if is_refused.is_set():
                return digests, checksums
            digests.append(digest)
            checksums += blocks
    return digests, checksums


def _check_files(
    sources: list[SourceFile], spec: DatasetSpec, home: Path, progress: Callable[[float], None]
) -> array[int]:
    """(first row, file, number in it) of every row group, and the number of rows with two zeros at the end."""
    total = sum(describe(source.path).size_bytes for source in sources) or 1
    groups, rows, done = array("Q"), 0, 0
    for number, source in enumerate(sources):
        parquet_rows.keep_schema(source, home / layout.SCHEMA)
        with parquet_rows.bounded_memory(), parquet_rows.opened(source.path) as file:
            size = describe(source.path).size_bytes
            batch_rows = parquet_rows.batch_rows(file)
            for group in range(file.num_row_groups):
                _check_group(source.path, file, group, batch_rows, spec)
                if count := file.metadata.row_group(group).num_rows:
                    groups.extend((rows, number, group))
                    rows += count
                progress((done + size * (group + 1) // file.num_row_groups) / total)
            done += size
    groups.extend((rows, 0, 0))
    return groups


def _check_group(path: str, file: pq.ParquetFile, group: int, batch_rows: int, spec: DatasetSpec) -> None:
    rows = 0
    try:
        for batch in file.iter_batches(batch_rows, row_groups=[group]):
            if batch.nbytes > BATCH_BYTES_MAX:
                raise _NeedsConversion
            batch.validate(full=True)
            if longest_row(batch) > spec.line_bytes_max:
                raise _NeedsConversion
            rows += batch.num_rows
    except (MemoryError, pa.ArrowMemoryError):
        raise _NeedsConversion from None
    except (pa.ArrowException, OSError) as error:
        raise parquet_rows.broken(path, error) from None
    if rows != file.metadata.row_group(group).num_rows:
        raise InvalidDataset(
            f"{path} cannot be read as Parquet: its row group {group} has {rows} rows and says "
            f"{file.metadata.row_group(group).num_rows}",
            code="invalid_parquet",
        )


def longest_row(batch: pa.RecordBatch) -> int:
    """A bound on the bytes of the longest row as a JSON line: the sum of the longest values of the columns."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return 2 + sum(_member(name, column) for name, column in columns)


def _member(name: str, array: pa.Array) -> int:
    return ESCAPED_BYTES * len(name.encode()) + 4 + _longest(array)


def _longest(array: pa.Array) -> int:
    """A bound on the bytes of the longest value as JSON."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _longest(array.storage)
    if _types.is_dictionary(kind):
        return _longest(array.dictionary)
    if _types.is_struct(kind):
        return 4 + sum(_member(kind.field(number).name, array.field(number)) for number in range(kind.num_fields))
    if _types.is_map(kind):
        return _items(array.offsets) * (_longest(array.keys) + _longest(array.items) + 2) + 4
    if _types.is_fixed_size_list(kind):
        return kind.list_size * (_longest(array.values) + 1) + 4
    if _types.is_nested(kind):
        return _items(array.offsets) * (_longest(array.values) + 1) + 4
    if _types.is_string(kind) or _types.is_large_string(kind):
        return ESCAPED_BYTES * _most(parquet_rows.compute().binary_length(array)) + 4
    if _types.is_binary(kind) or _types.is_large_binary(kind):
        return BASE64_BYTES * _most(parquet_rows.compute().binary_length(array)) + 8
    if _types.is_fixed_size_binary(kind) and not _types.is_decimal(kind):
        return BASE64_BYTES * kind.byte_width + 8
    return NUMBER_BYTES


def _items(offsets: pa.Array) -> int:
    """The length of the longest list."""
    return _most(parquet_rows.compute().subtract(offsets[1:], offsets[:-1]))


def _most(lengths: pa.Array) -> int:
    return parquet_rows.compute().max(lengths).as_py() or 0
