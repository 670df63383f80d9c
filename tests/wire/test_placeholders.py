"""Texts with placeholders, taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill.wire.rows.json_templates import Placeholder, find_placeholders, split


def hole(name, default=None, scope="parameters"):
    mark = "" if default is None else f":-{default}"
    return Placeholder(scope, name, default, f"${{{scope}.{name}{mark}}}")


CASES = {
    "": [],
    "plain": ["plain"],
    "${parameters.a}": [hole("a")],
    "x${parameters.a}y": ["x", hole("a"), "y"],
    "${parameters.a}${parameters.b}": [hole("a"), hole("b")],
    "${parameters.a:-b}": [hole("a", "b")],
    "${parameters.a:-}": [hole("a", "")],
    "${parameters.a:-b:-c}": [hole("a", "b:-c")],
    '${parameters.a:-{"b": {}}}!': [hole("a", '{"b": {}}'), "!"],
    "${parameters.a:-${parameters.b:-c}}": [hole("a", "${parameters.b:-c}")],
    "${parameters.a:-{}": [hole("a", "{")],
    "${credential.k}": [hole("k", scope="credential")],
    "${parameters.a.toString()}": [hole("a.toString()")],
    "$${parameters.a}": ["${parameters.a}"],
    "$$${parameters.a}": ["$${parameters.a}"],
    "${parameters.a": ["${parameters.a"],
    "${other.a}": ["${other.a}"],
    "$parameters.a}": ["$parameters.a}"],
    "${ parameters.a}": ["${ parameters.a}"],
}


@pytest.mark.parametrize("text", CASES, ids=repr)
def test_texts_are_taken_apart(text):
    """Each placeholder is found with its name and default; everything else is text."""
    assert split(text) == CASES[text]


def test_holes_of_defaults_are_found():
    """A placeholder within the default of another is one of the text's."""
    found = find_placeholders("a ${parameters.a:-${credential.b}} ${parameters.c}")
    assert [(each.scope, each.name) for each in found] == [
        ("parameters", "a"),
        ("credential", "b"),
        ("parameters", "c"),
    ]


@given(st.text(alphabet='a${}.:-parmets\\" '))
def test_nothing_of_a_text_is_lost(text):
    """The pieces put together again are the text, but for the `$` that escapes."""
    joined = "".join(piece if isinstance(piece, str) else piece.text for piece in split(text))
    assert joined == text.replace("$${parameters.", "${parameters.")


@pytest.mark.parametrize(
    "text",
    [
        "${parameters.x" * 50_000,
        "${parameters.x:-{" * 50_000,
        "${parameters.x:-{" * 50_000 + "}",
        "${parameters.x:-{}" * 50_000,
        "${parameters.x:-" * 50_000 + "}" * 50_000,
        "$${parameters.x:-{" * 50_000 + "}",
    ],
    ids=["open", "open-brace", "one-end", "pairs", "nested", "literal"],
)
def test_braces_without_end(text: str) -> None:
    """Text that opens more than it closes is taken apart in a time that grows with its length alone."""
    pieces = split(text)
    assert sum(len(piece if isinstance(piece, str) else piece.text) for piece in pieces) >= len(text) - 50_000
    assert sum(1 for _ in find_placeholders(text)) <= 50_000 + 1
