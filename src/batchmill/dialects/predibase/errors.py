"""The error replies of Predibase and LoRAX.

Predibase: `{"error": "<text>"}`. Its published client repeats a request, also a POST, four times after 429, 500, 502,
503 and 504, and shows the text of the last reply. So these statuses are for errors that a retry may solve.

LoRAX: `{"error": "<text>", "error_type": "<type>"}`. On the OpenAI paths the text is in OpenAI's error object, because
the openai package shows only that. LoRAX's client chooses its exception by the types generation, incomplete_generation,
overloaded and validation, and otherwise by the status. Source: LoRAX's router, `server.rs`; predibase 2025.10.3,
`resources/lorax/errors.py`.
"""

from __future__ import annotations

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.replies import error_reply, text_reply
from batchmill.wire.error_statuses import decode_error, status_of, with_overrides

STATUSES = with_overrides({"model_failed": 422, "timeout": 422, "paused": 409})
VALIDATION, GENERATION, INCOMPLETE, OVERLOADED = "validation", "generation", "incomplete_generation", "overloaded"
LORAX_DOCUMENTED = (404, 422, 424)  # besides the statuses of every operation
SHOWN_CHARS = 4_000  # of an engine's message
LORAX_STATUSES = with_overrides(
    {
        "invalid_input": 422,
        "conflict": 422,
        "invalid_transition": 422,
        "model_failed": 424,
        "timeout": 424,
        "generation": 424,
        "answer_too_large": 424,  # after other statuses the client would generate it six times
    }
)
ERROR_TYPES = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    410: "not_found",
    424: GENERATION,
    429: OVERLOADED,
    500: INCOMPLETE,
    503: OVERLOADED,
}  # any other status: validation


class Envelope(Struct, frozen=True):
    error: str
    error_type: str


# The schema of all errors of the dialect. Errors of calls other than those of a deployment have only a text.
SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": ["string", "object"]}, "error_type": {"type": "string"}},
}


class OpenAIDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIEnvelope(Struct, frozen=True):
    error: OpenAIDetail
    error_type: str


class LoraxRefused(BatchmillError):
    """A call of a deployment was refused before its body was read. `error` is the cause."""

    def __init__(self, error: BatchmillError, *, is_openai: bool) -> None:
        super().__init__(error.message, code=error.code)
        self.error, self.is_openai, self.blame = error, is_openai, error.blame


class EngineRefused(BatchmillError):
    """An engine answered with an error; `status` is its own."""

    code = "engine_refused"
    blame = "model"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def lorax_status(error: BatchmillError) -> int:
    """Return the status of the reply. An engine's own status becomes one that LoRAX's clients know."""
    if not isinstance(error, EngineRefused):
        return status_of(error, LORAX_STATUSES)
    if error.status in (404, 429, 503):
        return error.status
    return 422 if error.status < 500 else 424


def lorax_envelope(error: BatchmillError, message: str, *, is_openai: bool = False) -> Envelope | OpenAIEnvelope:
    """Return the body of an error reply; `is_openai`: in OpenAI's form."""
    kind = INCOMPLETE if error.code == "engine_lost" else ERROR_TYPES.get(lorax_status(error), VALIDATION)
    return OpenAIEnvelope(OpenAIDetail(message, kind, None, error.code), kind) if is_openai else Envelope(message, kind)


def refusal(error: BatchmillError, message: str) -> Response:
    """Return Predibase's reply to a failed request; `message` is safe to show to the caller. Never raises."""
    return text_reply(error, message, STATUSES)


def lorax_refusal(error: BatchmillError, message: str, *, is_openai: bool = False) -> Response:
    """Return LoRAX's reply to a failed request; `message` is safe to show to the caller. Never raises."""
    return error_reply(error, lorax_envelope(error, message, is_openai=is_openai), lorax_status(error))


def refused_by_engine(status: int, answer: bytes) -> EngineRefused:
    """Return an engine's error reply as an exception."""
    message = decode_error(answer).message[:SHOWN_CHARS]
    return EngineRefused(message or f"the engine answered with status {status}", status)
