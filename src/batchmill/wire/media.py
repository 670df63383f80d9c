"""Images, recordings and documents as content parts of chat requests: their types and their form.

Source: OpenAI's API reference, "Create chat completion": the parts `image_url`, `input_audio` and `file`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchmill.errors import InvalidRow
from batchmill.types import LoadedPart, MediaColumn
from batchmill.wire.rows.rendered_rows import MediaPart

IMAGE, AUDIO, DOCUMENT = KINDS = ("image", "audio", "document")
HEAD_BYTES = 16  # that show the type of a content
MEDIA_COLUMNS_MAX = 16
AUDIO_FORMATS = {
    "audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg", "audio/mp4": "m4a",
}  # fmt: skip
TYPES = {
    IMAGE: ("image/png", "image/jpeg", "image/webp", "image/gif"),
    AUDIO: tuple(AUDIO_FORMATS),
    DOCUMENT: ("application/pdf",),
}
_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"), (b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"),
    (b"%PDF-", "application/pdf"),
)  # fmt: skip
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def media_columns(
    images: Sequence[str] = (), audio: Sequence[str] = (), documents: Sequence[str] = ()
) -> list[MediaColumn]:
    """The columns of a job's media, in the order of the parts: images, recordings, documents."""
    columns = zip(KINDS, (images, audio, documents), strict=True)
    return [MediaColumn(kind, column) for kind, named in columns for column in named]


def type_of(head: bytes) -> str | None:
    """The type of a content by its first bytes; None: it is not known."""
    for start, name in _STARTS:
        if head.startswith(start):
            return name
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:12] == b"ftypM4A ":
        return "audio/mp4"
    is_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2  # of MPEG audio, layer III
    return "audio/mpeg" if is_frame else None


def type_for(kind: str, column: str, head: bytes) -> str:
    """The type of a content of a column by its first bytes. Raises: InvalidRow if it is not what the column is for."""
    found = type_of(head)
    if found not in TYPES[kind]:
        known = f"it is {found}" if found else "its first bytes are of no known type"
        raise InvalidRow(
            f"the {kind} in {column!r} is none: {known}; it can be {', '.join(TYPES[kind])}", code="media_invalid"
        )
    return found


def encoded_bytes(size_bytes: int) -> int:
    """How long so many bytes are as base64, about."""
    return size_bytes * 4 // 3


def placeholder(part: MediaPart) -> LoadedPart:
    """What stands for a part that is not loaded: its digest, or the URL that says where its bytes will come from."""
    return LoadedPart(part.type, part.digest or part.url)


def content_part(part: MediaPart, loaded: LoadedPart) -> dict[str, Any]:
    """The part of a message."""
    data = loaded.data
    url = f"data:{loaded.type};base64,{data}"
    if part.kind == IMAGE:
        return {"type": "image_url", "image_url": {"url": url}}
    if part.kind == AUDIO:
        return {"type": "input_audio", "input_audio": {"data": data, "format": AUDIO_FORMATS.get(loaded.type, "")}}
    return {"type": "file", "file": {"filename": "document.pdf", "file_data": url}}
