"""A lease in a worker's hands: what of it is under way, and what an engine that outlives the worker needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.datasets.sealed import SealedRows
from batchmill.errors import JobPaused
from batchmill.executors.allowance import Allowance
from batchmill.states import PauseReason
from batchmill.store.segments import BlockRows, SegmentFile
from batchmill.types import AdapterSet, Lease, RowError, SegmentRef, Usage
from batchmill.wire.forms import Form
from batchmill.wire.messages import Note, Noted

PAUSE, OVER = "pause", "over"
REFUSED = Noted(0, is_kept=False)


class OpenJob(Struct, eq=False):
    """A job that this worker holds leases of."""

    id: str
    form: Form
    rows: SealedRows
    segment: SegmentFile
    revoked: bool = False
    adapters: AdapterSet = AdapterSet()
    ending: str = ""  # how its leases are to be let go, once it is revoked
    project: str = ""
    allowance: Allowance | None = None  # where the job has a budget


class Unsent(Struct, eq=False):
    """Outcomes in a segment that no commit names yet: adjacent blocks of one lease."""

    ref: SegmentRef
    positions: list[int]
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int]
    samples: dict[str, str]


class Desk(Protocol):
    """What a lease asks of the worker that holds it."""

    async def note(self, held: Held, key: str, data: bytes) -> Noted:
        """What became of it; where it is kept, everything put before it has been counted."""

    def leave(self, held: Held) -> None: ...

    def fail(self, held: Held, error: JobPaused) -> None: ...


class Held(Struct, eq=False):
    """A lease in this worker's hands: `ports.LeaseHandle`. Rows carry it as `row.lease`."""

    lease: Lease
    job: OpenJob
    seq: int
    base: int
    key: str  # of the job and generation, for idempotency keys
    undone: int  # rows granted and not yet put
    careful: bool
    ok: BlockRows
    failed: BlockRows
    ok_usage: Usage
    failed_usage: Usage
    failures: list[RowError]
    unsent: list[Unsent]
    stale: bool = False  # a commit was refused: nothing of it counts any more
    rows: int = 0  # granted
    noted: dict[str, bytes] = msgspec.field(default_factory=dict)
    desk: Desk | None = None
    ending: str = ""
    is_afforded: bool = False  # what its rows may cost together is reserved
    is_cut: bool = False  # the budget did not bear all of its rows: the others go back
    is_left: bool = False  # no more outcomes of it come
    waiters: list[asyncio.Future[None]] = []

    @property
    def adapters(self) -> AdapterSet:
        return self.job.adapters

    @property
    def project(self) -> str:
        return self.job.project

    @property
    def job_id(self) -> str:
        return self.job.id

    @property
    def notes(self) -> Mapping[str, bytes]:
        return self.noted

    async def note(self, key: str, data: bytes) -> None:
        """See `ports.LeaseHandle`: also, everything put before it has been counted once it returns."""
        told = REFUSED if self.desk is None or self.stale or self.is_left else await self.desk.note(self, key, data)
        if not told.is_kept:
            if not told.reason:
                self.stale = True
                self.end(PAUSE)
            raise JobPaused(
                told.message or f"the shard {self.lease.shard} of {self.lease.job} is another worker's meanwhile",
                reason=PauseReason(told.reason or PauseReason.INTERRUPTED),
            )
        if data:
            self.noted[key] = data
        else:
            self.noted.pop(key, None)

    def end(self, how: str) -> None:
        """It is to be let go: "pause" or "over"."""
        if self.ending == OVER:
            return
        self.ending = how
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    async def until_ending(self) -> str:
        while not self.ending:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self.waiters:
                    self.waiters.remove(waiter)
        return self.ending

    def leave(self) -> None:
        assert self.ending, "a lease is left once it is to be let go"
        self._leave()

    def fail(self, error: JobPaused) -> None:
        if self.desk is not None and not self.is_left and not self.stale:
            self.desk.fail(self, error)
        self._leave()

    def _leave(self) -> None:
        if self.desk is not None and not self.is_left:
            self.is_left = True
            self.desk.leave(self)


class NoteDesk:
    """Notes on their way to the owner, each until it has said what became of it."""

    def __init__(self, send: Callable[[Struct], None]) -> None:
        self._send = send
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Noted]] = {}

    async def send(self, lease: Lease, key: str, data: bytes) -> Noted:
        """Return once the owner has said what became of it."""
        faults.point("before_note")
        self._next += 1
        number = self._next
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Note(number, lease, key, data))
        try:
            return await answer
        finally:
            del self._waiting[number]

    def hear(self, noted: Noted) -> None:
        """The owner has said what became of a note."""
        answer = self._waiting.get(noted.id)
        if answer is not None and not answer.done():
            answer.set_result(noted)
