"""What every query shares, and the language of `query_string`: words, `field:value`, phrases, wildcards, AND, OR."""

from __future__ import annotations

import math
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


INT_MAX = 2**31 - 1
BOOST_MAX = 3.4028234663852886e38  # a Java float
SHOWN_CHARS = 80
_WHOLE = re.compile(r"-?[0-9]{1,10}")
_PERCENT = re.compile(r"(-?[0-9]{1,10})%")


def shown(value: Any) -> str:
    """A value in a message; of an object or list no more than what it is: it may nest as deep as a body can."""
    if isinstance(value, (Mapping, list)):
        return "an object" if isinstance(value, Mapping) else "a list"
    return value[:SHOWN_CHARS] if isinstance(value, str) else str(value)[:SHOWN_CHARS]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole_number(name: str, value: Any) -> int:
    """An integer of 32 bits, or a text that says one. Raises: InvalidInput."""
    text = "" if isinstance(value, (bool, Mapping, list)) else str(value)
    if not _WHOLE.fullmatch(text) or abs(int(text)) > INT_MAX:
        raise parse_error(f"[{name}] is a number from {-INT_MAX} to {INT_MAX}, not [{shown(value)}]")
    return int(text)


def boost_of(values: Mapping[str, Any], name: str) -> float:
    """The `boost` of a query, 1 where there is none. Raises: InvalidInput."""
    value = values.get("boost", 1.0)
    try:
        boost = float(value) if is_number(value) or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        boost = math.nan
    if not -BOOST_MAX <= boost <= BOOST_MAX:  # NaN is neither
        raise parse_error(f"[{name}] query wants a finite number for [boost], not [{shown(value)}]")
    if boost < 0:
        raise InvalidInput(
            f"negative [boost] are not allowed in [{name}], but was [{boost}]", code="illegal_argument_exception"
        )
    return boost


def least_of(asked: Any, count: int) -> int:
    """How many of `count` clauses a `minimum_should_match` wants: a number, a share, or what may be missing.

    Raises: InvalidInput.
    """
    text = str(asked) if is_number(asked) or isinstance(asked, str) else ""
    if percent := _PERCENT.fullmatch(text):
        share = count * int(percent[1])
        wanted = share // 100 if share >= 0 else count - (-share // 100)
    elif _WHOLE.fullmatch(text):
        wanted = int(text) if int(text) >= 0 else count + int(text)
    else:
        raise parse_error(f"[bool] query wants a number for [minimum_should_match], not [{shown(asked)}]")
    return max(0, wanted)


TEXT_CHARS_MAX = 4096
CLAUSES_MAX = 1024
DEPTH_MAX = 20
_TOKEN = re.compile(r'\s+|(?P<mark>[()]|[+!-](?=\S)|&&|\|\|)|(?P<term>(?:[\w.*?\\-]+:)?(?:"[^"]*"|[^\s()"]+))')
_STRANGE = re.compile(r"[\[\]{}~^/]|^[<>]")
_OPTIONS = {"query", "default_field", "fields", "default_operator", "analyze_wildcard", "lenient", "boost"}


def compile_text(body: Any) -> Score:
    """The function that a `query_string` is. Raises: InvalidInput (`parsing_exception`)."""
    if not isinstance(body, Mapping) or not isinstance(body.get("query"), str):
        raise parse_error("[query_string] must be provided with a [query]")
    if strangers := set(body) - _OPTIONS:
        raise parse_error(f"[query_string] query does not support [{min(strangers)[:80]}]")
    boost_of(body, "query_string")
    text = body["query"]
    if len(text) > TEXT_CHARS_MAX:
        raise parse_error(f"[query_string] has {len(text)} characters, and may have {TEXT_CHARS_MAX}")
    fields = body.get("fields") or [body.get("default_field", "*")]
    if not isinstance(fields, list) or not all(isinstance(each, str) for each in fields):
        raise parse_error("[query_string] wants a list of names as [fields]")
    needs_all = str(body.get("default_operator", "or")).lower() == "and"
    return _Reader(text, [each.partition("^")[0] for each in fields], needs_all).read()


