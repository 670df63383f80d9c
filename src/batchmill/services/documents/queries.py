"""Queries of OpenSearch's DSL over documents in memory: each is compiled to a function that scores a document. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchmill.services.documents.matching import (
    KEYWORD,
    Score,
    best,
    combined,
    fits,
    having,
    is_same,
    match_words,
    number_of,
    parse_error,
    phrase,
    text_of,
    words,
)
from batchmill.services.documents.numbers import boost_of, least_of, shown
from batchmill.services.documents.query_strings import compile_text

CLAUSES_MAX = 1024
DEPTH_MAX = 20
SHOWN_CHARS = 80


def compile_query(query: Any, depth: int = 0) -> Score:
    """The function that a query is. Raises: InvalidInput (`parsing_exception`) for one that nobody knows."""
    if depth > DEPTH_MAX:
        raise parse_error(f"The nested depth of the query exceeds the maximum nested depth for queries [{DEPTH_MAX}]")
    if depth == 0:
        _count_clauses(query)
    name, body = _single(query, "query")
    if name in ("bool", "constant_score"):
        return _bool(body, depth) if name == "bool" else _constant(body, depth)
    if name not in _QUERIES:
        raise parse_error(f"unknown query [{name[:SHOWN_CHARS]}]")
    return _QUERIES[name](body)


def _count_clauses(query: Any) -> None:
    """All of them together count: lists within lists make more than any one has. Raises: InvalidInput."""
    count, open_ = 0, [query]
    while open_:
        at = open_.pop()
        if isinstance(at, Mapping):
            open_ += at.values()
        elif isinstance(at, list):
            within = [each for each in at if isinstance(each, Mapping)]
            count += len(within)
            open_ += within
        if count > CLAUSES_MAX:
            raise parse_error(f"too many clauses: more than {CLAUSES_MAX} in all")


# -- the queries of one field -----------------------------------------------------------------------------------------


def _match_all(body: Any) -> Score:
    boost = boost_of(_options(body, "match_all", {"boost"}), "match_all")
    return lambda document: boost


def _match_none(body: Any) -> Score:
    _options(body, "match_none", {"boost"})
    return lambda document: None


def _term(body: Any) -> Score:
    field, told = _field(body, "term", "value", {"boost", "case_insensitive"})
    wanted, whole = told["value"], field.endswith(KEYWORD)
    if told.get("case_insensitive"):
        lower = text_of(wanted).lower()
        return having(field, lambda value: text_of(value).lower() == lower)
    return having(field, lambda value: is_same(value, wanted, whole=whole))


def _terms(body: Any) -> Score:
    boost_of(_object(body, "terms"), "terms")
    told = {name: value for name, value in body.items() if name != "boost"}
    field, wanted = _single(told, "terms")
    if not isinstance(wanted, list) or len(wanted) > CLAUSES_MAX:
        raise parse_error(f"[terms] query wants a list of at most {CLAUSES_MAX} values for [{field[:SHOWN_CHARS]}]")
    if any(isinstance(each, (list, Mapping)) for each in wanted):
        raise parse_error(f"[terms] query wants single values for [{field[:SHOWN_CHARS]}]")
    whole = field.endswith(KEYWORD)
    return having(field, lambda value: any(is_same(value, each, whole=whole) for each in wanted))


def _match(body: Any) -> Score:
    field, told = _field(body, "match", "query", {"boost", "operator", "fuzziness", "minimum_should_match", "lenient"})
    if told.get("fuzziness") not in (None, 0, "0"):
        raise parse_error("[match] query does not support [fuzziness] here")
    if told.get("minimum_should_match") is not None:
        raise parse_error("[match] query does not support [minimum_should_match] here")
    return match_words(field, told["query"], needs_all=str(told.get("operator", "or")).lower() == "and")


def _match_phrase(body: Any) -> Score:
    field, told = _field(body, "match_phrase", "query", {"boost"})
    return phrase(field, told["query"])


def _multi_match(body: Any) -> Score:
    told = _options(body, "multi_match", {"query", "fields", "operator", "type", "boost"})
    fields = told.get("fields")
    if "query" not in told or not isinstance(fields, list) or not fields or len(fields) > CLAUSES_MAX:
        raise parse_error("[multi_match] query wants [query] and a list of [fields]")
    if told["query"] is None or isinstance(told["query"], (list, Mapping)):
        raise parse_error("[multi_match] query wants one value for [query]")
    if not all(isinstance(each, str) for each in fields):
        raise parse_error("[multi_match] query wants a list of names as [fields]")
    make = phrase if told.get("type") == "phrase" else match_words
    if told.get("type", "best_fields") not in ("best_fields", "most_fields", "phrase"):
        raise parse_error(f"[multi_match] query does not support type [{shown(told['type'])}] here")
    return best([make(field.partition("^")[0], told["query"]) for field in fields])


def _prefix(body: Any) -> Score:
    field, told = _field(body, "prefix", "value", {"boost", "case_insensitive"})
    return having(field, _folded(field, told, lambda text, wanted: text.startswith(wanted)))


def _wildcard(body: Any) -> Score:
    field, told = _field(body, "wildcard", "value", {"boost", "case_insensitive", "wildcard"})
    return having(field, _folded(field, told, lambda text, wanted: fits(wanted, text)))


def _folded(field: str, told: Mapping[str, Any], test: Callable[[str, str], bool]) -> Callable[[Any], bool]:
    """A test of the whole value, of a bare field of its words too."""
    wanted, folds = text_of(told["value"]), bool(told.get("case_insensitive"))
    wanted = wanted.lower() if folds else wanted

    def holds(value: Any) -> bool:
        text = text_of(value)
        if test(text.lower() if folds else text, wanted):
            return True
        return not field.endswith(KEYWORD) and any(test(word, wanted) for word in words(value))

    return holds


def _exists(body: Any) -> Score:
    field = _options(body, "exists", {"field", "boost"}).get("field")
    if not isinstance(field, str):
        raise parse_error("[exists] must be provided with a [field]")
    return having(field, lambda value: True)


def _ids(body: Any) -> Score:
    wanted = _options(body, "ids", {"values", "boost"}).get("values")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list) or any(isinstance(each, (list, Mapping)) for each in wanted):
        raise parse_error("[ids] requires providing a [values] array")
    known = {text_of(each) for each in wanted}
    return lambda document: 1.0 if document.id in known else None


_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}


def _range(body: Any) -> Score:
    field, told = _single(body, "range")
    told = _options(told, "range", {*_BOUNDS, "boost", "format", "time_zone", "relation"})
    if strangers := set(told) & {"format", "time_zone", "relation"}:
        raise parse_error(f"[range] query does not support [{min(strangers)}] here: times are milliseconds")
    if any(isinstance(told.get(name), (list, Mapping)) for name in _BOUNDS):
        raise parse_error(f"[range] query wants single values as bounds of [{field[:SHOWN_CHARS]}]")
    bounds = [(_BOUNDS[name], told[name]) for name in _BOUNDS if told.get(name) is not None]

    def holds(value: Any) -> bool:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            limits = [(test, number_of(bound)) for test, bound in bounds]
            return all(bound is not None and test(value, bound) for test, bound in limits)
        return all(test(text_of(value), text_of(bound)) for test, bound in bounds)

    return having(field, holds)


# -- those of several -------------------------------------------------------------------------------------------------


def _constant(body: Any, depth: int) -> Score:
    told = _options(body, "constant_score", {"filter", "boost"})
    inner, boost = compile_query(told.get("filter"), depth + 1), boost_of(told, "constant_score")
    return lambda document: None if inner(document) is None else boost


def _bool(body: Any, depth: int) -> Score:
    told = _options(body, "bool", {"must", "should", "filter", "must_not", "minimum_should_match", "boost"})
    must, should, kept, without = (
        [compile_query(each, depth + 1) for each in _list(told.get(name))]
        for name in ("must", "should", "filter", "must_not")
    )
    return combined(must, should, kept, without, least=_least(told, should, bool(must or kept)))


def _least(told: Mapping[str, Any], should: list[Score], has_others: bool) -> int:
    asked = told.get("minimum_should_match")
    if asked is None:
        return 0 if has_others or not should else 1
    return least_of(asked, len(should))


# -- forms ------------------------------------------------------------------------------------------------------------


def _object(body: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise parse_error(f"[{name[:SHOWN_CHARS]}] query malformed, no start_object after query name")
    return body


def _single(body: Any, name: str) -> tuple[str, Any]:
    told = _object(body, name)
    if len(told) != 1:
        what = "no" if not told else "more than one"
        raise parse_error(f"[{name[:SHOWN_CHARS]}] malformed query, it has {what} field name")
    return next(iter(told.items()))


def _options(body: Any, name: str, known: set[str]) -> Mapping[str, Any]:
    told = _object(body, name)
    for each in told:
        if each not in known and each != "_name":
            raise parse_error(f"[{name}] query does not support [{each[:SHOWN_CHARS]}]")
    boost_of(told, name)
    return told


def _field(body: Any, name: str, main: str, options: set[str]) -> tuple[str, Mapping[str, Any]]:
    """The field of a query and what it says: `{"field": value}`, or `{"field": {"value": value, …}}`."""
    field, told = _single(body, name)
    if not isinstance(told, Mapping):
        told = {main: told}
    told = _options(told, name, {main, *options})
    if main not in told and "wildcard" in told:  # the older name of its value
        told = {**told, main: told["wildcard"]}
    if told.get(main) is None or isinstance(told[main], (list, Mapping)):
        raise parse_error(f"[{name}] query wants one value for [{field[:SHOWN_CHARS]}]")
    return field, told


def _list(told: Any) -> list[Any]:
    found = [] if told is None else told if isinstance(told, list) else [told]
    if len(found) > CLAUSES_MAX:
        raise parse_error(f"too many clauses: {len(found)}, and there may be {CLAUSES_MAX}")
    return found


_QUERIES: dict[str, Callable[[Any], Score]] = {
    "match_all": _match_all, "match_none": _match_none, "match": _match, "match_phrase": _match_phrase,
    "multi_match": _multi_match, "term": _term, "terms": _terms, "prefix": _prefix, "wildcard": _wildcard,
    "exists": _exists, "ids": _ids, "range": _range, "query_string": compile_text,
}  # fmt: skip
