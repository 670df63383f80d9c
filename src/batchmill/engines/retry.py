"""What may be tried again, and when: replies and failures sorted by what a further call can do about them.

Pure: nothing here waits, sends or knows a connection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum

from msgspec import Struct

from batchmill.engines.replies import Reply, status_named
from batchmill.types import Outcome, Row, RowError

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0
REST_MAX_S = 3600.0  # a service that asks for longer than this pauses the job: nobody should watch a process sleep
REST_BELIEVED_MAX_S = 31 * 86400.0  # a header that asks for more is broken, and ignored
RETRY_SHARE, RETRIES_SPARE = 0.1, 32.0
OVERLOADED = 529  # Anthropic's; others use it too


class Kind(Enum):
    """What a further call can do about a failure."""

    THROTTLED = "throttled"  # the service wants fewer calls: wait, however often; costs no attempt
    UNREACHABLE = "unreachable"  # no connection: the row was never seen
    TRANSIENT = "transient"  # the same call may succeed: costs an attempt
    GARBLED = "garbled"  # a reply came, and one more may read better: costs an attempt, and two are enough
    PERMANENT = "permanent"  # it will not: the row has its error
    AUTH = "auth"  # no call will, until somebody mends the credentials
    QUOTA = "quota"  # no call will, until somebody pays or the period ends


class Fault(Struct, frozen=True):
    """A call that brought no result."""

    kind: Kind
    error: RowError  # what the row's outcome says if no further call is made
    reply: Reply | None = None  # None: none came
    rest_s: float | None = None  # how long the service asked to be left alone; 0: try again at once
    request_id: str | None = None

    def outcome(self, row: Row, calls: int) -> Outcome:
        """The row's outcome when no further call is made after `calls`."""
        error = self.error
        if calls > 1:
            error = RowError(error.code, f"{error.message} (after {calls} calls)")
        if self.reply is None:
            return Outcome(row, None, error, 0, None, self.request_id)
        return Outcome(row, self.reply.body, error, self.reply.status, self.reply.usage, self.request_id)


class Stretch(Struct, eq=False):
    """Failures in a row, without an answer between them, and what became of their rows when they were called again.

    Rows that are answered then show that the service was down; rows that fail again are themselves to blame.
    """

    is_outage: bool = False  # there were enough of them to take the service for down
    was_down: bool = False  # it was the service, for all that is known
    balance: int = 0  # rows answered when they were called again, less those that failed again

    def answered(self) -> None:
        """A row of it was called again, and answered."""
        self.balance += 1
        self.was_down = self.was_down or (self.is_outage and self.balance > 0)

    def failed(self) -> None:
        """A row of it was called again, and failed."""
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
# Refusals of one row's content that some services answer with 403: they say nothing about the key.
_CONTENT_MARKS = ("moderation", "content_policy", "content_filter", "flagged", "safety")
_THROTTLE_CODES = frozenset({"rate_limit_exceeded", "rate_limit_error", "overloaded_error", "slow_down"})
_CALLER_CODES = frozenset({"invalid_request_error", "invalid_prompt", "context_length_exceeded", "content_filter"})
_RETRIED = frozenset({408, 409, 425})


def is_result(reply: Reply) -> bool:
    """Whether a reply is what the row asked for."""
    return reply.status == 200 and reply.body is not None and reply.error is None


def judge(reply: Reply, headers: Mapping[str, str], now: float, *, request_id: str | None = None) -> Fault:
    """Sort a reply that was received in full and is no result: see `is_result`.

    Args: `headers`, looked up by names in lower case; `now` in seconds since the epoch, for a header's date.
    """
    if 300 <= reply.status < 400:
        target = headers.get("location", "nowhere").partition("?")[0]
        error = RowError("redirected", f"the service redirects to {target}, and calls are not redirected")
        return Fault(Kind.PERMANENT, error, reply, None, request_id)
    if reply.status < 300:
        if reply.error is None or reply.body is None:
            kind = Kind.GARBLED if reply.is_half_text or reply.flaw else Kind.TRANSIENT
            paid = None if reply.usage is None else Reply(0, None, reply.usage)
            return Fault(kind, _unreadable(reply), paid, None, request_id)
        # Proxies report a failure of the service behind them in a reply of status 200; a result file must not.
        reply = Reply(_implied_status(reply.body, reply.error.code), reply.body, reply.usage, reply.error)
    kind = _kind(reply, headers)
    error = reply.row_error()
    rest = rest_asked(headers, now) if kind is Kind.THROTTLED else None
    error = RowError(_stable_code(kind, reply.status, error.code), error.message)
    return Fault(kind, error, reply, rest, request_id)


