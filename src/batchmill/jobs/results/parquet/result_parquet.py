"""Results as Parquet: columns with the types they had in the input, fields with those of their schema, and `output`
with the type its values have.

Row groups are written as they fill, so memory does not grow with the rows; the file is opened again and counted before
it is published.
"""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw, Struct

from batchmill.datasets.formats import columns_schema
from batchmill.errors import LedgerBroken
from batchmill.jobs.results.gathering import TableSource
from batchmill.jobs.results.result_columns import (
    ColumnKind,
    ColumnKinds,
    ColumnNames,
    decoded_members,
    field_kinds,
    in_batches,
)
from batchmill.jobs.results.results import Learned, ResultFile
from batchmill.part_files import Digest, PartFile
from batchmill.wire.rows.forms import ERROR, FETCHED, FOLDED_FROM, REUSED_FROM
from batchmill.wire.rows.parquet_lines import result_field

_types = pa.types
_UNITS = {"s": 1, "ms": 1000, "us": 1000**2, "ns": 1000**3}
_MOMENT = re.compile(r"(-?\d+)-(\d\d)-(\d\d)(?:T(\d\d):(\d\d):(\d\d)(?:\.(\d+))?Z?)?")
_NOT_IN_FIELDS = re.compile(r'[\\"\x00-\x1f]')  # characters that no name of a struct's field may have
_EPOCH = date(1970, 1, 1).toordinal()
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097  # the Gregorian calendar repeats


@dataclass(frozen=True)
class Build:
    """Turns JSON values into an array. `exact`: their numbers must come as Decimal, with every digit."""

    make: Callable[[list[Any]], pa.Array]
    exact: bool = False


def builder(kind: pa.DataType) -> Build:
    """The array builder of `kind`, one of those that `datasets.parquet_rows` reads."""
    if isinstance(kind, pa.BaseExtensionType):
        inner = builder(kind.storage_type)
        return Build(lambda values: pa.ExtensionArray.from_storage(kind, inner.make(values)), inner.exact)
    if _types.is_dictionary(kind):
        inner = builder(kind.value_type)
        return Build(lambda values: inner.make(values).dictionary_encode(), inner.exact)
    if _types.is_struct(kind):
        return _struct(kind)
    if _types.is_map(kind):
        return _map(kind)
    if _types.is_fixed_size_list(kind):
        return _fixed_list(kind)
    if _types.is_list(kind) or _types.is_large_list(kind):
        return _list(kind)
    make = next((make for matches, make in _LEAVES if matches(kind)), pa.array)
    return Build(lambda values: make(values, kind), exact=_types.is_decimal(kind))


def type_of(kind: pa.DataType) -> pa.DataType:
    """The type that `builder(kind)` makes: an index of a dictionary is as wide as a batch may need."""
    return pa.dictionary(pa.int32(), kind.value_type) if _types.is_dictionary(kind) else kind


def _struct(kind: pa.StructType) -> Build:
    fields = list(kind)
    inner = [builder(field.type) for field in fields]
    pairs = list(zip(fields, inner, strict=True))
    empty: dict[str, Any] = {}

    def make(values: list[Any]) -> pa.Array:
        records = [empty if value is None else value for value in values]
        children = [each.make([record.get(field.name) for record in records]) for field, each in pairs]
        missing = pa.array([value is None for value in values], pa.bool_())
        if not fields:
            return pa.array(values, kind)
        return pa.StructArray.from_arrays(children, fields=_nullable(fields), mask=missing)

    return Build(make, any(each.exact for each in inner))


def _nullable(fields: list[pa.Field]) -> list[pa.Field]:
    return [field.with_nullable(True) for field in fields]


def _list(kind: pa.ListType) -> Build:
    inner = builder(kind.value_type)
    large = _types.is_large_list(kind)
    array, index = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())

    def make(values: list[Any]) -> pa.Array:
        flat = inner.make([item for value in values if value is not None for item in value])
        return array.from_arrays(_offsets(values, index), flat)

    return Build(make, inner.exact)


