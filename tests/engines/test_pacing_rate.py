"""The rate that is learned from refusals, against services whose limits are known, in minutes that pass at once."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from batchmill.engines.remote.learned_rate import LearnedRate, RefusalCause
from batchmill.engines.remote.pacing import Pacer
from batchmill.engines.retry import Fault, FaultKind, Reply
from batchmill.types import Limits, RowError

IN_FLIGHT = 64
REFUSED_S = 0.002  # until a refusal is back
LATE_S = 0.001  # by which a timer may be late


@dataclass
class Service:
    """Takes calls by a token bucket, or as long as few enough are inside; the others it refuses."""

    rate: float = math.inf
    burst: float = 10.0
    inside_max: float = math.inf
    latency_s: float = 0.02
    refused_s: float = REFUSED_S
    retry_after_s: float | None = None
    inside: int = 0
    _level: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._level = self.burst

    def takes(self, now: float) -> bool:
        if self.rate != math.inf:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
            if self._level < 1:
                return False
            self._level -= 1
        if self.inside >= self.inside_max:
            return False
        self.inside += 1
        return True

    @property
    def fault(self) -> Fault:
        return Fault(FaultKind.THROTTLED, RowError("rate_limited", "slow down"), Reply(429), self.retry_after_s)


@dataclass
class Told:
    """What became of calls: when each was sent, and whether it was taken."""

    calls: list[tuple[float, bool]]

    def used(self, start_s: float, end_s: float) -> float:
        """Calls taken per second."""
        return sum(taken for at, taken in self.calls if start_s <= at < end_s) / (end_s - start_s)

    def refused(self, start_s: float, end_s: float) -> float:
        """The share of calls that were refused."""
        seen = [taken for at, taken in self.calls if start_s <= at < end_s]
        return seen.count(False) / len(seen)


def play(
    service: Service, seconds: float, seed: int, change: tuple[float, Callable[[Service], None]] | None = None
) -> Told:
    """Send as many calls as the pacer lets go, for so long."""
    chance = random.Random(seed)
    pacer = Pacer(Limits(), 0.0, jitter=chance.random, ceiling=IN_FLIGHT)
    replies: list[tuple[float, int, bool, float]] = []
    now, calls = 0.0, Told([])
    while now < seconds:
        if change is not None and now >= change[0]:
            change[1](service)
            change = None
        wait_s = pacer.wait_s(100, now)
        if wait_s == 0:
            pacer.sent(100)
            taken = service.takes(now)
            back_s = service.latency_s * chance.uniform(0.7, 1.3) if taken else service.refused_s
            heapq.heappush(replies, (now + back_s, len(calls.calls), taken, now))
            calls.calls.append((now, taken))
            continue
        wakes = now + wait_s + (0.0 if wait_s == math.inf else chance.uniform(0, LATE_S))
        if not replies or wakes < replies[0][0]:
            now = wakes
            continue
        now, _, taken, sent_at = heapq.heappop(replies)
        if taken:
            service.inside -= 1
            pacer.answered(now)
        else:
            pacer.throttled(service.fault, sent_at, now)
    return calls


SEEDS = (1, 2, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hundred_a_second(seed: int) -> None:
    """Of 100 calls a second that are allowed at least 95 are used over the first minute; under 3 % are refused."""
    received = play(Service(100), 60, seed)
    assert received.used(0, 60) >= 95
    assert received.refused(10, 60) < 0.03


@pytest.mark.parametrize(
    ("service", "used", "refused"),
    [
        (Service(5), 0.95, 0.09),
        (Service(5, burst=1), 0.65, 0.06),
        (Service(1000), 0.9, 0.01),
        (Service(1000, burst=100), 0.95, 0.01),
        (Service(100, latency_s=0.5), 0.85, 0.03),
        (Service(100, latency_s=0.2, refused_s=0.2), 0.95, 0.04),
        (Service(100, retry_after_s=1.0), 0.75, 0.01),
    ],
    ids=["5/s", "5/s without a burst", "1000/s", "1000/s in bursts", "slow", "slow to refuse", "that asks for rest"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_other_limits(service: Service, used: float, refused: float, seed: int) -> None:
    """Slow, fast, bursty and demanding services are used nearly as far as they allow, with few refusals."""
    received = play(
        Service(
            service.rate,
            service.burst,
            latency_s=service.latency_s,
            refused_s=service.refused_s,
            retry_after_s=service.retry_after_s,
        ),
        120,
        seed,
    )
    assert received.used(0, 120) >= used * service.rate
    assert received.refused(10, 120) < refused


@pytest.mark.parametrize(("rate", "later"), [(100, 300), (100, 20)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_limit_that_changes(rate: float, later: float, seed: int) -> None:
    """When the service allows more, or less, that is what is used a minute later."""

    def change(service: Service) -> None:
        service.rate = later

    received = play(Service(rate), 180, seed, (60.0, change))
    assert received.used(120, 180) == pytest.approx(later, rel=0.08)
    assert received.refused(60, 180) < 0.05


@pytest.mark.parametrize(("inside", "latency_s", "share"), [(20, 0.5, 0.95), (8, 0.1, 0.75), (40, 2.0, 0.93)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_limit_on_calls_in_flight(inside: int, latency_s: float, share: float, seed: int) -> None:
    """A service that refuses by how many calls it has inside is kept as busy as before rates were learned."""
    received = play(Service(inside_max=inside, latency_s=latency_s), 120, seed)
    assert received.used(0, 120) >= share * inside / latency_s
    assert received.refused(10, 120) < 0.03


def test_nothing_is_paced_before_a_refusal() -> None:
    """A service that never refuses is called as fast as calls come."""
    rate = LearnedRate()
    for _ in range(1000):
        rate.sent()
        rate.answered()
        assert rate.wait_s(0.0) == 0


def test_a_refusal_alone_says_nothing() -> None:
    """Without anything answered there is no rate to go by."""
    rate = LearnedRate()
    assert [rate.refused(at, at, None, 1) for at in (1.0, 2.0, 3.0)] == [RefusalCause.UNKNOWN] * 3
    assert rate.pace is None


def test_refusals_together_are_one() -> None:
    """Calls that were out when the rate fell do not make it fall again."""
    rate = LearnedRate()
    rate.refused(0.0, 0.0, None, 1)
    for _ in range(100):
        rate.answered()
    assert rate.refused(0.9, 1.0, None, 1) is RefusalCause.FOUND
    assert rate.pace == pytest.approx(100.0)
    assert [rate.refused(0.95, 1.01, None, 1) for _ in range(50)] == [RefusalCause.STALE] * 50
    assert rate.pace == pytest.approx(100.0)
    assert rate.refused(1.02, 1.03, None, 1) is RefusalCause.RATE
    assert rate.pace is not None
    assert rate.pace < 100


def test_calls_are_spread() -> None:
    """With a rate known, a call goes each so often; few are saved up."""
    rate = LearnedRate()
    rate.refused(0.0, 0.0, None, 1)
    for _ in range(20):
        rate.answered()
    rate.refused(0.9, 1.0, None, 1)
    assert rate.pace == pytest.approx(20.0)
    now, sent = 1.0, []
    while now < 1.24:
        wait_s = rate.wait_s(now)
        if wait_s == 0:
            rate.sent()
            sent.append(now)
        now += wait_s
    assert sent == [pytest.approx(1.05 + n * 0.05) for n in range(4)]
