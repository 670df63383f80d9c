"""Shared parts of queries, and the `query_string` language: words, `field:value`, phrases, wildcards, AND, OR."""

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
    """A document to search, with the values that its hit shows."""

    id: str
    source: dict[str, Any]
    version: int = 1
    seq_no: int = 0


Score = Callable[[Document], float | None]  # None: it does not match


def parse_error(reason: str) -> InvalidInput:
    """Return the error for an invalid query, with OpenSearch's code."""
    return InvalidInput(reason, code="parsing_exception")


def values_of(document: Document, field: str) -> list[Any]:
    """Return the values of a field. Lists are flattened; `a.b` reaches into objects."""
    if field == ID:
        return [document.id]
    field = field.removesuffix(KEYWORD)
    return [value for value in _reach(document.source, field) if value is not None]


def _reach(node: Any, path: str) -> Iterator[Any]:
    if isinstance(node, list):
        for each in node:
            yield from _reach(each, path)
    elif not path:
        yield node
    elif isinstance(node, Mapping):
        if path in node:
            yield from _reach(node[path], "")
            return
        head, _, rest = path.partition(".")
        if rest and head in node:
            yield from _reach(node[head], rest)


def leaves(value: Any) -> Iterator[Any]:
    """Yield every value in a document that is not an object or list."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield value


def words(value: Any) -> list[str]:
    """Split a text into lower case words, as an analyzer does."""
    return _WORD.findall(text_of(value).lower())


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def is_same(value: Any, term: Any, *, whole: bool) -> bool:
    """Tell whether a value matches a term. `whole`: only the whole value, not its words."""
    if isinstance(value, (dict, list)):
        return False
    if text_of(value) == text_of(term):
        return True
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_of(term) == value
    return not whole and isinstance(value, str) and text_of(term) in words(value)


def number_of(value: Any) -> float | None:
    """Return a value as a number; None if it is not one."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def fits(pattern: str, text: str) -> bool:
    """Tell whether a text matches a pattern with `*` and `?`, without exponential backtracking."""
    text_at = star_text_at = 0
    star = -1
    pattern_at = 0
    while text_at < len(text):
        if pattern_at < len(pattern) and pattern[pattern_at] == "*":
            star, star_text_at = pattern_at, text_at
            pattern_at += 1
        elif pattern_at < len(pattern) and pattern[pattern_at] in ("?", text[text_at]):
            pattern_at, text_at = pattern_at + 1, text_at + 1
        elif star >= 0:
            star_text_at += 1
            pattern_at, text_at = star + 1, star_text_at
        else:
            return False
    return all(each == "*" for each in pattern[pattern_at:])


def having(field: str, matches: Callable[[Any], bool]) -> Score:
    """Match documents with a value of the field for which `matches` is true."""
    return lambda document: 1.0 if any(matches(value) for value in values_of(document, field)) else None


def match_words(field: str, query: Any, *, needs_all: bool = False) -> Score:
    """Match documents with one of the words of `query` in a field, or with all of them."""
    if field.endswith(KEYWORD) or field == ID or not isinstance(query, str):
        return having(field, lambda value: is_same(value, query, whole=True))
    query_words = set(words(query))

    def score(document: Document) -> float | None:
        matched = query_words & {word for value in values_of(document, field) for word in words(value)}
        is_match = matched == query_words if needs_all else bool(matched)
        return float(len(matched)) if query_words and is_match else None

    return score


def phrase(field: str, query: Any) -> Score:
    """Match documents with the words of `query` in a field one after another."""
    query_words = words(query)

    def matches(value: Any) -> bool:
        value_words = words(value)
        return any(
            value_words[at : at + len(query_words)] == query_words
            for at in range(len(value_words) - len(query_words) + 1)
        )

    return having(field, matches if query_words else lambda value: False)


def best(scores: list[Score]) -> Score:
    """Match documents that any of the queries matches, with the best score."""

    def score(document: Document) -> float | None:
        matching = [each for each in (one(document) for one in scores) if each is not None]
        return max(matching) if matching else None

    return score


