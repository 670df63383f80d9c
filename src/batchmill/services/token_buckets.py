"""Rate limits of many callers: one token bucket for each name."""

from __future__ import annotations

from collections import OrderedDict

BUCKETS_MAX = 20_000  # the least recently used are forgotten: they are full again


class TokenBuckets:
    """Each bucket starts full and fills evenly. Times are monotonic seconds.

    Args of its methods: capacity: tokens of a full bucket, at least 1; rate: tokens per second.
    """

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._max = buckets_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> tokens, and when that was

    def take(self, name: str, capacity: float, rate: float, now: float) -> float:
        """Take one token. Returns the seconds until there is one; 0 if it was taken."""
        tokens = self._filled(name, capacity, rate, now)
        is_there = tokens >= 1.0
        self._buckets[name] = (tokens - 1.0 if is_there else tokens, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._max:
            self._buckets.popitem(last=False)
        return 0.0 if is_there else (1.0 - tokens) / rate

    def wait_s(self, name: str, capacity: float, rate: float, now: float) -> float:
        """Seconds until there is a token; takes none."""
        return max(0.0, 1.0 - self._filled(name, capacity, rate, now)) / rate

    def forget(self, name: str) -> None:
        """The next token of this name comes from a full bucket."""
        self._buckets.pop(name, None)

    def _filled(self, name: str, capacity: float, rate: float, now: float) -> float:
        tokens, then = self._buckets.get(name, (capacity, now))
        return min(capacity, tokens + max(0.0, now - then) * rate)
