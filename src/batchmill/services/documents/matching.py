"""What every query of documents is made of: how values are reached, what their words are, how scores are put together.

Pure. Texts are taken as OpenSearch maps them by default: words without regard to case, `field.keyword` for the whole; a
bare field is both. Scores only order: a matching word counts 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from batchmill.errors import InvalidInput

KEYWORD = ".keyword"
ID = "_id"
_WORD = re.compile(r"\w+")


class Document(Struct, frozen=True):
    """What is searched, and what a hit says of it."""

    id: str
    source: dict[str, Any]
    version: int = 1
    seq_no: int = 0


Score = Callable[[Document], float | None]  # None: it does not match


def parse_error(reason: str) -> InvalidInput:
    """A query that cannot be read, as OpenSearch calls it."""
    return InvalidInput(reason, code="parsing_exception")


def values_of(document: Document, field: str) -> list[Any]:
    """The values of a field, of lists each; `a.b` reaches into objects."""
    if field == ID:
        return [document.id]
    field = field.removesuffix(KEYWORD)
    return [value for value in _reach(document.source, field) if value is not None]


def _reach(place: Any, path: str) -> Iterator[Any]:
    if isinstance(place, list):
        for each in place:
            yield from _reach(each, path)
    elif not path:
        yield place
    elif isinstance(place, Mapping):
        if path in place:
            yield from _reach(place[path], "")
            return
        head, _, rest = path.partition(".")
        if rest and head in place:
            yield from _reach(place[head], rest)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a document that is neither object nor list."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield value


def words(value: Any) -> list[str]:
    """What an analyzer makes of a text."""
    return _WORD.findall(text_of(value).lower())


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def is_same(value: Any, wanted: Any, *, whole: bool) -> bool:
    """A term and a value; `whole`: its words do not count."""
    if isinstance(value, (dict, list)):
        return False
    if text_of(value) == text_of(wanted):
        return True
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_of(wanted) == value
    return not whole and isinstance(value, str) and text_of(wanted) in words(value)


def number_of(value: Any) -> float | None:
    """The number that a value is or says; None: it is none."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def fits(pattern: str, text: str) -> bool:
    """Whether a text fits a pattern of `*` and `?`, in time that no pattern can make long."""
    at = mark = 0
    star = -1
    for_at = 0
    while at < len(text):
        if for_at < len(pattern) and pattern[for_at] == "*":
            star, mark = for_at, at
            for_at += 1
        elif for_at < len(pattern) and pattern[for_at] in ("?", text[at]):
            for_at, at = for_at + 1, at + 1
        elif star >= 0:
            mark += 1
            for_at, at = star + 1, mark
        else:
            return False
    return all(each == "*" for each in pattern[for_at:])


def having(field: str, holds: Callable[[Any], bool]) -> Score:
    """Documents of which a value of the field is such a one."""
    return lambda document: 1.0 if any(holds(value) for value in values_of(document, field)) else None


def match_words(field: str, query: Any, *, needs_all: bool = False) -> Score:
    """Documents that have one of the words of `query` in a field, or all of them."""
    if field.endswith(KEYWORD) or field == ID or not isinstance(query, str):
        return having(field, lambda value: is_same(value, query, whole=True))
    wanted = set(words(query))

    def score(document: Document) -> float | None:
        found = wanted & {word for value in values_of(document, field) for word in words(value)}
        enough = found == wanted if needs_all else bool(found)
        return float(len(found)) if wanted and enough else None

    return score


def phrase(field: str, query: Any) -> Score:
    """Documents that have the words of `query` in a field one after another."""
    wanted = words(query)

    def holds(value: Any) -> bool:
        found = words(value)
        return any(found[at : at + len(wanted)] == wanted for at in range(len(found) - len(wanted) + 1))

    return having(field, holds if wanted else lambda value: False)


def best(scores: list[Score]) -> Score:
    """Whatever one of them finds, by the best score."""

    def score(document: Document) -> float | None:
        found = [each for each in (one(document) for one in scores) if each is not None]
        return max(found) if found else None

    return score


def combined(must: list[Score], should: list[Score], kept: list[Score], without: list[Score], *, least: int) -> Score:
    """A document that `must` and `kept` hold of, `without` not, and of `should` at least so many."""

    def score(document: Document) -> float | None:
        if any(each(document) is not None for each in without):
            return None
        if any(each(document) is None for each in kept):
            return None
        needed = [each(document) for each in must]
        wished = [found for found in (each(document) for each in should) if found is not None]
        if None in needed or len(wished) < least:
            return None
        return sum(each for each in needed if each is not None) + sum(wished)

    return score
