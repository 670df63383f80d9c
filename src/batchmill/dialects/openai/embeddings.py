"""Replies to live requests that this API rewrites: events, and vectors as numbers or base64 of little-endian float32.

Both ways are exact. The openai package asks for base64 unless it is told otherwise; an engine may know only one.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import AsyncGenerator, Callable

import msgspec
from msgspec import Raw, Struct

from batchmill.dialects.openai.errors import envelope
from batchmill.errors import BatchmillError
from batchmill.server.replies import PieceReply
from batchmill.types import LiveHead
from batchmill.wire.json_bytes import decode, encode, join_object, split_object

ENCODINGS = ("float", "base64")


class _Asked(Struct):
    encoding_format: str | None = None


def encoding_of(body: bytes) -> str | None:
    """The encoding a request asks for; None where it is neither of the two: then the engine's own is handed on."""
    try:
        asked = decode(body, type=_Asked).encoding_format or "float"
    except msgspec.MsgspecError:
        return None
    return asked if asked in ENCODINGS else None


def with_encoding(reply: bytes, encoding: str) -> bytes:
    """The reply with every vector so encoded; a reply of another shape as it is."""
    try:
        members = split_object(reply)
        items = decode(members["data"], type=list[dict[str, Raw]])
        changed = [_recoded(item, encoding) for item in items]
    except (msgspec.MsgspecError, KeyError, ValueError, OverflowError, RecursionError):
        return reply
    return join_object({**members, "data": items}) if any(changed) else reply


def recode(order: bytes, progress: Callable[[float], None]) -> bytes:
    """`with_encoding`, of an order that is the encoding, a line end and the reply."""
    encoding, _, reply = order.partition(b"\n")
    return with_encoding(reply, encoding.decode())


def _recoded(item: dict[str, Raw], encoding: str) -> bool:
    """Encode the vector of one item in place. False: it was so already."""
    vector = item["embedding"]
    is_text = bytes(vector).lstrip()[:1] == b'"'
    if is_text == (encoding == "base64"):
        return False
    item["embedding"] = Raw(encode(_floats(vector) if is_text else _packed(vector)))
    return True


def _packed(vector: Raw) -> str:
    return base64.b64encode(_little_endian(array("f", decode(vector, type=list[float]))).tobytes()).decode()


def _floats(vector: Raw) -> list[float]:
    numbers = array("f")
    try:
        numbers.frombytes(base64.b64decode(decode(vector, type=str), validate=True))
    except binascii.Error as error:
        raise ValueError("no base64") from error
    return _little_endian(numbers).tolist()


def _little_endian(numbers: array) -> array:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class EventReply(PieceReply):
    """Server-sent events, handed on as they come."""

    def __init__(self, head: LiveHead, pieces: AsyncGenerator[bytes], hide: Callable[[str], str]) -> None:
        self._hide = hide
        super().__init__(pieces, media=head.content_type, status=head.status)

    def late(self, error: BatchmillError) -> bytes:
        """The openai package raises what such an event says."""
        return b"data: " + encode(envelope(error, self._hide(error.message))) + b"\n\n"