def _offsets(values: list[Any], index: pa.DataType) -> pa.Array:
    """Where each list begins in the flat values; null for a list that is null, and the end of the last."""
    ends = list(accumulate((0 if value is None else len(value) for value in values), initial=0))
    begins = [None if value is None else end for value, end in zip(values, ends, strict=False)]
    return pa.array([*begins, ends[-1]], index)


def _fixed_list(kind: pa.FixedSizeListType) -> Build:
    inner, size = builder(kind.value_type), kind.list_size

    def make(values: list[Any]) -> pa.Array:
        flat = inner.make([item for value in values for item in (value or (None,) * size)])
        missing = pa.array([value is None for value in values], pa.bool_())
        return pa.FixedSizeListArray.from_arrays(flat, list_size=size, mask=missing)

    return Build(make, inner.exact)


def _map(kind: pa.MapType) -> Build:
    inner = builder(kind.item_type)

    def make(values: list[Any]) -> pa.Array:
        maps = [value for value in values if value is not None]
        keys = pa.array([key for value in maps for key in value], kind.key_type)
        items = inner.make([item for value in maps for item in value.values()])
        return pa.MapArray.from_arrays(_offsets(values, pa.int32()), keys, items)

    return Build(make, inner.exact)


def _decimals(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(
        [None if value is None else Decimal(value) for value in values], pa.decimal256(76, kind.scale)
    ).cast(kind)


def _binary(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array([None if value is None else b64decode(value) for value in values], kind)


def _durations(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, pa.int64()).cast(kind)


def _times(values: list[Any], kind: pa.DataType) -> pa.Array:
    digits = len(str(_UNITS[kind.unit])) - 1
    storage = pa.int32() if _types.is_time32(kind) else pa.int64()
    return pa.array([None if text is None else _time(text, digits) for text in values], storage).cast(kind)


def _time(text: str, digits: int) -> int:
    clock, _, fraction = text.partition(".")
    hours, minutes, seconds = map(int, clock.split(":"))
    return _scaled(hours * 3600 + minutes * 60 + seconds, fraction, digits)


def _scaled(seconds: int, fraction: str, digits: int) -> int:
    return seconds * 10**digits + int(fraction.ljust(digits, "0")[:digits] or "0")


def _moments(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Dates and timestamps."""
    texts = pa.array(values, pa.string())
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:  # a year that has not four digits, which Arrow writes and does not read
        pass
    numbers = [None if text is None else _moment(text, kind) for text in values]
    return pa.array(numbers, pa.int32() if _types.is_date32(kind) else pa.int64()).cast(kind)


def _moment(text: str, kind: pa.DataType) -> int:
    """Units since 1970-01-01, in the Gregorian calendar of all years."""
    match = _MOMENT.fullmatch(text)
    assert match is not None, f"{text!r} is no {kind}"
    year, month, day, *clock = match.groups()
    cycles, year_in_cycle = divmod(int(year) - 1, _CYCLE_YEARS)
    days = date(year_in_cycle + 1, int(month), int(day)).toordinal() + cycles * _CYCLE_DAYS - _EPOCH
    if _types.is_date32(kind):
        return days
    if _types.is_date64(kind):
        return days * 86_400_000
    hours, minutes, seconds = (int(part or 0) for part in clock[:3])
    digits = len(str(_UNITS[kind.unit])) - 1
    return _scaled(days * 86_400 + hours * 3600 + minutes * 60 + seconds, clock[3] or "", digits)


def _is_binary(kind: pa.DataType) -> bool:
    return _types.is_binary(kind) or _types.is_large_binary(kind) or _types.is_fixed_size_binary(kind)


_LEAVES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[list[Any], pa.DataType], pa.Array]], ...] = (
    (_types.is_timestamp, _moments),
    (_types.is_date, _moments),
    (_types.is_time, _times),
    (_types.is_duration, _durations),
    (_types.is_decimal, _decimals),
    (_is_binary, _binary),
)


GROUP_BYTES = 64 * 1024 * 1024  # of Arrow memory in a row group, about
GROUP_ROWS = 1024 * 1024


ARROW_TYPES = {
    ColumnKind.BOOL: pa.bool_(),
    ColumnKind.INT: pa.int64(),
    ColumnKind.FLOAT: pa.float64(),
    ColumnKind.TEXT: pa.string(),
    ColumnKind.INTS: pa.list_(pa.int64()),
    ColumnKind.VECTOR: pa.list_(pa.float64()),
    ColumnKind.TEXTS: pa.list_(pa.string()),
    ColumnKind.BOOLS: pa.list_(pa.bool_()),
    ColumnKind.JSON: pa.string(),
}


class PartSink(io.RawIOBase):
    """A PartFile as the file object that Arrow writes to, from its beginning to its end."""

    def __init__(self, file: PartFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(bytes(data))  # Arrow's buffer is gone after the call

    def tell(self) -> int:
        return self._file.size_bytes


class ThreadSink(PartSink):
    """Writes in another thread; what comes meanwhile waits, `waiting_max` bytes at most.

    Args: before: is called in that thread before anything is written; offsets do not count what it writes.
    """

    def __init__(
        self, file: PartFile, thread: ThreadPoolExecutor, waiting_max: int, before: Callable[[], object] = int
    ) -> None:
        super().__init__(file)
        self._thread, self._writing = thread, thread.submit(before)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._size_bytes = 0
        self._waiting_max = waiting_max

    def write(self, data: Any) -> int:
        piece = bytes(data)  # Arrow's buffer is gone after the call
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        self._size_bytes += len(piece)
        if self._waiting_bytes >= self._waiting_max:
            self._hand_over()
        return len(piece)

    def tell(self) -> int:
        return self._size_bytes

    def finish(self) -> None:
        """Return once everything was written. Raises: the error of a write."""
        self._hand_over()
        self._writing.result()

    def _hand_over(self) -> None:
        self._writing.result()
        self._writing = self._thread.submit(self._write_all, self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _write_all(self, pieces: list[bytes]) -> int:
        return sum(map(self._file.write, pieces))


def repeating(schema: pa.Schema) -> list[str]:
    """The columns whose values are likely to repeat: a dictionary of floats costs time and is given up."""
    return [field.name for field in schema if not (_types.is_floating(field.type) or _types.is_nested(field.type))]


class ParquetFile:
    def __init__(self, output: Path, source: TableSource, digest: Digest | None) -> None:
        self.must_learn = True
        self._output, self._source = output, source
        self._input_schema = columns_schema(source.dataset)
        self._names, self._kinds = ColumnNames(source), ColumnKinds(field_kinds(source.schema))
        self._part = PartFile(output, digest=digest)
        self._writer: pq.ParquetWriter | None = None
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._batch_bytes = self._batch_rows = 0

    def learn(self, lines: Sequence[bytes]) -> None:
        kinds = self._kinds
        for members in decoded_members(lines):
            if self._source.fixed:
                for name in self._source.added:
                    kinds.note(name, members.get(name))
                continue
            self._names.note(members)
            for name, value in members.items():
                kinds.note(name, value)

    def learned(self) -> Learned:
        return Learned([] if self._source.fixed else self._names.input(), self._kinds.seen())

    def know(self, learned: Learned) -> None:
        self._names.note(learned.names)
        self._kinds.add(learned.kinds)

    def write(self, lines: Sequence[bytes]) -> None:
        self._begin()
        for batch in in_batches(lines):
            self._add(batch)

    def publish(self) -> ResultFile:
        self._begin()
        self._write_group()
        assert self._writer is not None
        self._writer.close()
        self._part.flush()
        with pq.ParquetFile(self._part.part) as written:
            if written.metadata.num_rows != self._rows:
                raise LedgerBroken(f"{self._part.part} holds {written.metadata.num_rows} rows instead of {self._rows}")
        self._part.publish()
        return ResultFile(str(self._output), self._rows, self._part.size_bytes)

    def discard(self) -> None:
        self._part.discard()

    def _begin(self) -> None:
        """Settle the columns: every row has been seen."""
        if self._writer is not None:
            return
        self._columns = [self._column(name) for name in self._names.all()]
        self._schema = pa.schema([result_field(each.name, each.type, is_json=each.as_text) for each in self._columns])
        self._decode = _columns_decoder(self._columns)
        self._writer = pq.ParquetWriter(pa.PythonFile(PartSink(self._part), mode="w"), self._schema, compression="zstd")

    def _column(self, name: str) -> _Column:
        if name in (ERROR, FETCHED, REUSED_FROM):
            return _Column(name, pa.string(), Build(lambda values: pa.array(values, pa.string())))
        if name == FOLDED_FROM:
            return _Column(name, pa.int64(), Build(lambda values: pa.array(values, pa.int64())))
        is_added = name in self._source.added
        if self._input_schema is not None and not is_added:
            kind = self._input_schema.field(name).type
            return _Column(name, type_of(kind), builder(kind))
        kind = ColumnKind.TEXT if self._source.fixed and not is_added else self._kinds.kind(name)
        arrow = ARROW_TYPES[kind]
        return _Column(name, arrow, Build(lambda values: pa.array(values, arrow)), as_text=kind is ColumnKind.JSON)

    def _add(self, lines: list[bytes]) -> None:
        values = self._decode(b"[" + b",".join(lines) + b"]")
        arrays = [
            column.build.make(column.values(found)) for found, column in zip(values, self._columns, strict=True)
        ]  # fmt: skip
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._batches.append(batch)
        self._batch_bytes += batch.nbytes
        self._batch_rows += batch.num_rows
        if self._batch_bytes >= GROUP_BYTES or self._batch_rows >= GROUP_ROWS:
            self._write_group()

    def _write_group(self) -> None:
        if self._batches:
            assert self._writer is not None
            table = pa.Table.from_batches(self._batches)
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._rows += table.num_rows
            self._batches, self._batch_bytes, self._batch_rows = [], 0, 0


class _Column(Struct, frozen=True):
    """A column of the result: its values as the builder wants them."""

    name: str
    type: pa.DataType
    build: Build
    as_text: bool = False  # each value as its own JSON text

    @property
    def is_raw(self) -> bool:
        return self.as_text or self.build.exact

    def values(self, decoded: list[Any]) -> list[Any]:
        if self.as_text:
            texts = [bytes(value).strip().decode() for value in decoded]
            return [None if text == "null" else text for text in texts]
        return [_decode_exact(bytes(value)) for value in decoded] if self.build.exact else decoded


_decode_exact = msgspec.json.Decoder(float_hook=Decimal).decode


def _columns_decoder(columns: list[_Column]) -> Callable[[bytes], list[list[Any]]]:
    """Decodes a JSON array of rows into the values of each column, in order; a row may lack some."""
    if any(_NOT_IN_FIELDS.search(column.name) for column in columns):
        return _slow_decoder(columns)
    fields: list[Any] = [
        (f"c{number}", Raw, Raw(b"null")) if column.is_raw else (f"c{number}", Any, None)
        for number, column in enumerate(columns)
    ]
    names = {f"c{number}": column.name for number, column in enumerate(columns)}
    decode = msgspec.json.Decoder(list[msgspec.defstruct("ResultRow", fields, rename=names, gc=False)]).decode
    getters = [attrgetter(f"c{number}") for number in range(len(columns))]

    def decode_columns(data: bytes) -> list[list[Any]]:
        rows = decode(data)
        return [list(map(getter, rows)) for getter in getters]

    return decode_columns


def _slow_decoder(columns: list[_Column]) -> Callable[[bytes], list[list[Any]]]:
    """For names that no field of a struct may have."""
    decode, null = msgspec.json.Decoder(list[dict[str, Raw]]).decode, Raw(b"null")

    def decode_columns(data: bytes) -> list[list[Any]]:
        rows = decode(data)
        found = [[row.get(column.name, null) for row in rows] for column in columns]
        return [
            values if column.is_raw else list(map(msgspec.json.decode, values))
            for values, column in zip(found, columns, strict=True)
        ]

    return decode_columns


def create(output: Path, source: TableSource, digest: Digest | None = None) -> ParquetFile:
    return ParquetFile(output, source, digest)
