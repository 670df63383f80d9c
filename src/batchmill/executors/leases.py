"""Leases in a worker: rows in flight, budget reservations, and notes for engines that outlive the worker."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.datasets.sealed import DatasetRows
from batchmill.errors import InvalidRow, JobPaused
from batchmill.owner_term import Term
from batchmill.ports.storage import SegmentSink
from batchmill.states import PauseReason
from batchmill.store.segments.format import BlockRows
from batchmill.types import (
    AdapterSet,
    Lease,
    MediaBounds,
    Outcome,
    Price,
    ReplyRules,
    Request,
    Row,
    RowError,
    SegmentRef,
    Usage,
)
from batchmill.wire.json_bytes import split_object
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.messages import Note, Noted, Renewed, Spending
from batchmill.wire.rows.forms import Form, TableForm
from batchmill.wire.rows.rendered_rows import media_of
from batchmill.wire.schemas.output_schema import WORDS_BYTES_MAX

OUTPUT_GUESS = 4096  # output tokens of a row without a limit, until one such row has finished
# The guess is then learned from this many recent rows; below KNOWN rows it is twice the longest output.
KNOWN, MEMORY = 8, 256
ROUNDING_USD = 1e-9  # sums of fractions are not exact
SHARE = 0.9  # of these rows that write no more than the guess
UNREADABLE = (InvalidRow, msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_WRITES_NOTHING = ("/embeddings", "/rerank", "/score", "/pooling", "/classify", "/moderations")


class _Bounds(Struct, gc=False):
    """The limits on output tokens in a request body."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")

    def tokens(self, url: str) -> int | None:
        """The maximum output tokens; None: unlimited."""
        if url.endswith("/responses"):
            limits = [self.max_output_tokens]
        elif url.endswith("/completions"):  # a server may apply either limit
            limits = [self.max_completion_tokens, self.max_tokens]
        else:
            limits = [self.max_completion_tokens, self.max_output_tokens, self.max_tokens]
        most = max((each for each in limits if each is not None), default=None)
        if most is None or most < 0:
            return None
        return most * max(self.n or 1, self.best_of or 1, 1) * self._prompts()

    def _prompts(self) -> int:
        """The number of prompts in a body of /completions, each of which gets a completion."""
        prompt = bytes(self.prompt)
        if not prompt.startswith(b"["):
            return 1
        prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
        are_tokens = bool(prompts) and bytes(prompts[0])[:1].isdigit()
        return 1 if are_tokens else max(len(prompts), 1)


_bounds = msgspec.json.Decoder(_Bounds)


class _Reserved(Struct, gc=False):
    usd: float
    base: float | None = None  # the maximum cost of its prompt, if it does not limit its output; None: it does


