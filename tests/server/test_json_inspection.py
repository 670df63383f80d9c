"""How much a body of JSON may hold before anybody reads it on the loop."""

from __future__ import annotations

import httpx2
import pytest
from fakes.held_clock import HeldClock
from server.small_api import small_api

from batchmill.children.programs import Programs
from batchmill.errors import TooComplex
from batchmill.server import json_inspection
from batchmill.server.json_inspection import count, inspect


def json_of(values: int) -> bytes:
    return b'{"more":[' + b",".join([b"[]"] * values) + b"]}"


def test_values_are_counted_outside_of_strings():
    """Commas and brackets count where they stand for values, and not in a text."""
    assert int(count(b'{"a": ["x,[{,\\",", 1, {"b": 2}]}', lambda _: None)) == 6
    assert int(count(b"1", lambda _: None)) == 1


def test_counting_goes_on_over_pieces(monkeypatch):
    """Wherever a long body is cut for counting, no string is taken for values."""
    body = b'{"a": ["x,[{,\\",", 1, {"b": 2}], "' + b"[,\\\\" * 20 + b'": "", "": [[], []]}'
    for size in range(1, len(body) + 1):
        monkeypatch.setattr(json_inspection, "PIECE_BYTES", size)
        assert int(count(body, lambda _: None)) == 12


async def test_a_body_of_too_many_values_is_not_read(monkeypatch):
    """A long body has so many values, and not one more; its bytes and its texts count for nothing."""
    monkeypatch.setattr(json_inspection, "UNSEEN_BYTES_MAX", 100)
    programs = Programs(HeldClock())
    try:
        whole = json_of(1000)
        held = int(count(whole, lambda _: None))
        await inspect(whole, held, programs, "p")
        with pytest.raises(TooComplex, match="more than 2,001 values"):
            await inspect(whole, held - 1, programs, "p")
        await inspect(b'{"text":"' + b"," * 100_000 + b'"}', 10, programs, "p")
    finally:
        await programs.close()


async def test_numbers_that_are_slow_to_read_count_for_more():
    """A short body of numbers that take a thousand times as long as others is refused; usual floats are not."""
    programs = Programs(HeldClock())
    try:
        for slow in (b"1e300", b"-1.5E+308", b"1e-324", b"1e0300", b"0." + b"0" * 300 + b"1"):
            body = b"[" + b",".join([slow] * 1000) + b"]"
            with pytest.raises(TooComplex, match="three-digit exponent"):
                await inspect(body, 50_000, programs, "p")
            text = b'["' + b",".join([slow] * 1000) + b'"]'
            await inspect(text, 50_000, programs, "p")
        for usual in (b"0.00012345678901234567", b"1.2345678901234567e-05", b"6.02e23", b"123456789012345678901"):
            await inspect(b"[" + b",".join([usual] * 10_000) + b"]", 50_000, programs, "p")
    finally:
        await programs.close()


async def test_no_large_body_is_decoded_before_it_is_looked_at(monkeypatch):
    """A request with a body of too many values is refused without a value of it being read on the loop."""
    decoded: list[int] = []
    monkeypatch.setattr("batchmill.server.bodies.parse_json", lambda raw, wanted: decoded.append(len(raw)))
    async with small_api(body_bytes_max=2 * 1024 * 1024) as small, httpx2.AsyncClient(base_url=small.url) as http:
        body = json_of(json_inspection.VALUES_MAX + 1) + b" " * json_inspection.INLINE_BYTES_MAX
        sent = await http.post("/small/things", content=body, headers={"content-type": "application/json"})
        assert sent.status_code == 400 and "too_complex" in sent.text
    assert decoded == []