class _Reader:
    def __init__(self, text: str, fields: list[str], needs_all: bool) -> None:
        self._tokens, self._fields, self._needs_all = _tokens(text), fields, needs_all
        self._at = 0

    def read(self) -> Score:
        found = self._either(0)
        if self._at < len(self._tokens):
            raise parse_error(f"Failed to parse query: [{self._tokens[self._at]}] stands where nothing may")
        return found

    def _next(self, *wanted: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return True
        return False

    def _either(self, depth: int) -> Score:
        """Groups with OR between them."""
        if depth > DEPTH_MAX:
            raise parse_error(f"Failed to parse query: more than {DEPTH_MAX} parentheses within one another")
        groups = [self._group(depth)]
        while self._next("OR", "||"):
            groups.append(self._group(depth))
        return groups[0] if len(groups) == 1 else best(groups)

    def _group(self, depth: int) -> Score:
        """Clauses one after another, or with AND between them."""
        must: list[Score] = []
        should: list[Score] = []
        without: list[Score] = []
        has_and = False
        while self._at < len(self._tokens) and self._tokens[self._at] not in ("OR", "||", ")"):
            if self._next("AND", "&&"):
                has_and = True
                must, should = must + should, []
                continue
            if self._next("NOT", "!", "-"):
                without.append(self._clause(depth))
            elif self._next("+"):
                must.append(self._clause(depth))
            else:
                (must if has_and or self._needs_all else should).append(self._clause(depth))
            has_and = False
        if has_and or not (must or should or without):
            raise parse_error("Failed to parse query: there is nothing to look for")
        return combined(must, should, [], without, least=1 if should and not must else 0)

    def _clause(self, depth: int) -> Score:
        if self._next("("):
            found = self._either(depth + 1)
            if not self._next(")"):
                raise parse_error("Failed to parse query: a parenthesis is not closed")
            return found
        if self._at >= len(self._tokens) or self._tokens[self._at] in ("AND", "OR", "NOT", "&&", "||", ")"):
            raise parse_error("Failed to parse query: there is nothing to look for")
        self._at += 1
        return self._term(self._tokens[self._at - 1])

    def _term(self, token: str) -> Score:
        named = re.match(r"([\w.*-]+):(?=.)", token)
        fields, value = ([named[1]], token[named.end() :]) if named else (self._fields, token)
        if not value.startswith('"') and _STRANGE.search(value):
            raise parse_error(f"Failed to parse query: [{value[:80]}] is not supported here")
        if fields == ["_exists_"]:
            return lambda document: 1.0 if values_of(document, value) else None
        return best([_in_field(field, value) for field in fields])


def _in_field(field: str, value: str) -> Score:
    if field == "*" and value == "*":
        return lambda document: 1.0
    if field == "*":
        return lambda document: _everywhere(document, value)
    return _test(field, value)


def _test(field: str, value: str) -> Score:
    if value.startswith('"'):
        return phrase(field, value.strip('"'))
    if "*" in value or "?" in value:
        return lambda document: 1.0 if any(map(_wild(value), values_of(document, field))) else None
    return match_words(field, value)


def _everywhere(document: Document, value: str) -> float | None:
    """As `_test`, in whatever a document holds."""
    flat = Document(document.id, {"all": [*leaves(document.source)]})
    return _test("all", value)(flat)


def _wild(pattern: str) -> Callable[[Any], bool]:
    folded = pattern.lower()
    return lambda value: fits(folded, text_of(value).lower()) or any(fits(folded, word) for word in words(value))


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise parse_error(f"Failed to parse query: [{text[at : at + 80]}]")
        if match["mark"] or match["term"]:
            found.append(match[0])
        at = match.end()
    if len(found) > CLAUSES_MAX:
        raise parse_error(f"too many clauses: {len(found)}, and there may be {CLAUSES_MAX}")
    return found
