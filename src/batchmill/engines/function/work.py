"""What a function's process is asked in one frame, and what becomes of that when the process dies with it."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import ModelFailed
from batchmill.function_side.frames import pack_text
from batchmill.models.call_log import CallLog
from batchmill.models.function_socket import Buffer
from batchmill.types import BatchTimes, CallStats
from batchmill.wire.calls import Asked, CallError, Results

CRASHED, HUNG, STUFFED = "worker_crashed", "timeout", "memory_limit"  # why a process was to be replaced
OWN_IDS = 1 << 48  # ids from here on are ours; below are those of Asks

ASK = b'{"kind":"ask","id":%d,"rows":%d,"layout":"%b","train":%b,"exact":%b,"of":%b}'
WORDS = {True: b"true", False: b"false"}


Origin = tuple[str, str] | tuple[str, str, int] | tuple[()]  # project, request or job, number of the first row
_json = msgspec.json.encode


class Fault(Struct, frozen=True):
    """Why a process ended."""

    code: str  # CRASHED, HUNG, STUFFED
    message: str

    def error(self) -> ModelFailed:
        return ModelFailed(self.message, code=self.code)


def hung(seconds: float) -> Fault:
    return Fault(HUNG, f"the function took longer than {seconds:g} s")


def unheard(seconds: float) -> Fault:
    return Fault(HUNG, f"there was no answer in {seconds:g} s: the function was busy, or being started")


def stuffed(limit: int, held: int) -> Fault:
    text = f"the function's process held {held / 2**20:.0f} MiB, more than its limit of {limit / 2**20:.0f} MiB"
    return Fault(STUFFED, text)


class Blame(Struct, frozen=True):
    """The part of one Work in a process' end."""

    fault: Fault
    rows: list[int]  # whose call had begun
    is_alone: bool  # nothing else was called with it


class Work:
    """Base of LiveCall, Train, FormRow and Stream."""

    __slots__ = ("asked", "deadline", "id", "is_exact", "is_sent", "origin", "strikes")
    limit_s = math.inf  # what its deadline was made of
    is_train = False
    holds_up = True  # counts as running while the process has it

    def __init__(self, id_: int, asked: Asked, *, is_exact: bool = False) -> None:
        self.id, self.asked, self.is_exact = id_, asked, is_exact
        self.origin: Origin = ()  # whose it is; (): nobody knows
        self.deadline = math.inf  # monotonic: somebody waits so long
        self.is_sent = False
        self.strikes = 0  # processes that died with it and nobody knows why

    def frame(self) -> list[Buffer]:
        asked = self.asked
        train, exact, of = WORDS[self.is_train], WORDS[self.is_exact], _json(self.origin)
        text = ASK % (self.id, asked.rows, asked.layout.encode(), train, exact, of)
        return pack_text(text, [asked.calls, *asked.buffers] if asked.buffers else (asked.calls,))

    def take(self, meta: dict[str, Any], buffers: list[Buffer]) -> bool:
        """A `results` or `piece` frame of it. True: it was the last."""
        raise AssertionError("said by what it is")

    def again(self) -> Work | None:
        """What to ask the next process after one that died by no fault of this; None: nothing is left to ask."""
        return self

    def blame(self, blame: Blame) -> tuple[Work | None, list[Work]]:
        """(what to ask again, what to ask again with nothing beside it)."""
        raise AssertionError("said by what it is")

    def note(self, calls: CallLog, text: str, row: int | None = None) -> None:
        """Write down what became of it, or of one of its rows."""
        match self.origin:
            case (project, request):
                calls.write(text, project, request)
            case (project, job, first):
                calls.write(text, project, job if row is None else f"{job} row {first + row}")

    def expire(self, *, was_called: bool) -> None:
        """Its deadline has passed: who waits is told. `was_called`: the function was at it."""

    def fail(self, error: ModelFailed) -> None:
        """No process will answer it."""
        raise AssertionError("said by what it is")


def results_of(meta: dict[str, Any], buffers: list[Buffer]) -> Results:
    """A `results` frame as the forms read it."""
    errors = {int(row): CallError(*error) for row, error in meta["errors"].items()} if meta.get("errors") else {}
    if meta["layout"] == "columns":
        return Results(columns=bytes(buffers[0]), buffers=buffers[1:], errors=errors)
    return Results(bytes(buffers[0]), b"", buffers[1:], errors)


_items = msgspec.json.Decoder(list[Raw])


class _Array(Struct, rename={"place": "$array"}):
    place: tuple[int, str, list[int]]  # number of the buffer, datatype, shape


_columns = msgspec.json.Decoder(dict[str, _Array])


