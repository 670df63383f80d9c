"""How many calls of a model are answered: the `rate_limiter` of ML Commons, as a bucket of tokens for each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchmill.errors import InvalidInput, RateLimited
from batchmill.ports import Clock
from batchmill.services.remote.model_records import RateLimiter

LIMIT_MAX = 1e9
SHOWN_CHARS = 40
UNITS = {
    "NANOSECONDS": 1e-9, "MICROSECONDS": 1e-6, "MILLISECONDS": 1e-3, "SECONDS": 1.0, "MINUTES": 60.0,
    "HOURS": 3600.0, "DAYS": 86_400.0,
}  # fmt: skip


def read_limiter(value: Any) -> RateLimiter | None:
    """The field `rate_limiter`: {"limit": "4", "unit": "MINUTES"}; empty: none. Raises: InvalidInput."""
    if value in (None, {}):
        return None
    if not isinstance(value, Mapping):
        raise InvalidInput('rate_limiter is an object: {"limit": "4", "unit": "MINUTES"}', code="invalid_rate_limiter")
    unit = str(value.get("unit")).upper()
    if unit not in UNITS:
        raise InvalidInput(
            f"rate_limiter.unit must be one of {', '.join(UNITS)}, not {unit[:SHOWN_CHARS]!r}",
            code="invalid_rate_limiter",
        )
    try:
        limit = float(str(value.get("limit")))
    except ValueError:
        limit = 0.0
    if not 0 < limit <= LIMIT_MAX:
        raise InvalidInput(
            f"rate_limiter.limit must be more than 0 and at most {LIMIT_MAX:,.0f}, not "
            f"{str(value.get('limit'))[:SHOWN_CHARS]!r}",
            code="invalid_rate_limiter",
        )
    return RateLimiter(limit, unit)


def per_minute(limiter: RateLimiter | None) -> int | None:
    """As `types.Limits` has it; None: there is no limit."""
    return None if limiter is None else max(1, min(round(limiter.limit * 60 / UNITS[limiter.unit]), 10**9))


class _Bucket(Struct):
    tokens: float
    at: float  # monotonic seconds


class ModelRates:
    """Buckets are full at first, and hold what may be answered in one unit of time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, model_id: str, limiter: RateLimiter | None) -> None:
        """Count a call. Raises: RateLimited where it is one too many."""
        if limiter is None:
            return
        now, size, rate = self._clock.monotonic(), max(1.0, limiter.limit), limiter.limit / UNITS[limiter.unit]
        bucket = self._buckets.setdefault(model_id, _Bucket(size, now))
        bucket.tokens = min(size, bucket.tokens + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.tokens < 1:
            raise RateLimited("Request is throttled at model level.", retry_after_s=(1 - bucket.tokens) / rate)
        bucket.tokens -= 1

    def forget(self, model_id: str) -> None:
        """The model is gone, or has another limit."""
        self._buckets.pop(model_id, None)
