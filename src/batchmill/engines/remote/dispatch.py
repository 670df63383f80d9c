"""Dispatch: keeps as many calls in flight as the pacer allows, retries, and ends cleanly.

Knows nothing of HTTP: how a call is made is a function it is given.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine

import msgspec
from msgspec.structs import replace

from batchmill.engines.remote.outgoing import RemoteRow
from batchmill.engines.remote.pacing import Ahead, Pacer, nothing
from batchmill.engines.retry import BACKOFF_MAX_S, REST_MAX_S, Fault, FaultKind, Retries, RetryBudget
from batchmill.errors import AuthRefused, InvalidRow, JobPaused, QuotaExhausted
from batchmill.ports import Clock, Feed, Sink
from batchmill.states import PauseReason
from batchmill.types import Outcome, Row, RowError, Usage

THROTTLED_MAX_S = 86400.0  # a row that the service keeps putting off for a day is given up
GARBLED_CALLS_MAX = 2
DRAIN_S = 30.0  # what calls in flight get when the job pauses
LAST_WAIT_S = 10.0  # a last attempt waits so long where no other row was answered since the first one failed
HELD_MAX = 2048  # rows that are held while a row is looked for that is answered

Send = Callable[[RemoteRow], Awaitable[Outcome | Fault]]
Prepare = Callable[[Row], RemoteRow]


class Dispatch:
    """One `run` of an engine: rows from a feed through `send` into a sink.

    A task is a call in flight; after its reply it continues with the next row, so a task is created only
    when more calls are to be in flight than before. Rows that wait for their retry hold no place in flight.
    """

    def __init__(
        self, prepare: Prepare, send: Send, pacer: Pacer, *, ahead: Ahead, retries: Retries, clock: Clock
    ) -> None:
        self._prepare = prepare
        self._send = send
        self._pacer = pacer
        self._ahead = ahead
        self._retries = retries
        self._clock = clock
        self._budget = RetryBudget()
        self._queue: deque[RemoteRow] = deque()
        self._done: list[Outcome] = []
        self._held = 0  # rows taken and not put
        self._held_of: Counter[str] = Counter()  # the same for each job
        self._waiting: set[RemoteRow] = set()  # of these, rows that wait for their retry
        self._aside: list[RemoteRow] = []  # and rows that failed in the outage that lasts
        self._reach = 0  # rows to hold while it lasts
        self._given_up: set[str] = set()  # jobs whose failures are final, until one of their rows is answered
        self._feed_ended = False
        self._stopped: JobPaused | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None  # for the end of patience, while nothing may go
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_room, self._has_done, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, feed: Feed, sink: Sink) -> None:
        """As `ports.Engine.run`."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._ahead.resume = self._pump
                self._feeder = self._spawn(self._take(feed))
                self._spawn(self._deliver(sink))
                await self._ended.wait()
                for task in self._tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._ahead.resume = nothing
            self._pacer.idle(self._ahead.in_flight)
            self._flush(sink)
        if self._stopped is not None:
            raise self._stopped

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # rows in

    async def _take(self, feed: Feed) -> None:
        while True:
            while (room := self._room()) <= 0:
                self._has_room.clear()
                await self._has_room.wait()
            rows = await feed.take(room)
            if not rows:
                break
            self._held += len(rows)
            for row in rows:
                self._held_of[_job_of(row)] += 1
                self._enqueue(row)
            self._pump()
        self._feed_ended = True
        self._end_if_done()

    def _room(self) -> int:
        """How many more rows to hold: those in flight, half as many ready to go, and some that wait.

        In an outage more and more: one of them may be answered.
        """
        limit = self._pacer.window.limit
        return max(limit + max(1, limit // 2) + min(len(self._waiting), limit), self._reach) - self._held

    def _enqueue(self, row: Row) -> None:
        try:
            self._queue.append(self._prepare(row))
        except InvalidRow as error:
            self._finish(Outcome(row, None, RowError(error.code, error.message), 0))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._finish(Outcome(row, None, RowError("invalid_row", f"the row cannot be read: {error}"), 0))

    # calls out

    def _pump(self) -> None:
        while (call := self._next()) is not None:
            self._spawn(self._fly(call))

    def _next(self) -> RemoteRow | None:
        """The next call, counted as sent; None if none may go now."""
        if self._ahead.is_wanted() or self._stopped is not None:
            return None
        is_down = self._pacer.outage.is_open
        if (self._aside or self._reach) and not is_down:
            self._take_back()
        if not self._queue and not self._aside:
            return None
        now = self._clock.monotonic()
        given_up = self._given_up_row() if is_down else None
        call = given_up or (self._test_row(now) if is_down else self._queue[0])
        if call is None:
            return None
        wait = self._pacer.wait_s(len(call.body), now, is_no_outage=given_up is not None)
        if wait > 0:
            if wait != math.inf and self._alarm is None:
                self._alarm = self._spawn(self._pump_after(wait))
            return None
        if is_down:
            (self._aside if call in self._aside else self._queue).remove(call)
        else:
            self._queue.popleft()
        call.sent_at = now
        call.since = call.since or now
        call.charged = self._pacer.sent(len(call.body))
        return call

    # a service that is down, as against rows that fail

    def _test_row(self, now: float) -> RemoteRow | None:
        """The row that tests whether an outage is over: ideally the newest one that has not failed in it.

        Rows that failed are tested with too where there are no others, but for their last attempt: that waits. A
        refused connection costs none, so any row asks whether there is one.
        """
        if self._has_lasted_too_long(now):
            return None
        outage, last = self._pacer.outage, self._retries.attempts_max - 1
        for call in reversed(self._queue):
            if call.stretch is not outage.stretch and call.attempts < max(last, 1):
                return call
        failed = [*self._aside, *self._queue]
        test = min(failed, key=lambda call: call.attempts)
        if test.attempts < max(last, 1) or not outage.is_reachable:
            return test
        self._has_room.set()
        if self._watch is None:
            self._watch = self._spawn(self._watch_for(outage.patience_s(now)))
        return None

    async def _watch_for(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._watch = None
        self._pump()

    def _look_further(self) -> None:
        """Hold more rows after a test row has failed, to find a better one."""
        if self._pacer.outage.is_reachable and self._is_idle():
            self._reach = min(HELD_MAX, max(self._pacer.window.limit, 2 * self._reach))
        self._has_room.set()

    def _take_back(self) -> None:
        """Queue the rows of an outage that is over, as long as other rows confirm that it is over.

        Its duration does not count as theirs.
        """
        now = self._clock.monotonic()
        for call in self._aside:
            call.since += now - call.sent_at
        self._queue.extendleft(reversed(self._aside))
        self._aside.clear()
        self._reach = 0

    def _has_lasted_too_long(self, now: float) -> bool:
        """Stop with a pause if the outage has lasted too long; return whether it has."""
        trouble = self._pacer.outage.trouble(now)
        if trouble is None:
            return False
        verb = "has not answered" if trouble.was_up else "cannot be reached"
        text = f"the service {verb} for {trouble.lasted_s:.0f} s: {trouble.last}"
        if failed := sum(call.attempts > 0 for call in [*self._aside, *self._queue]):
            text += f"; {failed} rows were refused so: where they are to blame, `batchmill fail JOB` ends them"
        self._stop(JobPaused(text, reason=PauseReason.ENGINE_FAILED))
        return True

    def fail_rows(self, job_id: str) -> None:
        """Give up the failed rows of a job with their last error, and those that fail from now on.

        Outages hold its rows back no more, until one of them is answered; rows of other jobs wait as before. Rows that
        never had a reply go on waiting.
        """
        self._given_up.add(job_id)
        for calls in (self._aside, self._queue, self._waiting):
            for call in [call for call in calls if call.attempts and _job_of(call.row) == job_id]:
                assert call.fault is not None
                calls.remove(call)
                outcome = call.fault.outcome(call.row, call.attempts)
                self._finish(outcome if call.wasted is None else replace(outcome, usage=call.wasted))
        self._dismiss()
        self._pump()

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended or paused."""
        self._given_up.discard(job_id)

    def _given_up_row(self) -> RemoteRow | None:
        """A row of a given-up job, which no outage holds back as long as connections work."""
        if not self._given_up or not self._pacer.outage.is_reachable:
            return None
        return next((call for call in self._queue if self._is_given_up(call)), None)

    def _dismiss(self) -> None:
        """Whoever gives rows up says that it is they, not the service, unless there is no connection. Of rows of other
        jobs nobody has said so."""
        if self._given_up and self._pacer.outage.is_reachable and self._held_of.keys() <= self._given_up:
            self._pacer.outage.dismiss()

    async def _pump_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm = None
        self._pump()

    async def _fly(self, call: RemoteRow | None) -> None:
        while call is not None:
            result = await self._send(call)
            now = self._clock.monotonic()
            if isinstance(result, Outcome):
                self._pacer.answered(now)
                if call.stretch is not None:
                    call.stretch.answered()
                if self._given_up:
                    self.forget(_job_of(call.row))
                if result.usage is not None:
                    tokens = (result.usage.input_tokens, result.usage.output_tokens)
                    self._pacer.correct(len(call.body), call.charged, tokens)
                self._budget.earn()
                self._end(call, result)
            else:
                self._handle(call, result, now)
            call = self._next()
            self._pump()
        if self._stopped is not None and self._is_idle():
            self._ended.set()

    def _is_idle(self) -> bool:
        """Whether no row is in flight."""
        return self._pacer.window.in_flight == self._ahead.in_flight

    # replies

    def _handle(self, call: RemoteRow, fault: Fault, now: float) -> None:
        match fault.kind:
            case FaultKind.PERMANENT:
                self._pacer.answered(now)
                self._end(call, fault.outcome(call.row, call.attempts + 1))
            case FaultKind.AUTH:
                self._pacer.answered(now)
                self._stop(AuthRefused(f"the service refused the credentials: {fault.error.message}"))
            case FaultKind.QUOTA:
                self._pacer.answered(now)
                self._stop(QuotaExhausted(f"the account has nothing left to spend: {fault.error.message}"))
            case FaultKind.THROTTLED:
                self._pacer.throttled(fault, call.sent_at, now)
                self._hold(call, fault, now)
            case FaultKind.GARBLED:
                self._pacer.answered(now)
                self._try_again(call, fault, now, min(self._retries.attempts_max, GARBLED_CALLS_MAX))
            case _:
                self._pacer.failed(fault, call.sent_at, now)
                self._retry(call, fault, now)

    def _hold(self, call: RemoteRow, fault: Fault, now: float) -> None:
        """Queue a throttled row first."""
        if fault.rest_s is not None and fault.rest_s > REST_MAX_S:
            hours = fault.rest_s / 3600
            self._stop(QuotaExhausted(f"the service asked to be left alone for {hours:.1f} h: {fault.error.message}"))
        elif now - call.since >= THROTTLED_MAX_S:
            self._end(call, fault.outcome(call.row, call.attempts + 1))
        else:
            self._queue.appendleft(call)

    def _retry(self, call: RemoteRow, fault: Fault, now: float) -> None:
        outage = self._pacer.outage
        if outage.is_open:
            self._look_further()
        if fault.kind is not FaultKind.UNREACHABLE:
            self._count(call, fault)
            if self._is_given_up(call) or self._is_spent(call, now, self._retries.attempts_max):
                self._end(call, fault.outcome(call.row, call.attempts))
                self._dismiss()
                return
        if outage.is_open:
            if not self._has_lasted_too_long(now):
                self._aside.append(call)
        else:
            self._go_again(call, fault)

    def _try_again(self, call: RemoteRow, fault: Fault, now: float, calls_max: int) -> None:
        """Count a failed attempt that does not suggest an outage."""
        call.attempts += 1
        call.fault = fault
        if self._is_given_up(call) or self._is_spent(call, now, calls_max):
            self._end(call, fault.outcome(call.row, call.attempts))
            return
        if fault.reply is not None and fault.reply.usage is not None:
            call.wasted = fault.reply.usage + (call.wasted or Usage())
        self._go_again(call, fault)

    def _count(self, call: RemoteRow, fault: Fault) -> None:
        """Count a failed attempt. Attempts during a confirmed outage are given back."""
        stretch, earlier = self._pacer.outage.stretch, call.stretch
        if earlier is not stretch:
            if earlier is not None:
                earlier.failed()
                if earlier.was_down:
                    call.attempts -= call.within
            call.stretch, call.within = stretch, 0
        call.attempts += 1
        call.within += 1
        call.fault = fault

    def _is_spent(self, call: RemoteRow, now: float, calls_max: int) -> bool:
        """Whether the row has no attempt or time left. The time of an outage does not count."""
        is_late = now - call.since >= self._retries.lasts_s and not self._pacer.outage.is_open
        return call.attempts >= calls_max or is_late

    def _is_given_up(self, call: RemoteRow) -> bool:
        return bool(self._given_up) and _job_of(call.row) in self._given_up

    def _go_again(self, call: RemoteRow, fault: Fault) -> None:
        """Try a row again, at once or after a delay."""
        delay_s = self._retries.delay_s
        if fault.rest_s == 0 and call.attempts == 1:
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
        self._spawn(self._return(call, delay))

    async def _return(self, call: RemoteRow, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        if call not in self._waiting:  # it was given up
            return
        self._waiting.discard(call)
        if self._pacer.outage.is_open and call.stretch is self._pacer.outage.stretch:
            self._aside.append(call)
        else:
            self._queue.appendleft(call)
        self._pump()

    # results and the end

    def _end(self, call: RemoteRow, outcome: Outcome) -> None:
        """Finish a row. Replies that could not be kept were paid, so their tokens count."""
        if call.wasted is not None:
            outcome = replace(outcome, usage=call.wasted + (outcome.usage or Usage()))
        self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        self._held -= 1
        job_id = _job_of(outcome.row)
        self._held_of[job_id] -= 1
        if not self._held_of[job_id]:
            del self._held_of[job_id]
        self._done.append(outcome)
        self._has_done.set()
        if self._feed_ended:
            self._end_if_done()
        elif self._room() * 8 > self._pacer.window.limit:
            self._has_room.set()

    async def _deliver(self, sink: Sink) -> None:
        """Put all finished outcomes of a loop turn in one call."""
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
