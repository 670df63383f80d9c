"""How this API says that something is wrong: `{"error": "<text>"}`, whose last line is `Type: message`.

Its published client repeats 429, 500, 502, 503 and 504 five times, whatever the body says, and shows of a text only the
last line. So those statuses are for what a repetition may mend: a function that raised is no such thing.
"""

from __future__ import annotations

import re

from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.replies import Envelope, text_reply
from batchmill.wire.error_statuses import with_own

STATUSES = with_own({"function_error": 400, "bad_return": 400, "model_failed": 422, "timeout": 422, "paused": 409})
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


def envelope(error: BatchmillError, message: str) -> Envelope:
    return Envelope(text_of(error, message))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    return text_reply(error, text_of(error, message), STATUSES)
