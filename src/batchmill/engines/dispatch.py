"""Keeps as many calls in flight as the pacer allows, tries again what a retry can help, and ends cleanly.

Knows nothing of HTTP: how a call is made is a function it is given.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine

import msgspec

from batchmill.engines.ahead import Ahead, nothing
from batchmill.engines.outgoing import Call
from batchmill.engines.pacing import Pacer
from batchmill.engines.retry import BACKOFF_MAX_S, REST_MAX_S, Fault, Kind, Retries, RetryBudget
from batchmill.errors import AuthRefused, InvalidRow, JobPaused, QuotaExhausted
from batchmill.ports import Clock, Feed, Sink
from batchmill.states import PauseReason
from batchmill.types import Outcome, Row, RowError

THROTTLED_MAX_S = 86400.0  # a row that the service keeps putting off for a day is given up
GARBLED_CALLS_MAX = 2
DRAIN_S = 30.0  # what calls in flight get when the job pauses

Send = Callable[[Call], Awaitable[Outcome | Fault]]
Prepare = Callable[[Row], Call]


class Dispatch:
    """One `run` of an engine: rows from a feed through `send` into a sink.

    A task stands for a call in flight; when it has its reply it goes on with the next row, so a task is made only
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
        self._queue: deque[Call] = deque()
        self._done: list[Outcome] = []
        self._held = 0  # rows taken and not put
        self._waiting = 0  # of these, rows that wait for their retry
        self._feed_ended = False
        self._stopped: JobPaused | None = None
        self._alarm: asyncio.Task[None] | None = None
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
                self._enqueue(row)
            self._pump()
        self._feed_ended = True
        self._end_if_done()

    def _room(self) -> int:
        """How many rows more to hold: those in flight, half as many that are ready to go, and some that wait."""
        limit = self._pacer.window.limit
        return limit + max(1, limit // 2) + min(self._waiting, limit) - self._held

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

    def _next(self) -> Call | None:
        """The call that goes now, counted as sent; None when none may."""
        if self._ahead.is_wanted() or not self._queue or self._stopped is not None:
            return None
        call = self._queue[0]
        now = self._clock.monotonic()
        wait = self._pacer.wait_s(len(call.body), now)
        if wait > 0:
            if wait != math.inf and self._alarm is None:
                self._alarm = self._spawn(self._pump_after(wait))
            return None
        self._queue.popleft()
        call.sent_at = now
        call.since = call.since or now
        call.charged = self._pacer.sent(len(call.body))
        return call

    async def _pump_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm = None
        self._pump()

    async def _fly(self, call: Call | None) -> None:
        while call is not None:
            result = await self._send(call)
            now = self._clock.monotonic()
            if isinstance(result, Outcome):
                self._pacer.answered(now)
                if result.usage is not None:
                    tokens = (result.usage.input_tokens, result.usage.output_tokens)
                    self._pacer.correct(len(call.body), call.charged, tokens)
                self._budget.earn()
                self._finish(result)
            else:
                self._handle(call, result, now)
            call = self._next()
            self._pump()
        if self._stopped is not None and self._pacer.window.in_flight == self._ahead.in_flight:
            self._ended.set()

    # what came back

    def _handle(self, call: Call, fault: Fault, now: float) -> None:
        match fault.kind:
            case Kind.PERMANENT:
                self._pacer.answered(now)
                self._finish(fault.outcome(call.row, call.attempts + 1))
            case Kind.AUTH:
                self._pacer.answered(now)
                self._stop(AuthRefused(f"the service refused the credentials: {fault.error.message}"))
            case Kind.QUOTA:
                self._pacer.answered(now)
                self._stop(QuotaExhausted(f"the account has nothing left to spend: {fault.error.message}"))
            case Kind.THROTTLED:
                self._pacer.throttled(fault, call.sent_at, now)
                self._hold(call, fault, now)
            case Kind.GARBLED:
                self._pacer.answered(now)
                self._try_again(call, fault, now, min(self._retries.attempts_max, GARBLED_CALLS_MAX))
            case _:
                self._pacer.failed(fault, call.sent_at, now)
                self._retry(call, fault, now)

    def _hold(self, call: Call, fault: Fault, now: float) -> None:
        """Throttled: the row goes first once the service may be called again."""
        if fault.rest_s is not None and fault.rest_s > REST_MAX_S:
            hours = fault.rest_s / 3600
            self._stop(QuotaExhausted(f"the service asked to be left alone for {hours:.1f} h: {fault.error.message}"))
        elif now - call.since >= THROTTLED_MAX_S:
            self._finish(fault.outcome(call.row, call.attempts + 1))
        else:
            self._queue.appendleft(call)

    def _retry(self, call: Call, fault: Fault, now: float) -> None:
        trouble = self._pacer.outage.trouble(now)
        if trouble is not None:
            verb = "has not answered" if trouble.was_up else "cannot be reached"
            text = f"the service {verb} for {trouble.lasted_s:.0f} s: {trouble.last}"
            self._stop(JobPaused(text, reason=PauseReason.ENGINE_FAILED))
            return
        if self._pacer.outage.is_open:
            self._queue.appendleft(call)
            return
        self._try_again(call, fault, now, self._retries.attempts_max)

    def _try_again(self, call: Call, fault: Fault, now: float, calls_max: int) -> None:
        """An attempt is spent: go again after a while, unless it was the last."""
        call.attempts += 1
        told = self._retries.delay_s
        if call.attempts >= calls_max or now - call.since >= self._retries.lasts_s:
            self._finish(fault.outcome(call.row, call.attempts))
        elif fault.rest_s == 0 and call.attempts == 1:
            self._queue.appendleft(call)
        else:
            if told is not None:
                delay = told(call.attempts)
            else:
                delay = self._pacer.retry_in_s(call.attempts) if self._budget.spend() else BACKOFF_MAX_S
            self._waiting += 1
            self._spawn(self._return(call, delay))

    async def _return(self, call: Call, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._waiting -= 1
        self._queue.appendleft(call)
        self._pump()

    # results and the end

    def _finish(self, outcome: Outcome) -> None:
        self._held -= 1
        self._done.append(outcome)
        self._has_done.set()
        if self._feed_ended:
            self._end_if_done()
        elif self._room() * 8 > self._pacer.window.limit:
            self._has_room.set()

    async def _deliver(self, sink: Sink) -> None:
        """Put what has been finished since the last turn of the loop, in one call."""
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
        """No further call goes out; those in flight have their chance."""
        if self._stopped is None:
            self._stopped = pause
            self._feeder.cancel()
            self._spawn(self._give_up_after(DRAIN_S))

    async def _give_up_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._ended.set()
