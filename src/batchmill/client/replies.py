"""From a reply to a value or to one of batchmill's errors, its code kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from batchmill import errors
from batchmill.client.messages import Ask, Reply
from batchmill.errors import BatchmillError
from batchmill.wire.native import ErrorDetail, ErrorReply
from batchmill.wire.upstream_errors import decode_error

T = TypeVar("T")

SHOWN_CHARS = 300  # of a reply that is not ours, in a message
RETRY_AFTER_S_MAX = 120.0
_UNIQUE = (
    errors.InvalidConfig, errors.InvalidRow, errors.InvalidDataset, errors.InvalidTransition, errors.InputChanged,
    errors.AuthRefused, errors.QuotaExhausted, errors.StorageFull, errors.ModelFailed, errors.LedgerBroken,
)  # fmt: skip
BY_CODE: dict[str, type[BatchmillError]] = {each.code: each for each in _UNIQUE} | {"deploy_failed": errors.ModelFailed}
BY_STATUS: dict[int, type[BatchmillError]] = {
    400: errors.InvalidInput,
    401: errors.Unauthenticated,
    403: errors.Forbidden,
    404: errors.UnknownName,
    405: errors.InvalidInput,
    409: errors.Conflict,
    410: errors.Gone,
    413: errors.TooLarge,
    415: errors.InvalidInput,
    416: errors.InvalidInput,
    429: errors.RateLimited,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}


def value_of(ask: Ask[T], reply: Reply) -> T:
    """What the server answered. Raises: the error it answered with; BatchmillError for what is no answer of ours."""
    if reply.status >= 400:
        raise error_of(reply.status, reply.headers, reply.body)
    if ask.reply is type(None):
        return None  # type: ignore[return-value]
    try:
        return msgspec.json.decode(reply.body, type=ask.reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchmillError(
            f"the server answered {ask.request.method} {ask.request.path} with what this client cannot read: {error}",
            code="unexpected_reply",
        ) from None


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> BatchmillError:
    """The error that a reply tells of."""
    detail = _detail(status, body)
    kind = BY_CODE.get(detail.code) or BY_STATUS.get(status)
    if kind is None:
        kind = errors.InvalidInput if status < 500 else BatchmillError
    if kind is errors.RateLimited:
        error: BatchmillError = errors.RateLimited(detail.message, retry_after_s=retry_after_s(headers) or 1.0)
    else:
        error = kind(detail.message)
    error.code, error.blame, error.retryable = detail.code, detail.blame, detail.retryable
    error.request_id = detail.request_id or headers.get("x-request-id")
    return error


def _detail(status: int, body: bytes) -> ErrorDetail:
    """What the envelope says, or for a reply of something between us and the server, what can be said."""
    try:
        return msgspec.json.decode(body, type=ErrorReply).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = decode_error(body).message or body[: 2 * SHOWN_CHARS].decode(errors="replace")
        shown = " ".join(text.split())[:SHOWN_CHARS]
        text = f"this is no answer of batchmill's own API; status {status}: {shown or 'no text'}"
        return ErrorDetail(f"http_{status}", text, retryable=status in (429, 502, 503, 504))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """When to come again, where the reply says so in seconds."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, RETRY_AFTER_S_MAX) if seconds >= 0 else None
