"""Token buckets: how often somebody may ask. Pure but for the time it is given."""

from __future__ import annotations

from collections import OrderedDict

BUCKETS_MAX = 20_000  # those that were used longest ago are forgotten: full again


class Buckets:
    """Each name has a bucket that holds a minute's worth and fills evenly."""

    def __init__(self, buckets_max: int = BUCKETS_MAX) -> None:
        self._max = buckets_max
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> tokens, and when that was

    def take(self, name: str, per_minute: int, now: float) -> float:
        """Take one token. Returns the seconds until there is one: 0 when it was taken."""
        tokens = self._filled(name, per_minute, now)
        is_there = tokens >= 1.0
        self._buckets[name] = (tokens - 1.0 if is_there else tokens, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._max:
            self._buckets.popitem(last=False)
        return 0.0 if is_there else (1.0 - tokens) * 60.0 / per_minute

    def wait_s(self, name: str, per_minute: int, now: float) -> float:
        """The seconds until there is a token, taking none."""
        return max(0.0, 1.0 - self._filled(name, per_minute, now)) * 60.0 / per_minute

    def _filled(self, name: str, per_minute: int, now: float) -> float:
        tokens, then = self._buckets.get(name, (float(per_minute), now))
        return min(float(per_minute), tokens + max(0.0, now - then) * per_minute / 60.0)
