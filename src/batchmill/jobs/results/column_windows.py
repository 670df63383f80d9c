"""The rows of a job whose dataset is columns, joined with their outcomes, a bounded window at a time in row order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Raw, Struct

from batchmill.datasets.column_rows import ColumnRows
from batchmill.errors import LedgerBroken
from batchmill.function_runtime.arrow.rows import JSON, OUTPUT
from batchmill.function_runtime.arrow.values import ArrowValues
from batchmill.jobs.results.parquet.result_parquet import ARROW_TYPES
from batchmill.jobs.results.result_columns import ColumnKinds
from batchmill.jobs.results.results import ColumnKind, GatherOrder
from batchmill.jobs.results.row_windows import OutcomeIndex, Window
from batchmill.store.segments.format import Block, read_payload, where
from batchmill.types import RowError, SegmentRef
from batchmill.wire.json_bytes import append_members, decode, encode, split_object
from batchmill.wire.rows.forms import ERROR
from batchmill.wire.rows.parquet_lines import lines_in, result_field

NONE = -1  # no outcome
KEPT_BYTES = 64 * 1024 * 1024  # of blocks in memory: those of a window and around it
SLICES_MAX = 64  # of a window; where outcomes alternate more often, its rows are picked one by one

_values = ArrowValues(number=lambda text: Raw(text.encode()))


class _ErrorLine(Struct):
    error: str


_error_line = msgspec.json.Decoder(_ErrorLine)


class ColumnIndex(OutcomeIndex):
    """The number of the block with every row's outcome, and its place there."""

    refused = 0
    followers: Sequence[int] = ()

    def _begin(self, refs: list[SegmentRef]) -> None:
        self.blocks: list[Block] = []
        self.block_of = self.arrays.full(np.int32, NONE)
        self.place_of = self.arrays.full(np.uint32, 0)

    def _add(self, block: Block, rows: np.ndarray) -> None:
        self.block_of[rows] = len(self.blocks)
        self.place_of[rows] = np.arange(block.n, dtype=np.uint32)
        self.blocks.append(block)

    def _finish(self, order: GatherOrder) -> None:
        self.missing = self.count(self.block_of, NONE)
        # By number of the block; NONE is the last one.
        self.is_failed = np.array([*(not block.ok for block in self.blocks), True])
        self._sizes = np.array([*(block.payload_bytes for block in self.blocks), 0])

    def payload_bytes(self, first: int, end: int) -> int:
        """The bytes of all blocks that have outcomes of the rows first <= n < end."""
        is_there = np.zeros(len(self._sizes), bool)
        is_there[self.block_of[first:end]] = True
        return int(self._sizes[is_there].sum())


class Outcomes(Struct, eq=False):
    """The outcomes of one block: a typed column, or the JSON of every value, or error lines."""

    column: pa.Array | None = None
    texts: list[bytes] = []
    errors: list[bytes] = []

    def json(self) -> list[bytes]:
        """The JSON of every value."""
        return self.texts if self.column is None else [encode(value) for value in _values.values(self.column)]

    def values(self) -> list[Any]:
        """Every value, as JSON has it. A number that no machine number holds comes as Raw."""
        return list(map(_decoded, self.texts)) if self.column is None else _values.values(self.column)


def _decoded(text: bytes) -> Any:
    try:
        return decode(text)
    except msgspec.ValidationError:
        return Raw(text)


