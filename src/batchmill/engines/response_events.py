"""The events of vLLM's Responses API as OpenAI has them: an answer that was cut off ends with `response.incomplete`.

vLLM ends every stream with `response.completed`, whatever status the response in it has.
Source: OpenAI's API reference, "Streaming events"; vLLM 0.32, entrypoints/openai/responses/serving.py.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from batchmill.wire.json_bytes import join_object, split_object

COMPLETED = b"response.completed"
ENDS = {"incomplete": b"response.incomplete", "failed": b"response.failed"}  # by the status of the response
EVENT_BYTES_MAX = 64 * 1024 * 1024  # of one that is looked into: a longer one is handed on as it comes
_END = b"\n\n"
_DATA = b"data:"


class _Response(Struct, frozen=True):
    status: str = ""


class _Event(Struct):
    response: _Response = _Response()


_event = msgspec.json.Decoder(_Event).decode


class ResponseEvents:
    """Puts whole events together, and names the last one by what it says."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """The events that are whole with this piece; what begins another is kept for the next."""
        kept = self._kept
        seen = max(0, len(kept) - 1)
        kept += piece
        end = kept.rfind(_END, seen)
        if end < 0:
            return self.rest() if len(kept) > EVENT_BYTES_MAX else b""
        whole = bytes(kept[: end + len(_END)])
        del kept[: end + len(_END)]
        if COMPLETED not in whole:
            return whole
        return b"".join(named(event) + _END for event in whole.split(_END)[:-1])

    def rest(self) -> bytes:
        """What was kept, at the end."""
        kept, self._kept = bytes(self._kept), bytearray()
        return kept


def named(event: bytes) -> bytes:
    """An event under the name that its response's status gives it; one of another kind as it is."""
    lines = event.split(b"\n")
    at = next((number for number, line in enumerate(lines) if line.startswith(_DATA)), None)
    if at is None or COMPLETED not in event:
        return event
    data = lines[at].removeprefix(_DATA)
    try:
        members = split_object(data)
        if bytes(members.get("type", b"")) != b'"%b"' % COMPLETED:
            return event
        name = ENDS.get(_event(data).response.status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return event
    if name is None:
        return event
    members["type"] = Raw(b'"%b"' % name)
    lines[at] = _DATA + b" " + join_object(members)
    return b"\n".join(b"event: " + name if line.startswith(b"event:") else line for line in lines)