def combined(
    must: list[Score], should: list[Score], filters: list[Score], must_not: list[Score], *, least: int
) -> Score:
    """Match documents that match all `must` and `filters`, no `must_not`, and at least `least` of `should`."""

    def score(document: Document) -> float | None:
        if any(each(document) is not None for each in must_not):
            return None
        if any(each(document) is None for each in filters):
            return None
        must_scores = [each(document) for each in must]
        should_scores = [value for value in (each(document) for each in should) if value is not None]
        if None in must_scores or len(should_scores) < least:
            return None
        return sum(each for each in must_scores if each is not None) + sum(should_scores)

    return score


INT_MAX = 2**31 - 1
BOOST_MAX = 3.4028234663852886e38  # a Java float
SHOWN_CHARS = 80
_WHOLE = re.compile(r"-?[0-9]{1,10}")
_PERCENT = re.compile(r"(-?[0-9]{1,10})%")


def shown(value: Any) -> str:
    """Return a value for a message. Objects and lists are not shown, because they may be nested deeply."""
    if isinstance(value, (Mapping, list)):
        return "an object" if isinstance(value, Mapping) else "a list"
    return value[:SHOWN_CHARS] if isinstance(value, str) else str(value)[:SHOWN_CHARS]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def whole_number(name: str, value: Any) -> int:
    """Return a 32-bit integer from an integer or a text. Raises: InvalidInput."""
    text = "" if isinstance(value, (bool, Mapping, list)) else str(value)
    if not _WHOLE.fullmatch(text) or abs(int(text)) > INT_MAX:
        raise parse_error(f"[{name}] is a number from {-INT_MAX} to {INT_MAX}, not [{shown(value)}]")
    return int(text)


def boost_of(values: Mapping[str, Any], name: str) -> float:
    """Return the `boost` of a query, by default 1. Raises: InvalidInput."""
    value = values.get("boost", 1.0)
    try:
        boost = float(value) if is_number(value) or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        boost = math.nan
    if not -BOOST_MAX <= boost <= BOOST_MAX:  # also false for NaN
        raise parse_error(f"[{name}] query requires a finite number for [boost], not [{shown(value)}]")
    if boost < 0:
        raise InvalidInput(
            f"negative [boost] are not allowed in [{name}], but was [{boost}]", code="illegal_argument_exception"
        )
    return boost


def least_of(minimum: Any, count: int) -> int:
    """Return how many of `count` clauses must match: a number, a percentage, or negative ones that may be missing.

    Raises: InvalidInput.
    """
    text = str(minimum) if is_number(minimum) or isinstance(minimum, str) else ""
    if percent := _PERCENT.fullmatch(text):
        share = count * int(percent[1])
        required = share // 100 if share >= 0 else count - (-share // 100)
    elif _WHOLE.fullmatch(text):
        required = int(text) if int(text) >= 0 else count + int(text)
    else:
        raise parse_error(f"[bool] query requires a number for [minimum_should_match], not [{shown(minimum)}]")
    return max(0, required)


TEXT_CHARS_MAX = 4096
CLAUSES_MAX = 1024
DEPTH_MAX = 20
_TOKEN = re.compile(r'\s+|(?P<mark>[()]|[+!-](?=\S)|&&|\|\|)|(?P<term>(?:[\w.*?\\-]+:)?(?:"[^"]*"|[^\s()"]+))')
_UNSUPPORTED = re.compile(r"[\[\]{}~^/]|^[<>]")
_OPTIONS = {"query", "default_field", "fields", "default_operator", "analyze_wildcard", "lenient", "boost"}


def compile_text(body: Any) -> Score:
    """Compile a `query_string` to a scoring function. Raises: InvalidInput (`parsing_exception`)."""
    if not isinstance(body, Mapping) or not isinstance(body.get("query"), str):
        raise parse_error("[query_string] must be provided with a [query]")
    if unknown := set(body) - _OPTIONS:
        raise parse_error(f"[query_string] query does not support [{min(unknown)[:80]}]")
    boost_of(body, "query_string")
    text = body["query"]
    if len(text) > TEXT_CHARS_MAX:
        raise parse_error(f"[query_string] has {len(text)} characters, at most {TEXT_CHARS_MAX} are allowed")
    fields = body.get("fields") or [body.get("default_field", "*")]
    if not isinstance(fields, list) or not all(isinstance(each, str) for each in fields):
        raise parse_error("[query_string] requires a list of names as [fields]")
    needs_all = str(body.get("default_operator", "or")).lower() == "and"
    return _Reader(text, [each.partition("^")[0] for each in fields], needs_all).read()


