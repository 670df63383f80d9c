"""The worker's side of a lease: granted rows become one stream for the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from batchmill.datasets.sealed import ColumnDataset
from batchmill.errors import JobPaused
from batchmill.executors.asked_again import RowsAskedAgain
from batchmill.executors.fair_queue import FairQueue, JobQueue
from batchmill.executors.leases import Allowance, Held
from batchmill.executors.read_ahead import Block, ReadAhead, line_end, rows_of
from batchmill.executors.row_rate import RowRate
from batchmill.ports.engines import Columns
from batchmill.types import ColumnBlock, Lease, Outcome, Row, RowBlock
from batchmill.types.connectors import RemoteJob
from batchmill.wire.messages import Grant, unpack_u32

WINDOW = 1024  # rows that are looked at together

Result = TypeVar("Result")

_note = msgspec.json.Decoder(RemoteJob)


def cutting(
    held: Held, allowance: Allowance, positions: Sequence[int]
) -> Generator[tuple[int, int], list[Row], list[int] | None]:
    """Which rows of a lease run, as indexes into `positions`; their maximum cost is reserved.

    Yields ranges of indexes, and is sent their rows. Those that a provider has already go in any case. None: all of
    them go; none: the owner was asked for more.
    """
    there = _handed_over(held)
    kept: list[int] = []
    is_spent = False
    for first in range(0, len(positions), WINDOW):
        last = min(first + WINDOW, len(positions))
        rows = yield first, last
        known = [row for row in rows if row.position in there]
        allowance.reserve(known, at_any_price=True)
        fresh = [] if is_spent else [row for row in rows if row.position not in there]
        count = allowance.reserve(fresh, is_first=not kept and not known)
        is_spent = is_spent or count < len(fresh)
        going = {row.position for row in [*known, *fresh[:count]]}
        kept += [place for place, row in enumerate(rows, first) if row.position in going]
        if is_spent and not there:
            break
    return None if len(kept) == len(positions) else kept


def _handed_over(held: Held) -> set[int]:
    """Plan positions that the provider's batches hold."""
    jobs = [_note.decode(data) for data in held.notes.values()]
    runs = [run for job in jobs if job.state != "forgotten" for run in job.runs]
    return {position for first, count in runs for position in range(first, first + count)}


def _names(wanted: Columns, there: list[str]) -> tuple[str, ...] | None:
    """The columns to read of those that are there; None: all."""
    if wanted.names is None or not wanted.required.issubset(there):
        return None
    return tuple(name for name in there if name in wanted.names)


TAKE_S = 0.25  # a take beside other jobs is as many rows as last so long: it is what those have to wait for
GROWTH_MAX = 8  # from one take of a job to its next
ROWS_MOST = 2**32
READS_MAX = 4  # threads that read rows of stores; of each job one at a time, and one block ahead


class _Queued(Struct, eq=False):
    held: Held
    grant: Grant
    positions: array | range
    numbers: array | range
    next: int = 0
    ahead: ReadAhead | None = None
    waits: bool = False  # for budget: it is read again when there may be some

    @property
    def is_noted(self) -> bool:
        return bool(self.grant.notes) or self.grant.is_over


class _JobLane(JobQueue, eq=False):
    """The waiting grants of one job, in the order of arrival."""

    queue: deque[_Queued] = msgspec.field(default_factory=deque)
    rate: RowRate = msgspec.field(default_factory=RowRate)
    pending: int = 0  # rows granted and not yet taken
    requested: int = 0  # grants that are on their way, as far as we know
    grant_rows: int = 1  # of the last grant
    project: str = ""
    take_max: int = 0  # rows that TAKE_S is enough for, as far as we know
    dataset: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)  # one thread at a time reads its rows


