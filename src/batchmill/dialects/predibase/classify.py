"""Texts classified, and texts as vectors, in the words of LoRAX's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from batchmill.dialects.predibase.lorax import NO_TOKEN
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.wire.json_bytes import encode

INPUTS_MAX = 10_000
T = TypeVar("T", bound=Struct)
Progress = Callable[[float], None]


class Classify(Struct, frozen=True, forbid_unknown_fields=True):
    """The client sends all three, and an empty token."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
    model: str | None = None
    api_token: str = ""


class Class(Struct, frozen=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classified(Struct, frozen=True):
    """Source: vLLM's /classify, whose answer the client takes as it is."""

    id: str
    object: str
    created: int
    model: str
    data: list[Class]


class Embed(Struct, frozen=True, forbid_unknown_fields=True):
    """As the client's generate, of which only the text means something here."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: None = None
    stream: bool = False


class Embedded(Struct, frozen=True):
    embeddings: list[float]


class _Vector(Struct):
    embedding: list[float]


class _Vectors(Struct):
    data: Annotated[list[_Vector], Meta(min_length=1)]


def classify_body(asked: Classify) -> dict[str, object]:
    """What the engine is asked. Raises: InvalidInput."""
    if asked.api_token:
        raise InvalidInput(f"`api_token` {NO_TOKEN}", code="invalid_parameter")
    return {"input": asked.input}


def classified(answer: bytes, progress: Progress) -> bytes:
    """The reply to a call, of the engine's answer; `embedded` too."""
    return encode(_read(answer, Classified))


def embed_body(asked: Embed) -> dict[str, object]:
    """What the engine is asked. Raises: InvalidInput."""
    if asked.stream:
        raise InvalidInput("`stream`: a vector comes in one piece; leave it out", code="invalid_parameter")
    return {"input": asked.inputs}


def embedded(answer: bytes, progress: Progress) -> bytes:
    return encode(Embedded(_read(answer, _Vectors).data[0].embedding))


def _read(answer: bytes, wanted: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=wanted)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BatchmillError(f"the engine's answer cannot be read: {error}", code="internal_error") from None