def rest_asked(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds for which a reply's headers ask to be left alone; None: they do not say, or nothing believable."""
    return (
        _seconds(headers.get("retry-after-ms"), 0.001)
        or _retry_after(headers.get("retry-after"), now)
        or _reset_of_what_ran_out(headers)
    )


def backoff_s(attempts: int, jitter: Callable[[], float]) -> float:
    """Full jitter over a span that doubles from 0.5 s to 30 s. `attempts` (>= 1) have failed; `jitter` gives [0, 1)."""
    return jitter() * min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(attempts - 1, 16))


class Retries(Struct, frozen=True):
    """How often and when a call that failed is made again. Calls that were throttled do not count."""

    attempts_max: int  # calls for one row, the first included
    delay_s: Callable[[int], float] | None = None  # after so many failed (>= 1); None: `backoff_s`, within a budget
    lasts_s: float = math.inf  # from the first call on


class RetryBudget:
    """Keeps retries under a tenth of recent successes and a constant, so that they never are the load."""

    def __init__(self) -> None:
        self._left = RETRIES_SPARE

    def earn(self) -> None:
        """A call succeeded."""
        if self._left < 2 * RETRIES_SPARE:
            self._left += RETRY_SHARE

    def spend(self) -> bool:
        """Whether a retry may be made at its normal time; if not, it is to wait as long as any would."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _kind(reply: Reply, headers: Mapping[str, str]) -> Kind:
    status = reply.status
    code = "" if reply.error is None else reply.error.code.lower()
    if status == 402 or code in _QUOTA_CODES:
        return Kind.QUOTA
    if status == 401:
        return Kind.AUTH
    if status == 403:
        text = f"{code} {reply.error.message if reply.error else ''}".lower()
        return Kind.PERMANENT if any(mark in text for mark in _CONTENT_MARKS) else Kind.AUTH
    has_rest = "retry-after" in headers or "retry-after-ms" in headers
    if status in (429, OVERLOADED) or (status == 503 and has_rest):
        return Kind.THROTTLED
    return Kind.TRANSIENT if status >= 500 or status in _RETRIED else Kind.PERMANENT


def _implied_status(body: bytes, code: str) -> int:
    """The HTTP status that an error sent with status 200 stands for."""
    code = code.lower()
    for codes, status in ((_AUTH_CODES, 401), (_THROTTLE_CODES, 429), (_CALLER_CODES, 400)):
        if code in codes:
            return status
    return status_named(body) or 500


def _stable_code(kind: Kind, status: int, code: str) -> str:
    """Errors that a retry may help have few, stable codes; the others keep the service's own."""
    if kind is Kind.THROTTLED:
        return "rate_limited"
    if kind is Kind.TRANSIENT:
        return "timeout" if status == 408 else "server_error" if status >= 500 else f"http_{status}"
    return code


def _unreadable(reply: Reply) -> RowError:
    if reply.is_half_text:
        return RowError("bad_response", "the reply's text holds half of a surrogate pair, which is no character")
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
    return _believable(seconds)


def _believable(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and 0 < seconds <= REST_BELIEVED_MAX_S else None


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
    return _believable(date.timestamp() - now)


def _reset_of_what_ran_out(headers: Mapping[str, str]) -> float | None:
    """OpenAI's `x-ratelimit-*`: when what has run out is there again."""
    for what in ("requests", "tokens"):
        if headers.get(f"x-ratelimit-remaining-{what}") == "0":
            rest = _duration(headers.get(f"x-ratelimit-reset-{what}", ""))
            if rest is not None:
                return rest
    return None


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def _duration(text: str) -> float | None:
    """Go's way to write a duration: "6m0s", "20ms", "1.5s"."""
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        return None
    return _believable(sum(float(number) * _UNITS[unit] for number, unit in parts))
