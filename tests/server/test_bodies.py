"""Queries and bodies become structs, or a refusal that names what is wrong."""

import pytest
from small_api import Body, Query

from batchmill.server.bodies import InvalidField, parse_json, parse_query
from batchmill.wire.json_bytes import DEPTH_MAX
from batchmill.wire.native import NewJob


def test_a_query_fills_its_struct():
    """Numbers are read, a list may stand there more than once, what is absent has its default."""
    assert parse_query(b"limit=3&tags=a&tags=b", Query) == Query(3, None, ["a", "b"])
    assert parse_query(b"", Query) == Query()
    assert parse_query(b"", None) is None


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        (b"limt=3", "unknown_parameter", "limt"),
        (b"limit=3&limit=4", "repeated_parameter", "limit"),
        (b"limit=abc", "invalid_value", "limit"),
        (b"limit=", "invalid_value", "limit"),
        (b"most=Null", "invalid_value", "most"),
        (b"after=%ff", "invalid_query", None),
        (b"&".join(b"a=1" for _ in range(101)), "invalid_query", None),
        (b"\xff", "invalid_query", None),
    ],
)
def test_a_query_that_does_not_fit(query, code, param):
    """What is unknown, repeated or no value is refused by name."""
    with pytest.raises(InvalidField) as caught:
        parse_query(query, Query)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_query_nobody_asked_for():
    """An operation without a query takes none."""
    with pytest.raises(InvalidField, match="Unknown query parameter"):
        parse_query(b"x=1", None)


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        (b"", "invalid_json", None, "not JSON"),
        (b'{"name":', "invalid_json", None, "not JSON"),
        (b'{"name":"a"} x', "invalid_json", None, "not JSON"),
        (b'{"name":"\xff"}', "invalid_json", None, "not JSON"),
        (b"[]", "invalid_value", None, "Expected `object`"),
        (b"{}", "missing_required_parameter", "name", "'name'"),
        (b'{"name":3}', "invalid_value", "name", "expected `str`"),
        (b'{"name":"a","conut":1}', "unknown_parameter", "conut", "did you mean 'count'?"),
        (b'{"name":"a","inner":{"deep":1}}', "unknown_parameter", "inner.deep", "'inner.deep'"),
        (b'{"name":"a","inner":{"depth":null}}', "invalid_value", "inner.depth", "expected `int`"),
        (b'{"name":' + b"[" * 100_000, "invalid_json", None, "nested deeper than 500"),
    ],
)
def test_a_body_that_does_not_fit(body, code, param, words):
    """What is unknown, missing or of another type is refused by name, with the nearest that is known."""
    with pytest.raises(InvalidField) as caught:
        parse_json(body, Body)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in caught.value.message


def test_a_value_that_is_none_of_a_few():
    """The message has those that there are, in lists too."""
    with pytest.raises(InvalidField, match="invalid enum value 'long'; known are truncated, filtered, refused"):
        parse_json(b'{"files":["f"],"models":["m"],"fail_on":["empty","long"]}', NewJob)


@pytest.mark.parametrize("levels", [DEPTH_MAX, DEPTH_MAX + 200, 100_000])
def test_a_body_without_a_bottom(levels):
    """JSON that is nested deeper than every process can read is refused, whatever reads it here."""
    with pytest.raises(InvalidField, match="nested deeper"):
        parse_json(b'{"name":"a","more":' + b"[" * levels + b"]" * levels + b"}", Body)


def test_a_body_that_is_deep_enough():
    """One that every process can read is taken."""
    levels = DEPTH_MAX - 1
    parse_json(b'{"name":"a","more":' + b"[" * levels + b"]" * levels + b"}", Body)
