"""How many calls go, how fast, and when none goes."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from batchmill.engines.remote.pacing import (
    IN_FLIGHT_START,
    OUTAGE_FAILURES,
    OUTAGE_MAX_S,
    OUTAGE_NEW_S,
    Bucket,
    ConcurrencyWindow,
    Outage,
    Pacer,
    TokenGuess,
)
from batchmill.engines.retry import Fault, FaultKind, Reply
from batchmill.types import Limits, RowError

THROTTLED = Fault(FaultKind.THROTTLED, RowError("rate_limited", "slow down"), Reply(429))
REFUSED = Fault(FaultKind.UNREACHABLE, RowError("connection_failed", "refused"))
BROKEN = Fault(FaultKind.TRANSIENT, RowError("server_error", "oops"), Reply(500))
TIMED_OUT = Fault(FaultKind.TRANSIENT, RowError("timeout", "too long"))


class Simulation:
    """A window kept full of calls to a service that does `slots` of them at a time, each in about `latency_s`."""

    def __init__(self, ceiling: int, slots: int, latency_s: float, *, spread: float = 0.3) -> None:
        self._random = random.Random(1)
        self._spread = spread
        self.window = ConcurrencyWindow(ceiling, 0.0)
        self.now = 0.0
        self.latency_s = latency_s
        self._free = [0.0] * slots
        self._flying: list[float] = []

    def add_slots(self, slots: int) -> None:
        for _ in range(slots):
            heapq.heappush(self._free, self.now)

    def _one_latency(self) -> float:
        return self.latency_s * self._random.uniform(1 - self._spread, 1 + self._spread)

    def play(self, calls: int) -> float:
        """Go on until so many calls were answered. Returns how many were in a second."""
        began, window = self.now, self.window
        for _ in range(calls):
            while window.in_flight < window.limit:
                window.in_flight += 1
                done_at = max(self.now, heapq.heappop(self._free)) + self._one_latency()
                heapq.heappush(self._free, done_at)
                heapq.heappush(self._flying, done_at)
            self.now = heapq.heappop(self._flying)
            window.answered(self.now)
        return calls / (self.now - began)


def pacer(limits: Limits | None = None, now: float = 0.0, jitter: float = 0.5) -> Pacer:
    return Pacer(limits or Limits(), now, jitter=lambda: jitter, ceiling=1024)


def test_window_starts_small_and_doubles() -> None:
    """Each round trip doubles the rows in flight: 256 are reached in three."""
    simulation = Simulation(256, 1000, 0.02, spread=0)
    assert simulation.window.limit == IN_FLIGHT_START
    simulation.play(32 + 64 + 128)
    assert simulation.window.limit == 256
    assert simulation.now == pytest.approx(0.06)


@pytest.mark.parametrize("slots", [8, 60, 300])
def test_window_finds_what_the_service_bears(slots: int) -> None:
    """It reaches the service's throughput, and piles up no more than a few times the calls that takes."""
    simulation = Simulation(1024, slots, 0.5)
    simulation.play(20_000)
    assert simulation.play(5000) > 0.95 * slots / 0.5
    assert simulation.window.limit <= max(5 * slots, IN_FLIGHT_START * 2)


def test_window_follows_a_service_that_grows() -> None:
    """When the service bears more than before, it is found out."""
    simulation = Simulation(1024, 64, 0.1)
    simulation.play(20_000)
    assert simulation.window.limit < 300
    simulation.add_slots(536)
    simulation.play(200_000)
    assert simulation.window.limit > 500


def test_window_keeps_to_its_ceiling() -> None:
    """The ceiling is never passed, be it below the start."""
    for ceiling in (1, 5, 100):
        simulation = Simulation(ceiling, 1000, 0.01)
        simulation.play(5000)
        assert simulation.window.limit == ceiling


def test_idle_window_learns_nothing() -> None:
    """Rows that come one by one are not evidence, and do not open the window."""
    window = ConcurrencyWindow(1024, 0.0)
    for n in range(5000):
        window.in_flight += 1
        window.answered(n * 0.02)
    assert window.limit == IN_FLIGHT_START


