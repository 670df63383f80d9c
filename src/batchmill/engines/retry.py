"""Reads replies of services, and decides which calls may be retried, and when."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.models.redaction import mask
from batchmill.types import Outcome, Row, RowError, Usage
from batchmill.wire.error_statuses import decode_error, error_in
from batchmill.wire.json_bytes import DEPTH_MAX, is_too_deep, oddity
from batchmill.wire.rows.forms import counted, usage_of

REPLY_BYTES_MAX = 64 * 1024 * 1024  # decoded
MESSAGE_BYTES_MAX = 2048

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Reply(Struct, frozen=True, gc=False):
    """A complete reply."""

    status: int
    body: bytes | None = None  # a JSON object on one line; None if the reply is not a JSON object
    usage: Usage | None = None
    error: RowError | None = None  # from its error envelope, if it has one
    text: str = ""  # the beginning of a body that is not a JSON object
    flaw: str = ""  # why readable JSON cannot be stored
    is_half_text: bool = False  # it would be a JSON object but for an escape of half a surrogate pair

    def ok(self, row: Row, request_id: str | None = None) -> Outcome:
        """The outcome of a row with a result."""
        return Outcome(row, self.body, None, self.status, self.usage, request_id)

    def refused(self, row: Row, request_id: str | None = None) -> Outcome:
        """The error of a row that the service will never answer."""
        return Outcome(row, self.body, self.row_error(), self.status, self.usage, request_id)

    def row_error(self) -> RowError:
        """The reply as an error, with its own code or else `http_STATUS`."""
        error = self.error or RowError("", self.text)
        message = redact(error.message) or f"the service answered with HTTP status {self.status} and no reason"
        return RowError(error.code or f"http_{self.status}", message)


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Tokens(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Skim(Struct, gc=False):
    """The two members of a reply that are read here. The decoder checks the rest and drops it."""

    usage: _Tokens | None = None
    error: Raw = Raw(b"null")


_skim = msgspec.json.Decoder(_Skim)
_object = msgspec.json.Decoder(dict[str, Any])
_EMPTY = (b"null", b"false", b'""', b"{}", b"[]", b"0")


def read_reply(status: int, data: bytes) -> Reply:
    """Read a reply's bytes. If they are not a strict JSON object, `body` is None."""
    if is_too_deep(data, DEPTH_MAX):
        return Reply(status, text=_start_of(data))
    try:
        if not data.isascii():
            data.decode()
        skim = _skim.decode(data)
        has_error = status >= 400 or bytes(skim.error) not in _EMPTY
        error = _error_of(_object.decode(data)) if has_error else None
    except msgspec.ValidationError:
        return _read_odd(status, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Reply(status, text=_start_of(data), is_half_text=_is_half_text(data))
    usage = None if skim.usage is None else _usage(skim.usage)
    return _storable(status, data, usage, error)


def _storable(status: int, data: bytes, usage: Usage | None, error: RowError | None) -> Reply:
    """A reply whose body may be stored as a result: JSON that every parser reads the same way."""
    odd = oddity(data)
    if odd is not None:
        return Reply(status, None, usage, error, flaw=f"the reply cannot be stored: {odd}")
    return Reply(status, _one_line(data), usage, error)


def redact(message: str) -> str:
    """A message of at most 2 KiB, with everything that looks like a key masked."""
    message = mask(message)
    data = message.encode(errors="replace")
    return message if len(data) <= MESSAGE_BYTES_MAX else data[: MESSAGE_BYTES_MAX - 3].decode(errors="ignore") + "…"


def _read_odd(status: int, data: bytes) -> Reply:
    """Read a reply that is not an object, or whose usage has an unexpected shape."""
    try:
        reply = _object.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return Reply(status, text=_start_of(data))
    is_error = status >= 400 or bool(reply.get("error"))
    return _storable(status, data, usage_of(reply), _error_of(reply) if is_error else None)


def _is_half_text(data: bytes) -> bool:
    """Whether bytes that are not a strict JSON object would be one if halves of surrogate pairs were characters.

    A model whose output is cut off within a character sends such a reply, and sends it again for the same request.
    """
    if _SURROGATE.search(data) is None:
        return False
    try:
        return isinstance(json.loads(data, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _one_line(data: bytes) -> bytes:
    if b"\n" in data or b"\r" in data:
        return msgspec.json.format(data, indent=-1)
    return data.strip()


def _usage(tokens: _Tokens) -> Usage:
    details = tokens.prompt_tokens_details or tokens.input_tokens_details
    return counted(
        tokens.prompt_tokens or tokens.input_tokens or 0,
        (details.cached_tokens or 0) if details is not None else 0,
        tokens.completion_tokens or tokens.output_tokens or 0,
    )


def _error_of(reply: dict[str, Any]) -> RowError:
    error = error_in(reply)
    return RowError(error.name[:100], error.message)


def status_named(body: bytes) -> int | None:
    """The HTTP status in an error's body, which proxies send with status 200."""
    return decode_error(body).status


def _start_of(data: bytes) -> str:
    return data[:200].decode(errors="replace").strip()


BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0
RETRY_AFTER_MAX_S = 3600.0  # a service that requests a longer wait pauses the job
REST_PLAUSIBLE_MAX_S = 31 * 86400.0  # a header that requests more is ignored as broken
RETRY_SHARE, RETRIES_SPARE = 0.1, 32.0
OVERLOADED = 529  # Anthropic's; others use it too


class FaultKind(Enum):
    """What another attempt can do about a failure."""

    THROTTLED = "throttled"  # the service requests fewer calls: wait and retry; costs no attempt
    UNREACHABLE = "unreachable"  # no connection: the service did not receive the call
    TRANSIENT = "transient"  # the same call may succeed later; costs an attempt
    GARBLED = "garbled"  # an unreadable reply: retried once; costs an attempt
    PERMANENT = "permanent"  # the same call always fails: the row gets the error
    AUTH = "auth"  # all calls fail until the credentials are replaced
    QUOTA = "quota"  # all calls fail until the account is paid or the period ends


class Fault(Struct, frozen=True):
    """A failed call."""

    kind: FaultKind
    error: RowError  # of the row's outcome if no further call is made
    reply: Reply | None = None  # None: no reply
    retry_after_s: float | None = None  # how long the service requests to wait; 0: retry at once
    request_id: str | None = None

    def outcome(self, row: Row, calls: int) -> Outcome:
        """The row's error if no further attempt is made after `calls`."""
        error = self.error
        if calls > 1:
            error = RowError(error.code, f"{error.message} (after {calls} calls)")
        if self.reply is None:
            return Outcome(row, None, error, 0, None, self.request_id)
        return Outcome(row, self.reply.body, error, self.reply.status, self.reply.usage, self.request_id)


class NoReply(Exception):
    """A call that failed before its answer was complete."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error.message)
        self.fault = fault


class FailureStreak(Struct, eq=False):
    """Failures in a row without an answer between them, and the results of the retries of their rows.

    Rows that succeed on a retry show that the service was down; rows that fail again caused the failures themselves.
    """

    is_outage: bool = False  # there were enough failures to consider the service down
    was_down: bool = False  # retries indicate that the service was down
    balance: int = 0  # rows that succeeded on a retry, minus rows that failed again

    def answered(self) -> None:
        """Note that a row succeeded on a retry."""
        self.balance += 1
        self.was_down = self.was_down or (self.is_outage and self.balance > 0)

    def failed(self) -> None:
        """Note that a row failed on a retry."""
        self.balance -= 1


_QUOTA_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_hard_limit_reached",
        "billing_not_active",
        "quota_exceeded",
        "insufficient_credits",
        "insufficient_balance",
        "credit_balance_too_low",
        "billing_error",
    }
)
_AUTH_CODES = frozenset({"invalid_api_key", "authentication_error", "permission_error", "account_deactivated"})
# Some services refuse a row's content with 403; such a refusal does not concern the key.
_CONTENT_MARKS = ("moderation", "content_policy", "content_filter", "flagged", "safety")
_THROTTLE_CODES = frozenset({"rate_limit_exceeded", "rate_limit_error", "overloaded_error", "slow_down"})
_CALLER_CODES = frozenset({"invalid_request_error", "invalid_prompt", "context_length_exceeded", "content_filter"})
_RETRIED = frozenset({408, 409, 425})


def is_result(reply: Reply) -> bool:
    """Whether a reply is the requested result."""
    return reply.status == 200 and reply.body is not None and reply.error is None


def judge(reply: Reply, headers: Mapping[str, str], now: float, *, request_id: str | None = None) -> Fault:
    """Classify a complete reply that is not a result: see `is_result`.

    Args: `headers`, looked up by names in lower case; `now` in seconds since the epoch, for a header's date.
    """
    if 300 <= reply.status < 400:
        target = headers.get("location", "nowhere").partition("?")[0]
        error = RowError("redirected", f"the service redirects to {target}, and batchmill follows no redirects")
        return Fault(FaultKind.PERMANENT, error, reply, None, request_id)
    if reply.status < 300:
        if reply.error is None or reply.body is None:
            kind = FaultKind.GARBLED if reply.is_half_text or reply.flaw else FaultKind.TRANSIENT
            paid = None if reply.usage is None else Reply(0, None, reply.usage)
            return Fault(kind, _unreadable(reply), paid, None, request_id)
        # Proxies report a failure of the service behind them with status 200; a result file must not.
        reply = Reply(_implied_status(reply.body, reply.error.code), reply.body, reply.usage, reply.error)
    kind = _kind(reply, headers)
    error = reply.row_error()
    retry_after_s = requested_wait_s(headers, now) if kind is FaultKind.THROTTLED else None
    error = RowError(_stable_code(kind, reply.status, error.code), error.message)
    return Fault(kind, error, reply, retry_after_s, request_id)


def requested_wait_s(headers: Mapping[str, str], now: float) -> float | None:
    """The wait in seconds that a reply's headers request; None for no wait or an implausible one."""
    return (
        _seconds(headers.get("retry-after-ms"), 0.001)
        or _retry_after(headers.get("retry-after"), now)
        or _rate_limit_reset_s(headers)
    )


def backoff_s(attempts: int, jitter: Callable[[], float]) -> float:
    """Full jitter over a span that doubles from 0.5 s to 30 s. `attempts` (>= 1) have failed; `jitter` gives [0, 1)."""
    return jitter() * min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempts - 1, 16))


class Retries(Struct, frozen=True):
    """How often and when a failed call is repeated. Throttled calls do not count."""

    attempts_max: int  # calls for one row, the first included
    delay_s: Callable[[int], float] | None = (
        None  # from the number of failed calls (>= 1); None: `backoff_s`, within a budget
    )
    lasts_s: float = math.inf  # no retries this long after the first call


class RetryBudget:
    """Limits retries to a tenth of recent successes plus a constant, so that retries never overload the service."""

    def __init__(self) -> None:
        self._left = RETRIES_SPARE

    def earn(self) -> None:
        """Note a successful call."""
        if self._left < 2 * RETRIES_SPARE:
            self._left += RETRY_SHARE

    def spend(self) -> bool:
        """Whether a retry may run at its normal time; otherwise it waits for the maximum delay."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _kind(reply: Reply, headers: Mapping[str, str]) -> FaultKind:
    status = reply.status
    code = "" if reply.error is None else reply.error.code.lower()
    if status == 402 or code in _QUOTA_CODES:
        return FaultKind.QUOTA
    if status == 401:
        return FaultKind.AUTH
    if status == 403:
        text = f"{code} {reply.error.message if reply.error else ''}".lower()
        return FaultKind.PERMANENT if any(mark in text for mark in _CONTENT_MARKS) else FaultKind.AUTH
    has_rest = "retry-after" in headers or "retry-after-ms" in headers
    if status in (429, OVERLOADED) or (status == 503 and has_rest):
        return FaultKind.THROTTLED
    return FaultKind.TRANSIENT if status >= 500 or status in _RETRIED else FaultKind.PERMANENT


def _implied_status(body: bytes, code: str) -> int:
    """The HTTP status of an error that was sent with status 200."""
    code = code.lower()
    for codes, status in ((_AUTH_CODES, 401), (_THROTTLE_CODES, 429), (_CALLER_CODES, 400)):
        if code in codes:
            return status
    return status_named(body) or 500


def _stable_code(kind: FaultKind, status: int, code: str) -> str:
    """The error's code: one of a few stable ones if a retry may help, otherwise the service's own."""
    if kind is FaultKind.THROTTLED:
        return "rate_limited"
    if kind is FaultKind.TRANSIENT:
        return "timeout" if status == 408 else "server_error" if status >= 500 else f"http_{status}"
    return code


def _unreadable(reply: Reply) -> RowError:
    if reply.is_half_text:
        return RowError("bad_response", "the reply's text contains half of a surrogate pair, which is not a character")
    if reply.flaw:
        return RowError("bad_response", reply.flaw)
    if reply.body is None:
        return RowError("bad_response", f"the reply is not one JSON object: it begins {reply.text[:100]!r}")
    return RowError("bad_response", f"the service answered with HTTP status {reply.status} instead of a result")


def _seconds(text: str | None, unit: float = 1.0) -> float | None:
    try:
        seconds = float(text or "") * unit
    except ValueError:
        return None
    return _plausible(seconds)


def _plausible(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and 0 < seconds <= REST_PLAUSIBLE_MAX_S else None


def _retry_after(text: str | None, now: float) -> float | None:
    if text is None:
        return None
    seconds = _seconds(text)
    if seconds is not None:
        return seconds
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return _plausible(date.timestamp() - now)


def _rate_limit_reset_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until the exhausted one of OpenAI's `x-ratelimit-*` limits resets."""
    for unit in ("requests", "tokens"):
        if headers.get(f"x-ratelimit-remaining-{unit}") == "0":
            wait_s = _duration(headers.get(f"x-ratelimit-reset-{unit}", ""))
            if wait_s is not None:
                return wait_s
    return None


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def _duration(text: str) -> float | None:
    """Parse a Go duration: "6m0s", "20ms", "1.5s"."""
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        return None
    return _plausible(sum(float(number) * _UNITS[unit] for number, unit in parts))
