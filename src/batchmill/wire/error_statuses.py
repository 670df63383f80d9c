"""Which HTTP status an error has: one table from codes to statuses, and what a dialect says otherwise.

A code without a row has the row of its class, or of the nearest class above it that has one, so no error goes without
a status. A dialect names only the codes whose status its published client needs otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from batchmill.errors import BatchmillError

T = TypeVar("T")

STATUSES: Mapping[str, int] = {
    "internal_error": 500,
    # the caller's mistakes
    "invalid_input": 400,
    "unknown_name": 404,
    "deleted": 410,
    "invalid_transition": 409,
    "conflict": 409,
    "too_large": 413,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "unsupported_media_type": 415,
    # what the caller may not do
    "refused": 403,
    "invalid_api_key": 401,
    "rate_limit_exceeded": 429,
    "link_expired": 410,
    "link_used": 410,
    # the model, a service, this server
    "model_failed": 500,
    "timeout": 504,
    "paused": 503,
    "storage_full": 503,
    "unavailable": 503,
    "ledger_broken": 500,
}


def with_own(own: Mapping[str, int]) -> Mapping[str, int]:
    """The table of a dialect that has other statuses for these codes."""
    return {**STATUSES, **own}


def row_of(error: BatchmillError, table: Mapping[str, T]) -> T | None:
    """The row of an error's code, or else of the nearest class that has one; None: neither it nor a class has a row."""
    if error.code in table:
        return table[error.code]
    codes = (kind.code for kind in type(error).__mro__ if issubclass(kind, BatchmillError))
    return next((table[code] for code in codes if code in table), None)


def status_of(error: BatchmillError, table: Mapping[str, int] = STATUSES) -> int:
    """The status of an error. `table`: a dialect's, by `with_own`."""
    return row_of(error, table) or 500
