"""Errors on the wire: the HTTP status of each code, errors between processes, and decoding the errors of services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from batchmill import errors
from batchmill.errors import BatchmillError, JobPaused, RateLimited
from batchmill.states import PauseReason
from batchmill.wire.json_bytes import decode, shallow


class Raised(Struct, frozen=True, tag="raised"):
    """A BatchmillError, encoded for another process."""

    kind: str
    code: str
    message: str
    reason: str | None = None
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: BatchmillError) -> Raised:
        reason = str(error.reason) if isinstance(error, JobPaused) else None
        wait_s = error.retry_after_s if isinstance(error, RateLimited) else 0.0
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return cls(kind.__name__, error.code, error.message, reason, wait_s)

    def error(self) -> BatchmillError:
        """Rebuild the error, with its class."""
        kind = getattr(errors, self.kind, BatchmillError)
        if issubclass(kind, JobPaused):
            return kind(self.message, reason=PauseReason(self.reason) if self.reason else None)
        if issubclass(kind, RateLimited):
            return kind(self.message, retry_after_s=self.retry_after_s, code=self.code)
        return kind(self.message, code=self.code)


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


def with_overrides(own: Mapping[str, int]) -> Mapping[str, int]:
    """The statuses of a dialect: the common ones, with these overrides."""
    return {**STATUSES, **own}


def row_of(error: BatchmillError, table: Mapping[str, T]) -> T | None:
    """Return the row of the error's code, or of its nearest class that has one; None: there is no row."""
    if error.code in table:
        return table[error.code]
    codes = (kind.code for kind in type(error).__mro__ if issubclass(kind, BatchmillError))
    return next((table[code] for code in codes if code in table), None)


def status_of(error: BatchmillError, table: Mapping[str, int] = STATUSES) -> int:
    """Return the HTTP status of an error. `table`: a dialect's, from `with_overrides`."""
    return row_of(error, table) or 500


class UpstreamError(Struct, frozen=True):
    """The decoded error envelope of a service; missing texts are empty."""

    message: str = ""
    code: str = ""  # never a number: some services put the HTTP status in `code`
    type: str = ""
    param: str | None = None
    status: int | None = None  # the HTTP status that `code` or `status` names
    request_id: str | None = None
    has_envelope: bool = False  # there is a member `error`, not only a message

    @property
    def name(self) -> str:
        """`code`, or else `type`."""
        return self.code or self.type


NO_ERROR = UpstreamError()


def decode_error(data: bytes) -> UpstreamError:
    """Decode the error in the body of a reply. It never raises: without a known envelope it returns NO_ERROR."""
    try:
        reply = decode(shallow(data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return NO_ERROR
    return error_in(reply) if isinstance(reply, dict) else NO_ERROR


def error_in(reply: Mapping[str, Any]) -> UpstreamError:
    """Read the error of a decoded reply, or of one member of its list of errors."""
    request_id = _text(reply.get("request_id")) or None
    inner = reply.get("error")
    if isinstance(inner, str):
        return UpstreamError(inner, request_id=request_id, has_envelope=True)
    source: Mapping[str, Any] = inner if isinstance(inner, dict) else reply
    code, kind = _name(source.get("code")) or _aws_name(source.get("__type")), _name(source.get("type"))
    message = next((source[each] for each in ("message", "Message", "detail") if source.get(each)), "")
    return UpstreamError(
        message if isinstance(message, str) else msgspec.json.encode(message).decode(),
        code,
        kind,
        _text(source.get("param")) or None,
        _status(source.get("code")) or _status(source.get("status")),
        request_id,
        "error" in reply,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _name(value: Any) -> str:
    return value if isinstance(value, str) and not value.isdigit() else ""


def _aws_name(value: Any) -> str:
    """`com.amazonaws.service#Name:http://…` as `Name`."""
    return _text(value).partition(":")[0].rpartition("#")[2]


def _status(value: Any) -> int | None:
    number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else 0
    return number if 400 <= number <= 599 else None
