"""Body fields that LoRAX's OpenAI-compatible API has beside OpenAI's, for an engine that does not know them.

vLLM would ignore them in silence: what it has under another name gets that name, the rest is refused.
Source: LoRAX's router, `lib.rs` (ChatCompletionRequest, CompletionRequest, ResponseFormat).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidRow
from batchmill.wire.json_bytes import encode, join_object, split_object

RENAMED = {"ignore_eos_token": "ignore_eos"}
FORMAT = "response_format"
# What it cannot do -> why, and what to do.
REFUSED = {
    "adapter_id": "name the adapter in `model`",
    "adapter_source": "an adapter is registered with its source: leave it out",
    "merged_adapters": "vLLM merges none: merge them into one adapter, register that, and name it in `model`",
    "api_token": "an adapter is fetched when it is registered, with a token of its own: leave it out",
}
KNOWN = frozenset([*RENAMED, *REFUSED, FORMAT])
NOTHING = (b"null", b'""')  # a client's way to say nothing
_HINT = re.compile(b"|".join(b'"%b"' % name.encode() for name in sorted(KNOWN)))


class _Format(Struct):
    type: str | None = None
    schema: Raw = Raw(b"null")
    json_schema: Raw = Raw(b"null")


def in_engine_words(body: bytes) -> bytes:
    """A request body with its fields translated. Raises: InvalidRow, naming the field."""
    if _HINT.search(body) is None:  # as nearly all are
        return body
    members = split_object(body)
    found = translated(members)
    return body if found == members else join_object(found)


def translated(members: Mapping[str, Raw]) -> dict[str, Raw]:
    """The members in the engine's words. Raises: InvalidRow, naming the field."""
    found = dict(members)
    for name in KNOWN.intersection(members):
        value = found.pop(name)
        if name == FORMAT:
            found[name] = _format(value)
        elif bytes(value) in NOTHING:
            continue
        elif name in REFUSED:
            raise refusal(name)
        elif RENAMED[name] in members:
            raise InvalidRow(f"body has {name} and {RENAMED[name]}, which mean the same", code="invalid_field")
        else:
            found[RENAMED[name]] = value
    return found


def refusal(name: str) -> InvalidRow:
    """Of a name in REFUSED."""
    return InvalidRow(f"body.{name} is not taken: {REFUSED[name]}", code="parameter_not_allowed")


def _format(value: Raw) -> Raw:
    """LoRAX's `{"type": "json_object", "schema": …}` as OpenAI writes it; others as they are."""
    try:
        told = msgspec.json.decode(value, type=_Format | None)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return value  # the engine says what is wrong with it
    if told is None or bytes(told.schema) == b"null":
        return value
    if told.type != "json_object" or bytes(told.json_schema) != b"null":
        raise InvalidRow("body.response_format.schema needs the type json_object", code="invalid_field")
    return Raw(encode({"type": "json_schema", "json_schema": {"name": "response", "schema": told.schema}}))