class Stages:
    """Gathers the results of `rows` rows; they may come in any order."""

    def __init__(self, rows: int) -> None:
        self._left = rows
        self._parts: list[tuple[int, Results]] = []

    def add(self, first: int, rows: int, results: Results) -> bool:
        """True: these were the last."""
        self._parts.append((first, results))
        self._left -= rows
        return self._left <= 0

    def whole(self) -> Results:
        """All of them as one. Raises: ModelFailed where their outputs do not go together."""
        parts = [results for _, results in sorted(self._parts, key=lambda part: part[0])]
        if len(parts) == 1:
            return parts[0]
        errors = {row: error for results in parts for row, error in results.errors.items()}
        if all(results.columns for results in parts):
            columns, buffers = _joined_columns(parts)
            return Results(columns=columns, buffers=buffers, errors=errors)
        if any(results.columns for results in parts):
            raise ModelFailed("the function returned arrays for some rows of the body only", code="bad_return")
        values, buffers = _joined_values(parts)
        return Results(values, b"", buffers, errors)


def _joined_values(parts: list[Results]) -> tuple[bytes, list[Buffer]]:
    items: list[Any] = []
    buffers: list[Buffer] = []
    for results in parts:
        if results.buffers:
            items += _moved(msgspec.json.decode(results.values), len(buffers))
            buffers += results.buffers
        else:
            items += _items.decode(results.values)
    return msgspec.json.encode(items), buffers


def _moved(value: Any, by: int) -> Any:
    """The value with the numbers of its buffers raised."""
    if isinstance(value, list):
        return [_moved(each, by) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$array": [int(number), datatype, shape]} if len(value) == 1:
            return {"$array": [number + by, datatype, shape]}
        case {"$object": dict(inner)} if len(value) == 1:
            return {"$object": {name: _moved(each, by) for name, each in inner.items()}}
    return {name: _moved(each, by) for name, each in value.items()}


def _joined_columns(parts: list[Results]) -> tuple[bytes, list[Buffer]]:
    decoded = [_columns.decode(results.columns) for results in parts]
    names = list(decoded[0])
    if any(set(columns) != set(names) for columns in decoded):
        raise ModelFailed("the function returned other outputs for some rows of the body", code="bad_return")
    joined: dict[str, _Array] = {}
    buffers: list[Buffer] = []
    for name in names:
        arrays = [columns[name].place for columns in decoded]
        kinds = {(datatype, tuple(shape[1:])) for _, datatype, shape in arrays}
        if len(kinds) > 1:
            raise ModelFailed(f"the output {name!r} has not the same shape in every row", code="bad_return")
        data = [results.buffers[number] for (number, _, _), results in zip(arrays, parts, strict=True)]
        shape = [sum(shape[0] for _, _, shape in arrays), *arrays[0][2][1:]]
        joined[name] = _Array((len(buffers), arrays[0][1], shape))
        buffers.append(b"".join(data))
    return msgspec.json.encode(joined), buffers


class Counts:
    """Sums of one engine. Durations are in nanoseconds."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.succeeded = self.succeeded_ns = self.failed = self.failed_ns = 0
        self._rows = self._executions = self._queue_ns = 0
        self._sizes: dict[int, list[int]] = {}  # batch size -> executions and what they took
        self._is_new = False

    def called(self, meta: dict[str, Any]) -> None:
        """A `results` frame: what the process has called since its last one."""
        self._is_new = True
        self._queue_ns += meta["queue_ns"]
        for size, executions, input_ns, infer_ns, output_ns in meta["ran"]:
            self._rows += size * executions
            self._executions += executions
            had = self._sizes.get(size)
            if had is None:
                self._sizes[size] = [executions, input_ns, infer_ns, output_ns]
            else:
                had[0] += executions
                had[1] += input_ns
                had[2] += infer_ns
                had[3] += output_ns

    def answered(self, is_ok: bool, took_ns: int, requests: int = 1) -> None:
        """So many requests, or rows of jobs, have been answered; `took_ns` for each."""
        self._is_new = True
        if is_ok:
            self.succeeded += requests
            self.succeeded_ns += took_ns * requests
        else:
            self.failed += requests
            self.failed_ns += took_ns * requests

    def take(self) -> CallStats | None:
        """The sums since this was last called; None: there is nothing new."""
        if not self._is_new:
            return None
        batches = [BatchTimes(size, *self._sizes[size]) for size in sorted(self._sizes)]
        taken = CallStats(
            rows=self._rows, executions=self._executions, succeeded=self.succeeded, succeeded_ns=self.succeeded_ns,
            failed=self.failed, failed_ns=self.failed_ns, queue_ns=self._queue_ns, batches=batches, last_at=time.time(),
        )  # fmt: skip
        self._clear()
        return taken
