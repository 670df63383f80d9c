"""What every reply of the server has, whichever way it went: headers, and the form of a refusal."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Iterable, Sequence
from email.utils import formatdate

from starlette.responses import Response

from batchmill.errors import BatchmillError, RateLimited, of_system
from batchmill.server.operations import Dialect

log = logging.getLogger("batchmill.server")

RETRY_S = 1.0
# Of the root's own refusals, whatever a dialect makes of their codes.
STATUS = {
    "method_not_allowed": 405, "request_timeout": 408, "unsupported_media_type": 415, "request_too_large": 413,
    "invalid_host": 400, "invalid_http": 400, "head_too_large": 431, "uri_too_long": 414, "too_many_requests": 503,
    "body_memory_full": 503,
}  # fmt: skip
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}


def security_headers(given: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Those that a reply with the headers `given`, in lower case, has not set itself."""
    names = set(given)
    return [(name, value) for name, value in SECURITY_HEADERS.items() if name not in names]


def date() -> bytes:
    return formatdate(time.time(), usegmt=True).encode()


_ids = random.Random(secrets.randbits(256))  # to be told apart, not to be kept secret


def new_request_id() -> str:
    return f"req_{_ids.getrandbits(96):024x}"


def refusal(dialect: Dialect, error: BatchmillError, methods: Sequence[str]) -> Response:
    """The reply to a request that failed; `error` has the request's id. A fault of ours or a model's is logged."""
    response = dialect.refusal(error)
    response.status_code = STATUS.get(error.code, response.status_code)
    if response.status_code == 405:
        response.headers["allow"] = ", ".join(methods)
    if response.status_code == 401:
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimited):
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s + 0.5)))
    elif response.status_code == 503:
        response.headers.setdefault("retry-after", f"{RETRY_S:.0f}")
    if response.status_code >= 500:
        told = error.message if error.blame == "system" else "see the reply"  # a model's words may hold a row's
        log.warning("request %s: %s: %s", error.request_id, error.code, told)
    return response


def hidden(error: Exception, request_id: str) -> BatchmillError:
    """Our own fault as whoever asked is told of it: that it is not theirs, and no more."""
    log.error("request %s failed", request_id, exc_info=error)
    told = of_system(error) if isinstance(error, OSError) else None
    if told is not None:  # without the path
        return type(told)(f"the server's disk is in trouble; its log has more under request {request_id}")
    return BatchmillError(f"the server failed to answer; its log has more under request {request_id}")
