"""Errors as `{"error": "<text>"}`, which several public APIs have in common; each has its own table of statuses.

A code that has no row falls back on its class, so that no error goes without a status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server.operations import json_reply

# Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], int], ...] = (
    (errors.UnknownName, 404),
    (errors.TooLarge, 413),
    (errors.InvalidInput, 400),
    (errors.Unauthenticated, 401),
    (errors.Forbidden, 403),
    (errors.RateLimited, 429),
    (errors.Refused, 403),
    (errors.StorageFull, 503),
    (errors.Unavailable, 503),
    (errors.JobPaused, 503),
    (BatchmillError, 500),
)
SCHEMA: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class Envelope(Struct, frozen=True):
    error: str


def text_refusal(
    error: BatchmillError,
    message: str,
    statuses: Mapping[str, int],
    by_class: Sequence[tuple[type[BatchmillError], int]] = BY_CLASS,
) -> Response:
    """The reply to a request that failed; `message` is fit for whoever asked. Never raises."""
    status = statuses.get(error.code) or next(each for kind, each in by_class if isinstance(error, kind))
    headers = {}
    if isinstance(error, errors.RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_reply(Envelope(message), status, headers)
