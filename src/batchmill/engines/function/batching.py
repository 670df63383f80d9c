"""RowBatcher: groups job rows into batches, long enough to keep the process busy, short enough to pause."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from batchmill.engines.function.process import OWN_IDS, Blame, Counts, Process
from batchmill.engines.function.row_batches import Block, BlockBatch, FormRow, RowBatch, origin_of, row_error
from batchmill.engines.function.row_reader import FormBody, RowReader
from batchmill.engines.function.row_results import BlockResults, failed
from batchmill.errors import BatchmillError
from batchmill.ports.engines import BlockFeed, BlockSink, Feed, Sink
from batchmill.types import ColumnBlock, FunctionSpec, ModelSpec, Outcome, Row, RowBlock, RowError
from batchmill.wire.calls import CALL_FORMS, CallError

ROWS_MAX = 2048  # of one RowBatch, or as many as go together in one call; there are two
COLUMN_ROWS_MAX = 16_384  # of one block of columns
BATCH_S = 0.1  # how long a RowBatch is meant to run
GROWTH_MAX = 8  # from one RowBatch to the next
TOGETHER = 64  # rows of a function that may take many at once


class RowBatcher:
    """Runs a feed through the process. Concurrency: one event loop; one `run` at a time."""

    def __init__(self, model: ModelSpec, function: FunctionSpec, process: Process, counts: Counts) -> None:
        self.named = model.name, function.number
        self._process, self._counts = process, counts
        self._received_shapes, self._most = function.received_shapes, model.limits.in_flight_max
        self._ids = itertools.count(OWN_IDS)
        self._sink: Sink | None = None
        self.reader = RowReader(function.interface)
        self._room = asyncio.Event()
        self._reading: set[asyncio.Task[None]] = set()  # rows of blocks of columns whose process died
        self._failed: asyncio.Future[None]  # of a run: the first of those that failed
        self.held = 0  # rows taken and not put
        self._size = 1
        self._rows_max = ROWS_MAX
        self._last_done = 0.0
        self.interface = function.interface

    def next_id(self) -> int:
        return next(self._ids)

    @property
    def most(self) -> int:
        """The maximum number of rows to hold."""
        most = 2 * max(self._rows_max, self._batch_size())
        return min(self._most or most, most)

    async def run(self, feed: Feed, sink: Sink) -> None:
        """As `Engine.run`. Raises: ModelFailed when the process cannot be had any more."""
        self._sink, self.reader = sink, RowReader(self.interface)
        feeding = asyncio.create_task(self._feed_all(feed))
        broken = asyncio.create_task(self._process.broken.wait())
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({feeding, broken, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if feeding.done():
                feeding.result()
            else:
                assert self._process.failure is not None
                raise self._process.failure
        finally:
            self._sink = None
            tasks = {feeding, broken, *self._reading}
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            await asyncio.wait(tasks)
            for work in [work for work in self._process.works.values() if work.from_job]:
                self._process.drop(work)
            self.held = 0

    async def _feed_all(self, feed: Feed) -> None:
        while taken := await self._take(feed):
            self.held += len(taken)
            layout = None if isinstance(taken, list) else self.reader.block_layout(taken)
            if isinstance(taken, list):
                self.send(taken)
            elif layout is None:
                self._send_read(taken.rows() if isinstance(taken, RowBlock) else await taken.read(), len(taken))
            else:
                self._rows_max = COLUMN_ROWS_MAX if isinstance(taken, ColumnBlock) else ROWS_MAX
                self._process.begin(BlockBatch(self, taken, layout))
            while self.held > self._unit_size() or self.held >= self.most:
                self._room.clear()
                await self._room.wait()
        while self.held:
            self._room.clear()
            await self._room.wait()

    async def _take(self, feed: Feed) -> list[Row] | Block | None:
        """The next rows, in the form that moves fastest. None or empty: no more will come."""
        if not (isinstance(feed, BlockFeed) and isinstance(self._sink, BlockSink)):
            return await feed.take(self._wanted())
        child = self._process.child
        return await feed.take_block(
            self._wanted(), self.reader.columns() if child is not None and child.reads_arrow else None
        )  # fmt: skip

    def _unit_size(self) -> int:
        """The rows of one batch: as many as last BATCH_S, and whole function batches."""
        together = self.interface.calls != "row" or self.interface.is_async
        batch = self._batch_size()
        unit = max(batch, TOGETHER if together else 1)
        return min(max(unit, self._size), max(self._rows_max, batch))

    def _batch_size(self) -> int:
        child = self._process.child
        return max(1, child.batch_size) if child is not None else 1

    def _wanted(self) -> int:
        return max(1, min(self._unit_size(), self.most - self.held))

    def _send_read(self, rows: Sequence[Row], taken: int) -> None:
        """Send rows of a block; none of them if their job has ended."""
        if rows:
            self.send(rows)
        else:
            self.drop(taken)

    def read_again(self, batch: BlockBatch, blame: Blame | None) -> None:
        """Read the open rows of a block of columns, which its process has not finished, and send them again."""
        reading = asyncio.create_task(self._read_again(batch, blame))
        self._reading.add(reading)
        reading.add_done_callback(self._was_read)

    async def _read_again(self, batch: BlockBatch, blame: Blame | None) -> None:
        again, suspects = batch.parted(await batch.read(), blame)
        if again is not None and batch.is_suspect:
            again, suspects = None, [*suspects, again]
        self._process.repeat(again, suspects)

    def _was_read(self, reading: asyncio.Task[None]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled() and (error := reading.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    def send(self, rows: Sequence[Row]) -> None:
        plain: list[Row] = []
        items: list[bytes] = []
        refused: list[Outcome] = []
        for row, read in zip(rows, self.reader.read(rows), strict=True):
            if isinstance(read, bytes):
                plain.append(row)
                items.append(read)
            elif isinstance(read, RowError):
                refused.append(Outcome(row, error=read, status=0))
            else:
                refused += self._send_form(row, read)
        if plain:
            self._process.begin(RowBatch(self, plain, items))
        if refused:
            self.put(refused, time.monotonic(), {})

    def _send_form(self, row: Row, read: FormBody) -> list[Outcome]:
        """Send a row in its own form; put its error if it cannot be read."""
        try:
            form = CALL_FORMS[read.form]
            parsed = form.read(read.body, b"", self.interface, received_shapes=self._received_shapes)
        except BatchmillError as error:
            return [Outcome(row, error=row_error(error), status=0)]
        self._process.begin(FormRow(self, row, read.form, parsed))
        return []

    # -- what comes back ----------------------------------------------------------------------------------------------

    def put(self, outcomes: list[Outcome], sent_at: float, errors: dict[int, CallError]) -> None:
        """Put outcomes; tracebacks of `errors` go to the log."""
        if self._sink is None:
            return
        bad = sum(outcome.error is not None for outcome in outcomes)
        took_ns = int((time.monotonic() - sent_at) * 1e9)
        if bad < len(outcomes):
            self._counts.answered(True, took_ns, len(outcomes) - bad)
        if bad:
            self._counts.answered(False, took_ns, bad)
            self._log(outcomes, errors)
        self.held -= len(outcomes)
        self._sink.put(outcomes)
        self._room.set()

    def put_results(self, block: Block, results: BlockResults, sent_at: float, errors: dict[int, CallError]) -> None:
        """Put finished rows of a block; tracebacks of `errors` go to the log."""
        if not isinstance(self._sink, BlockSink):  # the run has ended
            return
        for done in results.ok:
            rows = len(done.numbers)
            self._counts.answered(True, int((time.monotonic() - sent_at) * 1e9), rows)
            self.held -= rows
            self._sink.put_block(done)
        if results.other_forms:
            self.send(results.other_forms)
        if results.failed:
            by_number = {block.numbers[place]: error for place, error in errors.items()}
            for outcome in results.failed:
                self._log_trace(outcome.row, by_number.get(outcome.row.number))
            self.put(results.failed, sent_at, {})
        self._room.set()

    def _log(self, outcomes: list[Outcome], errors: dict[int, CallError]) -> None:
        for place, error in errors.items():
            self._log_trace(outcomes[place if place < len(outcomes) else 0].row, error)

    def _log_trace(self, row: Row, error: CallError | None) -> None:
        child = self._process.child
        if error is None or not error.trace or child is None:
            return
        if child.log.traceback(error.code, error.trace, f"row {row.number}"):
            self._note(row, error.trace)

    def _note(self, row: Row, trace: str) -> None:
        calls = self._process.calls
        if calls is not None and (origin := origin_of([row])):
            calls.write(trace, origin[0], f"{origin[1]} row {row.number}")

    def drop(self, rows: int) -> None:
        """Forget rows that get no outcome: their job has ended."""
        self.held -= rows
        self._room.set()

    def give_up(self, row: Row, blame: Blame, deaths: int) -> None:
        """Put the error of a row that kills every process it runs in."""
        fault = blame.fault
        text = fault.message if deaths == 1 else f"{fault.message} (tried {deaths} times)"
        self.put([failed(row, CallError(fault.code, text))], time.monotonic(), {})

    def measure(self, rows: int, sent_at: float) -> None:
        """Learn how many rows last BATCH_S, from a finished batch."""
        now = time.monotonic()
        took_s = now - max(sent_at, self._last_done)
        self._last_done = now
        fitting = int(rows * BATCH_S / max(took_s, 1e-6))
        self._size = max(1, min(fitting, max(rows, self._size) * GROWTH_MAX, self._rows_max))
