"""How many tokens models count for images, recordings and documents: estimates from what their heads say.

Sources: OpenAI's "Images and vision" (tiles of 512 pixels, patches of 32), Anthropic's "Vision" (pixels / 750),
Gemini's "Understand and count tokens" (tiles of 768 pixels, 32 tokens for a second of audio). docs/media.md has the
table.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from batchmill.types import ModelSpec
from batchmill.wire.media import AUDIO, DOCUMENT, IMAGE, type_of
from batchmill.wire.rows.rendered_rows import MediaPart

HEAD_BYTES_MAX = 192 * 1024  # of a content, in which its size is looked for; a JPEG may have a thumbnail before it
BYTES_A_TOKEN = 4  # of text, where a size in bytes stands for tokens
UNKNOWN_SECONDS, UNKNOWN_PAGES = 3600, 100  # of a recording and a document of which nothing is known
SECOND_BYTES = 4000  # of compressed audio, at least about
RATES = range(4_000, 8_000_000)  # bytes a second that the head of a WAV may say: speech of 8 bits at 4 kHz; studios
GEMINI_TILES_MAX = 24  # of an image: larger ones are scaled down
PAGE_BYTES, PAGE_TOKENS = 50_000, 3000  # of a document, about
TYPED_BYTES = 64  # before `;base64,`, in which the type is looked for
_BASE64, _AUDIO, _DATA = b";base64,", b'"input_audio"', re.compile(rb'"data"\s*:\s*"')
_SOF = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # the markers of JPEG that have its size

Size = tuple[int, int]  # width, height in pixels


class MediaInBody(Struct, frozen=True):
    """What a body has of media: how many bytes of it they are as base64, and how many tokens they count, about."""

    size_bytes: int = 0
    tokens: int = 0


NO_MEDIA = MediaInBody()


class MediaTokens:
    """Estimates for one model."""

    def __init__(self, model: ModelSpec) -> None:
        self._family, self._name = _family_of(model), model.source.lower()

    def part(self, part: MediaPart) -> int:
        """The tokens of a part of a table's row; where its size is not known, those of a large one."""
        if part.kind == IMAGE:
            return self.image((part.width, part.height) if part.width and part.height else None)
        if part.kind == AUDIO:
            return self._audio(part.seconds or part.size_bytes / SECOND_BYTES or UNKNOWN_SECONDS)
        return _document(part.size_bytes)

    def content(self, part: dict[str, Any]) -> int | None:
        """The same of a part of a message that is no text; None: it is none of these."""
        match part:
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                return self.image(size_of(_head_of(url)))
            case {"type": "image_url" | "input_image"}:
                return self.image(None)
            case {"input_audio": {"data": str(data)}}:
                return self._audio(seconds_of(_head_of(data), len(data) * 3 // 4))
            case {"type": "file", "file": {"file_data": str(data)}}:
                return _document(len(data) * 3 // 4)
            case {"type": "file" | "input_file"}:
                return _document(0)
        return None

    def in_body(self, body: bytes) -> MediaInBody:
        """What a whole request has of media, without reading its JSON."""
        if _BASE64 not in body and _AUDIO not in body:
            return NO_MEDIA
        size = tokens = 0
        for kind, data in _inlined(body):
            size += len(data)
            if kind == IMAGE:
                tokens += self.image(size_of(_decoded(data)))
            elif kind == AUDIO:
                tokens += self._audio(seconds_of(_decoded(data), len(data) * 3 // 4))
            else:
                tokens += _document(len(data) * 3 // 4)
        return MediaInBody(size, tokens)

    def image(self, size: Size | None) -> int:
        """The tokens of an image. Args: size: None: not known, so it counts as a large one."""
        return _IMAGES[self._family](self._name, size)

    def _audio(self, seconds: float) -> int:
        return ceil(round(seconds * _SECONDS.get(self._family, 32), 2))


def _family_of(model: ModelSpec) -> str:
    """Whose rules count for a model; those of most vision models that vLLM serves where that is not known."""
    host = urlsplit(model.base_url or "").hostname or ""
    if model.provider in ("anthropic", "gemini"):
        return model.provider
    if model.provider in ("openai", "azure") or (model.traits.calls_openai and model.base_url is None):
        return "openai"
    hosts = {"openai.com": "openai", "openai.azure.com": "openai", "anthropic.com": "anthropic"}
    hosts |= {"googleapis.com": "gemini"}
    return next((family for name, family in hosts.items() if f".{host}".endswith(f".{name}")), "vllm")


# -- images ------------------------------------------------------------------------------------------------------------

_PATCHES = {"gpt-4.1-mini": 1.62, "gpt-4.1-nano": 2.46, "o4-mini": 1.72, "gpt-5-mini": 1.62, "gpt-5-nano": 2.46}
_TILES = {"gpt-4o-mini": (2833, 5667), "gpt-5": (70, 140), "o1": (75, 150), "o3": (75, 150)}
_TILES_DEFAULT = 85, 170  # of an image, and of each tile
_OLDER_CLAUDE = re.compile(r"claude-(2|3|instant)|-4-(0|1|5|6|2025\d+)\b")


def _openai(name: str, size: Size | None) -> int:
    if (factor := next((each for start, each in _PATCHES.items() if name.startswith(start)), None)) is not None:
        patches = 1536 if size is None else min(1536, ceil(size[0] / 32) * ceil(size[1] / 32))
        return ceil(patches * factor)
    base, tile = next((each for start, each in _TILES.items() if name.startswith(start)), _TILES_DEFAULT)
    if size is None:
        return base + 8 * tile
    width, height = _within(size, 2048)
    scale = min(1.0, 768 / min(width, height))
    return base + tile * ceil(width * scale / 512) * ceil(height * scale / 512)


def _anthropic(name: str, size: Size | None) -> int:
    edge, most = (1568, 1600) if _OLDER_CLAUDE.search(name) else (2576, 4784)
    if size is None:
        return most
    width, height = _within(size, edge)
    return min(most, ceil(width * height / 750))


def _gemini(name: str, size: Size | None) -> int:
    if size is None:
        return GEMINI_TILES_MAX * 258
    return 258 if max(size) <= 384 else 258 * min(GEMINI_TILES_MAX, ceil(size[0] / 768) * ceil(size[1] / 768))


def _vllm(name: str, size: Size | None) -> int:
    return 16_384 if size is None else min(16_384, ceil(size[0] / 28) * ceil(size[1] / 28))


_IMAGES = {"openai": _openai, "anthropic": _anthropic, "gemini": _gemini, "vllm": _vllm}
_SECONDS = {"openai": 10, "gemini": 32}  # tokens of a second of audio


def _within(size: Size, edge: int) -> tuple[float, float]:
    scale = min(1.0, edge / max(size))
    return max(1.0, size[0] * scale), max(1.0, size[1] * scale)


def _document(size_bytes: int) -> int:
    return PAGE_TOKENS * (ceil(size_bytes / PAGE_BYTES) if size_bytes else UNKNOWN_PAGES)


# -- heads -------------------------------------------------------------------------------------------------------------


def size_of(data: bytes) -> Size | None:
    """The size of an image by its head, which is not decoded; None: it does not say."""
    kind = type_of(data[:16])
    size = None
    if kind == "image/png" and data[12:16] == b"IHDR" and len(data) >= 24:
        size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    elif kind == "image/gif" and len(data) >= 10:
        size = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    elif kind == "image/webp":
        size = _size_of_webp(data)
    elif kind == "image/jpeg":
        size = _size_of_jpeg(data)
    return size if size is not None and all(size) else None


def _size_of_webp(data: bytes) -> Size | None:
    form = data[12:16]
    if len(data) < 30:
        return None
    if form == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if form == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _size_of_jpeg(data: bytes) -> Size | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _SOF:
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


def seconds_of(head: bytes, size_bytes: int) -> float:
    """How long a recording lasts, at most about."""
    rate = int.from_bytes(head[28:32], "little") if type_of(head[:16]) == "audio/wav" and len(head) >= 32 else 0
    return size_bytes / (rate if rate in RATES else SECOND_BYTES)


def _inlined(body: bytes) -> Iterator[tuple[str, memoryview]]:
    """The kind and the base64 of each content in a body."""
    view, at = memoryview(body), body.find(_BASE64)
    while at >= 0:
        start = at + len(_BASE64)
        end = body.find(b'"', start)
        end = len(body) if end < 0 else end
        mime = body[max(0, at - TYPED_BYTES) : at].rpartition(b"data:")[2]
        kind = IMAGE if mime.startswith(b"image/") else AUDIO if mime.startswith(b"audio/") else DOCUMENT
        yield kind, view[start:end]
        at = body.find(_BASE64, end)
    at = body.find(_AUDIO)
    while at >= 0:
        at += len(_AUDIO)
        if (found := _DATA.search(body, at, at + TYPED_BYTES)) is not None:
            end = body.find(b'"', found.end())
            end = len(body) if end < 0 else end
            yield AUDIO, view[found.end() : end]
            at = end
        at = body.find(_AUDIO, at)


def _head_of(text: str) -> bytes:
    data = text.partition(",")[2] if text.startswith("data:") else text
    return _decoded(data.encode()) if ";base64," in text[: 2 * TYPED_BYTES] or not text.startswith("data:") else b""


def _decoded(data: bytes | memoryview) -> bytes:
    """The first bytes of base64; none if it is none."""
    try:
        return b64decode(bytes(data[: HEAD_BYTES_MAX // 3 * 4]) + b"==="[: -len(data[: HEAD_BYTES_MAX // 3 * 4]) % 4])
    except ValueError:
        return b""
