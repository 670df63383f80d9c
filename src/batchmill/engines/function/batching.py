"""RowBatcher: groups job rows into batches, long enough to keep the process busy, short enough to pause."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.engines.function.live import EXACT
from batchmill.engines.function.process import (
    HUNG,
    OWN_IDS,
    Blame,
    Counts,
    Origin,
    Process,
    ProcessWork,
    Stages,
    results_of,
)
from batchmill.errors import BatchmillError
from batchmill.models.function_socket import Buffer
from batchmill.ports import Feed, Sink
from batchmill.types import FunctionSpec, Interface, ModelSpec, Outcome, Row, RowError
from batchmill.wire.calls import ARGUMENTS, CALL_FORMS, FUNCTION_ERROR, NAMED, CallError, ParsedCalls, form_of_body
from batchmill.wire.forms import OpenAIForm, usage_of
from batchmill.wire.json_bytes import DEPTH_MAX, decode, encode, is_too_deep, join_object, split_object
from batchmill.wire.text_cells import CellReader

MESSAGE_CHARS_MAX = 2048
SHALLOW_BYTES_MAX = 2 * DEPTH_MAX  # a result up to here cannot nest too deep
ADDRESSES = ("model", "stream")  # fields of a body that are not arguments, unless the function names them

# What reading a row may raise.
READ_ERRORS = (BatchmillError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

FORM_WORDS = (b'"data"', b'"inputs"', b"/infer")  # a row without them is in no form of live calls

_values = msgspec.json.Decoder(list[Raw])


class FormBody(Struct, frozen=True, gc=False):
    """The body of a row in a live call's form."""

    form: str
    body: bytes


Read = bytes | FormBody | RowError  # bytes: the JSON object of its arguments


class _Line(Struct, gc=False):
    """A line of an OpenAI file with raw members."""

    custom_id: Raw
    url: str
    body: Raw


_lines = msgspec.json.Decoder(list[_Line])


