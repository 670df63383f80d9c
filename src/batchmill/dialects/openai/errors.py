"""OpenAI's error replies: the envelope, the error types, and the parameters that errors name."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError, UnknownName
from batchmill.server.bodies import InvalidField
from batchmill.server.replies import error_reply
from batchmill.wire.error_statuses import decode_error, status_of

INVALID, SERVER, RATE = "invalid_request_error", "server_error", "requests"
# Code -> OpenAI's name of the parameter, for errors without a parameter of their own.
PARAMS = {
    "unknown_job": "batch_id",
    "unknown_batch": "batch_id",
    "invalid_completion_window": "completion_window",
    "invalid_endpoint": "endpoint",
    "wrong_purpose": "input_file_id",
    "no_model": "model",
    "unknown_file": "id",
    "unknown_upload": "upload_id",
    "model_not_found": "model",
    "missing_model": "model",
    "streaming_not_supported": "stream",
}
# Our codes for which OpenAI has no code.
NAMELESS = frozenset(
    ["unknown_job", "unknown_batch", "unknown_file", "unknown_upload", "unknown_url", "invalid_json",
     "method_not_allowed", "internal_error"]
)  # fmt: skip


class UnknownParam(UnknownName):
    """A parameter names something that does not exist."""

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


def envelope(error: BatchmillError, message: str) -> Envelope:
    """Return the error in OpenAI's envelope; `message` is safe to show to the caller."""
    param = error.param if isinstance(error, InvalidField | UnknownParam) else PARAMS.get(error.code)
    return Envelope(Detail(message, _type_of(status_of(error)), param, None if error.code in NAMELESS else error.code))


def refusal(error: BatchmillError, message: str) -> Response:
    """Return the reply to a failed request. Never raises."""
    return error_reply(error, envelope(error, message), status_of(error))


def upstream_envelope(status: int, answer: bytes) -> Envelope:
    """Convert an error of an engine or a remote service.

    vLLM's type is the name of a class, which is replaced by OpenAI's type; its code is the status.
    """
    error = decode_error(answer)
    return Envelope(
        Detail(
            error.message or f"the model answered with status {status}",
            error.type if error.type.islower() else _type_of(status),
            error.param,
            error.code or None,
        )
    )


def _type_of(status: int) -> str:
    return RATE if status == 429 else SERVER if status >= 500 else INVALID


def schema() -> dict[str, Any]:
    """Return the JSON schema of the envelope. Source: OpenAI's ErrorResponse."""
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
