"""Rate limits for many callers: one token bucket per name."""

from __future__ import annotations

from collections import OrderedDict

BUCKETS_MAX = 20_000  # beyond it the least recently used is dropped: its next bucket is full
WHOLE = 1.0 - 1e-9  # what sums of fractions come to when exactly a token is there


class TokenBuckets:
    """Each bucket starts full and fills evenly.

    Times are monotonic seconds. A caller may have read the clock before another caller did: nothing is filled twice.

    Args of its methods: capacity: tokens of a full bucket, at least 1; rate: tokens per second.
    """

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._max = buckets_max
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # name -> tokens, and when they were counted

    def take(self, name: str, capacity: float, rate: float, now: float) -> float:
        """Take one token. Returns 0 if it was taken, else the seconds until one is available."""
        tokens, counted_at = self._filled(name, capacity, rate, now)
        has_token = tokens >= WHOLE
        self._buckets[name] = (max(0.0, tokens - 1.0) if has_token else tokens, counted_at)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._max:
            self._buckets.popitem(last=False)
        return 0.0 if has_token else (1.0 - tokens) / rate

    def give_back(self, name: str) -> None:
        """Put back a token that was taken."""
        if name in self._buckets:
            tokens, counted_at = self._buckets[name]
            self._buckets[name] = tokens + 1.0, counted_at

    def wait_s(self, name: str, capacity: float, rate: float, now: float) -> float:
        """Return the seconds until a token is available, without taking one."""
        tokens, _ = self._filled(name, capacity, rate, now)
        return 0.0 if tokens >= WHOLE else (1.0 - tokens) / rate

    def forget(self, name: str) -> None:
        """Drop the bucket of this name: its next token comes from a full bucket."""
        self._buckets.pop(name, None)

    def _filled(self, name: str, capacity: float, rate: float, now: float) -> tuple[float, float]:
        """Return the tokens, and the time up to which they are counted."""
        tokens, counted_at = self._buckets.get(name, (capacity, now))
        until = max(now, counted_at)
        return min(capacity, tokens + (until - counted_at) * rate), until