class Allowance:
    """The budget of one job at this worker. `free` is unreserved money; it comes from the owner and returns to it."""

    def __init__(
        self, job: str, price: Price, *, has_requests: bool, send: Callable[[Spending], None],
        media: MediaTokens, takes_all: bool = False, attempts: int = 0,
    ) -> None:  # fmt: skip
        """Args:
        has_requests: its rows are requests to a model, not arguments.
        media: counts what images and documents are for the model.
        takes_all: all rows are submitted together, and paid for then.
        attempts: how often a row may be asked for again.
        """
        self.takes_all, self._attempts = takes_all, attempts
        self.free = 0.0
        self.is_lean = False  # the budget is nearly spent: unused reservations go back at once
        self._job, self._price, self._has_requests, self._send = job, price, has_requests, send
        self._media = media
        self._input, self._output = max(price.input, price.cached or 0.0) / 1e6, price.output / 1e6
        self._reserved: dict[int, _Reserved] = {}  # position -> reservation of its row
        self._output_costs: deque[float] = deque(maxlen=MEMORY)  # USD for the output of rows without a limit
        self._usual = price.output / 1e6 * OUTPUT_GUESS
        self._done = self._allowances_seen = 0
        self._needs = 0.0  # reservation of the next row, if it exceeds `free`
        self._reported: Spending | None = None
        self._asking = asyncio.Lock()  # one `wants` at a time
        self._reply: asyncio.Future[float] | None = None

    def reserve(self, rows: Sequence[Row], *, is_first: bool = True, at_any_price: bool = False) -> int:
        """Reserve the maximum cost of these rows in order; return how many may run.

        If none may run and the first row `is_first` of its lease, request more from the owner. `at_any_price`: the rows
        are already paid for.
        """
        for count, row in enumerate(rows):
            most = self._most(row)
            if most.usd > self.free + ROUNDING_USD and not at_any_price:
                if count == 0 and is_first:
                    self._needs = most.usd
                    self.report(gives_back=True)
                return count
            self.free -= most.usd
            self._reserved[row.position] = most
        self._needs = 0.0
        if self.free < -ROUNDING_USD:
            self.report(gives_back=True)  # the owner must know what was spent beyond its allowances
        return len(rows)

    def settle(self, outcomes: Iterable[Outcome]) -> bool:
        """Record what rows have cost, and free the rest of their reservation.

        Returns: whether the waiting row can now run.
        """
        for outcome in outcomes:
            self._done += 1
            cost = 0.0 if outcome.usage is None else self._price.cost(outcome.usage)
            cost += self._cost_of_earlier(outcome.row)
            most = self._reserved.pop(outcome.row.position, None)
            self.free += (0.0 if most is None else most.usd) - cost
            if most is not None and most.base is not None and outcome.error is None and outcome.usage is not None:
                self._learn(self._price.output / 1e6 * outcome.usage.output_tokens)
        if self.is_lean:
            self.report(gives_back=True)
        return 0 < self._needs <= self.free

    def spend(self, row: Row, usage: Usage) -> None:
        """Record what an answer has cost that is no outcome; `reserve_again` follows if its row is asked for again."""
        most = self._reserved.pop(row.position, None)
        self.free += (0.0 if most is None else most.usd) - self._price.cost(usage)
        if most is not None and most.base is not None:
            self._learn(self._price.output / 1e6 * usage.output_tokens)

    async def reserve_again(self, rows: Sequence[Row]) -> int:
        """As `reserve`, for rows that are asked for again. What is missing is asked of the owner, once."""
        async with self._asking:
            needs = self._needs  # of a row that waits: it goes on waiting
            count = self.reserve(rows, is_first=False)
            self._needs = needs
            if count < len(rows):
                wanted = sum(self._most(row).usd for row in rows[count:]) - self.free
                await self._ask(max(wanted, ROUNDING_USD))
                needs = self._needs
                count += self.reserve(rows[count:], is_first=False)
                self._needs = needs
            if self.is_lean:
                self.report(gives_back=True)
            return count

    async def _ask(self, usd: float) -> None:
        """Ask the owner for money, and add what it has of it now. Nobody else here may give that back before."""
        reply = self._reply = asyncio.get_running_loop().create_future()
        self.report(wants=usd)
        try:
            await asyncio.wait({reply})
        finally:
            self._reply = None
            if reply.done():
                self.free += reply.result()

    def release(self, row: Row) -> None:
        """Free the reservation of a row that stays undone, but for what its answers so far have cost."""
        most = self._reserved.pop(row.position, None)
        self.free += (0.0 if most is None else most.usd) - self._cost_of_earlier(row)

    def _cost_of_earlier(self, row: Row) -> float:
        return sum(self._price.cost(each.usage) for each in row.earlier)

    def add(self, usd: float, *, is_lean: bool, is_reply: bool = False) -> None:
        """Add money from the owner."""
        if is_reply and self._reply is not None and not self._reply.done():
            self._reply.set_result(usd)
        else:
            self.free += usd
        self._allowances_seen += 1
        self._reported = None
        if is_lean and not (self.is_lean and usd):
            self.is_lean = True
            self.report(gives_back=not is_reply)
        if usd and not is_reply:
            self._needs = 0.0

    def return_unused(self) -> None:
        """Return unused money to the owner after a while, because others may need it."""
        self.report(gives_back=self.is_lean and not self._reserved)

    def report(self, *, gives_back: bool = False, wants: float = 0.0) -> None:
        """Report the budget to the owner if it has changed."""
        returned, self.free = (self.free, 0.0) if gives_back and self.free else (0.0, self.free)
        unbounded = sum(each.base is not None for each in self._reserved.values()) if self._output_costs else 0
        beyond = unbounded * (max(self._output_costs) - self._usual) if unbounded else 0.0
        spending = Spending(
            self._job,
            returned,
            self._needs,
            len(self._reserved),
            self._done,
            max(0.0, beyond),
            self._allowances_seen,
            self.takes_all,
            wants,
        )
        if spending != self._reported or returned:
            self._reported = None if wants else spending
            self._send(spending)

    def _most(self, row: Row) -> _Reserved:
        """The maximum cost of a row. A row that cannot be read is never sent."""
        if not self._has_requests:
            base = self._input * len(row.raw)
            return _Reserved(max(0.0, base + self._usual), base)
        try:
            request = row.form.request(row)
        except UNREADABLE:
            return _Reserved(0.0)
        base = self._input * self._input_tokens(row, request)
        try:
            bounds = _bounds.decode(request.body)
            tokens = 0 if request.url.endswith(_WRITES_NOTHING) else bounds.tokens(request.url)
        except UNREADABLE:  # a service may accept what cannot be read here
            tokens = None
        output = self._usual if tokens is None else self._output * tokens
        most = base + output + self._asked_again(base, output, tokens)
        return _Reserved(max(0.0, most), base) if tokens is None else _Reserved(most)

    def _input_tokens(self, row: Row, request: Request) -> int:
        """The most tokens of a request: each byte of its text may be one; media count as estimates say."""
        form = row.form
        if isinstance(form, TableForm) and form.media:
            return len(request.body) + sum(map(self._media.part, media_of(split_object(row.raw))))
        media = self._media.in_body(request.body)
        return len(request.body) - media.size_bytes + media.tokens

    def _asked_again(self, base: float, output: float, tokens: int | None) -> float:
        """The maximum cost of asking again: each request has the earlier answers, and what was wrong with them."""
        if tokens is None:
            tokens = math.ceil(self._usual / self._output) if self._output else OUTPUT_GUESS
        said = self._input * (tokens + WORDS_BYTES_MAX)
        return sum(base + output + number * said for number in range(1, self._attempts + 1))

    def _learn(self, output_usd: float) -> None:
        self._output_costs.append(output_usd)
        if len(self._output_costs) >= KNOWN:
            self._usual = sorted(self._output_costs)[int(SHARE * len(self._output_costs))]
        else:
            self._usual = 2 * max(self._output_costs)