class GrantFeed:
    """Rows of several jobs, each in the order they were granted. Keeps one grant of each ahead of the engine."""

    def __init__(
        self,
        *,
        want: Callable[[str, int], None],
        failed: Callable[[str, JobPaused], None],
        broken: Callable[[OSError], None],
        suspect: Path,
        may_begin: Callable[[], bool] = lambda: True,
        grants_max: int = 1,
        ahead_s: float = 0.0,
    ) -> None:
        """Args:
        may_begin: while it returns False, no row is taken; `wake` is called when that changes.
        grants_max: that are requested at once, where the engine has room for several.
        ahead_s: rows for so long are requested, where one grant is fewer.
        """
        self._may_begin, self._grants_max, self._ahead_s = may_begin, grants_max, ahead_s
        self._room = 0  # rows that the engine would have taken, too, when it took some last
        self._want, self._failed, self._broken = want, failed, broken
        self._time = asyncio.get_running_loop().time
        self._lanes: dict[str, _JobLane] = {}
        self._turns = FairQueue()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ended = False
        self._least = ROWS_MOST  # the fewest rows that the engine has ever asked for
        self._last: tuple[_JobLane, int, float] | None = None  # whose rows were taken last, how many, when
        self._suspect = suspect
        self._readers: ThreadPoolExecutor | None = None  # of rows that lie in a store
        self._reads: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # of one of them
        self._held_back: frozenset[str] = frozenset()  # projects whose rows wait
        self._held_jobs: frozenset[str] = frozenset()  # the same of jobs, for the engine
        self._slow_jobs: frozenset[str] = frozenset()  # and of those whose answers wait to be validated
        self._again = RowsAskedAgain()
        self._isolated: tuple[int, Held] | None = None  # number and lease of the one row in flight of an isolated lease

    def grant(self, held: Held, grant: Grant) -> None:
        """Queue the rows of a grant."""
        if grant.positions:
            positions, numbers = unpack_u32(grant.positions), unpack_u32(grant.rows)
        else:
            positions = range(grant.position, grant.position + grant.n)
            numbers = range(grant.row, grant.row + grant.n)
        lane = self._lanes.get(held.job.id)
        if lane is None:
            lane = self._lanes[held.job.id] = _JobLane(held.job.id)
        lane.requested = max(0, lane.requested - 1)
        lane.grant_rows = max(1, grant.n) if held.job.allowance is None else ROWS_MOST  # which may not pay for more
        self._turns.weigh(lane, priority=grant.priority, share=grant.share, row_cost=grant.row_cost)
        if grant.n:
            lane.queue.append(_Queued(held, grant, positions, numbers))
            lane.pending += grant.n
            lane.project = held.project
            if not self._is_held_back(lane):
                self._turns.enter(lane)
        self._wake()
        self._ask(lane)

    def weigh(self, job_id: str, *, priority: int, share: float, row_cost: float) -> None:
        """Change the weight of a job's rows."""
        lane = self._lanes.get(job_id)
        if lane is not None:
            self._turns.weigh(lane, priority=priority, share=share, row_cost=row_cost)

    def unblock(self, job_id: str) -> None:
        """Try rows of this job again: it may have budget now."""
        lane = self._lanes.get(job_id)
        if lane is not None and lane.queue:
            lane.queue[0].waits = False
            if not self._is_held_back(lane):
                self._turns.enter(lane)
                self._wake()

    def end(self) -> None:
        """No grant comes after those that are queued."""
        self._ended = True
        self._wake()

    def hold_back(self, projects: frozenset[str]) -> None:
        """See `ports.engines.ProjectFeed`."""
        self._hold(projects, self._held_jobs, self._slow_jobs)

    def hold_jobs(self, jobs: frozenset[str]) -> None:
        """See `ports.engines.JobFeed`."""
        self._hold(self._held_back, jobs, self._slow_jobs)

    def hold_answers(self, jobs: frozenset[str]) -> None:
        """As `hold_jobs`, of jobs of which enough answers wait to be validated; rows asked for again wait, too."""
        self._hold(self._held_back, self._held_jobs, jobs)

    def _is_held_back(self, lane: _JobLane) -> bool:
        return lane.project in self._held_back or lane.job in self._held_jobs or lane.job in self._slow_jobs

    def _is_held_again(self, held: Held) -> bool:
        return held.project in self._held_back or held.job.id in self._slow_jobs

    def _hold(self, projects: frozenset[str], jobs: frozenset[str], slow: frozenset[str]) -> None:
        if (projects, jobs, slow) == (self._held_back, self._held_jobs, self._slow_jobs):
            return
        self._held_back, self._held_jobs, self._slow_jobs = projects, jobs, slow
        for lane in self._lanes.values():
            if self._is_held_back(lane):
                self._turns.leave(lane)
            elif lane.queue:
                self._turns.enter(lane)
        self._wake()

    def _is_empty(self) -> bool:
        """Whether no row waits, with or without budget."""
        return not len(self._turns) and not any(lane.queue for lane in self._lanes.values())

    def drop(self, job_id: str) -> None:
        """Forget the job and its rows that no engine has taken yet."""
        lane = self._lanes.pop(job_id, None)
        if lane is not None:
            for queued in list(lane.queue):
                self._discard(lane, queued)
        self._release_isolated(self._again.forget_job(job_id))

    def drop_lease(self, held: Held) -> None:
        """Forget the rows of one lease that no engine has taken yet."""
        self._release_isolated(self._again.forget(held))
        lane = self._lanes.get(held.job.id)
        if lane is not None:
            for queued in [queued for queued in lane.queue if queued.held is held]:
                self._discard(lane, queued)
            self._ask(lane)

    def _discard(self, lane: _JobLane, queued: _Queued) -> None:
        left = len(queued.numbers) - queued.next
        queued.held.undone -= left
        lane.pending -= left
        lane.queue.remove(queued)
        if not lane.queue:
            self._turns.leave(lane)

    def settled(self, outcome: Outcome) -> None:
        """A isolated row has its outcome: the next may begin."""
        isolated = self._isolated
        if isolated is not None and outcome.row.number == isolated[0] and outcome.row.lease is isolated[1]:
            self._isolated = None
            self._wake()

    async def take(self, n: int) -> list[Row]:
        while not self._may_ask_again():
            block = await self.take_block(n, may_be_again=True)
            if block is not None:
                rows = block.rows()
                if block.form.schema is not None:
                    self._again.taken(rows)
                return rows
            if self._is_over():
                return []
        rows = self._again.take(n, self._is_held_again)
        if (lane := self._lanes.get(rows[0].lease.job.id)) is not None:
            self._turns.charge(lane, len(rows))
        if self._again:
            self._wake()
        return rows

    def _may_ask_again(self) -> bool:
        return bool(self._again) and self._may_begin() and self._again.has_any(self._is_held_again)

    def _is_over(self) -> bool:
        """Whether no row will come any more."""
        return self._ended and self._is_empty() and not self._again.may_come

    def ask_again(self, row: Row) -> None:
        """Give a row that was taken once more, before others. If its lease has ended it stays undone."""
        if not self._again.add(row):
            self._release_isolated([row])
        self._wake()

    def _release_isolated(self, undone: list[Row]) -> None:
        """An isolated row gets no outcome here: others may begin."""
        if self._isolated is not None and any((row.number, row.lease) == self._isolated for row in undone):
            self._isolated = None
            self._wake()

    def settle_checked(self, row: Row) -> None:
        """A row of a job with a schema is not asked for again."""
        if self._again.settle(row) and self._ended:
            self._wake()

    async def take_block(
        self, n: int, columns: Columns | None = None, *, may_be_again: bool = False
    ) -> Block | None:  # fmt: skip
        """See `ports.engines.BlockFeed`. `may_be_again`: return None also when rows are to be asked for again."""
        self._measure(n)
        while not (may_be_again and self._may_ask_again()):
            block = self._take_now(n, columns)
            if block is not None:
                if len(self._turns):
                    self._wake()
                return block
            if self._failure is not None:
                raise self._failure
            if self._is_over():
                self._wake()
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return None

    def _is_there(self, lane: _JobLane, n: int, columns: Columns | None) -> bool:
        """Whether the next rows of a job can be taken now. If they lie in a store, a thread begins to read them."""
        queued = lane.queue[0]
        if not queued.held.job.rows.is_remote:
            return True
        if queued.waits:
            self._turns.leave(lane)
            return False
        ahead = queued.ahead
        if ahead is not None and (ahead.first, ahead.columns) == (queued.next, columns):
            return True
        if not lane.is_reading:
            self._read_ahead(lane, n, columns)
        return False

    def _read_ahead(self, lane: _JobLane, n: int, columns: Columns | None) -> None:
        lane.is_reading = True
        task = asyncio.create_task(self._read_remote(lane, lane.queue[0], n, columns))
        self._reads.add(task)
        task.add_done_callback(lambda task: self._was_read(task, lane))

    def _was_read(self, task: asyncio.Task[None], lane: _JobLane) -> None:
        self._reads.discard(task)
        lane.is_reading = False
        if not task.cancelled() and (error := task.exception()) is not None and self._is_known(lane):
            self._failure = error  # of this machine: of a job that was dropped meanwhile it means nothing
        self._wake()

    async def _read_remote(self, lane: _JobLane, queued: _Queued, n: int, columns: Columns | None) -> None:
        """Read the next rows of a grant in a thread: the event loop never waits for a store."""
        held = queued.held
        allowance = held.job.allowance
        try:
            if allowance is not None and allowance.takes_all and not held.is_afforded:
                await self._afford_remote(lane, queued, allowance)
                return
            first, last = self._next_range(lane, queued, n)
            block = await self._in_thread(lane, lambda: self._read(lane, queued, first, last, columns))
            queued.ahead = ReadAhead(first, columns, block)
        except JobPaused as error:
            if self._is_known(lane):
                self._forget(held, error)

    async def _in_thread(self, lane: _JobLane, read: Callable[[], Result]) -> Result:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READS_MAX, thread_name_prefix="rows-of-stores")
        async with lane.dataset:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _is_known(self, lane: _JobLane) -> bool:
        return self._lanes.get(lane.job) is lane

    def _next_range(self, lane: _JobLane, queued: _Queued, n: int) -> tuple[int, int]:
        """Which rows of a job's first grant are taken next, by index, where the engine asks for `n`."""
        # Beside other jobs a take is short, however slow this one's rows are; alone the engine knows best.
        n = n if len(self._turns) == 1 else min(n, max(self._least, lane.take_max))
        n = 1 if queued.held.isolated else n
        return queued.next, min(queued.next + n, len(queued.numbers))

    async def take_noted(self, n: int) -> list[Row]:
        """See `ports.engines.LeaseFeed`."""
        while True:
            noted = [lane for lane in self._lanes.values() if lane.queue and lane.queue[0].is_noted]
            noted.sort(key=lambda lane: -lane.priority)
            for lane in noted if self._may_begin() else ():
                if self._is_there(lane, n, None) and (block := self._take_of(lane, n)) is not None:
                    self._turns.charge(lane, len(block))
                    if not lane.queue:
                        self._turns.leave(lane)
                    self._ask(lane)
                    return block.rows()
            if self._failure is not None:
                raise self._failure
            if self._ended and not any(lane.is_reading for lane in noted):
                return []
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _measure(self, n: int) -> None:
        """Learn how many rows of the job that was served last suffice for `TAKE_S`."""
        self._room = n
        self._least = min(self._least, n)
        if self._last is None:
            return
        lane, rows, at = self._last
        self._last = None
        fitting = int(rows * TAKE_S / max(self._time() - at, 1e-6))
        lane.take_max = min(fitting, max(rows, lane.take_max) * GROWTH_MAX)

    def _take_now(self, n: int, columns: Columns | None) -> Block | None:
        while self._isolated is None and self._may_begin() and (lane := self._turns.next()) is not None:
            block = self._take_of(lane, n, columns) if self._is_there(lane, n, columns) else None
            if block is not None:
                self._turns.charge(lane, len(block))
                self._last, self._room = (lane, len(block), self._time()), n - len(block)
                if not lane.queue:
                    self._turns.leave(lane)
                if block.lease.isolated and not self._note_suspect(block):
                    return None
                self._ask(lane)
                return block
        return None

    def _take_of(self, lane: _JobLane, n: int, columns: Columns | None = None) -> Block | None:
        """Up to `n` rows of a job's first grant; None where its input cannot be read: then it is forgotten."""
        queued = lane.queue[0]
        held = queued.held
        allowance = held.job.allowance
        is_bought = allowance is not None and allowance.takes_all and not held.is_afforded
        if is_bought and not self._afford(lane, queued, allowance):
            return None
        first, last = self._next_range(lane, queued, n)
        try:
            block = self._block(lane, queued, first, last, columns)
        except JobPaused as error:
            self._forget(held, error)
            return None
        if allowance is not None and not allowance.takes_all:
            assert isinstance(block, RowBlock), "rows under a budget are no columns"
            count = allowance.reserve(block.rows())
            if not count:
                self._turns.leave(lane)
                return None
            if count < len(block):
                block = rows_of(block, 0, line_end(block.lines, 0, count), 0, count)
        queued.next = first + len(block)
        lane.pending -= len(block)
        lane.rate.count(len(block), self._time())
        if queued.ahead is not None:
            queued.ahead = queued.ahead.without(len(block))
        if queued.next == len(queued.numbers):
            lane.queue.popleft()
        self._prefetch(lane, n, columns)
        return block

    def _prefetch(self, lane: _JobLane, n: int, columns: Columns | None) -> None:
        """Read the next rows from a store while the engine runs these. Rows that must be afforded first can wait."""
        if lane.queue and lane.queue[0].held.job.rows.is_remote:
            allowance = lane.queue[0].held.job.allowance
            if allowance is None or not allowance.takes_all:
                self._is_there(lane, n, columns)

    def _block(
        self, lane: _JobLane, queued: _Queued, first: int, last: int, columns: Columns | None = None
    ) -> Block:  # fmt: skip
        """Rows of a grant by index: those that are there, perhaps only the first ones. Raises: JobPaused."""
        if (ahead := queued.ahead) is not None:
            return ahead.take(min(last, ahead.last) - first)
        return self._read(lane, queued, first, last, columns)

    def _read(self, lane: _JobLane, queued: _Queued, first: int, last: int, columns: Columns | None) -> Block:
        """Rows of a grant by index; of columns, perhaps only the first ones. Raises: JobPaused."""
        held, numbers = queued.held, queued.numbers[first:last]
        if columns is not None and held.takes_blocks and isinstance(rows := held.job.rows, ColumnDataset):
            data, count = rows.read_columns(numbers, _names(columns, rows.columns))
            last = first + count
            return ColumnBlock(
                data, queued.positions[first:last], numbers[:count], held.job.form, held,
                lambda numbers: self._read_rows(lane, held, numbers),
            )  # fmt: skip
        if isinstance(numbers, range):
            lines = held.job.rows.read_lines(numbers.start, numbers.stop, queued.numbers[-1] + 1)
        else:
            lines = b"".join([raw + b"\n" for raw in held.job.rows.read_many(numbers)])
        return RowBlock(lines, queued.positions[first:last], numbers, held.job.form, held)

    async def _read_rows(self, lane: _JobLane, held: Held, numbers: Sequence[int]) -> list[bytes]:
        """Whole rows that were taken as columns; none where the input cannot be read: then their job is forgotten."""
        rows = held.job.rows
        try:
            if not rows.is_remote:
                return rows.read_many(numbers)
            return await self._in_thread(lane, lambda: rows.read_many(numbers))
        except JobPaused as error:
            if self._is_known(lane):
                self._forget(held, error)
            return []
        except (OSError, ValueError):
            if self._is_known(lane):
                raise
            return []  # the job was dropped meanwhile, and its dataset closed

    def _forget(self, held: Held, error: JobPaused) -> None:
        """Forget a job whose input has changed or cannot be read, and tell the owner."""
        self.drop(held.job.id)
        self._failed(held.job.id, error)

    def _afford(self, lane: _JobLane, queued: _Queued, allowance: Allowance) -> bool:
        """Cut the lease to the job's budget; return whether any row runs now."""
        steps = cutting(queued.held, allowance, queued.positions)
        try:
            first, last = next(steps)
            while True:
                first, last = steps.send(self._read(lane, queued, first, last, None).rows())
        except StopIteration as stop:
            return self._was_afforded(lane, queued, stop.value)
        except JobPaused as error:
            self._forget(queued.held, error)
            return False

    async def _afford_remote(self, lane: _JobLane, queued: _Queued, allowance: Allowance) -> None:
        """As `_afford`, with rows of a store. Raises: JobPaused."""
        steps = cutting(queued.held, allowance, queued.positions)
        try:
            first, last = next(steps)
            while True:
                block = await self._in_thread(
                    lane, lambda first=first, last=last: self._read(lane, queued, first, last, None)
                )
                if queued not in lane.queue:
                    return  # it was dropped meanwhile
                first, last = steps.send(block.rows())
        except StopIteration as stop:
            queued.waits = not self._was_afforded(lane, queued, stop.value)

    def _was_afforded(self, lane: _JobLane, queued: _Queued, kept: list[int] | None) -> bool:
        held = queued.held
        if kept == []:
            self._turns.leave(lane)
            return False
        held.is_afforded = True
        if kept is not None:
            away = len(queued.numbers) - len(kept)
            queued.positions = array("I", [queued.positions[place] for place in kept])
            queued.numbers = array("I", [queued.numbers[place] for place in kept])
            held.rows, held.undone, held.is_cut = len(kept), held.undone - away, True
            lane.pending -= away
        return True

    def _note_suspect(self, block: Block) -> bool:
        """Record the row's position for the owner, in case the row kills the process. False if that fails."""
        self._isolated = block.numbers[0], block.lease
        lease: Lease = block.lease.lease
        data = f"{lease.job} {lease.generation} {lease.shard} {block.positions[0]}\n"
        try:
            self._suspect.write_text(data)
        except OSError as error:
            self._lanes.clear()
            self._turns = FairQueue()
            self._ended = True
            self._broken(error)
            return False
        return True

    def _ask(self, lane: _JobLane) -> None:
        """Request another grant if the job's rows may run out before it arrives; more, if no other job is here."""
        ahead = len(lane.queue[-1].numbers) if lane.queue else 0
        soon = lane.rate.rows_in(self._ahead_s) if len(self._lanes) == 1 else 0
        if not self._ended and not lane.requested and lane.pending < max(ahead, soon // 2, 1) + 1:
            room = max(self._room, soon) if len(self._lanes) == 1 else 0
            fitting = max(0, room - lane.pending) // lane.grant_rows
            lane.requested = min(1 + fitting, self._grants_max)
            self._want(lane.job, lane.requested)

    def wake(self) -> None:
        """Try again to take rows."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
