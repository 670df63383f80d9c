"""Pacing: calls in flight, configured and learned rates, requested delays, and outages of one service.

It only decides: callers report what happened and when, and ask whether another call may be sent. `Pacer` never waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from batchmill.engines.remote.learned_rate import LearnedRate, RefusalCause
from batchmill.engines.retry import RETRY_AFTER_MAX_S, FailureStreak, Fault, FaultKind, backoff_s
from batchmill.errors import RateLimited, Unavailable
from batchmill.ports.clock import Clock
from batchmill.types import Limits

IN_FLIGHT_START = 32
IN_FLIGHT_CEILING = 1024
BURST_S = 1.0  # calls and tokens saved up while nothing was sent
# After the start, throughput is measured over this many windows of replies, and for at least this long.
WINDOWS_A_ROUND, ROUND_S = 4, 0.25
PATIENCE, PATIENCE_MAX = 2, 64  # rounds until a larger limit is tried again; doubled after each try without gain
REFUSALS_KNOWN = 3  # refusals in a row that the learned rate explains
OUTAGE_FAILURES = 20  # failures in a row, without a reply between them, that indicate an outage of the service
PROBE_MAX_S = 10.0
OUTAGE_NEW_S, OUTAGE_MAX_S = 30.0, 600.0  # the longest outage of a service that never replied, and of one that did


class ConcurrencyWindow:
    """The limit of calls in flight: enough for the service's throughput, and at most a few times that.

    It starts as TCP does, with one more for every reply, until more calls bring no more throughput. Then it tries a
    quarter more now and then, and keeps it if it helps. Refusals and timeouts shrink it, once per round trip. Latency
    alone has no effect: the latency of an LLM depends on the length of its output.
    """

    def __init__(self, ceiling: int, now: float) -> None:
        self.ceiling = max(ceiling, 1)
        self.in_flight = 0
        self._shrunk_at = -math.inf
        self._uncapped: int | None = None  # the limit before it was capped
        self.restart(now)

    def restart(self, now: float) -> None:
        """Start again after an outage."""
        self.limit = min(IN_FLIGHT_START, self.ceiling)
        self._starting = True
        self._flat_rounds = 0
        self._best = 0.0  # replies per second at `_base` in flight
        self._base = self.limit
        self._patience = PATIENCE
        self._waited = 0
        self._open_round(now)

    def answered(self, now: float) -> None:
        """Note a reply that allows more calls."""
        self.in_flight -= 1
        self._replies += 1
        if self._starting and not self._flat_rounds and self.limit < self.ceiling and self.in_flight * 2 >= self.limit:
            self.limit += 1
        if self._replies >= self._round:
            self._close_round(now)

    def failed(self) -> None:
        """Note a call without a reply for a reason other than load."""
        self.in_flight -= 1

    def refused(self, sent_at: float, now: float, keep: float = 0.8) -> None:
        """Shrink to the share `keep` after a refusal or timeout, unless the call was sent before the last shrink."""
        self.in_flight -= 1
        if sent_at < self._shrunk_at:
            return
        self._shrunk_at = now
        # An unused allowance does not show what the service can take.
        used = min(self.limit, max(self.in_flight + 1, IN_FLIGHT_START))
        self.limit = max(1, int(used * keep))
        self._settle(now, 0.0)

    def cap(self, now: float) -> None:
        """Take the current number in flight as the service's maximum."""
        self._uncapped = self.limit
        self.limit = max(1, min(self.limit, self.in_flight))
        self._settle(now, 0.0)

    def uncap(self, now: float) -> None:
        """Remove that maximum."""
        if self._uncapped is not None:
            self.limit = max(self.limit, self._uncapped)
            self._settle(now, 0.0)
            self._uncapped = None

    def _open_round(self, now: float) -> None:
        self._began = now
        self._replies = 0
        self._allowed = self.limit  # when the round began
        # Services reply in bursts; over several windows the ends of a burst matter little.
        self._round = self.limit if self._starting else self.limit * WINDOWS_A_ROUND

    def _close_round(self, now: float) -> None:
        elapsed_s = now - self._began
        if not self._starting and elapsed_s < ROUND_S:
            self._round += self.limit
            return
        # A window that was not full does not measure the service.
        if elapsed_s > 0 and (self.in_flight + 1) * 10 >= self._allowed * 8:
            self._judge(self._replies / elapsed_s, now)
        self._open_round(now)

    def _judge(self, rate: float, now: float) -> None:
        if self._starting:
            if rate > self._best * 1.1:
                self._best, self._base, self._flat_rounds = rate, self._allowed, 0
            else:
                self._flat_rounds += 1
            if self._flat_rounds >= 2 or self.limit >= self.ceiling:
                # Stay up to twice above the best limit: the last rounds may have been slow for another reason.
                self.limit = min(self.limit, self._base * 2)
                self._settle(now, self._best)
            return
        if self.limit > self._base:
            if rate > self._best * 1.06:
                self._base, self._best, self._patience, self._waited = self.limit, rate, PATIENCE, PATIENCE
            else:
                self.limit = self._base
                self._patience = min(self._patience * 2, PATIENCE_MAX)
        else:
            self._best = rate if self._best == 0 else 0.7 * self._best + 0.3 * rate
        self._waited += 1
        if self._waited >= self._patience and self.limit < self.ceiling:
            self._waited = 0
            self.limit = min(self.ceiling, self.limit + max(1, self.limit // 4))

    def _settle(self, now: float, rate: float) -> None:
        self._starting = False
        self._base, self._best, self._patience, self._waited = self.limit, rate, PATIENCE, 0
        self._open_round(now)


class Bucket:
    """A token bucket: a rate per minute with at most one second saved up. Larger amounts are taken on credit."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60
        self._capacity = max(self._rate * BURST_S, 1.0)
        self._level = self._capacity
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0 for now."""
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        missing = min(amount, self._capacity) - self._level
        # Rounding must not leave a wait that is below the clock's resolution.
        return missing / self._rate if missing > 1e-6 else 0.0

    def take(self, amount: float) -> None:
        """Take `amount`; a negative amount is given back."""
        self._level = min(self._capacity, self._level - amount)


class TokenGuess:
    """Estimates the tokens of a call from its bytes and earlier replies."""

    def __init__(self) -> None:
        self._bytes_per_token = 4.0
        self._output = 64.0

    def tokens(self, size_bytes: int) -> float:
        return size_bytes / self._bytes_per_token + self._output

    def learn(self, size_bytes: int, input_tokens: int, output_tokens: int) -> None:
        if input_tokens:
            self._bytes_per_token += 0.1 * (size_bytes / input_tokens - self._bytes_per_token)
        self._output += 0.1 * (output_tokens - self._output)


class Trouble(Struct, frozen=True):
    """An outage that has lasted too long."""

    lasted_s: float
    last: str  # the message of the last failure
    was_up: bool


class Outage:
    """Detects whether the service is down, and not single rows that fail.

    A refused connection indicates an outage at once, other failures after many without a reply between them. During an
    outage one call at a time tests whether the service is back.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.was_up = False
        self.failures = 0
        self.last = ""
        self.is_reachable = True  # the last failure was not a refused connection
        self.streak = FailureStreak()  # the current streak of failures
        self.probe_at = -math.inf  # when the next call may test whether the outage is over
        self._since = 0.0
        self._probes = 0

    def failed(self, fault: Fault, now: float) -> None:
        if self.failures == 0:
            self._since = now
        self.failures += 1
        self.last = fault.error.message
        self.is_reachable = fault.kind is not FaultKind.UNREACHABLE
        self.is_open = self.is_open or not self.is_reachable or self.failures >= OUTAGE_FAILURES
        self.streak.is_outage = self.is_open

    def answered(self) -> None:
        self.was_up = True
        self.dismiss()

    def dismiss(self) -> None:
        """Forget the failures so far: they do not indicate an outage."""
        if self.failures:
            self.is_open, self.failures, self._probes, self.streak = False, 0, 0, FailureStreak()
            self.probe_at = -math.inf

    def probe_in_s(self, jitter: Callable[[], float]) -> float:
        """Seconds until the next test call. Call it once for each test."""
        self._probes += 1
        return min(max(0.1, backoff_s(self._probes, jitter)), PROBE_MAX_S)

    def patience_s(self, now: float) -> float:
        """Seconds until the outage has lasted too long; 0 or less if it has."""
        return self._since + (OUTAGE_MAX_S if self.was_up else OUTAGE_NEW_S) - now

    def trouble(self, now: float) -> Trouble | None:
        """The outage if it has lasted too long, else None."""
        if not self.is_open or self.patience_s(now) > 0:
            return None
        return Trouble(now - self._since, self.last, self.was_up)


class Pacer:
    """Decides whether a call may be sent now, for one service in one process."""

    def __init__(self, limits: Limits, now: float, *, jitter: Callable[[], float], ceiling: int) -> None:
        self.window = ConcurrencyWindow(ceiling, now)
        self.outage = Outage()
        self.guess = TokenGuess()
        self._requests = None if limits.requests_per_minute is None else Bucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else Bucket(limits.tokens_per_minute, now)
        self._learned = LearnedRate()
        self._jitter = jitter
        self._rest_until = -math.inf
        self._refusals = 0  # refusals in a row without a requested wait
        self._refused_at = -math.inf

    @property
    def is_full(self) -> bool:
        """Whether the maximum of calls is in flight and the service replies."""
        return self.window.in_flight >= self.window.limit and not self.outage.is_open

    def wait_s(self, size_bytes: int, now: float, *, is_admitted: bool = False, is_no_outage: bool = False) -> float:
        """Seconds until a call of this size may be sent: 0 for now, infinity if a call in flight must end first.

        Args:
            is_admitted: the call does not wait for the configured rate of calls, but counts toward it.
            is_no_outage: an outage does not hold the call back, because its failures count as its own.
        """
        window = self.window
        is_down = self.outage.is_open and not is_no_outage
        if window.in_flight >= (1 if is_down else window.limit):
            self._learned.held(now)
            return math.inf
        wait = max(self._rest_until, self.outage.probe_at if is_down else -math.inf) - now
        if wait > 0:
            return wait
        wait = self._learned.wait_s(now)
        if self._requests is not None and not is_admitted:
            wait = max(wait, self._requests.wait_s(1, now))
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait_s(self.guess.tokens(size_bytes), now))
        return wait

    def sent(self, size_bytes: int) -> float:
        """Note a sent call. Returns its estimated tokens, which `correct` adjusts."""
        self.window.in_flight += 1
        self._learned.sent()
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is None:
            return 0.0
        charged = self.guess.tokens(size_bytes)
        self._tokens.take(charged)
        return charged

    def answered(self, now: float) -> None:
        """Note a reply, even one that refuses its row."""
        if self.outage.is_open:
            self.window.restart(now)
        self.outage.answered()
        self._refusals = 0
        self._learned.answered()
        self.window.answered(now)

    def correct(self, size_bytes: int, charged: float, tokens: tuple[int, int]) -> None:
        """Replace an estimate with the actual input and output `tokens`."""
        if self._tokens is not None:
            self._tokens.take(sum(tokens) - charged)
            self.guess.learn(size_bytes, *tokens)

    def throttled(self, fault: Fault, sent_at: float, now: float) -> None:
        """Pause all calls for the requested time, or a default.

        The default grows while no rate is known or no call is answered.
        """
        self.outage.answered()
        requested_s = None if fault.retry_after_s is None else min(fault.retry_after_s, RETRY_AFTER_MAX_S)
        verdict = self._learned.refused(sent_at, now, requested_s, self.window.in_flight - 1)
        self._attribute(verdict, sent_at, now)
        if requested_s is not None:
            self._rest(now + requested_s * (1 + 0.1 * self._jitter()))
        elif sent_at >= self._refused_at:
            self._refused_at = now
            self._refusals += 1
            is_known = verdict is not RefusalCause.UNKNOWN and self._refusals <= REFUSALS_KNOWN
            self._rest(now + (self._learned.default_wait_s() if is_known else backoff_s(self._refusals, self._jitter)))

    def _attribute(self, verdict: RefusalCause, sent_at: float, now: float) -> None:
        """Attribute a refusal to the calls in flight or to the rate."""
        window = self.window
        if verdict is RefusalCause.UNKNOWN or (verdict is RefusalCause.STALE and self._learned.pace is None):
            window.refused(sent_at, now)
            return
        window.failed()
        if verdict is RefusalCause.FOUND:
            window.restart(now)
        elif verdict is RefusalCause.IN_FLIGHT:
            window.cap(now)
        elif verdict is RefusalCause.RATE:
            window.uncap(now)

    def failed(self, fault: Fault, sent_at: float, now: float) -> None:
        """Note a call without a reply, or with a reply that reports a failure of the service."""
        status = 0 if fault.reply is None else fault.reply.status
        if status in (503, 504) or fault.error.code == "timeout":
            self.window.refused(sent_at, now, keep=0.7)
        else:
            self.window.failed()
        self.outage.failed(fault, now)
        if self.outage.is_open and self.window.in_flight == 0:
            self.outage.probe_at = now + self.outage.probe_in_s(self._jitter)

    def retry_in_s(self, attempts: int) -> float:
        """Seconds until the next attempt of a row after `attempts` failures."""
        return backoff_s(attempts, self._jitter)

    def idle(self, live: int = 0) -> None:
        """Reset the number of calls in flight to the live calls."""
        self.window.in_flight = live

    def note(self, now: float) -> str:
        """Tell users why no call is sent; empty if calls are sent."""
        rest = self._rest_until - now
        if self.outage.is_open:
            return f"the service does not answer: {self.outage.last}"
        return f"the service requests a wait of {math.ceil(rest)} s" if rest > 0 else ""

    def _rest(self, until: float) -> None:
        self._rest_until = max(self._rest_until, until)


WAIT_MAX_S = 30.0  # how long a live call waits for a service that throttles or is down


class LiveQueue:
    """A queue of live calls, which are sent before rows. `resume` is called when rows may be sent again.

    Args:
        pool_wait_s: how long a live call waits while the maximum of calls is in flight; then RateLimited refuses it.
            None: it waits up to WAIT_MAX_S, and then fails with Unavailable.
    """

    def __init__(self, pacer: Pacer, clock: Clock, *, pool_wait_s: float | None = None) -> None:
        self._pacer = pacer
        self._clock = clock
        self._pool_wait_s = pool_wait_s
        self._waiting: deque[tuple[int, bool, asyncio.Future[float]]] = deque()
        self._alarm: asyncio.Task[None] | None = None
        self.in_flight = 0
        self.resume: Callable[[], None] = nothing

    def start_waiting(self) -> bool:
        """Start the waiting live calls that the pacer allows; return whether one still waits."""
        if not self._waiting:
            return False
        now = self._clock.monotonic()
        while self._waiting:
            size, is_admitted, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            wait_s = self._pacer.wait_s(size, now, is_admitted=is_admitted)
            if wait_s != math.inf and wait_s > WAIT_MAX_S:
                self._waiting.popleft()
                turn.set_exception(
                    Unavailable(self._pacer.note(now) or f"its rate limit allows no call for {wait_s:.0f} s")
                )
                continue
            if wait_s > 0:
                if wait_s != math.inf and self._alarm is None:
                    self._alarm = asyncio.create_task(self._wake_after(wait_s))
                return True
            self._waiting.popleft()
            self.in_flight += 1
            turn.set_result(self._pacer.sent(size))
        return False

    async def acquire(self, size_bytes: int, *, is_admitted: bool = False) -> float:
        """Wait until a call of this size may be sent; return its estimated tokens. It is in flight until `release`.

        Args:
            is_admitted: the call has passed the configured rate and does not wait for it.

        Raises: Unavailable if the wait is too long, RateLimited if too many other calls are in flight.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, is_admitted, turn))
        self.start_waiting()
        try:
            return await self._turn_of(turn)
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pacer.window.failed()  # it got its turn while it was cancelled
                self.release()
            turn.cancel()
            raise

    async def _turn_of(self, turn: asyncio.Future[float]) -> float:
        if turn.done():
            return turn.result()
        pool_wait_s = min(WAIT_MAX_S if self._pool_wait_s is None else self._pool_wait_s, WAIT_MAX_S)
        await asyncio.wait((turn,), timeout=pool_wait_s)
        if not turn.done() and self._pool_wait_s is not None and self._pacer.is_full:
            raise RateLimited(
                f"Error communicating with remote model: Acquire operation took longer than {pool_wait_s:g} s: "
                f"{self._pacer.window.in_flight} of its calls are in flight, which is the maximum",
                code="connection_pool_exhausted",
                retry_after_s=1.0,
            )
        if not turn.done() and pool_wait_s < WAIT_MAX_S:
            await asyncio.wait((turn,), timeout=WAIT_MAX_S - pool_wait_s)
        if not turn.done():
            note = self._pacer.note(self._clock.monotonic()) or "the maximum of calls is in flight"
            raise Unavailable(f"the service could not be called for {WAIT_MAX_S:g} s: {note}")
        return turn.result()

    def release(self) -> None:
        """Note the end of a call that was reported to the pacer."""
        self.in_flight -= 1
        if not self.start_waiting():
            self.resume()

    async def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            await asyncio.gather(self._alarm, return_exceptions=True)
            self._alarm = None

    async def _wake_after(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm = None
        if not self.start_waiting():
            self.resume()


def nothing() -> None: ...
