"""What a function's process is asked in one frame, and what becomes of that when the process dies with it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import ModelFailed
from batchmill.function_side.frames import pack_text
from batchmill.models.call_log import CallLog
from batchmill.models.function_socket import Buffer
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
