"""A body of OpenAI's API as a deployment takes it: `model` is empty or names an adapter, and LoRAX's fields count."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput
from batchmill.wire import lorax_fields
from batchmill.wire.json_bytes import shallow, split_object


class Asked(Struct, frozen=True):
    """What is left for the engine, and which adapter is meant; None: the base model."""

    members: dict[str, Raw]
    adapter: str | None = None
    adapter_source: str | None = None
    stream: bool = False


class _Head(Struct, frozen=True):
    model: str | None = None
    adapter_id: str | None = None
    adapter_source: str | None = None
    stream: bool | None = None


_head = msgspec.json.Decoder(_Head).decode


def read_body(raw: bytes) -> Asked:
    """Raises: InvalidInput, naming the field."""
    try:
        head, members = _head(shallow(raw)), split_object(raw)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the body is no request: {error}", code="invalid_field") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", code="invalid_json") from None
    if head.adapter_id and head.model and head.adapter_id != head.model:
        told = f"`model` names {head.model[:80]!r} and `adapter_id` {head.adapter_id[:80]!r}: name one adapter"
        raise InvalidInput(told, code="invalid_field")
    rest = {name: value for name, value in members.items() if name not in ("model", "adapter_id", "adapter_source")}
    adapter = head.adapter_id or head.model or None
    return Asked(lorax_fields.translated(rest), adapter, head.adapter_source, bool(head.stream))
