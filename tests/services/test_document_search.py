"""Searches as OpenSearch clients send them."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.errors import InvalidInput
from batchmill.services.documents.query_strings import fits
from batchmill.services.documents.search import WINDOW_MAX, Document, search

DOCUMENTS = [
    Document("a", {"name": "Amazon Titan", "algorithm": "REMOTE", "n": 1, "tags": ["x", "y"], "on": True}, 3, 7),
    Document("b", {"name": "OpenAI embeddings", "algorithm": "REMOTE", "n": 20, "inner": {"deep": "Value", "k": 1}}),
    Document("c", {"name": "openai chat", "algorithm": "TEXT", "n": 3, "state": None}),
    Document("d", {"name": "openai/v1 chat", "n": "text", "created": 1700000000000}),
]


def found(query: Any, **more: Any) -> list[str]:
    reply = search(DOCUMENTS, {"query": query, "sort": ["_id"], **more}, index="i")
    return [hit["_id"] for hit in reply["hits"]["hits"]]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"match_all": {}}, "abcd"),
        ({"match_none": {}}, ""),
        ({"term": {"name.keyword": "OpenAI embeddings"}}, "b"),
        ({"term": {"name.keyword": {"value": "openai embeddings", "case_insensitive": True}}}, "b"),
        ({"term": {"name.keyword": "openai"}}, ""),
        ({"term": {"name": "openai"}}, "bcd"),
        ({"term": {"algorithm": {"value": "REMOTE"}}}, "ab"),
        ({"term": {"n": 3}}, "c"),
        ({"term": {"n": "20"}}, "b"),
        ({"term": {"on": True}}, "a"),
        ({"term": {"tags": "y"}}, "a"),
        ({"term": {"_id": "c"}}, "c"),
        ({"terms": {"algorithm": ["REMOTE", "TEXT"]}}, "abc"),
        ({"terms": {"_id": ["a", "d"], "boost": 2}}, "ad"),
        ({"match": {"name": "CHAT embeddings"}}, "bcd"),
        ({"match": {"name": {"query": "openai chat", "operator": "and"}}}, "cd"),
        ({"match": {"algorithm": "remote"}}, "ab"),
        ({"match": {"n": 3}}, "c"),
        ({"match": {"name.keyword": "openai chat"}}, "c"),
        ({"match": {"name": ""}}, ""),
        ({"match_phrase": {"name": "v1 chat"}}, "d"),
        ({"match_phrase": {"name": "chat v1"}}, ""),
        ({"multi_match": {"query": "titan text", "fields": ["name^2", "algorithm"]}}, "ac"),
        ({"prefix": {"name.keyword": "Open"}}, "b"),
        ({"prefix": {"name": "open"}}, "bcd"),
        ({"wildcard": {"name.keyword": {"value": "*chat"}}}, "cd"),
        ({"wildcard": {"name": "t?tan"}}, "a"),
        ({"exists": {"field": "algorithm"}}, "abc"),
        ({"exists": {"field": "state"}}, ""),
        ({"exists": {"field": "inner.deep"}}, "b"),
        ({"ids": {"values": ["a", "z"]}}, "a"),
        ({"range": {"n": {"gte": 3, "lt": 20}}}, "c"),
        ({"range": {"created": {"gt": 1699999999999}}}, "d"),
        ({"range": {"name.keyword": {"gte": "openai"}}}, "cd"),
        ({"term": {"inner.deep.keyword": "Value"}}, "b"),
        ({"constant_score": {"filter": {"term": {"n": 1}}}}, "a"),
        ({"bool": {}}, "abcd"),
        ({"bool": {"must": {"term": {"algorithm": "REMOTE"}}, "must_not": [{"term": {"n": 1}}]}}, "b"),
        ({"bool": {"should": [{"term": {"n": 1}}, {"term": {"n": 3}}]}}, "ac"),
        ({"bool": {"filter": [{"exists": {"field": "algorithm"}}], "should": [{"term": {"n": 1}}]}}, "abc"),
        (
            {"bool": {"should": [{"match": {"name": "openai"}}, {"term": {"n": 3}}], "minimum_should_match": 2}},
            "c",
        ),
        ({"bool": {"should": [{"term": {"n": 1}}, {"term": {"n": 3}}], "minimum_should_match": "50%"}}, "ac"),
        ({"query_string": {"query": "name:open* AND NOT embeddings"}}, "cd"),
        ({"query_string": {"query": '"v1 chat" OR titan'}}, "ad"),
        ({"query_string": {"query": "+chat -v1"}}, "c"),
        ({"query_string": {"query": "(titan OR embeddings) AND algorithm:REMOTE"}}, "ab"),
        ({"query_string": {"query": "titan chat", "default_field": "name"}}, "acd"),
        ({"query_string": {"query": "openai chat", "fields": ["name"], "default_operator": "AND"}}, "cd"),
        ({"query_string": {"query": "_exists_:inner"}}, "b"),
        ({"query_string": {"query": "*"}}, "abcd"),
    ],
)
def test_queries(query: dict[str, Any], ids: str) -> None:
    """Each query finds what OpenSearch would find with its default mapping."""
    assert found(query) == list(ids)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"regexp": {"name": ".*"}}, r"unknown query \[regexp\]"),
        ({"nested": {}}, r"unknown query \[nested\]"),
        ({}, "malformed query"),
        ([], "malformed"),
        ({"term": {}, "match": {}}, "malformed query"),
        ({"term": {"n": [1, 2]}}, "requires one value"),
        ({"term": {"n": {"value": 1, "fuzzy": True}}}, r"does not support \[fuzzy\]"),
        ({"terms": {"n": 1}}, "requires a list"),
        ({"match": {"name": {"query": "x", "fuzziness": "AUTO"}}}, r"does not support \[fuzziness\]"),
        ({"range": {"n": {"gte": 1, "format": "yyyy"}}}, r"does not support \[format\]"),
        ({"bool": {"musst": []}}, r"\[bool\] query does not support \[musst\]"),
        ({"bool": {"must": [{"foo": {}}]}}, r"unknown query \[foo\]"),
        ({"exists": {}}, "must be provided with a"),
        ({"query_string": {"query": "a AND"}}, "a search term is missing"),
        ({"query_string": {"query": "(a"}}, "not closed"),
        ({"query_string": {"query": "a)"}}, "unexpected"),
        ({"query_string": {"query": "n:[1 TO 5]"}}, "is not supported here"),
        ({"query_string": {"query": "name~2"}}, "is not supported here"),
    ],
)
def test_what_cannot_be_read_is_named(query: Any, words: str) -> None:
    """A query that nobody knows, or an option that would do nothing, is an error that names it."""
    with pytest.raises(InvalidInput, match=words) as raised:
        found(query)
    assert raised.value.code == "parsing_exception"


def test_depth_and_clauses_are_bounded() -> None:
    """Queries lie within one another so deep and no deeper, and a list has so many and no more."""
    query: dict[str, Any] = {"match_all": {}}
    for _ in range(20):
        query = {"bool": {"must": [query]}}
    assert found(query) == list("abcd")
    with pytest.raises(InvalidInput, match="maximum nested depth"):
        found({"bool": {"must": [query]}})
    clause = {"match_all": {}}
    assert found({"bool": {"should": [clause] * 1024}}) == list("abcd")
    with pytest.raises(InvalidInput, match="too many clauses"):
        found({"bool": {"should": [clause] * 1025}})
    with pytest.raises(InvalidInput, match="too many clauses: more than 1024 in all"):
        found({"bool": {"should": [{"bool": {"must": [clause] * 100}}] * 11}})


def test_a_hit_has_its_version() -> None:
    """Every hit says index, id, version, sequence number and term."""
    hit = search(DOCUMENTS, {"query": {"ids": {"values": ["a"]}}}, index=".plugins-ml-model")["hits"]["hits"][0]
    assert {name: hit[name] for name in hit if name != "_source"} == {
        "_index": ".plugins-ml-model", "_id": "a", "_version": 3, "_seq_no": 7, "_primary_term": 1, "_score": 1.0,
    }  # fmt: skip
    assert hit["_source"] == DOCUMENTS[0].source


def test_the_best_come_first() -> None:
    """Without a sort hits stand by score, equal ones in their order; max_score is the first's."""
    query = {"bool": {"should": [{"match": {"name": "openai chat"}}, {"term": {"n": 1}}]}}
    reply = search(DOCUMENTS, {"query": query}, index="i")
    assert [hit["_id"] for hit in reply["hits"]["hits"]] == ["c", "d", "a", "b"]
    assert reply["hits"]["max_score"] == reply["hits"]["hits"][0]["_score"] == 2.0
    assert search(DOCUMENTS, {"query": query, "min_score": 2}, index="i")["hits"]["total"]["value"] == 2


