"""Checks the body of a request, for each path of the OpenAI API that batchmill runs.

Fields that are not listed pass unchecked: services know more fields than batchmill does.
Source: OpenAI's API reference and vLLM's request models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from batchmill.errors import InvalidRow
from batchmill.wire import features as body_features
from batchmill.wire import fields
from batchmill.wire.features import Guarded
from batchmill.wire.rows.forms import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE

# These fields would redirect a row, or our credentials, to another address (CVE-2024-6587).
REFUSED_FIELDS = ("api_base", "base_url", "api_key", "headers", "extra_body", "extra_headers")

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=16_384)]
Temperature = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Body(Guarded, gc=False):
    """The fields of every body."""

    model: str | None = None
    api_base: Raw | UnsetType = UNSET
    base_url: Raw | UnsetType = UNSET
    api_key: Raw | UnsetType = UNSET
    headers: Raw | UnsetType = UNSET
    extra_body: Raw | UnsetType = UNSET
    extra_headers: Raw | UnsetType = UNSET
    adapter_id: Raw | UnsetType = UNSET
    adapter_source: Raw | UnsetType = UNSET
    merged_adapters: Raw | UnsetType = UNSET
    api_token: Raw | UnsetType = UNSET


class _Generating(_Body, gc=False):
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Message(Struct, gc=False):
    role: str


class _Chat(_Generating, gc=False, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None


class _Completion(_Generating, gc=False, kw_only=True):
    prompt: Raw
    max_tokens: CountOrNone | None = None  # 0 requests the log-probabilities of a prompt alone


class _Embedding(_Body, gc=False):
    input: Raw | UnsetType = UNSET
    messages: list[_Message] | None = None  # vLLM embeds conversations too


class _Response(_Generating, gc=False, kw_only=True):
    input: Raw
    prompt: Raw | UnsetType = UNSET
    max_output_tokens: Count | None = None


class _Rerank(_Body, gc=False, kw_only=True):
    query: Raw
    documents: Raw
    top_n: CountOrNone | None = None


class _Score(_Body, gc=False):
    text_1: Raw | UnsetType = UNSET
    text_2: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET
    data_2: Raw | UnsetType = UNSET


_TEXTS = ("prompt", "input")
_BODIES: dict[str, type[_Body]] = {
    CHAT: _Chat,
    COMPLETIONS: _Completion,
    EMBEDDINGS: _Embedding,
    RESPONSES: _Response,
    RERANK: _Rerank,
    SCORE: _Score,
}
_decoders: dict[str, Callable[[bytes | Raw], _Body]] = {
    url: msgspec.json.Decoder(body).decode for url, body in _BODIES.items()
}


def check(
    url: str,
    body: bytes | Raw,
    *,
    may_stream: bool = False,
    is_ours: bool = False,
    features: frozenset[str] | None = None,
) -> str | None:
    """Check a body and return its `model`. Of a path that is not listed only the common fields are checked.

    `may_stream`: the caller waits for the reply and can receive it in pieces. `is_ours`: batchmill runs the engine,
    which would ignore unknown fields. `features`: the features of wire.features that the body may use; None: all.

    Raises: InvalidRow (`invalid_field`, `number_out_of_range`, `parameter_not_allowed`, `streaming_not_supported`).
    """
    try:
        decoded = _decoders.get(url, _decode_any)(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _to_invalid_row(url, error) from None
    for name in REFUSED_FIELDS:
        if getattr(decoded, name) is not UNSET:
            raise InvalidRow(
                f"body.{name} is not allowed: a row cannot set the address of the service",
                code="parameter_not_allowed",
            )
    if is_ours:
        _refuse_lorax(decoded)
    for name in _TEXTS:
        if not (name == "prompt" and isinstance(decoded, _Response)):  # the prompt of a response is an object
            _check_text(url, name, getattr(decoded, name, UNSET), may_be_null=isinstance(decoded, _Embedding))
    if features is not None:
        body_features.check(decoded, body, features)
        if isinstance(decoded, _Response):
            body_features.check_response(decoded.prompt, decoded.input, features)
    match decoded:
        case _Generating(stream=True) if not may_stream:
            raise InvalidRow(
                "body.stream is true, but a batch cannot stream: leave it out", code="streaming_not_supported"
            )
        case _Embedding(messages=None) if not _is_set(decoded.input):
            raise InvalidRow(f"body lacks `input`, which {url} needs", code="invalid_field")
        case _Score() if not _has_pair(decoded):
            raise InvalidRow(f"body lacks `text_1` and `text_2`, which {url} needs", code="invalid_field")
    return decoded.model


def _refuse_lorax(body: _Body) -> None:
    for name in fields.REFUSED:
        value = getattr(body, name)
        if value is not UNSET and bytes(value) not in fields.NOTHING:
            raise fields.lorax_refusal(name)


_decode_any = msgspec.json.Decoder(_Body).decode


def _has_pair(body: _Score) -> bool:
    pairs = ((body.text_1, body.text_2), (body.queries, body.documents), (body.data_1, body.data_2))
    return any(_is_set(left) and _is_set(right) for left, right in pairs)


def _is_set(value: Raw | UnsetType) -> bool:
    return not isinstance(value, UnsetType) and bytes(value) != b"null"


def _check_text(url: str, name: str, value: Raw | UnsetType, *, may_be_null: bool) -> None:
    """Check that a value is text or a list by its first byte: it may be long. Raises: InvalidRow (`invalid_field`)."""
    if isinstance(value, UnsetType):
        return
    first = memoryview(value)[:1].tobytes()
    if first in (b'"', b"[") or (may_be_null and first == b"n"):
        return
    kind = {b"{": "object", b"n": "null", b"t": "bool", b"f": "bool"}.get(first, "number")
    expected = "str | array | null" if may_be_null else "str | array"
    raise InvalidRow(f"body.{name}: expected `{expected}`, got `{kind}`", code="invalid_field")


def _to_invalid_row(url: str, error: Exception) -> InvalidRow:
    """Translate an error of msgspec, such as "Expected `int`, got `str` - at `$.max_tokens`"."""
    reason, _, path = str(error).partition(" - at `$")
    field = f"body{path.rstrip('`')}"
    if reason.startswith("Object missing required field "):
        return InvalidRow(f"{field} lacks {reason.rsplit(' ', 1)[1]}, which {url} needs", code="invalid_field")
    if "out of range" in reason or ((" >= " in reason or " <= " in reason) and "of length" not in reason):
        return InvalidRow(f"{field}: {_lower(reason)}", code="number_out_of_range")
    return InvalidRow(f"{field}: {_lower(reason)}", code="invalid_field")


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