class OutcomeReader:
    """Reads the outcomes of blocks. The newest ones are kept."""

    def __init__(self, index: ColumnIndex) -> None:
        self._index = index
        self._kept: OrderedDict[int, Outcomes] = OrderedDict()
        self._kept_bytes = 0

    def read(self, number: int) -> Outcomes:
        """Raises: LedgerBroken if the block does not hold what it says."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        block = self._index.blocks[number]
        outcomes = self._kept[number] = self._read(block)
        self._kept_bytes += block.payload_bytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            dropped, _ = self._kept.popitem(last=False)
            self._kept_bytes -= self._index.blocks[dropped].payload_bytes
        return outcomes

    def _read(self, block: Block) -> Outcomes:
        payload, place = read_payload(self._index.segments, block), where(self._index.segments, block)
        if block.is_columnar:
            return _columns_of(block, payload, place)
        lines = payload.split(b"\n")
        if lines.pop() or len(lines) != block.n:
            raise LedgerBroken(f"{place}: the payload is not {block.n} lines")
        if block.ok:
            return Outcomes(texts=[bytes(split_object(line)[OUTPUT]) for line in lines])
        return Outcomes(errors=[line + b"\n" for line in lines])


def _columns_of(block: Block, payload: bytes, place: str) -> Outcomes:
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            batch = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise LedgerBroken(f"{place}: {error}") from None
    if batch.num_rows != block.n or batch.schema.names not in ([OUTPUT], [JSON]):
        raise LedgerBroken(f"{place}: the payload is not {block.n} results")
    column = batch.column(0)
    return Outcomes(column) if batch.schema.names == [OUTPUT] else Outcomes(texts=column.to_pylist())


class OutputColumn:
    """One type for all results of a job, and the results as arrays of it.

    Results that functions gave as columns keep their type. Others have the type that their JSON values have together.
    """

    def __init__(
        self, index: ColumnIndex, reader: OutcomeReader, known: tuple[bytes, str | None] | None = None
    ) -> None:
        """Args: known: what `learned` has returned for all rows of the job."""
        self._reader = reader
        self._kind: ColumnKind | None = None  # None: every result has the type
        if known is not None:
            self.type = pa.ipc.read_schema(pa.py_buffer(known[0])).field(OUTPUT).type
            self._kind = None if known[1] is None else ColumnKind(known[1])
            return
        numbers = [number for number, block in enumerate(index.blocks) if block.ok]
        types: set[pa.DataType | None] = set()
        for number in numbers:
            outcomes = reader.read(number)
            types.add(None if outcomes.column is None else outcomes.column.type)
        if len(types) == 1 and (only := types.pop()) is not None:
            self.type = only
        else:
            self._kind = self._learn(numbers)
            self.type = ARROW_TYPES[self._kind]

    @property
    def field(self) -> pa.Field:
        return result_field(OUTPUT, self.type, is_json=self._kind is ColumnKind.JSON)

    def learned(self) -> tuple[bytes, str | None]:
        """The type as an Arrow schema, and the kind of the values."""
        schema = pa.schema([pa.field(OUTPUT, self.type)])
        return schema.serialize().to_pybytes(), None if self._kind is None else str(self._kind)

    def _learn(self, numbers: list[int]) -> ColumnKind:
        kinds = ColumnKinds()
        for number in numbers:
            for value in self._reader.read(number).values():
                kinds.note(OUTPUT, value)
            if kinds.kind(OUTPUT) is ColumnKind.JSON:
                break  # no other kind holds what was seen
        return kinds.kind(OUTPUT)

    def array(self, number: int) -> pa.Array:
        """The results of a block; of a block of errors as many nulls as rows."""
        outcomes = self._reader.read(number)
        if outcomes.errors:
            return pa.nulls(len(outcomes.errors), self.type)
        if self._kind is None and outcomes.column is not None:
            return outcomes.column
        if self._kind is ColumnKind.JSON:
            texts = [text.decode() for text in outcomes.json()]
            return pa.array([None if text == "null" else text for text in texts], self.type)
        return pa.array(outcomes.values(), self.type)


class ColumnWindow(Struct, eq=False):
    """Consecutive rows. `errors`: by index, the error lines of those that failed."""

    first: int
    batch: pa.RecordBatch
    errors: dict[int, bytes]


def error_column(errors: dict[int, bytes], rows: int) -> pa.Array:
    """The messages of rows that failed. Args: errors: by index, their error lines."""
    if not errors:
        return pa.nulls(rows, pa.string())
    texts: list[str | None] = [None] * rows
    for index, line in errors.items():
        texts[index] = _error_line.decode(line).error
    return pa.array(texts, pa.string())


class ColumnWindows:
    """Iterates as often as asked, over the same rows. With `partial` rows that have no outcome yet are left out.

    Args: rows: those of the windows; None: all.
    """

    added = (OUTPUT, ERROR)

    def __init__(
        self, order: GatherOrder, index: ColumnIndex, *, partial: bool = False, rows: range | None = None
    ) -> None:
        self._wanted = range(index.rows) if rows is None else rows
        self._index, self._partial = index, partial
        self._unrun = _unrun_line(order.unrun)
        self.rows = ColumnRows(Path(order.dataset))
        self.reader = OutcomeReader(index)
        self.schema = self.rows.schema

    def close(self) -> None:
        self.rows.close()

    def __iter__(self) -> Iterator[Window]:
        """Windows of lines."""
        for window in self.windows():
            yield self._lines(window)

    def windows(self) -> Iterator[ColumnWindow]:
        """Windows of columns. Raises: InputChanged."""
        first = self._wanted.start
        for batch in self.rows.batches(first, self._wanted.stop):
            self._index.arrays.touch(batch.num_rows)
            yield ColumnWindow(first, batch, self.errors(first, batch.num_rows))
            first += batch.num_rows

    def output(self, first: int, rows: int, output: OutputColumn) -> pa.Array:
        """The results of rows from `first` on; null for those that have none."""
        numbers, places = self._outcomes_of(first, rows)
        cuts = np.flatnonzero((numbers[1:] != numbers[:-1]) | (places[1:] != places[:-1] + 1)) + 1
        if len(cuts) < SLICES_MAX:
            starts = [0, *cuts.tolist()]
            ends = [*starts[1:], len(numbers)]
            slices = [
                self._slice(output, int(numbers[start]), int(places[start]), end - start)
                for start, end in zip(starts, ends, strict=True)
            ]
            return slices[0] if len(slices) == 1 else pa.concat_arrays(slices)
        known, inverse = np.unique(numbers, return_inverse=True)
        arrays = [pa.nulls(1, output.type) if number == NONE else output.array(int(number)) for number in known]
        begins = np.cumsum([0, *map(len, arrays)])[:-1]
        picked = begins[inverse] + np.where(numbers == NONE, 0, places)
        return pa.concat_arrays(arrays).take(pa.array(picked))

    def _slice(self, output: OutputColumn, number: int, place: int, rows: int) -> pa.Array:
        return pa.nulls(rows, output.type) if number == NONE else output.array(number).slice(place, rows)

    def _outcomes_of(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, places = self._index.block_of[first : first + rows], self._index.place_of[first : first + rows]
        return numbers, places.astype(np.int64)

    def errors(self, first: int, rows: int) -> dict[int, bytes]:
        """The error lines of those of `rows` rows from `first` on that failed, by index."""
        numbers, places = self._index.block_of[first : first + rows], self._index.place_of[first : first + rows]
        found = {}
        for index in np.flatnonzero(self._index.is_failed[numbers]).tolist():
            number = int(numbers[index])
            found[index] = self._unrun if number == NONE else self.reader.read(number).errors[int(places[index])]
        return found

    def _lines(self, window: ColumnWindow) -> Window:
        """The rows of a window as lines of the result file."""
        numbers, places = self._outcomes_of(window.first, window.batch.num_rows)
        texts = {int(number): self.reader.read(int(number)).json() for number in np.unique(numbers) if number != NONE}
        kept, lines, failed = [], [], []
        rows = zip(lines_in(window.batch), numbers.tolist(), places.tolist(), strict=True)
        for index, (raw, number, place) in enumerate(rows):
            if number == NONE and self._partial:
                continue
            if index in window.errors:
                failed.append(len(lines))
                error = _error_line.decode(window.errors[index]).error
                tail = b'"output":null,"error":' + encode(error)
            else:
                tail = b'"output":' + texts[number][place] + b',"error":null'
            kept.append(window.first + index)
            lines.append(append_members(raw, tail) + b"\n")
        is_whole = len(kept) == window.batch.num_rows
        return Window(range(window.first, window.first + len(kept)) if is_whole else kept, lines, failed)


def _unrun_line(error: RowError | None) -> bytes:
    """The error line of a row that never ran."""
    text = "" if error is None else f"{error.code}: {error.message}"
    return b'{"output":null,"error":%b}\n' % encode(text)


def open_columns(
    order: GatherOrder, progress: Any, *, partial: bool = False, rows: range | None = None
) -> tuple[ColumnIndex, ColumnWindows]:
    """Raises: as OutcomeIndex."""
    index = ColumnIndex(order, progress)
    return index, ColumnWindows(order, index, partial=partial, rows=rows)
