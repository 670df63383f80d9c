"""The fields of ML Commons' remote models: which are read, which are refused by name, and what they may be. Of them
`rate_limiter` says how many calls are answered: `ModelRates` counts, a bucket of tokens for each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import InvalidInput, RateLimited
from batchmill.ports import Clock
from batchmill.services.remote.interfaces import read_interface
from batchmill.services.remote.model_records import ModelDetails, RateLimiter

REMOTE = "REMOTE"
NAME_CHARS_MAX = 256
TEXT_CHARS_MAX = 10_000
SHOWN_CHARS = 80
LIMIT_MAX = 1e9
LIMIT_SHOWN_CHARS = 40
UNITS = {
    "NANOSECONDS": 1e-9, "MICROSECONDS": 1e-6, "MILLISECONDS": 1e-3, "SECONDS": 1.0, "MINUTES": 60.0,
    "HOURS": 3600.0, "DAYS": 86_400.0,
}  # fmt: skip
# What nobody here would act on, and why; a client that never hears of it would count on it.
_STRANGERS = {
    "guardrails": "nothing checks what goes into a model or comes out of it",
}
_ACCESS_FIELDS = ("backend_roles", "add_all_backend_roles")


def name_of(fields: Mapping[str, Any]) -> str:
    """Raises: InvalidInput."""
    name = fields.get("name")
    if name is None:
        raise InvalidInput("model name is null", code="missing_name")
    if not isinstance(name, str) or not 0 < len(name.strip()) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"a model's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    return name


def refuse_strangers(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput for a field that would be promised something here."""
    kind = fields.get("function_name")
    if kind is not None and str(kind).upper() != REMOTE:
        raise InvalidInput(
            f"function_name must be remote: models that are loaded from files, such as {str(kind)[:SHOWN_CHARS]!r}, "
            "are `batchmill deploy`ed",
            code="not_remote",
        )
    for name, why in _STRANGERS.items():
        if fields.get(name) not in (None, {}):
            raise InvalidInput(f"{name} is not supported here: {why}; leave it out", code="unsupported_field")
    if any(fields.get(name) not in (None, False, []) for name in _ACCESS_FIELDS):
        raise InvalidInput(
            "You cannot specify model access control parameters because the Security plugin or model access control "
            "is disabled on your cluster.",
            code="no_access_control",
        )


def require_remote(fields: Mapping[str, Any]) -> None:
    """Raises: InvalidInput where the kind is not said: ML Commons takes that for a model loaded from files."""
    if fields.get("function_name") is None:
        raise InvalidInput(
            "model format is null: a model without function_name is one that is loaded from files; write "
            '"function_name": "remote"',
            code="not_remote",
        )


def details_of(fields: Mapping[str, Any], old: ModelDetails) -> ModelDetails:
    """What fields say of a model besides its name and connector. Raises: InvalidInput."""
    changed: dict[str, Any] = {}
    if (description := fields.get("description")) is not None:
        if not isinstance(description, str) or len(description) > TEXT_CHARS_MAX:
            raise InvalidInput(f"a description is a text of at most {TEXT_CHARS_MAX:,} characters", code="invalid_text")
        changed["description"] = description
    if (enabled := fields.get("is_enabled")) is not None:
        changed["is_enabled"] = _flag("is_enabled", enabled)
    if "rate_limiter" in fields:
        changed["rate_limiter"] = read_limiter(fields["rate_limiter"])
    if "interface" in fields:
        changed["interface"] = read_interface(fields["interface"])
    setting = fields.get("deploy_setting")
    if setting is not None:
        if not isinstance(setting, Mapping):
            raise InvalidInput('deploy_setting is an object: {"is_auto_deploy_enabled": false}', code="invalid_field")
        told = setting.get("is_auto_deploy_enabled")
        changed["is_auto_deploy"] = None if told is None else _flag("is_auto_deploy_enabled", told)
    return replace(old, **changed)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is true or false, not {str(value)[:SHOWN_CHARS]!r}", code="invalid_field")
    return value


def read_limiter(value: Any) -> RateLimiter | None:
    """The field `rate_limiter`: {"limit": "4", "unit": "MINUTES"}; empty: none. Raises: InvalidInput."""
    if value in (None, {}):
        return None
    if not isinstance(value, Mapping):
        raise InvalidInput('rate_limiter is an object: {"limit": "4", "unit": "MINUTES"}', code="invalid_rate_limiter")
    unit = str(value.get("unit")).upper()
    if unit not in UNITS:
        raise InvalidInput(
            f"rate_limiter.unit must be one of {', '.join(UNITS)}, not {unit[:LIMIT_SHOWN_CHARS]!r}",
            code="invalid_rate_limiter",
        )
    try:
        limit = float(str(value.get("limit")))
    except ValueError:
        limit = 0.0
    if not 0 < limit <= LIMIT_MAX:
        raise InvalidInput(
            f"rate_limiter.limit must be more than 0 and at most {LIMIT_MAX:,.0f}, not "
            f"{str(value.get('limit'))[:LIMIT_SHOWN_CHARS]!r}",
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