class RowReader:
    """Reads rows for one function. Its process drops fields that the function does not take."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        names = {each.name for each in interface.inputs}
        takes_any = interface.takes_more or (interface.takes != "arguments" and not names)
        self._strange = frozenset(ADDRESSES) - names if takes_any else frozenset()  # would be taken for arguments
        self._cells = CellReader(interface.inputs)

    def read(self, rows: Sequence[Row]) -> Sequence[Read]:
        """The call of each row."""
        together = self._read_together(rows)
        return [self._read_one(row) for row in rows] if together is None else together

    def _read_together(self, rows: Sequence[Row]) -> Sequence[Read] | None:
        """Decode all rows in one call; None if a row is unusual."""
        form, raws = rows[0].form, [row.raw for row in rows]
        text = joined(raws)
        try:
            if type(form) is not OpenAIForm:
                if self._cells.is_needed and any(row.form.is_text for row in rows):
                    return None
                return raws if len(_values.decode(text)) == len(rows) else None
            if self._strange or any(word in text for word in FORM_WORDS):
                return None
            lines = _lines.decode(text)
        except READ_ERRORS:
            return None
        if len(lines) != len(rows) or any(row.form is not form for row in rows):
            return None
        for row, line in zip(rows, lines, strict=True):
            row.custom_id = line.custom_id  # type: ignore[assignment]  # Raw has the buffer that % wants
        return [bytes(line.body) for line in lines]

    def _read_one(self, row: Row) -> Read:
        try:
            if not isinstance(row.form, OpenAIForm):
                if self._cells.is_needed and row.form.is_text:
                    return encode(self._cells.read(row.form.arguments(row)))
                split_object(row.raw)
                return row.raw
            request = row.form.request(row)
            fields = split_object(request.body)
            form = form_of_body(request.url, fields, self._interface)
            if form != ARGUMENTS:
                return FormBody(form, request.body)
            if self._strange.isdisjoint(fields):
                return request.body
            return join_object({name: value for name, value in fields.items() if name not in self._strange})
        except BatchmillError as error:
            return RowError(error.code, error.message)
        except READ_ERRORS as error:
            return RowError("invalid_json", f"the row cannot be read: {error}")


def outcome_of(row: Row, body: bytes) -> Outcome:
    """The outcome of a row whose call returned this JSON."""
    if len(body) > SHALLOW_BYTES_MAX and is_too_deep(body, DEPTH_MAX):
        message = f"the function returned a value nested deeper than {DEPTH_MAX} levels"
        return Outcome(row, error=RowError("bad_return", message), status=0)
    if b'"usage"' in body and body[:1] == b"{":
        return Outcome(row, body, None, 200, usage_of(decode(body)))
    return Outcome(row, body)


def outcomes_of(rows: Sequence[Row], values: bytes, errors: dict[int, CallError]) -> list[Outcome]:
    """The outcomes of consecutive rows; `errors` by index."""
    bodies = _values.decode(values)
    if len(bodies) != len(rows):
        wrong = RowError("bad_return", f"the function's process answered {len(bodies)} of {len(rows)} rows")
        return [Outcome(row, error=wrong, status=0) for row in rows]
    if not errors and b'"usage"' not in values and len(values) <= SHALLOW_BYTES_MAX:
        return [Outcome(row, bytes(body)) for row, body in zip(rows, bodies, strict=True)]
    return [
        failed(row, errors[place]) if place in errors else outcome_of(row, bytes(body))
        for place, (row, body) in enumerate(zip(rows, bodies, strict=True))
    ]


def failed(row: Row, error: CallError) -> Outcome:
    """The outcome of a row that has no result."""
    message = error.message[:MESSAGE_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
    return Outcome(row, error=RowError(error.code, message), status=0)


def joined(items: Sequence[bytes]) -> bytes:
    """A JSON array of these items."""
    return b"[" + b",".join(items) + b"]"


ROWS_MAX = 2048  # of one RowBatch, or as many as go together in one call; there are two
BATCH_S = 0.1  # how long a RowBatch is meant to run
GROWTH_MAX = 8  # from one RowBatch to the next
TOGETHER = 64  # rows of a function that may take many at once
DEATHS_MAX = 3  # of processes that a row may cause


class RowBatch(ProcessWork):
    """Plain rows in one frame. `deaths`: of processes that were running them."""

    __slots__ = ("_received", "_items", "_left", "_rows", "_batcher", "deaths", "sent_at")
    from_job = True

    def __init__(self, batcher: RowBatcher, rows: Sequence[Row], items: Sequence[bytes], deaths: int = 0) -> None:
        super().__init__(batcher.next_id(), ParsedCalls(len(rows), NAMED, joined(items)))
        self._batcher, self._rows, self._items, self.deaths = batcher, rows, items, deaths
        self.origin = _origin(rows)
        self._left = len(rows)
        self._received: list[tuple[int, int]] = []  # first row, rows
        self.sent_at = time.monotonic()

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        first, count = meta["first"], meta["rows"]
        results = results_of(meta, buffers)
        self._left -= count
        self._received.append((first, count))
        errors = {row - first: error for row, error in results.errors.items()}
        self._batcher.put(outcomes_of(self._rows[first : first + count], results.values, errors), self.sent_at, errors)
        if self._left <= 0:
            self._batcher.measure(len(self._rows), self.sent_at)
        return self._left <= 0

    def _open(self) -> list[int]:
        """The indexes of rows without a result."""
        came = {place for first, count in self._received for place in range(first, first + count)}
        return [place for place in range(len(self._rows)) if place not in came]

    def _of(self, places: Sequence[int], deaths: int) -> RowBatch:
        return RowBatch(self._batcher, [self._rows[at] for at in places], [self._items[at] for at in places], deaths)

    def again(self) -> ProcessWork | None:
        if not self._received:
            return self
        places = self._open()
        return self._of(places, self.deaths) if places else None

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        blamed = set(blame.rows)
        still = self._open()
        at_fault = [place for place in still if place in blamed]
        others = [place for place in still if place not in blamed]
        again = self._of(others, self.deaths) if others else None
        deaths = self.deaths + 1
        if not at_fault:
            return again, []
        if not blame.is_alone:
            return again, [self._of(at_fault, deaths)]
        if len(at_fault) > 1:
            middle = len(at_fault) // 2
            return again, [self._of(at_fault[:middle], deaths), self._of(at_fault[middle:], deaths)]
        if deaths < DEATHS_MAX and blame.fault.code != HUNG:
            return again, [self._of(at_fault, deaths)]
        self._batcher.give_up(self._rows[at_fault[0]], blame, deaths)
        return again, []

    def fail(self, error: BatchmillError) -> None:
        """Leave the rows without an outcome: `run` ends."""


class FormRow(ProcessWork):
    """A row in a live call's form: as many calls as its body has."""

    __slots__ = ("_deaths", "_form", "_row", "_stages", "_batcher", "sent_at")
    from_job = True

    def __init__(self, batcher: RowBatcher, row: Row, form: str, parsed: ParsedCalls) -> None:
        super().__init__(batcher.next_id(), parsed, is_exact=form in EXACT)
        self._batcher, self._row, self._form = batcher, row, form
        self.origin = _origin([row])
        self._stages = Stages(parsed.rows)
        self._deaths = 0
        self.sent_at = time.monotonic()

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        results = results_of(meta, buffers)
        if not self._stages.add(meta["first"], meta["rows"], results):
            return False
        errors: dict[int, CallError] = {}
        try:
            whole = self._stages.whole()
            errors = whole.errors
            body, _ = CALL_FORMS[self._form].write(self.parsed, whole, *self._batcher.named)
            outcome = outcome_of(self._row, body)
        except BatchmillError as error:
            outcome = Outcome(self._row, error=self._error(error, errors), status=0)
        self._batcher.put([outcome], self.sent_at, results.errors)
        return True

    def _error(self, error: BatchmillError, errors: dict[int, CallError]) -> RowError:
        """The error of user code by its type, without a traceback, as rows in other forms have it."""
        if error.code != FUNCTION_ERROR or not errors:
            return _row_error(error)
        first = min(errors)
        place = f"in row {first + 1} of {self.parsed.rows}: " if self.parsed.rows > 1 else ""
        return RowError(errors[first].code, f"{place}{errors[first].message}")

    def again(self) -> ProcessWork | None:
        self._stages = Stages(self.parsed.rows)
        return self

    def blame(self, blame: Blame) -> tuple[ProcessWork | None, list[ProcessWork]]:
        self._deaths += 1
        if blame.is_alone and (self._deaths >= DEATHS_MAX or blame.fault.code == HUNG):
            self._batcher.give_up(self._row, blame, self._deaths)
            return None, []
        self.again()
        return None, [self]

    def fail(self, error: BatchmillError) -> None:
        """As `RowBatch.fail`."""