PAUSE, OVER = "pause", "over"
REFUSED = Noted(0, is_kept=False)


class OpenJob(Struct, eq=False):
    """A job that this worker holds leases of."""

    id: str
    form: Form
    rows: DatasetRows
    segment: SegmentSink
    revoked: bool = False
    adapters: AdapterSet = AdapterSet()
    ending: str = ""  # once it is revoked: how its leases end, PAUSE or OVER
    over: str = ""  # as of a lease
    project: str = ""
    replies: ReplyRules = ReplyRules()
    media: MediaBounds = MediaBounds()
    allowance: Allowance | None = None  # of a job with a budget


class Unsent(Struct, eq=False):
    """Outcomes in a segment that no commit names yet: adjacent blocks of one lease."""

    ref: SegmentRef
    positions: list[Sequence[int]]  # of each block
    rows_ok: int
    rows_failed: int
    usage: Usage
    errors: dict[str, int]
    samples: dict[str, str]
    warnings: dict[str, int]
    misfits: dict[str, list[tuple[int, int]]]


class LeaseHost(Protocol):
    """The worker of a lease."""

    async def note(self, held: Held, key: str, data: bytes) -> Noted:
        """Store a note; return the result once all earlier outcomes have been counted."""

    def count_misfits(self, held: Held, tag: str, misfits: Mapping[int, Usage]) -> None: ...

    async def until_owned(self) -> None:
        """Wait until the owner surely owns the database."""

    def leave(self, held: Held) -> None: ...

    def fail(self, held: Held, error: JobPaused) -> None: ...


