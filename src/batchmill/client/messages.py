"""The messages between a client and its transport. Nothing here sends or waits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from batchmill import errors
from batchmill.errors import BatchmillError, Unavailable
from batchmill.wire.error_statuses import decode_error
from batchmill.wire.native import ErrorDetail, ErrorReply

T = TypeVar("T")

TIMEOUT_S = 60.0  # without a byte, where the caller says nothing else
PIECE_BYTES = 1024 * 1024  # of an upload, at once


class HttpRequest(Struct, frozen=True):
    """An HTTP request with its path below the server's address."""

    method: str
    path: str
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes | None = None
    is_repeatable: bool = True  # doing it twice is as doing it once
    is_long: bool = False  # the server may be silent for as long as it takes
    result_path: str | None = None  # if a repetition raises InvalidTransition, a GET of this path shows what was done


class TypedRequest(Struct, Generic[T], frozen=True):
    """A request and the type of its reply; None: it has no body."""

    request: HttpRequest
    reply: type[T]


class HttpReply(Struct, frozen=True):
    """A complete reply. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Broken(Exception):
    """No complete reply arrived. `was_sent`: the server may have seen the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class OwnerGone(Broken):
    """The process that owned a data directory has ended; the request goes to the next owner."""


SHOWN_CHARS = 300  # of a reply that is not ours, in a message
RETRY_AFTER_S_MAX = 120.0
ATTEMPTS_MAX = 5
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.5, 20.0
UNSEEN = (429,)  # the server refused before it did anything
TRANSIENT = (429, 502, 503, 504)
_UNIQUE: tuple[type[BatchmillError], ...] = (
    errors.InvalidConfig, errors.InvalidRow, errors.InvalidDataset, errors.InvalidTransition, errors.InputChanged,
    errors.AuthRefused, errors.QuotaExhausted, errors.StorageFull, errors.ModelFailed, errors.LedgerBroken,
)  # fmt: skip
BY_CODE: Mapping[str, type[BatchmillError]] = {each.code: each for each in _UNIQUE} | {
    "deploy_failed": errors.ModelFailed
}
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


def value_of(ask: TypedRequest[T], reply: HttpReply) -> T:
    """The value of a reply. Raises: its error; BatchmillError for a reply that is not ours."""
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
    """The error in a reply."""
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
    """The message of the envelope; for a reply of a proxy, what is known of it."""
    try:
        return msgspec.json.decode(body, type=ErrorReply).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = decode_error(body).message or body[: 2 * SHOWN_CHARS].decode(errors="replace")
        shown = " ".join(text.split())[:SHOWN_CHARS]
        text = f"this is not a reply of batchmill's own API; status {status}: {shown or 'no text'}"
        return ErrorDetail(f"http_{status}", text, retryable=status in (429, 502, 503, 504))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The delay in seconds that the reply asks for, if any."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, RETRY_AFTER_S_MAX) if seconds >= 0 else None


def backoff_s(attempt: int, retry_after_s: float | None = None) -> float:
    """Seconds to wait after this attempt, counted from 0; at least `retry_after_s`."""
    own_s = min(BACKOFF_S_MIN * 2**attempt, BACKOFF_S_MAX)
    return max(retry_after_s or 0.0, own_s * (0.5 + random.random() / 2))


def is_transient(reply: HttpReply) -> bool:
    """Whether a later attempt may succeed. A proxy sends 502 and 504, not this server: their bodies say nothing."""
    if reply.status not in TRANSIENT:
        return False
    return reply.status in (502, 504) or error_of(reply.status, reply.headers, reply.body).retryable


def may_repeat(ask: TypedRequest[Any], failure: HttpReply | Broken) -> bool:
    """Whether a repeated request may help and is safe."""
    if isinstance(failure, Broken):
        return ask.request.is_repeatable or not failure.was_sent
    return is_transient(failure) and (ask.request.is_repeatable or failure.status in UNSEEN)


def unreachable(broken: Broken) -> Unavailable:
    """The error of a request without a reply."""
    return Unavailable(str(broken), code="unreachable")
