"""How many rows are in flight to an engine server, from what its metrics say. Pure: samples in, a limit out.

The engine is full when a few rows wait inside it; more of them only take memory, and come back when it dies.
"""

from __future__ import annotations

import math
import re
from collections import deque

from msgspec import Struct

LIMIT_START = 256
LIMIT_MIN = 8
LIMIT_MAX = 1024
SPARE_ROWS = 16  # rows that wait inside the engine, at least
SPARE_SHARE = 0.25  # of the rows that run
BACKLOG_ROWS = 128  # rows in flight beyond twice what ran at most lately
PEAK_SAMPLES = 20  # what "lately" is
SHRINK = 0.85
CALM_SAMPLES = 20  # samples without preemption before the limit grows fast again

_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:prefix_cache_queries_total": "cache_asked",
    "vllm:prefix_cache_hits_total": "cache_hits",
}
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^\n]*\})? ([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)


class Gauges(Struct, frozen=True):
    """One look at a server's metrics, summed over its engines. Counters start at 0 with the server."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1, of the fullest engine
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache_asked: int = 0  # prompt tokens that were looked up in the cache
    cache_hits: int = 0  # of these, found

    @property
    def cached_share(self) -> float | None:
        """0..1; None before the first prompt."""
        return self.cache_hits / self.cache_asked if self.cache_asked else None

    @property
    def tokens(self) -> int:
        """Grows as long as the engine does anything."""
        return self.prompt_tokens + self.output_tokens


def read_gauges(text: str) -> Gauges:
    """Read vLLM's /metrics. Source: Prometheus' text format, vllm/v1/metrics/loggers.py."""
    sums = dict.fromkeys(_SUMMED.values(), 0.0)
    kv_usage = 0.0
    for name, value in _SAMPLE.findall(text):
        if name in _SUMMED:
            sums[_SUMMED[name]] += float(value)
        elif name == _KV_USAGE:
            kv_usage = max(kv_usage, float(value))
    return Gauges(kv_usage=kv_usage, **{name: int(value) for name, value in sums.items()})


class Flight:
    """The limit on rows in flight.

    It grows while the engine takes all it gets, and falls below what runs when rows are preempted, whose work was for
    nothing. What merely waits in the engine is harmless up to a bound: rows end in waves, and each wave empties it.
    """

    def __init__(self, *, limit_max: int | None = None, start: int = LIMIT_START) -> None:
        self.limit_max = LIMIT_MAX if limit_max is None else max(1, limit_max)
        self.limit_min = min(LIMIT_MIN, self.limit_max)
        self.limit = min(start, self.limit_max)
        self.gauges = Gauges()  # the last sample
        self._preemptions = 0
        self._calm = CALM_SAMPLES  # samples since the last preemption
        self._running: deque[int] = deque(maxlen=PEAK_SAMPLES)

    def restarted(self) -> None:
        """The server is a new one: its counters begin at 0."""
        self._preemptions = 0

    def observe(self, gauges: Gauges, in_flight: int) -> None:
        """Take a sample in, with the rows that we had in flight at that moment."""
        self.gauges = gauges
        preempted = gauges.preemptions - self._preemptions
        self._preemptions = gauges.preemptions
        self._running.append(gauges.running)
        if preempted > 0:
            self._calm = 0
            self._set(int(SHRINK * min(self.limit, max(gauges.running, LIMIT_MIN))))
            return
        self._calm += 1
        spare = max(SPARE_ROWS, int(SPARE_SHARE * gauges.running))
        bound = 2 * max(self._running) + BACKLOG_ROWS
        if in_flight + spare >= self.limit and gauges.waiting < spare:
            # Over the place where rows were preempted it creeps; elsewhere it doubles.
            step = self.limit if self._calm > CALM_SAMPLES else max(1, self.limit // 32)
            self._set(min(self.limit + step, max(self.limit, bound)))
        elif self.limit > bound and len(self._running) == PEAK_SAMPLES:
            self._set(bound)

    def _set(self, limit: int) -> None:
        self.limit = max(self.limit_min, min(self.limit_max, limit))


ALERT_S = 5.0  # after the last live request rows go at full speed again
SLOWER, FASTER = 1.5, 1.25  # times the best lately: beyond the one fewer rows, below the other more
YIELD_SHRINK, GROWTH = 0.8, 1.1
FIRST_SHARE = 0.75  # of the rows that run, when the first live request comes
ROWS_MIN = 4
RATE_KEPT = 0.55  # of the rows' rate without live requests: below it they are not slowed further
BEST_FADES = 1.005  # with each answer, so that what was once possible is not asked for for ever
CREDIT_MAX_S = 4.0  # how long no row is sent while live requests are answered; it comes back as time goes by
LEARN = 0.2  # weight of the newest sample


class Yielding:
    """Follows how long live requests take, against the best of late, and how fast rows go.

    While a live request is answered no new row is sent, for at most half of the time; and as long as live requests
    come now and then, fewer rows are in flight: as many as leave the answers as quick as they were.
    """

    def __init__(self) -> None:
        self.live = 0
        self._live_at = -math.inf  # when one was last there
        self._allowed = math.inf
        self._best_s = math.inf  # for one piece of an answer
        self._running = 0
        self._rows_at: tuple[float, int] | None = None
        self._rate = 0.0  # rows a second, of late
        self._full_rate = 0.0  # without live requests
        self._credit_s = CREDIT_MAX_S
        self._credit_at: float | None = None

    def began(self, now: float) -> None:
        """A live request has come."""
        self._spend(now)
        if not self._is_alert(now):
            self._allowed = max(ROWS_MIN, FIRST_SHARE * self._running) if self._running else math.inf
        self.live += 1
        self._live_at = now

    def ended(self, now: float) -> None:
        """It is answered, or nobody waits any more."""
        self._spend(now)
        self.live -= 1
        self._live_at = now

    def answered(self, piece_s: float, in_flight: int) -> None:
        """A whole answer took `piece_s` for each of its pieces, beside so many rows."""
        self._best_s = min(self._best_s * BEST_FADES, piece_s)
        if in_flight == 0:
            return
        is_slow_enough = self._rate < RATE_KEPT * self._full_rate
        if is_slow_enough or piece_s < FASTER * self._best_s:
            self._allowed = self._allowed * GROWTH + 1
        elif piece_s > SLOWER * self._best_s:
            self._allowed = max(ROWS_MIN, YIELD_SHRINK * min(self._allowed, in_flight))

    def observe(self, running: int, rows_done: int, now: float) -> None:
        """Rows in the engine, and how many have been finished ever; now and then."""
        self._running = running
        if self._rows_at is not None and now > self._rows_at[0] and rows_done >= self._rows_at[1]:
            rate = (rows_done - self._rows_at[1]) / (now - self._rows_at[0])
            self._rate += LEARN * (rate - self._rate)
            if not self._is_alert(now):
                self._full_rate += LEARN * (rate - self._full_rate)
        self._rows_at = now, rows_done

    def limit(self, limit: int, in_flight: int, now: float) -> int:
        """Rows that may be in flight: `limit`, or fewer."""
        if not self._is_alert(now):
            return limit
        self._spend(now)
        allowed = int(min(limit, self._allowed))
        return min(allowed, in_flight) if self.live and self._credit_s > 0 else allowed

    def _is_alert(self, now: float) -> bool:
        return self.live > 0 or now - self._live_at < ALERT_S

    def _spend(self, now: float) -> None:
        """Keep the account of time in which rows were held back."""
        passed = 0.0 if self._credit_at is None else now - self._credit_at
        self._credit_at = now
        self._credit_s = max(0.0, min(CREDIT_MAX_S, self._credit_s + (-passed if self.live else passed)))
