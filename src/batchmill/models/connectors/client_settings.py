"""How a connector's service is to be called, read from `client_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.models.connectors.fields import invalid, read_flag, read_text
from batchmill.types.connectors import ClientConfig

POLICIES = ("constant", "exponential_equal_jitter", "exponential_full_jitter")
# Of each number: the least and the most it may be.
_BOUNDS = {
    "max_connection": (1, 10_000),
    "connection_timeout": (1, 86_400),
    "read_timeout": (1, 86_400),
    "retry_backoff_millis": (0, 3_600_000),
    "retry_timeout_seconds": (0, 86_400),
    "max_retry_times": (-1, 1_000_000),
}
FIELDS = (*ClientConfig.__struct_fields__, "mutual_tls_enabled", "keystore_type")


def read_client_config(value: Any) -> ClientConfig | None:
    """The settings, those that are missing filled in; None where there are none. Raises: InvalidInput."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid("`client_config` is an object")
    if read_flag(value, "mutual_tls_enabled"):
        raise InvalidInput(
            "`client_config.mutual_tls_enabled` is not supported: connectors present no certificates of their own",
            code="unsupported_field",
        )
    policy = (read_text(value, "retry_backoff_policy") or "constant").lower()
    if policy not in POLICIES:
        raise invalid("Unsupported retry backoff policy")
    numbers = {name: _number(value[name], name) for name in _BOUNDS if value.get(name) is not None}
    return ClientConfig(
        **numbers,
        retry_backoff_policy=policy,
        skip_ssl_verification=read_flag(value, "skip_ssl_verification"),
    )


def unknown_fields(value: Mapping[str, Any]) -> list[str]:
    return [name for name in value if name not in FIELDS]


def _number(value: Any, name: str) -> int:
    least, most = _BOUNDS[name]
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most or (isinstance(value, float) and value != number):
        raise invalid(f"`client_config.{name}` is {str(value)[:80]!r}; it is a whole number from {least} to {most}")
    return number
