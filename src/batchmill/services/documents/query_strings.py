"""The small language of `query_string`: words, `field:value`, "phrases", wildcards, AND, OR, NOT, + and -, parentheses.

Pure. What it cannot say here (ranges, fuzziness, boosts, regular expressions) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from batchmill.services.documents.matching import (
    Document,
    Score,
    best,
    combined,
    fits,
    leaves,
    match_words,
    parse_error,
    phrase,
    text_of,
    values_of,
    words,
)
from batchmill.services.documents.numbers import boost_of

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