class Held(Struct, eq=False):
    """A lease held by this worker: `ports.engines.LeaseHandle`. Rows carry it as `row.lease`."""

    lease: Lease
    job: OpenJob
    seq: int
    base: int
    key: str  # of the job and generation, for idempotency keys
    undone: int  # granted rows without an outcome
    isolated: bool
    ok: BlockRows
    failed: BlockRows
    ok_usage: Usage
    failed_usage: Usage
    failures: list[RowError]
    unsent: list[Unsent]
    ok_warnings: dict[str, int] = msgspec.field(default_factory=dict)
    stale: bool = False  # a commit was refused: further outcomes do not count
    rows: int = 0  # granted
    noted: dict[str, bytes] = msgspec.field(default_factory=dict)
    lease_host: LeaseHost | None = None
    ending: str = ""
    over: str = ""  # why its job is over, if its rows do not go on elsewhere
    is_afforded: bool = False  # the maximum cost of all its rows is reserved
    is_cut: bool = False  # the budget was too small for all of its rows: the others go back
    is_left: bool = False  # it gets no more outcomes
    waiters: list[asyncio.Future[None]] = []

    @property
    def adapters(self) -> AdapterSet:
        return self.job.adapters

    @property
    def takes_blocks(self) -> bool:
        """Whether no row of it needs an outcome of its own: for a budget, or to know which row is running."""
        return not self.isolated and self.job.allowance is None

    @property
    def project(self) -> str:
        return self.job.project

    @property
    def media(self) -> MediaBounds:
        return self.job.media

    @property
    def job_id(self) -> str:
        return self.job.id

    @property
    def notes(self) -> Mapping[str, bytes]:
        return self.noted

    async def note(self, key: str, data: bytes) -> None:
        """See `ports.engines.LeaseHandle`. Once it returns, all earlier outcomes have been counted."""
        result = (
            REFUSED
            if self.lease_host is None or self.stale or self.is_left
            else await self.lease_host.note(self, key, data)
        )
        if not result.is_kept:
            if not result.reason:
                self.stale = True
                self.end(PAUSE)
            raise self._lost() if not result.reason else JobPaused(result.message, reason=PauseReason(result.reason))
        if data:
            self.noted[key] = data
        else:
            self.noted.pop(key, None)

    def count_misfits(self, tag: str, misfits: Mapping[int, Usage]) -> None:
        """See `ports.engines.LeaseHandle`."""
        if self.lease_host is not None and not (self.stale or self.is_left):
            self.lease_host.count_misfits(self, tag, misfits)
        if self.stale or self.is_left:
            raise self._lost()

    def spend(self, row: Row, usage: Usage) -> None:
        """See `ports.engines.LeaseHandle`."""
        if self.job.allowance is not None:
            self.job.allowance.spend(row, usage)

    async def reserve(self, rows: Sequence[Row]) -> int:
        """See `ports.engines.LeaseHandle`."""
        return len(rows) if self.job.allowance is None else await self.job.allowance.reserve_again(rows)

    def _lost(self) -> JobPaused:
        return JobPaused(
            f"the shard {self.lease.shard} of {self.lease.job} now belongs to another worker",
            reason=PauseReason.INTERRUPTED,
        )

    async def until_owned(self) -> None:
        if self.lease_host is not None:
            await self.lease_host.until_owned()

    def end(self, how: str, over: str = "") -> None:
        """End the lease: "pause" or "over"."""
        if self.ending == OVER:
            return
        self.ending, self.over = how, over
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
        assert self.ending, "a lease is left only while it is ending"
        self._leave()

    def fail(self, error: JobPaused) -> None:
        if self.lease_host is not None and not self.is_left and not self.stale:
            self.lease_host.fail(self, error)
        self._leave()

    def _leave(self) -> None:
        if self.lease_host is not None and not self.is_left:
            self.is_left = True
            self.lease_host.leave(self)


class OwnerTerm(Term):
    """How long this worker may begin work: as long as its owner surely owns the database.

    An owner that is stopped, or cut off from its database, is silent: another one may have replaced it.
    """

    def __init__(self, clock: Callable[[], float], *, is_limited: bool) -> None:
        """Args: clock: see `owner_term`; is_limited: False: the owner owns its database until it ends."""
        self.clock, self._until = clock, 0.0 if is_limited else math.inf
        self._waiters: list[asyncio.Future[None]] = []

    def left_s(self) -> float:
        """As `Term.left_s`."""
        return self._until - self.clock()

    def renew(self, message: Renewed) -> bool:
        """Handle the owner's reply to a heartbeat. Returns whether work may begin again."""
        was_over = self.is_over()
        self._until = max(self._until, message.at + message.left_s)
        if not was_over or self.is_over():
            return False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        return True

    async def until_valid(self) -> None:
        while self.is_over():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)


class NoteClient:
    """Sends notes to the owner and waits for their replies."""

    def __init__(self, send: Callable[[Struct], None]) -> None:
        self._send = send
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Noted]] = {}

    async def send(self, lease: Lease, key: str, data: bytes) -> Noted:
        """Send a note and wait for the owner's reply."""
        faults.point("before_note")
        self._next += 1
        number = self._next
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Note(number, lease, key, data))
        try:
            return await future
        finally:
            del self._waiting[number]

    def receive(self, noted: Noted) -> None:
        """Handle the owner's reply to a note."""
        future = self._waiting.get(noted.id)
        if future is not None and not future.done():
            future.set_result(noted)
