"""Searches and `filter_path` as callers may write them: each ends, and holds up nobody."""

from __future__ import annotations

import json

import pytest
from fakes.held_clock import HeldClock

from batchmill.children.bounds import ResourceLimits
from batchmill.children.programs import Programs
from batchmill.dialects.ml_commons import programs as work
from batchmill.dialects.ml_commons.programs import Shape, apply_filter_path, run_search
from batchmill.errors import InvalidInput, TooComplex
from batchmill.services.documents.search import Document


@pytest.fixture
async def programs():
    made = Programs(HeldClock())
    yield made
    await made.close()


async def search(programs: Programs, documents: list[Document], asked: bytes, **shape) -> dict:
    return json.loads(await run_search(programs, "p", documents, asked, index="i", shape=Shape(**shape)))


async def test_a_search_is_answered_from_a_child(programs):
    """A search finds what it asks for, shaped as the request says; what cannot be read is refused as it is in place."""
    documents = [Document("1", {"name": "one"}), Document("2", {"name": "two"})]
    reply = await search(programs, documents, b'{"query": {"term": {"name": "two"}}}', filter_path="hits.hits._id")
    assert reply == {"hits": {"hits": [{"_id": "2"}]}}
    assert (await search(programs, documents, b""))["hits"]["total"]["value"] == 2
    for request, code in ((b'{"query": {"odd": {}}}', "parsing_exception"), (b"{", "invalid_json")):
        with pytest.raises(InvalidInput) as raised:
            await search(programs, documents, request)
        assert raised.value.code == code


async def test_a_search_that_takes_too_long_is_stopped(programs, monkeypatch):
    """A thousand wildcards over long texts end at the bound, and the next search is answered."""
    monkeypatch.setattr(work, "BOUNDS", ResourceLimits(cpu_s=0.3))
    documents = [Document(str(n), {"text": "ab" * 100_000}) for n in range(20)]
    clauses = [{"wildcard": {"text": f"*{'a*' * 20}c{n}"}} for n in range(1000)]
    with pytest.raises(TooComplex, match=r"the search took more than 0.3 s"):
        await search(programs, documents, json.dumps({"query": {"bool": {"should": clauses}}}).encode())
    assert (await search(programs, documents, b'{"size": 1, "_source": false}'))["hits"]["total"]["value"] == 20


async def test_too_much_to_search_is_told(programs, monkeypatch):
    """Documents beyond a bound are not searched at all."""
    monkeypatch.setattr(work, "DOCUMENTS_BYTES_MAX", 100)
    with pytest.raises(TooComplex, match="to search: delete"):
        await search(programs, [Document("1", {"text": "x" * 100})], b"")


def test_many_ways_to_one_member_are_one():
    """`**` after `**` names a member once, however many ways lead there."""
    value: dict = {"leaf": 1}
    for _ in range(100):
        value = {"in": value}
    assert apply_filter_path(value, "**." * 300 + "odd") == {}
    assert apply_filter_path(value, "**." * 50 + "leaf") == value
