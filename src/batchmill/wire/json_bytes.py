"""JSON objects handled as bytes, so that a number keeps its exact digits on its way through."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

DEPTH_MAX = (
    500  # levels that every process can read: the decoder shares Python's stack, of a thousand, with its callers
)

_object = msgspec.json.Decoder(dict[str, Raw])
_string = msgspec.json.Decoder(str)
encode = msgspec.json.encode
decode = msgspec.json.decode


def split_object(data: bytes) -> dict[str, Raw]:
    """The members of a JSON object, each value still as its own bytes."""
    return _object.decode(data)


def join_object(members: dict[str, Any]) -> bytes:
    """The JSON object with these members; values that are `Raw` go out as they came in."""
    return encode(members)


def text_of(value: Raw) -> str:
    """A JSON value as a person would write it: strings bare, null empty, the rest as its JSON text."""
    data = bytes(value).strip()
    if data[:1] == b'"':
        return _string.decode(data)
    return "" if data == b"null" else data.decode()


def append_members(data: bytes, members: bytes) -> bytes:
    """The JSON object `data` with the text `members` ('"a":1,"b":2') added at its end."""
    head = data.rstrip()[:-1].rstrip()
    return head + (b"" if head == b"{" else b",") + members + b"}"
