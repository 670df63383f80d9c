"""How this API says that something is wrong: an exception's name in snake case, a reason, a status.

A client's own mistake is a 4xx here, also where ML Commons answers 500. A code without a row falls back on its class.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server.operations import json_reply

ARGUMENT, PARSE, STATUS = "illegal_argument_exception", "parse_exception", "status_exception"
SECURITY, ILLEGAL_STATE = "security_exception", "illegal_state_exception"
# Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], int, str], ...] = (
    (errors.Gone, 410, STATUS),
    (errors.UnknownName, 404, STATUS),
    (errors.TooLarge, 413, STATUS),
    (errors.Conflict, 409, STATUS),
    (errors.InvalidTransition, 409, STATUS),
    (errors.InvalidInput, 400, ARGUMENT),
    (errors.Unauthenticated, 401, SECURITY),
    (errors.RateLimited, 429, STATUS),
    (errors.Refused, 403, SECURITY),
    (errors.StorageFull, 503, STATUS),
    (errors.Unavailable, 503, STATUS),
    (errors.JobPaused, 500, STATUS),  # opensearch-py repeats 502, 503 and 504 blindly: it would burn the quota
    (BatchmillError, 500, "exception"),
)
BY_CODE: dict[str, tuple[int, str]] = {
    "missing_body": (400, PARSE),
    "invalid_json": (400, PARSE),
    "feature_disabled": (400, ILLEGAL_STATE),
    "task_under_way": (400, ILLEGAL_STATE),
    "unknown_file": (404, "resource_not_found_exception"),
    "request_timeout": (408, STATUS),
    "method_not_allowed": (405, ARGUMENT),
    "unsupported_media_type": (415, ARGUMENT),
    "parsing_exception": (400, "parsing_exception"),
    "no_remote_job": (404, "resource_not_found_exception"),
}
# What this API says, whatever we would.
TEXTS = {
    "rate_limit_exceeded": "Request is throttled at user level. If you think there's an issue, please contact your "
    "cluster admin."
}

OF_MODEL = "Request is throttled at model level."


class Cause(Struct, frozen=True):
    type: str
    reason: str


class Detail(Struct, frozen=True):
    root_cause: list[Cause]
    type: str
    reason: str


class Envelope(Struct, frozen=True):
    error: Detail
    status: int


def status_and_type(error: BatchmillError) -> tuple[int, str]:
    """The code's own row, or its class's. What a remote service answered has its status."""
    told = getattr(error, "status", None)
    if isinstance(told, int) and 400 <= told < 600:
        return told, STATUS
    known = BY_CODE.get(error.code)
    return known or next((status, kind) for each, status, kind in BY_CLASS if isinstance(error, each))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    status, kind = status_and_type(error)
    reason = _reason(error, message)
    headers = {}
    if isinstance(error, errors.RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_reply(Envelope(Detail([Cause(kind, reason)], kind, reason), status), status, headers)


def _reason(error: BatchmillError, message: str) -> str:
    """Our message, or the words that OpenSearch has for it."""
    if error.asked is not None:
        method, path, methods = error.asked
        place = f"uri [{path}] and method [{method}]"
        known = ", ".join(methods)
        return f"Incorrect HTTP method for {place}, allowed: [{known}]" if known else f"no handler found for {place}"
    return message if message == OF_MODEL else TEXTS.get(error.code, message)


def schema() -> dict[str, Any]:
    """JSON schema of the envelope."""
    text = {"type": "string"}
    cause = {"type": "object", "required": ["type", "reason"], "properties": {"type": text, "reason": text}}
    detail = {
        "type": "object",
        "required": ["root_cause", "type", "reason"],
        "properties": {"root_cause": {"type": "array", "items": cause}, "type": text, "reason": text},
    }
    return {
        "type": "object",
        "required": ["error", "status"],
        "properties": {"error": detail, "status": {"type": "integer"}},
    }
