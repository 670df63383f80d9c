"""The bodies of rows, naming the model as its provider does."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidRow
from batchmill.types import ModelSpec
from batchmill.wire.forms import with_model


class _Head(Struct, gc=False):
    model: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head)
_fields = msgspec.json.Decoder(dict[str, Any])


def remote_name(model: ModelSpec, named: str | None) -> str:
    """The provider's name for the model that a row names: nothing and batchmill's own name mean `source`."""
    own = model.name if model.name not in model.adapters else model.source
    return model.source if not named or named in (own, model.alias) else named


def addressed(body: bytes, model: ModelSpec) -> bytes:
    """The body as it is, but for the model's name. Raises: InvalidRow for a row that wants a stream."""
    head = _head.decode(body)
    _refuse_stream(head.stream)
    name = remote_name(model, head.model)
    return body if name == head.model else with_model(body, name)


def fields_of(body: bytes, model: ModelSpec) -> dict[str, Any]:
    """The members of a body, with the provider's name for the model. Raises: InvalidRow as `addressed`."""
    fields = _fields.decode(body)
    named = fields.get("model")
    _refuse_stream(fields.get("stream"))
    return fields | {"model": remote_name(model, named if isinstance(named, str) else None)}


def _refuse_stream(stream: Any) -> None:
    if stream:
        raise InvalidRow("a row is answered in one piece: leave `stream` out", code="unsupported_parameter")