def test_refusals_shrink_once_a_round_trip() -> None:
    """Refusals of calls that were out when it shrank do not shrink it again; those of later calls do."""
    simulation = Simulation(1024, 1000, 0.02, spread=0)
    simulation.play(32 + 64)
    window = simulation.window
    assert window.limit == 128
    window.in_flight = 128
    for _ in range(100):
        window.refused(1.0, 2.0)
    assert window.limit == 102
    window.refused(2.5, 3.0)
    assert window.limit < 102


def test_window_never_closes() -> None:
    """However often a service refuses, one call stays possible."""
    window = ConcurrencyWindow(1024, 0.0)
    for n in range(200):
        window.in_flight += 1
        window.refused(float(n), n + 0.5)
    assert window.limit == 1


def test_bucket_rate() -> None:
    """Over a minute no more goes than its rate and one second's burst."""
    bucket, now, taken = Bucket(600, 0.0), 0.0, 0
    while now < 60:
        wait = bucket.wait_s(1, now)
        if wait == 0:
            bucket.take(1)
            taken += 1
        now += max(wait, 0.0)
    assert 600 <= taken <= 611


def test_bucket_saves_a_second() -> None:
    """After any idle time a burst of one second's worth goes, and no more."""
    bucket = Bucket(600, 0.0)
    taken = 0
    while bucket.wait_s(1, 3600.0) == 0:
        bucket.take(1)
        taken += 1
    assert taken == 10


def test_bucket_lends_to_large_calls() -> None:
    """A call larger than a second's worth goes when the bucket is full, and is paid off before the next."""
    bucket = Bucket(60, 0.0)
    assert bucket.wait_s(30, 0.0) == 0
    bucket.take(30)
    assert bucket.wait_s(1, 0.0) == pytest.approx(30.0)


def test_slow_bucket_starts_with_one() -> None:
    """One call a minute means the first at once and the second a minute later."""
    bucket = Bucket(1, 0.0)
    bucket.take(1)
    assert bucket.wait_s(1, 0.0) == pytest.approx(60.0)


def test_guess_learns() -> None:
    """The tokens a call will cost are learnt from those before it."""
    guess = TokenGuess()
    for _ in range(200):
        guess.learn(1000, 500, 20)
    assert guess.tokens(100) == pytest.approx(70, rel=0.01)


def test_tokens_are_corrected() -> None:
    """A call that cost more than was reckoned holds the next ones back."""
    pace = pacer(Limits(tokens_per_minute=6000))
    charged = pace.sent(100)
    pace.answered(0.0)
    pace.correct(100, charged, (500, 600))
    assert pace.wait_s(100, 0.0) > 9
    assert pace.wait_s(100, 12.0) == 0


def test_requests_per_minute() -> None:
    """Calls go at the rate that was set, however many may be in flight."""
    pace = pacer(Limits(requests_per_minute=60))
    assert pace.wait_s(10, 0.0) == 0
    pace.sent(10)
    assert pace.wait_s(10, 0.0) == pytest.approx(1.0)
    assert pace.wait_s(10, 1.0) == 0


def test_retry_after_holds_every_call() -> None:
    """What one call was told holds for the whole service: nothing goes until the time is over."""
    pace = pacer(jitter=0.0)
    pace.sent(1)
    rest = Fault(FaultKind.THROTTLED, THROTTLED.error, THROTTLED.reply, 12.0)
    pace.throttled(rest, 0.0, 1.0)
    assert pace.wait_s(1, 1.0) == pytest.approx(12.0)
    assert pace.note(1.0) == "the service requests a wait of 12 s"
    assert pace.wait_s(1, 13.0) == 0
    assert pace.note(13.0) == ""


def test_rests_do_not_shorten_each_other() -> None:
    """A shorter rest asked for later does not end a longer one."""
    pace = pacer(jitter=0.0)
    for rest in (30.0, 1.0):
        pace.sent(1)
        pace.throttled(Fault(FaultKind.THROTTLED, THROTTLED.error, None, rest), 0.0, 1.0)
    assert pace.wait_s(1, 1.0) == pytest.approx(30.0)


def test_rest_has_jitter() -> None:
    """Processes that were told the same time do not come back together."""
    ends = []
    for jitter in (0.0, 0.9):
        pace = pacer(jitter=jitter)
        pace.sent(1)
        pace.throttled(Fault(FaultKind.THROTTLED, THROTTLED.error, None, 10.0), 0.0, 1.0)
        ends.append(pace.wait_s(1, 1.0))
    assert ends == [pytest.approx(10.0), pytest.approx(10.9)]


