"""How LoRAX says that something is wrong: `{"error": "<text>", "error_type": "<word>"}`. Below its OpenAI base the text
is in OpenAI's object, since the openai package shows no other.

Its client raises by the word where it knows it (generation, incomplete_generation, overloaded, validation), and by the
status otherwise. Source: LoRAX's router, `server.rs`; predibase 2025.10.3, `resources/lorax/errors.py`.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct
from starlette.responses import Response

from batchmill import errors
from batchmill.errors import BatchmillError
from batchmill.server.operations import json_reply
from batchmill.wire.json_bytes import decode

VALIDATION, GENERATION, INCOMPLETE, OVERLOADED = "validation", "generation", "incomplete_generation", "overloaded"
STATUSES = (404, 422, 424)  # besides those that any operation may answer
SHOWN_CHARS = 4_000  # of what an engine said
# Order matters: the first class that fits.
BY_CLASS: tuple[tuple[type[BatchmillError], int, str], ...] = (
    (errors.Gone, 410, "not_found"),
    (errors.UnknownName, 404, "not_found"),
    (errors.TooLarge, 413, VALIDATION),
    (errors.InvalidInput, 422, VALIDATION),
    (errors.Unauthenticated, 401, "unauthenticated"),
    (errors.RateLimited, 429, OVERLOADED),
    (errors.Refused, 403, "forbidden"),
    (errors.ModelFailed, 424, GENERATION),
    (errors.Unavailable, 503, OVERLOADED),
    (errors.JobPaused, 503, OVERLOADED),
    (BatchmillError, 500, INCOMPLETE),
)
BY_CODE: dict[str, tuple[int, str]] = {
    "generation": (424, GENERATION),
    "answer_too_large": (424, GENERATION),  # the client would have it made six times
    "engine_lost": (503, INCOMPLETE),
}


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


class Said(BatchmillError):
    """What is said of a call before its body is read."""

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


def row_of(error: BatchmillError) -> tuple[int, str]:
    """Status and word."""
    if isinstance(error, EngineRefused):
        return _of_engine(error.status)
    known = BY_CODE.get(error.code)
    return known or next((status, word) for kind, status, word in BY_CLASS if isinstance(error, kind))


def _of_engine(status: int) -> tuple[int, str]:
    match status:
        case 404:
            return 404, "not_found"
        case 429 | 503:
            return status, OVERLOADED
        case _ if status < 500:
            return 422, VALIDATION
    return 424, GENERATION


def envelope(error: BatchmillError, message: str, *, is_openai: bool = False) -> Envelope | OpenAIEnvelope:
    word = row_of(error)[1]
    return OpenAIEnvelope(OpenAIDetail(message, word, None, error.code), word) if is_openai else Envelope(message, word)


def refusal(error: BatchmillError, message: str, *, is_openai: bool = False) -> Response:
    """The reply to a request that failed; `message` is the error's, fit for whoever asked. Never raises."""
    status = row_of(error)[0]
    headers = {}
    if isinstance(error, errors.RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.retryable and status >= 500:
        headers["x-should-retry"] = "false"  # the openai package repeats them otherwise
    return json_reply(envelope(error, message, is_openai=is_openai), status, headers)


def refused_by_engine(status: int, answer: bytes) -> EngineRefused:
    """What an engine said instead of an answer: vLLM has OpenAI's form, FastAPI one of its own."""
    try:
        told = decode(answer)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        told = None
    match told:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)} | {"detail": str(text)}:
            return EngineRefused(text[:SHOWN_CHARS], status)
    return EngineRefused(f"the engine answered with status {status}", status)
