"""How this API says that something is wrong: one table from our codes to OpenAI's status, type, code and param.

A code that has no row falls back on its class, so that no error goes without an envelope.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct
from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError, UnknownName
from batchmill.server.bodies import Refusal
from batchmill.server.operations import json_reply
from batchmill.wire.json_bytes import decode

INVALID, SERVER, RATE = "invalid_request_error", "server_error", "requests"


class Row(Struct, frozen=True):
    """What becomes of a code. `code` "": ours; None: OpenAI names none."""

    status: int
    type: str = INVALID
    code: str | None = ""
    param: str | None = None


# Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], Row], ...] = (
    (errors.Gone, Row(410)),
    (errors.UnknownName, Row(404)),
    (errors.TooLarge, Row(413)),
    (errors.Conflict, Row(409)),
    (errors.InvalidTransition, Row(409)),
    (errors.InvalidInput, Row(400)),
    (errors.Unauthenticated, Row(401)),
    (errors.Forbidden, Row(403)),
    (errors.RateLimited, Row(429, RATE)),
    (errors.Refused, Row(403)),
    (errors.StorageFull, Row(503, SERVER)),
    (errors.Unavailable, Row(503, SERVER)),
    (errors.JobPaused, Row(503, SERVER)),
    (BatchmillError, Row(500, SERVER)),
)

BY_CODE: dict[str, Row] = {
    # batches
    "unknown_job": Row(404, param="batch_id", code=None),
    "unknown_batch": Row(404, param="batch_id", code=None),
    "invalid_completion_window": Row(400, param="completion_window"),
    "invalid_endpoint": Row(400, param="endpoint"),
    "wrong_purpose": Row(400, param="input_file_id"),
    "no_model": Row(400, param="model"),
    # files
    "unknown_file": Row(404, param="id", code=None),
    "unknown_upload": Row(404, param="upload_id", code=None),
    "file_in_use": Row(409),
    # live requests
    "model_not_found": Row(404, param="model"),
    "missing_model": Row(400, param="model"),
    "unknown_url": Row(404, code=None),
    "invalid_field": Row(400),
    "number_out_of_range": Row(400),
    "parameter_not_allowed": Row(400),
    "streaming_not_supported": Row(400, param="stream"),
    "function_error": Row(500, SERVER),
    "model_failed": Row(500, SERVER),
    # repeats
    "idempotency_key_reused": Row(409),
    "invalid_idempotency_key": Row(400),
    # the door itself
    "invalid_json": Row(400, code=None),
    "method_not_allowed": Row(405, code=None),
    "unsupported_media_type": Row(415),
    "invalid_api_key": Row(401),
    "rate_limit_exceeded": Row(429, RATE),
    "storage_full": Row(503, SERVER),
    "storage_failed": Row(503, SERVER),
    "unavailable": Row(503, SERVER),
    "internal_error": Row(500, SERVER, code=None),
}


class UnknownParam(UnknownName):
    """A parameter that names something nobody knows."""

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class Detail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(Struct, frozen=True):
    error: Detail


def row_of(error: BatchmillError) -> Row:
    """The code's own row, or its class's."""
    known = BY_CODE.get(error.code)
    return known or next(row for kind, row in BY_CLASS if isinstance(error, kind))


def envelope(error: BatchmillError, message: str) -> Envelope:
    """`message` is the error's, fit for whoever asked."""
    row = row_of(error)
    param = error.param if isinstance(error, Refusal | UnknownParam) else row.param
    return Envelope(Detail(message, row.type, param, error.code if row.code == "" else row.code))


def refusal(error: BatchmillError, message: str) -> Response:
    """The reply to a request that failed. Never raises."""
    status = row_of(error).status
    return json_reply(envelope(error, message), status, _headers(error, status))


def as_ours(status: int, answer: bytes) -> Envelope:
    """An engine's or a service's error in this form. vLLM gives the name of a class as type and the status as code."""
    try:
        told = decode(answer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        told = None
    fields = told if isinstance(told, dict) else {}
    error = fields["error"] if isinstance(fields.get("error"), dict) else {"message": fields.get("error")}
    texts = {name: value for name, value in error.items() if isinstance(value, str) and value}
    message = texts.get("message") or fields.get("message") or fields.get("detail")
    kind, code = texts.get("type", ""), texts.get("code", "")
    own = RATE if status == 429 else SERVER if status >= 500 else INVALID
    return Envelope(
        Detail(
            message if isinstance(message, str) else f"the model answered with status {status}",
            kind if kind.islower() else own,
            texts.get("param"),
            None if not code or code.isdigit() else code,
        )
    )


def _headers(error: BatchmillError, status: int) -> dict[str, str]:
    """When to come again. The openai package repeats every 409 and 5xx unless it is told that it is no use."""
    headers = {}
    if isinstance(error, errors.RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.retryable and (status == 409 or status >= 500):
        headers["x-should-retry"] = "false"
    return headers


def schema() -> dict[str, Any]:
    """JSON schema of the envelope. Source: OpenAI's ErrorResponse."""
    text_or_null = {"type": ["string", "null"]}
    detail = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": text_or_null,
            "code": text_or_null,
        },
    }
    return {"type": "object", "required": ["error"], "properties": {"error": detail}}
