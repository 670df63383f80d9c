"""The work that jobs give a function's process: rows, blocks of lines, and rows in the form of a live call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from batchmill.engines.function.live import EXACT
from batchmill.engines.function.process import Blame, Origin, ProcessWork, results_of
from batchmill.engines.function.row_reader import RowReader, joined
from batchmill.engines.function.row_results import BlockResults, OpenRows, outcome_of, outcomes_of, read_results
from batchmill.errors import BatchmillError
from batchmill.function_runtime.frames import pack
from batchmill.function_runtime.shared_memory import MemoryWriter
from batchmill.models.function_socket import Buffer
from batchmill.optional import require
from batchmill.types import ColumnBlock, Outcome, Row, RowBlock, RowError
from batchmill.wire.calls import CALL_FORMS, FUNCTION_ERROR, NAMED, CallError, ParsedCalls

PARTS = 16  # of a batch whose process died: its calls are many, since each death costs a start and a setup
READ_COLUMN = "batchmill.engines.function.column_results:read_column"


Block = RowBlock | ColumnBlock


class Batcher(Protocol):
    """Sends batches to the process and receives their results."""

    named: tuple[str, int]  # the model's name and the function's version, for replies in the form of live calls
    reader: RowReader

    def next_id(self) -> int: ...

    def put(self, outcomes: list[Outcome], sent_at: float, errors: dict[int, CallError]) -> None: ...

    def put_results(
        self, block: Block, results: BlockResults, sent_at: float, errors: dict[int, CallError]
    ) -> None: ...

    def send(self, rows: Sequence[Row]) -> None: ...

    def drop(self, rows: int) -> None:
        """Forget rows that get no outcome: their job has ended."""

    def read_again(self, batch: BlockBatch, blame: Blame | None) -> None:
        """Read the open rows of a block of columns, and repeat what `BlockBatch.parted` makes of them."""

    def give_up(self, row: Row, blame: Blame, deaths: int) -> None: ...

    def measure(self, rows: int, sent_at: float) -> None: ...


class RowBatch(ProcessWork):
    """Plain rows in one frame. `deaths`: of processes that were running them."""

    __slots__ = ("_batcher", "_items", "_open", "_rows", "deaths", "sent_at")
    from_job = is_staged = True

    def __init__(self, batcher: Batcher, rows: Sequence[Row], items: Sequence[bytes], deaths: int = 0) -> None:
        super().__init__(batcher.next_id(), ParsedCalls(len(rows), NAMED, joined(items)))
        self._batcher, self._rows, self._items, self.deaths = batcher, rows, items, deaths
        self.origin = origin_of(rows)
        self._open = OpenRows(len(rows))
        self.sent_at = time.monotonic()

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        places = self._open.places_of(meta)
        results = results_of(meta, buffers)
        index = {place: at for at, place in enumerate(places)} if results.errors else {}
        errors = {index[row]: error for row, error in results.errors.items()}
        outcomes = outcomes_of([self._rows[place] for place in places], results.values, errors)
        self._open.close(places)
        self._batcher.put(outcomes, self.sent_at, errors)
        if self._open.count:
            return False
        self._batcher.measure(len(self._rows), self.sent_at)
        return True

    def _of(self, places: Sequence[int], deaths: int) -> RowBatch:
        return RowBatch(self._batcher, [self._rows[at] for at in places], [self._items[at] for at in places], deaths)

    def again(self) -> ProcessWork | None:
        return self if self._open.is_whole else self._of(self._open.places(), self.deaths)

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        blamed = set(blame.rows)
        still = self._open.places()
        at_fault = [place for place in still if place in blamed]
        others = [place for place in still if place not in blamed]
        again = self._of(others, self.deaths) if others else None
        deaths = self.deaths + 1
        if not at_fault:
            return again, []
        if not blame.is_alone:
            return again, [self._of(at_fault, deaths)]
        if len(at_fault) > 1:
            step = math.ceil(len(at_fault) / PARTS)
            parts = [at_fault[first : first + step] for first in range(0, len(at_fault), step)]
            return again, [self._of(part, deaths) for part in parts]
        if deaths < blame.fault.deaths_max:
            return again, [self._of(at_fault, deaths)]
        self._batcher.give_up(self._rows[at_fault[0]], blame, deaths)
        return again, []

    def fail(self, error: BatchmillError) -> None:
        """Leave the rows without an outcome: `run` ends."""


class BlockBatch(ProcessWork):
    """Rows in one frame as lines or columns of the dataset; results come back in the same form."""

    __slots__ = ("_batcher", "_block", "_called", "_layout", "_open", "sent_at")
    from_job = is_staged = True

    def __init__(self, batcher: Batcher, block: Block, layout: dict[str, Any]) -> None:
        super().__init__(batcher.next_id(), ParsedCalls(len(block), NAMED, b""))
        self._batcher, self._block, self._layout = batcher, block, layout
        numbers = block.numbers
        is_run = numbers[-1] - numbers[0] == len(numbers) - 1
        self.origin = (block.lease.project, block.lease.job_id, *([numbers[0]] if is_run else []))
        self._open = OpenRows(len(numbers))
        self._called = 0  # rows that the function was called with, and that have a result
        self.sent_at = time.monotonic()

    def frame(self, memory: MemoryWriter | None) -> list[Buffer]:
        numbers = self._block.numbers
        which = {"first": numbers.start} if isinstance(numbers, range) else {"numbers": list(numbers)}
        meta = {"kind": "ask", "id": self.id, "rows": len(numbers), "from_job": True, "staged": True, "exact": False}
        data = self._block.data if isinstance(self._block, ColumnBlock) else self._block.lines
        return pack(meta | {"of": self.origin} | self._layout | which, [data], memory)

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        places = self._open.places_of(meta)
        errors = {int(row): CallError(*error) for row, error in meta["errors"].items()}
        results = self._read(places, bytes(buffers[0]), errors)
        self._open.close(places)
        self._called += len(places) - len(results.other_forms)
        self._batcher.put_results(self._block, results, self.sent_at, errors)
        if self._open.count:
            return False
        if self._called:
            self._batcher.measure(self._called, self.sent_at)
        return True

    def _read(self, places: range | list[int], data: bytes, errors: dict[int, CallError]) -> BlockResults:
        if isinstance(self._block, ColumnBlock):
            return require(READ_COLUMN, "results as columns")(self._block, places, data, errors)
        return read_results(self._block, places, data, errors)

    async def read(self) -> list[Row]:
        """The rows of a block of columns, whole; none if their job has ended."""
        assert isinstance(self._block, ColumnBlock)
        return await self._block.read()

    def parted(
        self, block_rows: Sequence[Row], blame: Blame | None
    ) -> tuple[ProcessWork | None, list[ProcessWork]]:  # fmt: skip
        """What becomes of the open rows, as of `blame`; without blame they are repeated."""
        batch, places = self._single_rows(block_rows)
        if blame is None or batch is None:
            return batch, []
        blamed = frozenset(blame.rows)
        rows = [index for index, place in enumerate(places) if place in blamed]
        return batch.blame(replace(blame, rows=rows))

    def _single_rows(self, block_rows: Sequence[Row]) -> tuple[RowBatch | None, list[int]]:
        """The open rows as a RowBatch, which can run them in any combination, and the index of each in the block."""
        if not block_rows:
            self._batcher.drop(self._open.count)
            return None, []
        still = self._open.places()
        rows = [block_rows[place] for place in still]
        places: list[int] = []
        items: list[bytes] = []
        others: list[Row] = []
        for place, (row, read) in enumerate(zip(rows, self._batcher.reader.read(rows), strict=True)):
            if isinstance(read, bytes):
                places.append(place)
                items.append(read)
            else:
                others.append(row)
        if others:
            self._batcher.send(others)
        if not places:
            return None, []
        batch = RowBatch(self._batcher, [rows[place] for place in places], items)
        batch.strikes = self.strikes
        return batch, [still[place] for place in places]

    def _split(self, blame: Blame | None) -> tuple[ProcessWork | None, list[ProcessWork]]:
        if isinstance(self._block, ColumnBlock):  # they may lie in a store: the event loop does not wait for it
            self._batcher.read_again(self, blame)
            return None, []
        return self.parted(self._block.rows(), blame)

    def again(self) -> ProcessWork | None:
        return self if self._open.is_whole else self._split(None)[0]

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        return self._split(blame)

    def fail(self, error: BatchmillError) -> None:
        """As `RowBatch.fail`."""


class FormRow(ProcessWork):
    """A row in a live call's form: as many calls as its body has."""

    __slots__ = ("_batcher", "_deaths", "_form", "_row", "sent_at")
    from_job = True

    def __init__(self, batcher: Batcher, row: Row, form: str, parsed: ParsedCalls) -> None:
        super().__init__(batcher.next_id(), parsed, is_exact=form in EXACT)
        self._batcher, self._row, self._form = batcher, row, form
        self.origin = origin_of([row])
        self._deaths = 0
        self.sent_at = time.monotonic()

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        results = results_of(meta, buffers)
        try:
            body, _ = CALL_FORMS[self._form].write(self.parsed, results, *self._batcher.named)
            outcome = outcome_of(self._row, body)
        except BatchmillError as error:
            outcome = Outcome(self._row, error=self._error(error, results.errors), status=0)
        self._batcher.put([outcome], self.sent_at, results.errors)
        return True

    def _error(self, error: BatchmillError, errors: dict[int, CallError]) -> RowError:
        """The error of user code by its type, without a traceback, as rows in other forms have it."""
        if error.code != FUNCTION_ERROR or not errors:
            return row_error(error)
        first = min(errors)
        place = f"in row {first + 1} of {self.parsed.rows}: " if self.parsed.rows > 1 else ""
        return RowError(errors[first].code, f"{place}{errors[first].message}")

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        self._deaths += 1
        if blame.is_alone and self._deaths >= blame.fault.deaths_max:
            self._batcher.give_up(self._row, blame, self._deaths)
            return None, []
        return None, [self]

    def fail(self, error: BatchmillError) -> None:
        """As `RowBatch.fail`."""


def row_error(error: BatchmillError) -> RowError:
    return RowError(error.code, error.message)


def origin_of(rows: Sequence[Row]) -> Origin:
    """The origin of one lease's rows: project, job, and the first number if they are consecutive."""
    lease = rows[0].lease
    if lease is None:
        return ()
    is_run = rows[-1].number - rows[0].number == len(rows) - 1
    return (lease.project, lease.job_id, rows[0].number) if is_run else (lease.project, lease.job_id)
