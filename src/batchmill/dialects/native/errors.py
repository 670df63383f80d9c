"""How this API says that something is wrong: one envelope, and one table from our errors to a status."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server.operations import json_reply
from batchmill.wire.native import ErrorDetail, ErrorReply

# The first class that fits has the status, unless the code has one of its own.
BY_CLASS: tuple[tuple[type[BatchmillError], int], ...] = (
    (errors.Gone, 410),
    (errors.UnknownName, 404),
    (errors.TooLarge, 413),
    (errors.Conflict, 409),
    (errors.InvalidTransition, 409),
    (errors.InvalidInput, 400),
    (errors.Unauthenticated, 401),
    (errors.RateLimited, 429),
    (errors.Refused, 403),
    (errors.InputChanged, 409),
    (errors.AuthRefused, 409),
    (errors.QuotaExhausted, 409),
    (errors.StorageFull, 503),
    (errors.Unavailable, 503),
    (errors.ModelFailed, 503),
    (errors.JobPaused, 503),
    (BatchmillError, 500),
)
BY_CODE = {"deploy_failed": 422, "method_not_allowed": 405, "unsupported_media_type": 415, "request_timeout": 408}


def status_of(error: BatchmillError) -> int:
    return BY_CODE.get(error.code) or next(status for kind, status in BY_CLASS if isinstance(error, kind))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    headers = {}
    if isinstance(error, errors.RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    detail = ErrorDetail(error.code, message, error.blame, error.retryable, error.request_id)
    return json_reply(ErrorReply(detail), status_of(error), headers)


def schema() -> dict[str, Any]:
    """JSON schema of the envelope, in one piece."""
    (_,), components = msgspec.json.schema_components([ErrorReply])
    return {**components["ErrorReply"], "properties": {"error": components["ErrorDetail"]}}
