"""The worker's side of a lease: granted rows become one stream for the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from batchmill.datasets.sealed import SealedRows
from batchmill.errors import InputChanged
from batchmill.store.segments import BlockRows, SegmentFile
from batchmill.types import Lease, Outcome, Row, RowError, SegmentRef, Usage
from batchmill.wire.forms import Form
from batchmill.wire.messages import Grant, unpack_u32


class OpenJob(Struct, eq=False):
    """A job that this worker holds leases of."""

    id: str
    form: Form
    rows: SealedRows
    segment: SegmentFile
    revoked: bool = False


class Unsent(Struct, eq=False):
    """Outcomes in a segment that no commit names yet: adjacent blocks of one lease."""

    ref: SegmentRef
    positions: list[int]
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int]
    samples: dict[str, str]


class Held(Struct, eq=False):
    """A lease in this worker's hands. Rows carry it as `row.lease`."""

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


class _Queued(Struct, eq=False):
    held: Held
    grant: Grant
    positions: array | range
    numbers: array | range
    next: int = 0


class GrantFeed:
    """Rows in the order they were granted. Keeps one grant ahead of the engine, so that it never runs dry."""

    def __init__(
        self,
        *,
        want: Callable[[], None],
        changed: Callable[[str, InputChanged], None],
        broken: Callable[[OSError], None],
        suspect: Path,
    ) -> None:
        self._want, self._changed, self._broken = want, changed, broken
        self._queue: deque[_Queued] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ended = False
        self._asked = 1  # grants asked for and not yet here; the worker asks for the first when it is ready
        self._pending = 0  # rows granted and not yet taken
        self._suspect = suspect
        self._careful: Row | None = None  # the one row in flight of a careful lease

    def grant(self, held: Held, grant: Grant) -> None:
        """Queue the rows of a grant."""
        if grant.positions:
            positions, numbers = unpack_u32(grant.positions), unpack_u32(grant.rows)
        else:
            positions = range(grant.position, grant.position + grant.n)
            numbers = range(grant.row, grant.row + grant.n)
        self._asked = max(0, self._asked - 1)
        if grant.n:
            self._queue.append(_Queued(held, grant, positions, numbers))
            self._pending += grant.n
        self._wake()
        self._ask()

    def end(self) -> None:
        """No grant will come after those that are queued."""
        self._ended = True
        self._wake()

    def drop(self, job_id: str) -> None:
        """Forget the rows of a job that no engine has taken yet."""
        for queued in [queued for queued in self._queue if queued.held.job.id == job_id]:
            self._discard(queued)
        self._ask()

    def drop_lease(self, held: Held) -> None:
        """Forget the rows of one lease that no engine has taken yet."""
        for queued in [queued for queued in self._queue if queued.held is held]:
            self._discard(queued)
        self._ask()

    def _discard(self, queued: _Queued) -> None:
        left = len(queued.numbers) - queued.next
        queued.held.undone -= left
        self._pending -= left
        self._queue.remove(queued)

    def settled(self, outcome: Outcome) -> None:
        """A careful row has its outcome: the next may begin."""
        if self._careful is not None and outcome.row.number == self._careful.number:
            self._careful = None
            self._wake()

    async def take(self, n: int) -> list[Row]:
        while True:
            rows = self._take_now(n)
            if rows:
                self._ask()
                if self._queue:
                    self._wake()
                return rows
            if self._ended and not self._queue:
                self._wake()
                return []
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _take_now(self, n: int) -> list[Row]:
        while self._queue and self._careful is None:
            queued = self._queue[0]
            held = queued.held
            n = 1 if held.careful else n
            first, last = queued.next, min(queued.next + n, len(queued.numbers))
            numbers = queued.numbers[first:last]
            try:
                raws = self._read(held.job.rows, numbers)
            except InputChanged as error:
                self.drop(held.job.id)
                self._changed(held.job.id, error)
                continue
            queued.next = last
            self._pending -= last - first
            if last == len(queued.numbers):
                self._queue.popleft()
            form = held.job.form
            places = zip(queued.positions[first:last], numbers, raws, strict=True)
            rows = [Row(position, number, raw, form, held) for position, number, raw in places]
            if held.careful and not self._note_suspect(rows[0]):
                return []
            return rows
        return []

    @staticmethod
    def _read(rows: SealedRows, numbers: array | range) -> list[bytes]:
        if isinstance(numbers, range):
            return rows.read(numbers.start, numbers.stop)
        return rows.read_many(numbers)

    def _note_suspect(self, row: Row) -> bool:
        """Leave the row's place where the owner finds it should this row kill the process. False when it cannot be."""
        self._careful = row
        lease: Lease = row.lease.lease
        data = f"{lease.job} {lease.generation} {lease.shard} {row.position}\n"
        try:
            self._suspect.write_text(data)
        except OSError as error:
            self._queue.clear()
            self._ended = True
            self._broken(error)
            return False
        return True

    def _ask(self) -> None:
        """One grant more when the rows in hand may not outlast its way here."""
        ahead = len(self._queue[-1].numbers) if self._queue else 0
        if not self._ended and self._asked == 0 and (not self._queue or self._pending < max(ahead, 1) + 1):
            self._asked = 1
            self._want()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
