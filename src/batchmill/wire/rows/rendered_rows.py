"""Rows of a table to which sealing has added what becomes of them: the prompt that a template made and the media that
their cells name, or why there is none.

Additions are the last members of the row's JSON object. Their names begin with a NUL, as no column of a table does.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from batchmill.types import RowError
from batchmill.wire.json_bytes import append_members, encode

PROMPT, MEDIA, FAULT = "\0prompt", "\0media", "\0fault"
TEMPLATE_FAULTS = ("template_failed", "template_too_slow", "template_too_large")  # of single rows: the others go on
MEDIA_FAULTS = ("media_missing", "media_invalid", "media_too_large", "media_not_allowed", "media_changed")
ROW_FAULTS = TEMPLATE_FAULTS + MEDIA_FAULTS
_PROMPT_HEAD, _MEDIA_HEAD, _FAULT_HEAD = (encode(name) + b":" for name in (PROMPT, MEDIA, FAULT))
# In a string a quote follows a backslash, so these bytes can only be the name of a member.
_HEADS = (_PROMPT_HEAD, _MEDIA_HEAD, _FAULT_HEAD)


class MediaPart(Struct, frozen=True, omit_defaults=True):
    """One content part of a row: its bytes are in a file, at a URL, or in a cell of the row as base64."""

    kind: str  # as in MediaColumn
    type: str = ""  # of its content: image/png; as the following, empty for a URL: it is fetched when the row is sent
    size_bytes: int = 0
    digest: str = ""  # BLAKE3 of its bytes
    path: str = ""  # of the file
    is_copied: bool = False  # its bytes are in a copy of the job's, which its digest names
    url: str = ""  # without both, the bytes are in `column`
    column: str = ""
    width: int = 0  # of an image, in pixels; 0: its head does not say
    height: int = 0
    seconds: float = 0.0  # of a recording, about; 0: not known


_parts = msgspec.json.Decoder(list[MediaPart])
_fault = msgspec.json.Decoder(tuple[str, str])


def with_prompt(row: bytes, prompt: str) -> bytes:
    """Add a prompt to a JSON object, which has no line end."""
    return append_members(row, _PROMPT_HEAD + encode(prompt))


def with_fault(row: bytes, code: str, message: str) -> bytes:
    """Add the reason why there is no prompt."""
    return append_members(row, _FAULT_HEAD + encode([code, message]))


def with_media(row: bytes, parts: list[MediaPart]) -> bytes:
    """Add the content parts."""
    return append_members(row, _MEDIA_HEAD + encode(parts))


def media_of(members: dict[str, msgspec.Raw]) -> list[MediaPart]:
    """The content parts of a row, from the members of its object."""
    return _parts.decode(members[MEDIA]) if MEDIA in members else []


def without_additions(row: bytes, count: int = 1) -> bytes:
    """The row as it was in the input, before at most `count` additions. One without additions is unchanged."""
    for _ in range(count):
        at = max(map(row.rfind, _HEADS))
        row = row if at < 0 else row[:at].removesuffix(b",") + b"}"
    return row


def fault_of(members: dict[str, Any]) -> RowError | None:
    """Why a row has no prompt or no media, from the members of its object; None: it has them.

    A column of the input may have the name too: it is whatever its author likes.
    """
    if FAULT not in members:
        return None
    try:
        code, message = _fault.decode(members[FAULT])
    except msgspec.ValidationError:
        code = ""
    if code not in ROW_FAULTS:
        return RowError("column_conflict", f"a column is named {FAULT!r}, which batchmill uses: rename it")
    return RowError(code, message)