@pytest.mark.parametrize(
    ("sort", "ids"),
    [
        (["n"], "acbd"),
        ([{"n": "desc"}], "dbca"),
        ([{"n": {"order": "desc"}}], "dbca"),
        ("n:desc", "dbca"),
        ([{"algorithm": {"order": "asc"}}, {"n": "desc"}], "bacd"),
        ([{"algorithm": {"order": "asc", "missing": "_first"}}, "_id"], "dabc"),
        ([{"algorithm": {"order": "desc"}}, "_id"], "cabd"),
        ({"_score": "asc"}, "abcd"),
        (["_doc"], "abcd"),
    ],
)
def test_sorts(sort: Any, ids: str) -> None:
    """Hits stand by fields, numbers before texts, and by what has no value last unless it is told otherwise."""
    reply = search(DOCUMENTS, {"sort": sort}, index="i")
    assert [hit["_id"] for hit in reply["hits"]["hits"]] == list(ids)
    assert all("sort" in hit and hit["_score"] is None for hit in reply["hits"]["hits"])


def test_pages() -> None:
    """`from` and `size` cut the hits, up to the window of OpenSearch; the total counts them all."""
    reply = search(DOCUMENTS, {"from": 1, "size": 2, "sort": ["_id"]}, index="i")
    assert [hit["_id"] for hit in reply["hits"]["hits"]] == ["b", "c"]
    assert reply["hits"]["total"] == {"value": 4, "relation": "eq"}
    assert search(DOCUMENTS, {"size": 0}, index="i")["hits"]["hits"] == []
    assert len(search(DOCUMENTS * 4, {}, index="i")["hits"]["hits"]) == 10
    search(DOCUMENTS, {"from": 0, "size": WINDOW_MAX}, index="i")
    with pytest.raises(InvalidInput, match="Result window is too large"):
        search(DOCUMENTS, {"from": 1, "size": WINDOW_MAX}, index="i")
    with pytest.raises(InvalidInput, match="cannot be negative"):
        search(DOCUMENTS, {"size": -1}, index="i")


