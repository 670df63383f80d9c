"""How this API says that something is wrong: `{"error": "<text>"}`, whose last line is `Type: message`.

Its published client repeats 429, 500, 502, 503 and 504 five times, whatever the body says, and shows of a text only the
last line. So those statuses are for what a repetition may mend: a function that raised is no such thing.
"""

from __future__ import annotations

import re

from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server import text_errors

# Where this API differs from others with such errors. Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], int], ...] = (
    (errors.Conflict, 409),
    (errors.InvalidTransition, 409),
    (errors.StorageFull, 503),
    (errors.JobPaused, 409),
    (errors.ModelFailed, 422),
    *text_errors.BY_CLASS,
)
BY_CODE: dict[str, int] = {
    "function_error": 400,
    "bad_return": 400,
    "link_expired": 410,
    "deleted": 410,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "unsupported_media_type": 415,
}
# What stands before our own messages, as the name of an exception does before a function's.
TYPES: dict[str, str] = {
    "timeout": "TimeoutError",
    "memory_limit": "MemoryError",
    "worker_crashed": "WorkerCrashed",
    "bad_return": "BadReturn",
    "rate_limit_exceeded": "RateLimitExceeded",
}
# Source: Modelbit's page on rate limits.
TOO_MANY = "RateLimitExceeded: Concurrency request count limit reached"
TOO_LARGE = "RateLimitExceeded: Concurrency request size limit reached"
LIMITS: dict[str, str] = {"too_many_calls": TOO_MANY, "too_many_bytes": TOO_LARGE}
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*([A-Za-z_]\w*: .+|[A-Z]\w*)")  # as a traceback ends: "KeyError: 'x'"


def text_of(error: BatchmillError, message: str) -> str:
    """`message` so that its last line says what is wrong, and of what kind. It is never empty."""
    if error.code in LIMITS:
        return f"{LIMITS[error.code]}: {message}"
    last = message.rstrip().rpartition("\n")[2]
    if error.code == "function_error" and _EXCEPTION.fullmatch(last):
        return message.rstrip()
    kind = TYPES.get(error.code, type(error).__name__)
    if "\n" not in message.strip():
        return f"{kind}: {message.strip()}"
    return (
        message.rstrip()
        if _EXCEPTION.fullmatch(last) and ": " in last
        else f"{message.rstrip()}\n{kind}: {last.strip()}"
    )


def envelope(error: BatchmillError, message: str) -> text_errors.Envelope:
    return text_errors.Envelope(text_of(error, message))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    return text_errors.text_refusal(error, text_of(error, message), BY_CODE, BY_CLASS)
