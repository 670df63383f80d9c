"""Results as Parquet: the columns with the types they had in the input, `output` with the type its values have.

Row groups are written as they fill, so memory does not grow with the rows; the file is opened again and counted before
it is published.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw, Struct

from batchmill.datasets.formats import columns_schema
from batchmill.errors import LedgerBroken
from batchmill.jobs.arrow_values import Build, builder, type_of
from batchmill.jobs.gathering import TableSource
from batchmill.jobs.part_file import PartFile
from batchmill.jobs.result_columns import (
    ERROR,
    FOLDED_FROM,
    OUTPUT,
    ColumnKinds,
    ColumnNames,
    Kind,
    decoded_members,
    in_batches,
)
from batchmill.jobs.results import ResultFile

GROUP_BYTES = 64 * 1024 * 1024  # of Arrow memory in a row group, about
GROUP_ROWS = 1024 * 1024

ARROW_TYPES = {
    Kind.BOOL: pa.bool_(),
    Kind.INT: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.TEXT: pa.string(),
    Kind.INTS: pa.list_(pa.int64()),
    Kind.VECTOR: pa.list_(pa.float64()),
    Kind.JSON: pa.string(),
}


class _Sink(io.RawIOBase):
    """A PartFile as the file object that Arrow writes to, from its beginning to its end."""

    def __init__(self, file: PartFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(bytes(data))  # Arrow's buffer is gone after the call

    def tell(self) -> int:
        return self._file.size_bytes


class ParquetFile:
    def __init__(self, output: Path, source: TableSource) -> None:
        self.must_learn = True
        self._output, self._source = output, source
        self._input_schema = columns_schema(source.dataset)
        self._names, self._kinds = ColumnNames(source), ColumnKinds()
        self._part = PartFile(output)
        self._writer: pq.ParquetWriter | None = None
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._batch_bytes = self._batch_rows = 0

    def learn(self, lines: Sequence[bytes]) -> None:
        kinds = self._kinds
        for members in decoded_members(lines):
            if self._source.fixed:
                kinds.note(OUTPUT, members[OUTPUT])
                continue
            self._names.note(members)
            for name, value in members.items():
                kinds.note(name, value)

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
        digest = self._part.publish()
        return ResultFile(str(self._output), self._rows, self._part.size_bytes, digest)

    def discard(self) -> None:
        self._part.discard()

    def _begin(self) -> None:
        """Settle the columns: every row has been seen."""
        if self._writer is not None:
            return
        self._columns = [self._column(name) for name in self._names.all()]
        self._schema = pa.schema([pa.field(column.name, column.type) for column in self._columns])
        self._decode = _rows_decoder(self._columns)
        self._writer = pq.ParquetWriter(pa.PythonFile(_Sink(self._part), mode="w"), self._schema, compression="zstd")

    def _column(self, name: str) -> _Column:
        if name == ERROR:
            return _Column(name, pa.string(), Build(lambda values: pa.array(values, pa.string())))
        if name == FOLDED_FROM:
            return _Column(name, pa.int64(), Build(lambda values: pa.array(values, pa.int64())))
        if name != OUTPUT and self._input_schema is not None:
            kind = self._input_schema.field(name).type
            return _Column(name, type_of(kind), builder(kind))
        kind = Kind.TEXT if name != OUTPUT and self._source.fixed else self._kinds.kind(name)
        arrow = ARROW_TYPES[kind]
        return _Column(name, arrow, Build(lambda values: pa.array(values, arrow)), as_text=kind is Kind.JSON)

    def _add(self, lines: list[bytes]) -> None:
        rows = self._decode(b"[" + b",".join(lines) + b"]")
        arrays = [
            column.build.make(column.values(list(map(attrgetter(field), rows))))
            for field, column in zip(rows[0].__struct_fields__, self._columns, strict=True)
        ]
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


def _rows_decoder(columns: list[_Column]) -> Callable[[bytes], list[Any]]:
    """Decodes a JSON array of rows into structs with a field for each column, in order."""
    fields: list[Any] = [
        (f"c{number}", Raw, Raw(b"null")) if column.is_raw else (f"c{number}", Any, None)
        for number, column in enumerate(columns)
    ]
    names = {f"c{number}": column.name for number, column in enumerate(columns)}
    return msgspec.json.Decoder(list[msgspec.defstruct("ResultRow", fields, rename=names, gc=False)]).decode


def create(output: Path, source: TableSource) -> ParquetFile:
    return ParquetFile(output, source)