def test_refusals_without_a_time_rest_longer_and_longer() -> None:
    """A service that says no and not when is left alone for spans that double, until it answers."""
    pace, now, waits = pacer(jitter=1.0), 0.0, []
    for _ in range(4):
        pace.sent(1)
        pace.throttled(THROTTLED, now, now)
        waits.append(pace.wait_s(1, now))
        now += waits[-1]
    assert waits == [pytest.approx(w) for w in (0.5, 1, 2, 4)]
    pace.sent(1)
    pace.answered(now)
    pace.sent(1)
    pace.throttled(THROTTLED, now, now)
    assert pace.wait_s(1, now) == pytest.approx(0.5)


def test_one_round_of_refusals_is_one_rest() -> None:
    """A hundred calls refused together are one refusal."""
    pace = pacer(jitter=1.0)
    for _ in range(100):
        pace.sent(1)
    for _ in range(100):
        pace.throttled(THROTTLED, 0.0, 1.0)
    assert pace.wait_s(1, 1.0) == pytest.approx(0.5)


def test_full_window_waits_for_a_reply() -> None:
    """With as many in flight as may be, only a reply lets the next one go."""
    pace = pacer()
    for _ in range(IN_FLIGHT_START):
        assert pace.wait_s(1, 0.0) == 0
        pace.sent(1)
    assert pace.wait_s(1, 0.0) == math.inf
    pace.answered(0.1)
    assert pace.wait_s(1, 0.1) == 0


def test_refused_connection_is_an_outage() -> None:
    """From the first refused connection on, one call at a time asks whether the service is there."""
    pace = pacer(jitter=1.0)
    pace.sent(1)
    pace.failed(REFUSED, 0.0, 0.0)
    assert pace.outage.is_open
    assert pace.wait_s(1, 0.0) == pytest.approx(0.5)
    assert pace.wait_s(1, 0.5) == 0
    pace.sent(1)
    assert pace.wait_s(1, 0.5) == math.inf
    assert "refused" in pace.note(0.5)
    pace.answered(0.6)
    assert not pace.outage.is_open
    assert pace.wait_s(1, 0.6) == 0


def test_failures_in_a_row_are_an_outage() -> None:
    """Twenty failures without one reply between them are the service's; nineteen may be the rows'."""
    pace = pacer()
    for _ in range(OUTAGE_FAILURES - 1):
        pace.sent(1)
        pace.failed(BROKEN, 0.0, 0.0)
    assert not pace.outage.is_open
    pace.sent(1)
    pace.failed(BROKEN, 0.0, 0.0)
    assert pace.outage.is_open


def test_failures_among_replies_are_no_outage() -> None:
    """A service that answers now and then is not down, however many of its calls fail."""
    pace = pacer()
    for n in range(10 * OUTAGE_FAILURES):
        pace.sent(1)
        if n % 10:
            pace.failed(BROKEN, 0.0, 0.0)
        else:
            pace.answered(0.0)
    assert not pace.outage.is_open


def test_patience_ends() -> None:
    """A service that never answered has 30 s, one that did has 10 minutes, from the first failure on."""
    for answered, patience in ((False, OUTAGE_NEW_S), (True, OUTAGE_MAX_S)):
        outage = Outage()
        if answered:
            outage.answered()
        outage.failed(REFUSED, 100.0)
        assert outage.trouble(100.0 + patience - 0.1) is None
        trouble = outage.trouble(100.0 + patience)
        assert trouble is not None
        assert (trouble.was_up, trouble.last) == (answered, "refused")


def test_probes_never_rest_long() -> None:
    """A service that is down is asked at least every 10 s, so that its return is noticed."""
    outage = Outage()
    waits = [outage.probe_in_s(lambda: 1.0) for _ in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 10, 10, 10, 10]


def test_timeouts_shrink_and_server_errors_do_not() -> None:
    """A timeout speaks of load, a plain 500 does not."""
    for fault, shrinks in ((TIMED_OUT, True), (BROKEN, False)):
        pace = pacer()
        pace.sent(1)
        pace.failed(fault, 0.5, 1.0)
        assert (pace.window.limit < IN_FLIGHT_START) is shrinks
