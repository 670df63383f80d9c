"""Dispatch: keeps as many calls in flight as the pacer allows, retries, and ends cleanly.

It does not know HTTP: a function that it is given makes the calls.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine

import msgspec
from msgspec.structs import replace

from batchmill.datasets.media.loading import has_media
from batchmill.engines.remote.outgoing import RemoteRow, text_bytes
from batchmill.engines.remote.pacing import LiveQueue, Pacer, nothing
from batchmill.engines.retry import BACKOFF_MAX_S, RETRY_AFTER_MAX_S, Fault, FaultKind, Retries, RetryBudget
from batchmill.engines.row_media import AHEAD_MAX, LoadingRow, RowMedia
from batchmill.errors import AuthRefused, InvalidRow, JobPaused, QuotaExhausted
from batchmill.ports.clock import Clock
from batchmill.ports.engines import Feed, JobFeed, Sink
from batchmill.states import PauseReason
from batchmill.types import Outcome, Row, RowError, Usage

THROTTLED_MAX_S = 86400.0  # a row that the service throttles for a day fails
GARBLED_CALLS_MAX = 2
DRAIN_S = 30.0  # how long calls in flight may run when the job pauses
LAST_WAIT_S = 10.0  # the delay of a last attempt if no other row was answered since the first attempt
HELD_BYTES_MAX = 256 * 1024 * 1024  # of rows that are held and of their calls, and those of one row more
HELD_MAX = 2048  # rows to hold in an outage, to find one that the service answers

LOADING_MAX = 4 * AHEAD_MAX  # rows whose media are loaded that take no place of others

Send = Callable[[RemoteRow], Awaitable[Outcome | Fault]]
Prepare = Callable[[Row], RemoteRow]


class Dispatch:
    """One `run` of an engine: rows from a feed through `send` into a sink.

    Each task has one call in flight and continues with the next row after its reply, so new tasks are needed only for
    more calls in flight. Rows that wait for their retry do not count as in flight.
    """

    def __init__(
        self, prepare: Prepare, send: Send, pacer: Pacer, *, live_queue: LiveQueue, retries: Retries, clock: Clock
    ) -> None:
        self._prepare = prepare
        self._send = send
        self._pacer = pacer
        self._live_queue = live_queue
        self._retries = retries
        self._clock = clock
        self._budget = RetryBudget()
        self._queue: deque[RemoteRow] = deque()
        self._done: list[Outcome] = []
        self._taken: deque[Row] = deque()  # rows of which no call is made yet: those of others have many bytes
        self._held_bytes = 0  # of held rows and their calls
        self._row_bytes = 0  # of one row, as the last ones were
        self._media_bytes = 0  # of those that were made of rows with media
        self._media = RowMedia(lambda: self._media_bytes, attempts_max=retries.attempts_max, clock=clock)
        self._loading: dict[asyncio.Task[None], Row] = {}  # whose media are being loaded
        self._hold_jobs: Callable[[frozenset[str]], None] = lambda jobs: None
        self._held = 0  # rows taken from the feed and not yet put into the sink
        self._held_of: Counter[str] = Counter()  # the same for each job
        self._waiting: set[RemoteRow] = set()  # held rows that wait for their retry
        self._outage_rows: list[RemoteRow] = []  # held rows that failed in the current outage
        self._outage_held = 0  # rows to hold during the outage
        self._given_up: set[str] = set()  # jobs whose failed rows are not retried, until one of their rows is answered
        self._feed_ended = False
        self._stopped: JobPaused | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = (
            None  # waits until the outage has lasted too long, while no call may be sent
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_room, self._has_done, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, feed: Feed, sink: Sink) -> None:
        """See `ports.engines.Engine.run`."""
        self._hold_jobs = feed.hold_jobs if isinstance(feed, JobFeed) else self._hold_jobs
        try:
            async with asyncio.TaskGroup() as self._group:
                self._live_queue.resume = self._pump
                self._feeder = self._spawn(self._take(feed))
                self._spawn(self._deliver(sink))
                await self._ended.wait()
                for task in self._tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await self._media.close()
            self._live_queue.resume = nothing
            self._pacer.idle(self._live_queue.in_flight)
            self._flush(sink)
        if self._stopped is not None:
            raise self._stopped

    @property
    def media_note(self) -> str:
        """What keeps media of rows from being loaded; empty: nothing."""
        return self._media.note

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # rows

    async def _take(self, feed: Feed) -> None:
        while True:
            while (room := self._room()) <= 0:
                self._has_room.clear()
                await self._has_room.wait()
            rows = await feed.take(min(room, self._fitting()))
            if not rows:
                break
            self._row_bytes = sum(len(row.raw) for row in rows) // len(rows)
            self._held += len(rows)
            self._held_of.update(map(_job_of, rows))
            self._taken.extend(rows)
            while self._taken:
                await self._prepare_next()
            self._pump()
        self._feed_ended = True
        self._end_if_done()

    def _room(self) -> int:
        """How many more rows to take: for the calls in flight, half as many ready rows, and some that wait.

        In an outage the number grows, since one of the new rows may be answered.
        """
        limit, loading = self._pacer.window.limit, min(len(self._loading), LOADING_MAX)
        ready = max(limit + max(1, limit // 2) + min(len(self._waiting), limit), self._outage_held)
        return ready + loading - self._held

    def _fitting(self) -> int:
        """How many rows like the last ones may be held by their bytes, at least one."""
        return max(1, (HELD_BYTES_MAX - self._held_bytes) // max(1, self._row_bytes))

    async def _prepare_next(self) -> None:
        """Make the call of the next row that was taken, once the calls that are held have fewer bytes than they may.

        Rows whose media must be loaded first are loaded beside others.
        """
        row = self._taken[0]
        if has_media(row):
            self._taken.popleft()
            task = self._spawn(self._load(self._media.begin(row), row))
            self._loading[task] = row
            self._hold_slow_jobs()
            return
        if self._held_bytes >= HELD_BYTES_MAX:
            self._pump()
            self._has_room.clear()
            await self._has_room.wait()
            return
        self._taken.popleft()
        self._add(row, self._prepared(row))

    async def _load(self, loading: LoadingRow, row: Row) -> None:
        """Make the call of a row once its media are there."""
        try:
            prepared = await loading.make(self._prepared)
        except InvalidRow as error:
            prepared = Outcome(row, None, RowError(error.code, error.message), 0)
        finally:
            loading.close()
        task = asyncio.current_task()
        assert task is not None
        del self._loading[task]
        self._hold_slow_jobs()
        self._add(row, prepared)
        self._pump()

    def _hold_slow_jobs(self) -> None:
        """Take no more rows of jobs of which many are being loaded: their servers may be slow, or be gone."""
        counts = Counter(map(_job_of, self._loading.values())) if len(self._loading) >= AHEAD_MAX else Counter()
        self._hold_jobs(frozenset(job for job, count in counts.items() if count >= AHEAD_MAX))

    def _add(self, row: Row, prepared: RemoteRow | Outcome) -> None:
        """Queue a call, or finish a row of which there is none."""
        if isinstance(prepared, Outcome):
            self._finish(prepared)
            return
        prepared.held_bytes = len(prepared.body) + len(row.raw)
        self._held_bytes += prepared.held_bytes
        self._media_bytes += prepared.held_bytes if has_media(row) else 0
        self._queue.append(prepared)

    def _prepared(self, row: Row) -> RemoteRow | Outcome:
        """The call of a row, or why there is none."""
        try:
            return self._prepare(row)
        except InvalidRow as error:
            return Outcome(row, None, RowError(error.code, error.message), 0)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return Outcome(row, None, RowError("invalid_row", f"the row cannot be read: {error}"), 0)

    # calls

    def _pump(self) -> None:
        while (call := self._next()) is not None:
            self._spawn(self._send_calls(call))

    def _next(self) -> RemoteRow | None:
        """The next call, counted as sent; None if no call may be sent now."""
        if self._live_queue.start_waiting() or self._stopped is not None:
            return None
        is_down = self._pacer.outage.is_open
        if (self._outage_rows or self._outage_held) and not is_down:
            self._requeue_outage_rows()
        if not self._queue and not self._outage_rows:
            return None
        now = self._clock.monotonic()
        given_up = self._given_up_row() if is_down else None
        call = given_up or (self._test_row(now) if is_down else self._queue[0])
        if call is None:
            return None
        wait = self._pacer.wait_s(text_bytes(call), now, is_no_outage=given_up is not None)
        if wait > 0:
            if wait != math.inf and self._alarm is None:
                self._alarm = self._spawn(self._pump_after(wait))
            return None
        if is_down:
            (self._outage_rows if call in self._outage_rows else self._queue).remove(call)
        else:
            self._queue.popleft()
        call.sent_at = now
        call.since = call.since or now
        call.charged = self._pacer.sent(text_bytes(call))
        return call

    # outages

    def _test_row(self, now: float) -> RemoteRow | None:
        """The row that tests whether an outage is over, preferably the newest one that has not failed in it.

        If all rows failed, one of them is the test, but not with its last attempt. A refused connection costs no
        attempt, so any row can test whether connections work.
        """
        if self._has_lasted_too_long(now):
            return None
        outage, last = self._pacer.outage, self._retries.attempts_max - 1
        for call in reversed(self._queue):
            if call.streak is not outage.streak and call.attempts < max(last, 1):
                return call
        failed_rows = [*self._outage_rows, *self._queue]
        test = min(failed_rows, key=lambda call: call.attempts)
        if test.attempts < max(last, 1) or not outage.is_reachable:
            return test
        self._has_room.set()
        if self._watch is None:
            self._watch = self._spawn(self._pump_after_outage(outage.patience_s(now)))
        return None

    async def _pump_after_outage(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._watch = None
        self._pump()

    def _hold_more(self) -> None:
        """Hold more rows after a test row has failed, to find a better one."""
        if self._pacer.outage.is_reachable and self._is_idle():
            self._outage_held = min(HELD_MAX, max(self._pacer.window.limit, 2 * self._outage_held))
        self._has_room.set()

    def _requeue_outage_rows(self) -> None:
        """Queue the rows of an outage that is over, while other rows confirm that it is over.

        The duration of the outage does not count toward the rows' time limits.
        """
        now = self._clock.monotonic()
        for call in self._outage_rows:
            call.since += now - call.sent_at
        self._queue.extendleft(reversed(self._outage_rows))
        self._outage_rows.clear()
        self._outage_held = 0

    def _has_lasted_too_long(self, now: float) -> bool:
        """Stop with a pause if the outage has lasted too long; return whether it has."""
        trouble = self._pacer.outage.trouble(now)
        if trouble is None:
            return False
        verb = "has not answered" if trouble.was_up else "cannot be reached"
        text = f"the service {verb} for {trouble.lasted_s:.0f} s: {trouble.last}"
        if failed := sum(call.attempts > 0 for call in [*self._outage_rows, *self._queue]):
            text += f"; {failed} rows failed in this way: if the rows are the cause, `batchmill fail JOB` ends them"
        self._stop(JobPaused(text, reason=PauseReason.ENGINE_FAILED))
        return True

    def fail_rows(self, job_id: str) -> None:
        """Fail the failed rows of a job with their last error, and the rows that fail from now on.

        Outages no longer hold its rows back until one of them is answered. Rows of other jobs, and rows that never had
        a reply, still wait.
        """
        self._given_up.add(job_id)
        for calls in (self._outage_rows, self._queue, self._waiting):
            for call in [call for call in calls if call.attempts and _job_of(call.row) == job_id]:
                assert call.fault is not None
                calls.remove(call)
                outcome = call.fault.outcome(call.row, call.attempts)
                self._finish(outcome if call.wasted is None else replace(outcome, usage=call.wasted), call.held_bytes)
        self._dismiss_outage()
        self._pump()

    def give_back(self, job_id: str) -> list[Row]:
        """See `ports.engines.RetryingEngine`. A row with a discarded reply goes on: its outcome says what it cost."""
        rows: list[Row] = []
        for calls in (self._outage_rows, self._queue, self._waiting):
            for call in [call for call in calls if call.wasted is None and _job_of(call.row) == job_id]:
                calls.remove(call)
                self._let_go(call.row, call.held_bytes)
                rows.append(call.row)
        taken, self._taken = self._taken, deque(row for row in self._taken if _job_of(row) != job_id)
        loading = [(task, row) for task, row in self._loading.items() if _job_of(row) == job_id]
        for task, _ in loading:
            task.cancel()
            del self._loading[task]
        self._hold_slow_jobs()
        for row in [*(row for row in taken if _job_of(row) == job_id), *(row for _, row in loading)]:
            self._let_go(row)
            rows.append(row)
        return rows

    def forget(self, job_id: str) -> None:
        """Drop the state of a job that has ended or paused."""
        self._given_up.discard(job_id)

    def _given_up_row(self) -> RemoteRow | None:
        """A row of a given-up job, which no outage holds back while connections work."""
        if not self._given_up or not self._pacer.outage.is_reachable:
            return None
        return next((call for call in self._queue if self._is_given_up(call)), None)

    def _dismiss_outage(self) -> None:
        """End the outage if all held rows belong to given-up jobs and connections work.

        Giving rows up means that the rows are the cause, not the service.
        """
        if self._given_up and self._pacer.outage.is_reachable and self._held_of.keys() <= self._given_up:
            self._pacer.outage.dismiss()

    async def _pump_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm = None
        self._pump()

    async def _send_calls(self, call: RemoteRow | None) -> None:
        while call is not None:
            result = await self._send(call)
            now = self._clock.monotonic()
            if isinstance(result, Outcome):
                self._pacer.answered(now)
                if call.streak is not None:
                    call.streak.answered()
                if self._given_up:
                    self.forget(_job_of(call.row))
                if result.usage is not None:
                    tokens = (result.usage.input_tokens, result.usage.output_tokens)
                    self._pacer.correct(text_bytes(call), call.charged, tokens)
                self._budget.earn()
                self._finish_call(call, result)
            else:
                self._handle(call, result, now)
            call = self._next()
            self._pump()
        if self._stopped is not None and self._is_idle():
            self._ended.set()

    def _is_idle(self) -> bool:
        """Whether no row is in flight."""
        return self._pacer.window.in_flight == self._live_queue.in_flight

    # replies

    def _handle(self, call: RemoteRow, fault: Fault, now: float) -> None:
        match fault.kind:
            case FaultKind.PERMANENT:
                self._pacer.answered(now)
                self._finish_call(call, fault.outcome(call.row, call.attempts + 1))
            case FaultKind.AUTH:
                self._pacer.answered(now)
                self._stop(AuthRefused(f"the service refused the credentials: {fault.error.message}"))
            case FaultKind.QUOTA:
                self._pacer.answered(now)
                self._stop(QuotaExhausted(f"the account has nothing left to spend: {fault.error.message}"))
            case FaultKind.THROTTLED:
                self._pacer.throttled(fault, call.sent_at, now)
                self._requeue_throttled(call, fault, now)
            case FaultKind.GARBLED:
                self._pacer.answered(now)
                self._retry_garbled(call, fault, now, min(self._retries.attempts_max, GARBLED_CALLS_MAX))
            case _:
                self._pacer.failed(fault, call.sent_at, now)
                self._retry(call, fault, now)

    def _requeue_throttled(self, call: RemoteRow, fault: Fault, now: float) -> None:
        """Queue a throttled row first."""
        if fault.retry_after_s is not None and fault.retry_after_s > RETRY_AFTER_MAX_S:
            hours = fault.retry_after_s / 3600
            self._stop(QuotaExhausted(f"the service requests a wait of {hours:.1f} h: {fault.error.message}"))
        elif now - call.since >= THROTTLED_MAX_S:
            self._finish_call(call, fault.outcome(call.row, call.attempts + 1))
        else:
            self._queue.appendleft(call)

    def _retry(self, call: RemoteRow, fault: Fault, now: float) -> None:
        outage = self._pacer.outage
        if outage.is_open:
            self._hold_more()
        if fault.kind is not FaultKind.UNREACHABLE:
            self._count(call, fault)
            if self._is_given_up(call) or self._is_spent(call, now, self._retries.attempts_max):
                self._finish_call(call, fault.outcome(call.row, call.attempts))
                self._dismiss_outage()
                return
        if outage.is_open:
            if not self._has_lasted_too_long(now):
                self._outage_rows.append(call)
        else:
            self._schedule_retry(call, fault)

    def _retry_garbled(self, call: RemoteRow, fault: Fault, now: float, calls_max: int) -> None:
        """Count a failed attempt that does not suggest an outage."""
        call.attempts += 1
        call.fault = fault
        if self._is_given_up(call) or self._is_spent(call, now, calls_max):
            self._finish_call(call, fault.outcome(call.row, call.attempts))
            return
        if fault.reply is not None and fault.reply.usage is not None:
            call.wasted = fault.reply.usage + (call.wasted or Usage())
        self._schedule_retry(call, fault)

    def _count(self, call: RemoteRow, fault: Fault) -> None:
        """Count a failed attempt. Attempts during a confirmed outage do not count."""
        streak, earlier = self._pacer.outage.streak, call.streak
        if earlier is not streak:
            if earlier is not None:
                earlier.failed()
                if earlier.was_down:
                    call.attempts -= call.within
            call.streak, call.within = streak, 0
        call.attempts += 1
        call.within += 1
        call.fault = fault

    def _is_spent(self, call: RemoteRow, now: float, calls_max: int) -> bool:
        """Whether the row has no attempt or time left. The time of an outage does not count."""
        is_late = now - call.since >= self._retries.lasts_s and not self._pacer.outage.is_open
        return call.attempts >= calls_max or is_late

    def _is_given_up(self, call: RemoteRow) -> bool:
        return bool(self._given_up) and _job_of(call.row) in self._given_up

    def _schedule_retry(self, call: RemoteRow, fault: Fault) -> None:
        """Retry a row at once or after a delay."""
        delay_s = self._retries.delay_s
        if fault.retry_after_s == 0 and call.attempts == 1:
            self._queue.appendleft(call)
            return
        if delay_s is not None:
            delay = delay_s(call.attempts)
        else:
            delay = self._pacer.retry_in_s(call.attempts) if self._budget.spend() else BACKOFF_MAX_S
            is_last = call.attempts == self._retries.attempts_max - 1
            if is_last and call.within == call.attempts and self._held > 1:
                delay = max(delay, LAST_WAIT_S)
        self._waiting.add(call)
        self._spawn(self._requeue_after(call, delay))

    async def _requeue_after(self, call: RemoteRow, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        if call not in self._waiting:  # the row was given up
            return
        self._waiting.discard(call)
        if self._pacer.outage.is_open and call.streak is self._pacer.outage.streak:
            self._outage_rows.append(call)
        else:
            self._queue.appendleft(call)
        self._pump()

    # results

    def _finish_call(self, call: RemoteRow, outcome: Outcome) -> None:
        """Finish a row. Discarded replies cost money, so their tokens count."""
        if call.wasted is not None:
            outcome = replace(outcome, usage=call.wasted + (outcome.usage or Usage()))
        self._finish(outcome, call.held_bytes)

    def _finish(self, outcome: Outcome, held_bytes: int = 0) -> None:
        self._done.append(outcome)
        self._has_done.set()
        self._let_go(outcome.row, held_bytes)

    def _let_go(self, row: Row, held_bytes: int = 0) -> None:
        self._held -= 1
        self._held_bytes -= held_bytes
        self._media_bytes -= held_bytes if has_media(row) else 0
        self._media.wake()
        job_id = _job_of(row)
        self._held_of[job_id] -= 1
        if not self._held_of[job_id]:
            del self._held_of[job_id]
        if self._feed_ended:
            self._end_if_done()
        elif self._taken or self._room() * 8 > self._pacer.window.limit:
            self._has_room.set()

    async def _deliver(self, sink: Sink) -> None:
        """Put all outcomes of one turn of the event loop into the sink together."""
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            self._flush(sink)

    def _flush(self, sink: Sink) -> None:
        if self._done:
            done, self._done = self._done, []
            sink.put(done)

    def _end_if_done(self) -> None:
        if self._held == 0:
            self._ended.set()

    def _stop(self, pause: JobPaused) -> None:
        """Stop sending; calls in flight may finish."""
        if self._stopped is None:
            self._stopped = pause
            self._feeder.cancel()
            self._spawn(self._give_up_after(0.0 if self._is_idle() else DRAIN_S))

    async def _give_up_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._ended.set()


def _job_of(row: Row) -> str:
    return "" if row.lease is None else row.lease.job_id