def test_totals() -> None:
    """track_total_hits leaves the count out, bounds it or has it exact."""
    assert "total" not in search(DOCUMENTS, {"track_total_hits": False}, index="i")["hits"]
    assert search(DOCUMENTS, {"track_total_hits": 3}, index="i")["hits"]["total"] == {"value": 3, "relation": "gte"}
    assert search(DOCUMENTS, {"track_total_hits": True}, index="i")["hits"]["total"] == {"value": 4, "relation": "eq"}


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        (True, {"name": "OpenAI embeddings", "algorithm": "REMOTE", "n": 20, "inner": {"deep": "Value", "k": 1}}),
        ("name", {"name": "OpenAI embeddings"}),
        (["inner.d*", "n"], {"n": 20, "inner": {"deep": "Value"}}),
        (["inner"], {"inner": {"deep": "Value", "k": 1}}),
        ({"excludes": ["inner", "name"]}, {"algorithm": "REMOTE", "n": 20}),
        ({"includes": ["inner", "n"], "excludes": "*.k"}, {"n": 20, "inner": {"deep": "Value"}}),
    ],
)
def test_source(shape: Any, shown: dict[str, Any]) -> None:
    """`_source` chooses what is shown, by patterns."""
    reply = search(DOCUMENTS, {"query": {"ids": {"values": "b"}}, "_source": shape}, index="i")
    assert reply["hits"]["hits"][0]["_source"] == shown
    assert "_source" not in search(DOCUMENTS, {"_source": False}, index="i")["hits"]["hits"][0]


@pytest.mark.parametrize(
    "body", [{"aggs": {}}, {"highlight": {}}, {"search_after": [1]}, {"sort": [{"n": "up"}]}, {"_source": 3}]
)
def test_what_a_search_cannot_do(body: dict[str, Any]) -> None:
    """What would be left undone is refused, not ignored."""
    with pytest.raises(InvalidInput):
        search(DOCUMENTS, body, index="i")


def test_empty() -> None:
    """Where there is nothing, a search finds nothing, and says so as OpenSearch does."""
    reply = search([], None, index="i")
    assert reply["hits"] == {"total": {"value": 0, "relation": "eq"}, "max_score": None, "hits": []}
    assert reply["_shards"] == {"total": 1, "successful": 1, "skipped": 0, "failed": 0}
    assert not reply["timed_out"]


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=8))
def test_patterns(pattern: str, text: str) -> None:
    """A pattern fits as the regular expression fits that it stands for."""
    expression = "".join({"*": ".*", "?": "."}.get(each, each) for each in pattern)
    assert fits(pattern, text) == bool(re.fullmatch(expression, text))


_WORDS = (
    "query", "bool", "must", "should", "term", "terms", "match", "range", "gte", "name", "ids", "values", "size",
    "sort", "_source", "query_string", "exists", "field", "value", "from", "min_score",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(_WORDS), JSON, max_size=3))
