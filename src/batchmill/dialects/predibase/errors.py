"""How Predibase and LoRAX say that something is wrong.

Predibase: `{"error": "<text>"}`. Its published client repeats 429, 500, 502, 503 and 504 four times, POSTs too, and
shows the text of the last reply, so those statuses are for what a repetition may mend.

LoRAX: `{"error": "<text>", "error_type": "<word>"}`. Below its OpenAI base the text is in OpenAI's object, since the
openai package shows no other. Its client raises by the word where it knows it (generation, incomplete_generation,
overloaded, validation), and by the status otherwise. Source: LoRAX's router, `server.rs`; predibase 2025.10.3,
`resources/lorax/errors.py`.
"""

from __future__ import annotations

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.replies import error_reply, text_reply
from batchmill.wire.error_statuses import decode_error, status_of, with_own

STATUSES = with_own({"model_failed": 422, "timeout": 422, "paused": 409})
VALIDATION, GENERATION, INCOMPLETE, OVERLOADED = "validation", "generation", "incomplete_generation", "overloaded"
LORAX_DOCUMENTED = (404, 422, 424)  # besides those that any operation may answer
SHOWN_CHARS = 4_000  # of what an engine said
LORAX_STATUSES = with_own(
    {
        "invalid_input": 422,
        "conflict": 422,
        "invalid_transition": 422,
        "model_failed": 424,
        "timeout": 424,
        "generation": 424,
        "answer_too_large": 424,  # the client would have it made six times
    }
)
WORDS = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    410: "not_found",
    424: GENERATION,
    429: OVERLOADED,
    500: INCOMPLETE,
    503: OVERLOADED,
}  # of any other status: validation


class Envelope(Struct, frozen=True):
    error: str
    error_type: str


# Of all errors of the dialect: those of calls that are no deployment's are a text alone.
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
    """What was wrong with a call of a deployment before its body was read."""

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
    """An engine's status is one of those that LoRAX's clients know."""
    if not isinstance(error, EngineRefused):
        return status_of(error, LORAX_STATUSES)
    if error.status in (404, 429, 503):
        return error.status
    return 422 if error.status < 500 else 424


def lorax_envelope(error: BatchmillError, message: str, *, is_openai: bool = False) -> Envelope | OpenAIEnvelope:
    word = INCOMPLETE if error.code == "engine_lost" else WORDS.get(lorax_status(error), VALIDATION)
    return OpenAIEnvelope(OpenAIDetail(message, word, None, error.code), word) if is_openai else Envelope(message, word)


def refusal(error: BatchmillError, message: str) -> Response:
    """Predibase's reply to a request that failed; `message` may be shown to the caller. Never raises."""
    return text_reply(error, message, STATUSES)


def lorax_refusal(error: BatchmillError, message: str, *, is_openai: bool = False) -> Response:
    """LoRAX's reply to a request that failed; `message` may be shown to the caller. Never raises."""
    return error_reply(error, lorax_envelope(error, message, is_openai=is_openai), lorax_status(error))


def refused_by_engine(status: int, answer: bytes) -> EngineRefused:
    """What an engine said instead of an answer."""
    message = decode_error(answer).message[:SHOWN_CHARS]
    return EngineRefused(message or f"the engine answered with status {status}", status)
