"""Replies of requests that failed: the headers that say whether and when to try again, and the envelope
`{"error": "<text>"}`, which several public APIs have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError, RateLimited
from batchmill.server.operations import json_reply
from batchmill.wire.error_statuses import STATUSES, status_of

SCHEMA: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class Envelope(Struct, frozen=True):
    error: str


def text_reply(error: BatchmillError, message: str, table: Mapping[str, int] = STATUSES) -> Response:
    """The reply to a request that failed. `message` may be shown to the caller; `table`: the dialect's statuses."""
    return error_reply(error, Envelope(message), status_of(error, table))


def error_reply(error: BatchmillError, envelope: Struct, status: int) -> Response:
    """The reply to a request that failed, in a dialect's envelope. It never raises.

    `x-should-retry` is for the openai package and those made like it, which repeat 408, 409 and every 5xx otherwise.
    """
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.retryable and (status in (408, 409) or status >= 500):
        headers["x-should-retry"] = "false"
    return json_reply(envelope, status, headers)