class RowBatcher:
    """Runs a feed through the process. Concurrency: one event loop; one `run` at a time."""

    def __init__(self, model: ModelSpec, function: FunctionSpec, process: Process, counts: Counts) -> None:
        self.named = model.name, function.number
        self._process, self._counts = process, counts
        self._received_shapes, self._most = function.received_shapes, model.limits.in_flight_max
        self._ids = itertools.count(OWN_IDS)
        self._sink: Sink | None = None
        self._room = asyncio.Event()
        self.held = 0  # rows taken and not put
        self._size = 1
        self._last_done = 0.0
        self.interface = function.interface

    def next_id(self) -> int:
        return next(self._ids)

    @property
    def most(self) -> int:
        """The maximum number of rows to hold."""
        most = 2 * max(ROWS_MAX, self._batch_size())
        return min(self._most or most, most)

    async def run(self, feed: Feed, sink: Sink) -> None:
        """As `Engine.run`. Raises: ModelFailed when the process cannot be had any more."""
        self._sink = sink
        feeding = asyncio.create_task(self._feed_all(feed))
        broken = asyncio.create_task(self._process.broken.wait())
        try:
            await asyncio.wait({feeding, broken}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
            else:
                assert self._process.failure is not None
                raise self._process.failure
        finally:
            self._sink = None
            for task in (feeding, broken):
                task.cancel()
            await asyncio.wait({feeding, broken})
            for work in [work for work in self._process.works.values() if work.from_job]:
                self._process.drop(work)
            self.held = 0

    async def _feed_all(self, feed: Feed) -> None:
        reader = RowReader(self.interface)
        while rows := await feed.take(self._wanted()):
            self.held += len(rows)
            self._send(rows, reader)
            while self.held > self._unit_size() or self.held >= self.most:
                self._room.clear()
                await self._room.wait()
        while self.held:
            self._room.clear()
            await self._room.wait()

    def _unit_size(self) -> int:
        """The rows of one batch: as many as last TRAIN_S, and whole function batches."""
        together = self.interface.calls != "row" or self.interface.is_async
        batch = self._batch_size()
        unit = max(batch, TOGETHER if together else 1)
        return min(max(unit, self._size), max(ROWS_MAX, batch))

    def _batch_size(self) -> int:
        child = self._process.child
        return max(1, child.batch_size) if child is not None else 1

    def _wanted(self) -> int:
        return max(1, min(self._unit_size(), self.most - self.held))

    def _send(self, rows: Sequence[Row], reader: RowReader) -> None:
        plain: list[Row] = []
        items: list[bytes] = []
        refused: list[Outcome] = []
        for row, read in zip(rows, reader.read(rows), strict=True):
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
            return [Outcome(row, error=_row_error(error), status=0)]
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

    def _log(self, outcomes: list[Outcome], errors: dict[int, CallError]) -> None:
        if self._process.child is not None:
            for place, error in errors.items():
                if error.trace:
                    row = outcomes[place if place < len(outcomes) else 0].row
                    if self._process.child.log.traceback(error.code, error.trace, f"row {row.number}"):
                        self._note(row, error.trace)

    def _note(self, row: Row, trace: str) -> None:
        if origin := _origin([row]):
            self._process.calls.write(trace, origin[0], f"{origin[1]} row {row.number}")

    def give_up(self, row: Row, blame: Blame, deaths: int) -> None:
        """Put the error of a row that kills every process it runs in."""
        fault = blame.fault
        text = fault.message if deaths == 1 else f"{fault.message} (tried {deaths} times)"
        self.put([failed(row, CallError(fault.code, text))], time.monotonic(), {})

    def measure(self, rows: int, sent_at: float) -> None:
        """Learn how many rows last TRAIN_S, from a finished batch."""
        now = time.monotonic()
        took_s = now - max(sent_at, self._last_done)
        self._last_done = now
        fitting = int(rows * BATCH_S / max(took_s, 1e-6))
        self._size = max(1, min(fitting, max(rows, self._size) * GROWTH_MAX, ROWS_MAX))


def _row_error(error: BatchmillError) -> RowError:
    return RowError(error.code, error.message)


def _origin(rows: Sequence[Row]) -> Origin:
    """The origin of one lease's rows: project, job, and the first number if they are consecutive."""
    lease = rows[0].lease
    if lease is None:
        return ()
    is_run = rows[-1].number - rows[0].number == len(rows) - 1
    return (lease.project, lease.job_id, rows[0].number) if is_run else (lease.project, lease.job_id)