class _Reader:
    def __init__(self, text: str, fields: list[str], needs_all: bool) -> None:
        self._tokens, self._fields, self._needs_all = _tokens(text), fields, needs_all
        self._at = 0

    def read(self) -> Score:
        score = self._alternatives(0)
        if self._at < len(self._tokens):
            raise parse_error(f"Failed to parse query: unexpected [{self._tokens[self._at]}]")
        return score

    def _next(self, *tokens: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] in tokens:
            self._at += 1
            return True
        return False

    def _alternatives(self, depth: int) -> Score:
        """Read groups with OR between them."""
        if depth > DEPTH_MAX:
            raise parse_error(f"Failed to parse query: more than {DEPTH_MAX} nested parentheses")
        groups = [self._group(depth)]
        while self._next("OR", "||"):
            groups.append(self._group(depth))
        return groups[0] if len(groups) == 1 else best(groups)

    def _group(self, depth: int) -> Score:
        """Read clauses in sequence or with AND between them."""
        must: list[Score] = []
        should: list[Score] = []
        must_not: list[Score] = []
        has_and = False
        while self._at < len(self._tokens) and self._tokens[self._at] not in ("OR", "||", ")"):
            if self._next("AND", "&&"):
                has_and = True
                must, should = must + should, []
                continue
            if self._next("NOT", "!", "-"):
                must_not.append(self._clause(depth))
            elif self._next("+"):
                must.append(self._clause(depth))
            else:
                (must if has_and or self._needs_all else should).append(self._clause(depth))
            has_and = False
        if has_and or not (must or should or must_not):
            raise parse_error("Failed to parse query: a search term is missing")
        return combined(must, should, [], must_not, least=1 if should and not must else 0)

    def _clause(self, depth: int) -> Score:
        if self._next("("):
            score = self._alternatives(depth + 1)
            if not self._next(")"):
                raise parse_error("Failed to parse query: a parenthesis is not closed")
            return score
        if self._at >= len(self._tokens) or self._tokens[self._at] in ("AND", "OR", "NOT", "&&", "||", ")"):
            raise parse_error("Failed to parse query: a search term is missing")
        self._at += 1
        return self._term(self._tokens[self._at - 1])

    def _term(self, token: str) -> Score:
        field_match = re.match(r"([\w.*-]+):(?=.)", token)
        fields, value = ([field_match[1]], token[field_match.end() :]) if field_match else (self._fields, token)
        if not value.startswith('"') and _UNSUPPORTED.search(value):
            raise parse_error(f"Failed to parse query: [{value[:80]}] is not supported here")
        if fields == ["_exists_"]:
            return lambda document: 1.0 if values_of(document, value) else None
        return best([_in_field(field, value) for field in fields])


def _in_field(field: str, value: str) -> Score:
    if field == "*" and value == "*":
        return lambda document: 1.0
    if field == "*":
        return lambda document: _test_all_values(document, value)
    return _test(field, value)


def _test(field: str, value: str) -> Score:
    if value.startswith('"'):
        return phrase(field, value.strip('"'))
    if "*" in value or "?" in value:
        return lambda document: 1.0 if any(map(_wildcard_test(value), values_of(document, field))) else None
    return match_words(field, value)


def _test_all_values(document: Document, value: str) -> float | None:
    """As `_test`, in all values of a document."""
    flat = Document(document.id, {"all": [*leaves(document.source)]})
    return _test("all", value)(flat)


def _wildcard_test(pattern: str) -> Callable[[Any], bool]:
    lowered = pattern.lower()
    return lambda value: fits(lowered, text_of(value).lower()) or any(fits(lowered, word) for word in words(value))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise parse_error(f"Failed to parse query: [{text[at : at + 80]}]")
        if match["mark"] or match["term"]:
            tokens.append(match[0])
        at = match.end()
    if len(tokens) > CLAUSES_MAX:
        raise parse_error(f"too many clauses: {len(tokens)}, at most {CLAUSES_MAX} are allowed")
    return tokens