def test_nothing_but_answers_and_refusals(body: dict[str, Any]) -> None:
    """Whatever a search is, it is answered, or refused as a mistake of whoever sent it."""
    try:
        search(DOCUMENTS, body, index="i")
    except InvalidInput as refused:
        assert refused.code in ("parsing_exception", "illegal_argument_exception")


HUGE = 10**400
NO_COUNTS = (-1, HUGE, -HUGE, 2**31, 1.5, 1e308, "1e3", "--5", "\u00b2", "9" * 5000, "x", True, [1], {"a": 1})
NO_BOOSTS = (-1, HUGE, 1e39, "nan", "inf", "x", "", True, None, [1], {"a": 1}, "9" * 5000)
NO_LEASTS = ("x", "\u00b2", "\u00b2%", "--5", "9" * 5000, "9" * 5000 + "%", "1e3", 1.5, True, [1], {"a": 1}, "2<75%")


@pytest.mark.parametrize(
    ("name", "values", "search_of"),
    [
        ("from", NO_COUNTS, lambda value: {"from": value}),
        ("size", NO_COUNTS, lambda value: {"size": value}),
        ("track_total_hits", NO_COUNTS[1:-3] + NO_COUNTS[-2:], lambda value: {"track_total_hits": value}),
        ("boost", NO_BOOSTS, lambda value: {"query": {"match_all": {"boost": value}}}),
        ("boost", NO_BOOSTS, lambda value: {"query": {"match": {"name": {"query": "a", "boost": value}}}}),
        ("boost", NO_BOOSTS, lambda value: {"query": {"terms": {"n": [1], "boost": value}}}),
        ("boost", NO_BOOSTS, lambda value: {"query": {"query_string": {"query": "a", "boost": value}}}),
        ("boost", NO_BOOSTS, lambda v: {"query": {"constant_score": {"filter": {"match_all": {}}, "boost": v}}}),
        (
            "minimum_should_match",
            NO_LEASTS,
            lambda value: {"query": {"bool": {"should": [{"match_all": {}}], "minimum_should_match": value}}},
        ),
    ],
)
def test_absurd_numbers(name, values, search_of):
    """A number that none can be is refused as OpenSearch refuses it, and the refusal names it."""
    for value in values:
        with pytest.raises(InvalidInput, match=name) as caught:
            search(DOCUMENTS, search_of(value), index="i")
        assert caught.value.code in ("parsing_exception", "illegal_argument_exception"), value


@pytest.mark.parametrize(("asked", "ids"), [("-999%", "abcd"), (-5, "abcd"), ("-50%", "bcd"), ("100%", "c"), (3, "")])
def test_least_clauses(asked, ids):
    """How many clauses a document needs is never less than none, and may be more than there are."""
    should = [{"match": {"name": "openai"}}, {"term": {"n": 3}}]
    wanted = {"bool": {"must": {"match_all": {}}, "should": should, "minimum_should_match": asked}}
    assert "".join(found(wanted)) == ids


KEYS = (
    "query", "from", "size", "sort", "_source", "track_total_hits", "min_score", "bool", "must", "should", "must_not",
    "filter", "minimum_should_match", "boost", "match", "match_all", "match_phrase", "multi_match", "fields", "term",
    "terms", "range", "gte", "lt", "prefix", "wildcard", "exists", "field", "ids", "values", "constant_score",
    "query_string", "name", "n", "inner", "value", "order", "missing", "includes", "_id", "operator", "fuzziness",
    "type",
)  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(NO_COUNTS + NO_LEASTS),
    st.sampled_from(KEYS), st.sampled_from([HUGE, "nan", "50%", "_last", "name:desc", "a AND (b OR c*)"]),
)  # fmt: skip
BODIES = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)
NAMED = st.sampled_from(("match", "term", "terms", "range", "prefix", "wildcard", "match_phrase"))
QUERIES = st.one_of(
    BODIES,
    st.builds(lambda kind, body: {kind: body}, st.sampled_from(KEYS), BODIES),
    st.builds(lambda kind, body: {kind: {"n": body}}, NAMED, BODIES),
    st.builds(lambda kind, body: {"bool": {kind: body, "minimum_should_match": body}}, st.sampled_from(KEYS), BODIES),
)


@given(st.builds(lambda body, query: {**body, "query": query}, st.dictionaries(st.sampled_from(KEYS), BODIES), QUERIES))
def test_whatever_is_asked(body):
    """No search of any values ends otherwise than with a reply or a refusal."""
    with contextlib.suppress(InvalidInput):
        search(DOCUMENTS, body, index="i")
