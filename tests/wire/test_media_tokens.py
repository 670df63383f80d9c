"""Tokens of images, recordings and documents, by what their heads say of them."""

from __future__ import annotations

import json
import struct
from base64 import b64encode

import pytest

from batchmill.types import ModelSpec
from batchmill.wire.media_tokens import (
    NO_MEDIA,
    PAGE_TOKENS,
    UNKNOWN_PAGES,
    UNKNOWN_SECONDS,
    MediaInBody,
    MediaTokens,
    seconds_of,
    size_of,
)
from batchmill.wire.rows.rendered_rows import MediaPart


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(">II", width, height) + b"rest"


def jpeg(width: int, height: int, before: int = 0) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", before + 2) + b"x" * before
    return b"\xff\xd8" + exif + b"\xff\xff\xc2\0\x11\x08" + struct.pack(">HH", height, width) + b"rest"


def webp(form: bytes, data: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + form + b"\0\0\0\0" + data + b"\0" * 20


WAV = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0" + struct.pack("<II", 16_000, 32_000)


def test_sizes_by_heads():
    """Of each kind of image; a head that is cut off, broken or says zero says nothing."""
    lossless = struct.pack("<I", 199 | 99 << 14)
    cases = {
        png(640, 480): (640, 480), jpeg(300, 200): (300, 200), jpeg(300, 200, 60_000): (300, 200),
        b"GIF89a" + struct.pack("<HH", 7, 5): (7, 5),
        webp(b"VP8X", b"\0\0\0\0" + (399).to_bytes(3, "little") + (299).to_bytes(3, "little")): (400, 300),
        webp(b"VP8L", b"\x2f" + lossless): (200, 100),
        webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 176 | 0x4000, 144)): (176, 144),
        webp(b"ANIM", b""): None, png(0, 9): None, png(3, 4)[:20]: None, jpeg(3, 4)[:8]: None, b"": None,
        b"\xff\xd8\xff\xd9\xff\xd9": None, b"\xff\xd8\xff\xe1\0\0\0\0\0\0\0\0\0\0": None, b"GIF89a": None,
        b"\xff\xd8" + b"\xff" * 100: None, b"%PDF-1.7": None,
    }  # fmt: skip
    assert {data: size_of(data) for data in cases} == cases


def test_heads_that_lie_count_as_large():
    """4 billion pixels a side, a WAV of one byte a second: no call has so many tokens, and a limit counts them."""
    models = [ModelSpec("m", "http", source, base_url=url) for source, url in (
        ("gpt-4.1", "https://api.openai.com/v1"), ("gpt-4.1-mini", "https://api.openai.com/v1"),
        ("claude-sonnet-4-5", "https://api.anthropic.com/v1"), ("m", "http://127.0.0.1/v1"),
        ("gemini-2.5-flash", "https://generativelanguage.googleapis.com/v1beta/openai"),
    )]  # fmt: skip
    for model in models:
        tokens = MediaTokens(model)
        for size in ((2**32 - 1, 2**32 - 1), (2**32 - 1, 1), (1, 2**32 - 1)):
            assert tokens.image(size) <= max(tokens.image(None), 20_000), (model.source, size)
    for rate in (1, 2**32 - 1):
        assert seconds_of(WAV[:28] + struct.pack("<I", rate) + WAV[32:], 40_000) == 10.0


def test_seconds_by_heads():
    """Of a WAV its header says; of others the bytes of quiet speech are a bound."""
    assert seconds_of(WAV, 320_000) == 10.0
    assert seconds_of(b"ID3", 40_000) == 10.0
    assert seconds_of(WAV[:28] + b"\0\0\0\0", 40_000) == 10.0


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (ModelSpec("m", "http", "gpt-4o"), [85 + 4 * 170, 85 + 6 * 170, 85 + 170, 85 + 8 * 170]),
        (ModelSpec("m", "http", "gpt-4o-mini-2024"), [2833 + 4 * 5667, 2833 + 6 * 5667, 2833 + 5667, 2833 + 8 * 5667]),
        (ModelSpec("m", "provider_batch", "gpt-4.1-mini", provider="openai"), [1659, 2489, 2, 2489]),
        (ModelSpec("m", "provider_batch", "claude-3-5-haiku", provider="anthropic"), [1399, 1600, 1, 1600]),
        (ModelSpec("m", "provider_batch", "claude-opus-9", provider="anthropic"), [1399, 4784, 1, 4784]),
        (ModelSpec("m", "provider_batch", "gemini-2.5-flash", provider="gemini"), [258 * 4, 258 * 24, 258, 258 * 24]),
        (ModelSpec("m", "http", "qwen", base_url="http://127.0.0.1:8000/v1"), [1369, 15_876, 1, 16_384]),
    ],
)
def test_images_by_family(model, tokens):
    """A square of 1,024 pixels, a photograph of 4,096 by 3,000, an icon, and one of which nothing is known."""
    sizes = [(1024, 1024), (4096, 3000), (16, 16)]
    counter = MediaTokens(model)
    parts = [MediaPart("image", "image/png", 9, "d", "/p", width=width, height=height) for width, height in sizes]
    assert [counter.part(part) for part in [*parts, MediaPart("image", url="https://x/y")]] == tokens


def test_recordings_and_documents():
    """By seconds and pages; of a URL, those of an hour or a hundred pages."""
    counter = MediaTokens(ModelSpec("m", "provider_batch", "g", provider="gemini"))
    assert counter.part(MediaPart("audio", "audio/wav", 9, "d", seconds=2.5)) == 80
    assert counter.part(MediaPart("audio", url="https://x/y")) == 32 * UNKNOWN_SECONDS
    assert counter.part(MediaPart("document", "application/pdf", 120_000, "d")) == 3 * PAGE_TOKENS
    assert counter.part(MediaPart("document", url="https://x/y")) == UNKNOWN_PAGES * PAGE_TOKENS


def test_what_a_body_has_of_media():
    """Their base64 is no text; bodies without any, and broken ones, count as they are."""
    counter = MediaTokens(ModelSpec("m", "http", "gpt-4o"))
    image, pdf, wav = (b64encode(data).decode() for data in (png(512, 512), b"%PDF-1.7" * 9000, WAV * 1000))
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{pdf}"}},
    ]
    tokens = [85 + 170, 10, 2 * PAGE_TOKENS]
    assert [counter.content(part) for part in parts] == tokens
    body = json.dumps({"messages": [{"content": parts}]}).encode()
    assert counter.in_body(body) == MediaInBody(len(image) + len(pdf) + len(wav), sum(tokens))
    assert counter.in_body(b'{"messages":[{"content":"hi"}]}') is NO_MEDIA
    assert counter.in_body(b'"data:image/png;base64,????') == MediaInBody(4, 85 + 8 * 170)
    assert counter.in_body(b'"input_audio"') == NO_MEDIA
    assert counter.content({"type": "video"}) is None
