"""Searches as OpenSearch clients send them, over documents in memory: which, in what order, how much of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.services.documents.query_strings import (
    KEYWORD,
    Document,
    Score,
    best,
    boost_of,
    combined,
    compile_text,
    fits,
    having,
    is_same,
    least_of,
    match_words,
    number_of,
    parse_error,
    phrase,
    shown,
    text_of,
    values_of,
    whole_number,
    words,
)

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
    field, options = _field(body, "term", "value", {"boost", "case_insensitive"})
    wanted, whole = options["value"], field.endswith(KEYWORD)
    if options.get("case_insensitive"):
        lower = text_of(wanted).lower()
        return having(field, lambda value: text_of(value).lower() == lower)
    return having(field, lambda value: is_same(value, wanted, whole=whole))


def _terms(body: Any) -> Score:
    boost_of(_object(body, "terms"), "terms")
    fields = {name: value for name, value in body.items() if name != "boost"}
    field, wanted = _single(fields, "terms")
    if not isinstance(wanted, list) or len(wanted) > CLAUSES_MAX:
        raise parse_error(f"[terms] query wants a list of at most {CLAUSES_MAX} values for [{field[:SHOWN_CHARS]}]")
    if any(isinstance(each, (list, Mapping)) for each in wanted):
        raise parse_error(f"[terms] query wants single values for [{field[:SHOWN_CHARS]}]")
    whole = field.endswith(KEYWORD)
    return having(field, lambda value: any(is_same(value, each, whole=whole) for each in wanted))


def _match(body: Any) -> Score:
    field, options = _field(
        body, "match", "query", {"boost", "operator", "fuzziness", "minimum_should_match", "lenient"}
    )
    if options.get("fuzziness") not in (None, 0, "0"):
        raise parse_error("[match] query does not support [fuzziness] here")
    if options.get("minimum_should_match") is not None:
        raise parse_error("[match] query does not support [minimum_should_match] here")
    return match_words(field, options["query"], needs_all=str(options.get("operator", "or")).lower() == "and")


def _match_phrase(body: Any) -> Score:
    field, options = _field(body, "match_phrase", "query", {"boost"})
    return phrase(field, options["query"])


def _multi_match(body: Any) -> Score:
    options = _options(body, "multi_match", {"query", "fields", "operator", "type", "boost"})
    fields = options.get("fields")
    if "query" not in options or not isinstance(fields, list) or not fields or len(fields) > CLAUSES_MAX:
        raise parse_error("[multi_match] query wants [query] and a list of [fields]")
    if options["query"] is None or isinstance(options["query"], (list, Mapping)):
        raise parse_error("[multi_match] query wants one value for [query]")
    if not all(isinstance(each, str) for each in fields):
        raise parse_error("[multi_match] query wants a list of names as [fields]")
    make = phrase if options.get("type") == "phrase" else match_words
    if options.get("type", "best_fields") not in ("best_fields", "most_fields", "phrase"):
        raise parse_error(f"[multi_match] query does not support type [{shown(options['type'])}] here")
    return best([make(field.partition("^")[0], options["query"]) for field in fields])


def _prefix(body: Any) -> Score:
    field, options = _field(body, "prefix", "value", {"boost", "case_insensitive"})
    return having(field, _folded(field, options, lambda text, wanted: text.startswith(wanted)))


def _wildcard(body: Any) -> Score:
    field, options = _field(body, "wildcard", "value", {"boost", "case_insensitive", "wildcard"})
    return having(field, _folded(field, options, lambda text, wanted: fits(wanted, text)))


def _folded(field: str, options: Mapping[str, Any], test: Callable[[str, str], bool]) -> Callable[[Any], bool]:
    """A test of the whole value, of a bare field of its words too."""
    wanted, folds = text_of(options["value"]), bool(options.get("case_insensitive"))
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
    field, options = _single(body, "range")
    options = _options(options, "range", {*_BOUNDS, "boost", "format", "time_zone", "relation"})
    if strangers := set(options) & {"format", "time_zone", "relation"}:
        raise parse_error(f"[range] query does not support [{min(strangers)}] here: times are milliseconds")
    if any(isinstance(options.get(name), (list, Mapping)) for name in _BOUNDS):
        raise parse_error(f"[range] query wants single values as bounds of [{field[:SHOWN_CHARS]}]")
    bounds = [(_BOUNDS[name], options[name]) for name in _BOUNDS if options.get(name) is not None]

    def holds(value: Any) -> bool:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            limits = [(test, number_of(bound)) for test, bound in bounds]
            return all(bound is not None and test(value, bound) for test, bound in limits)
        return all(test(text_of(value), text_of(bound)) for test, bound in bounds)

    return having(field, holds)


# -- those of several -------------------------------------------------------------------------------------------------


def _constant(body: Any, depth: int) -> Score:
    options = _options(body, "constant_score", {"filter", "boost"})
    inner, boost = compile_query(options.get("filter"), depth + 1), boost_of(options, "constant_score")
    return lambda document: None if inner(document) is None else boost


def _bool(body: Any, depth: int) -> Score:
    options = _options(body, "bool", {"must", "should", "filter", "must_not", "minimum_should_match", "boost"})
    must, should, kept, without = (
        [compile_query(each, depth + 1) for each in _list(options.get(name))]
        for name in ("must", "should", "filter", "must_not")
    )
    return combined(must, should, kept, without, least=_least(options, should, bool(must or kept)))


def _least(options: Mapping[str, Any], should: list[Score], has_others: bool) -> int:
    asked = options.get("minimum_should_match")
    if asked is None:
        return 0 if has_others or not should else 1
    return least_of(asked, len(should))


# -- forms ------------------------------------------------------------------------------------------------------------


def _object(body: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise parse_error(f"[{name[:SHOWN_CHARS]}] query malformed, no start_object after query name")
    return body


def _single(body: Any, name: str) -> tuple[str, Any]:
    fields = _object(body, name)
    if len(fields) != 1:
        what = "no" if not fields else "more than one"
        raise parse_error(f"[{name[:SHOWN_CHARS]}] malformed query, it has {what} field name")
    return next(iter(fields.items()))


def _options(body: Any, name: str, known: set[str]) -> Mapping[str, Any]:
    options = _object(body, name)
    for each in options:
        if each not in known and each != "_name":
            raise parse_error(f"[{name}] query does not support [{each[:SHOWN_CHARS]}]")
    boost_of(options, name)
    return options


def _field(body: Any, name: str, main: str, options: set[str]) -> tuple[str, Mapping[str, Any]]:
    """The field of a query and what it says: `{"field": value}`, or `{"field": {"value": value, …}}`."""
    field, given = _single(body, name)
    if not isinstance(given, Mapping):
        given = {main: given}
    given = _options(given, name, {main, *options})
    if main not in given and "wildcard" in given:  # the older name of its value
        given = {**given, main: given["wildcard"]}
    if given.get(main) is None or isinstance(given[main], (list, Mapping)):
        raise parse_error(f"[{name}] query wants one value for [{field[:SHOWN_CHARS]}]")
    return field, given


def _list(value: Any) -> list[Any]:
    found = [] if value is None else value if isinstance(value, list) else [value]
    if len(found) > CLAUSES_MAX:
        raise parse_error(f"too many clauses: {len(found)}, and there may be {CLAUSES_MAX}")
    return found


_QUERIES: dict[str, Callable[[Any], Score]] = {
    "match_all": _match_all, "match_none": _match_none, "match": _match, "match_phrase": _match_phrase,
    "multi_match": _multi_match, "term": _term, "terms": _terms, "prefix": _prefix, "wildcard": _wildcard,
    "exists": _exists, "ids": _ids, "range": _range, "query_string": compile_text,
}  # fmt: skip


__all__ = ["Document", "search"]

SIZE = 10
WINDOW_MAX = 10_000
SORTS_MAX = 16
TOTAL_MAX = 10_000  # counted exactly unless track_total_hits says otherwise
SCORE, DOC = "_score", "_doc"
# What changes nothing here: there is one shard, and it answers at once.
_NO_EFFECT = frozenset({"timeout", "terminate_after", "version", "seq_no_primary_term", "preference", "track_scores"})
_KNOWN = frozenset({"query", "from", "size", "sort", "_source", "track_total_hits", "min_score"}) | _NO_EFFECT

Found = tuple[Document, float]


def search(documents: Sequence[Document], body: Mapping[str, Any] | None, *, index: str) -> dict[str, Any]:
    """The reply to a search. Every hit has its version and sequence number.

    Args:
        documents: in the order in which equal hits stand.
        body: as OpenSearch has it; empty or None: everything.

    Raises: InvalidInput (`parsing_exception`, `illegal_argument_exception`) for what cannot be read.
    """
    asked = {} if body is None else body
    if not isinstance(asked, Mapping):
        raise parse_error("a search is an object")
    for name in asked:
        if name not in _KNOWN:
            raise parse_error(f"Unknown key for a search: [{name[:SHOWN_CHARS]}] is not supported here")
    first, size = _window(asked)
    orders = _orders(asked.get("sort"))
    shape = _Shape(asked.get("_source"))
    query = asked.get("query")
    found = _found(documents, compile_query({"match_all": {}} if query is None else query), asked.get("min_score"))
    for field, descends, missing in reversed(orders or [(SCORE, True, "_last")]):
        _sort(found, field, descends, missing)
    hits = [_hit(each, shape, orders, index) for each in found[first : first + size]]
    scored = [score for _, score in found] if orders is None else []
    reply: dict[str, Any] = {"max_score": max(scored, default=None), "hits": hits}
    if (total := _total(len(found), asked.get("track_total_hits", TOTAL_MAX))) is not None:
        reply = {"total": total, **reply}
    shards = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}
    return {"took": 0, "timed_out": False, "_shards": shards, "hits": reply}


def _found(documents: Sequence[Document], score: Score, least: Any) -> list[Found]:
    if least is not None and (isinstance(least, bool) or not isinstance(least, (int, float))):
        raise parse_error(f"[min_score] is a number, not [{shown(least)}]")
    found = [(each, reached) for each in documents if (reached := score(each)) is not None]
    return found if least is None else [each for each in found if each[1] >= least]


def _window(asked: Mapping[str, Any]) -> tuple[int, int]:
    first, size = (_count(name, asked.get(name), default) for name, default in (("from", 0), ("size", SIZE)))
    if first + size > WINDOW_MAX:
        raise InvalidInput(
            f"Result window is too large, from + size must be less than or equal to: [{WINDOW_MAX}] but was "
            f"[{first + size}].",
            code="illegal_argument_exception",
        )
    return first, size


def _count(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    count = whole_number(name, value)
    if count < 0:
        raise InvalidInput(f"[{name}] parameter cannot be negative, found [{count}]", code="illegal_argument_exception")
    return count


def _total(count: int, asked: Any) -> dict[str, Any] | None:
    if asked is False:
        return None
    if asked is True:
        return {"value": count, "relation": "eq"}
    most = _count("track_total_hits", asked, TOTAL_MAX)
    return {"value": min(count, most), "relation": "eq" if count <= most else "gte"}


# -- order ------------------------------------------------------------------------------------------------------------


def _orders(asked: Any) -> list[tuple[str, bool, Any]] | None:
    """Field, whether it descends, and what stands for a value that is not there; None: by score."""
    listed = asked if isinstance(asked, list) else [] if asked is None else [asked]
    if len(listed) > SORTS_MAX:
        raise parse_error(f"a search sorts by {SORTS_MAX} fields at most")
    orders = [order for each in listed for order in _order(each)]
    return orders or None


def _order(asked: Any) -> list[tuple[str, bool, Any]]:
    if isinstance(asked, str):
        field, _, way = asked.partition(":")
        asked = {field: way} if way else {field: "desc" if field == SCORE else "asc"}
    if not isinstance(asked, Mapping):
        raise parse_error(f"malformed sort: [{shown(asked)}]")
    orders = []
    for field, direction in asked.items():
        options = direction if isinstance(direction, Mapping) else {"order": direction}
        way = shown(options.get("order", "desc" if field == SCORE else "asc")).lower()
        if isinstance(options.get("missing"), (list, Mapping)):
            raise parse_error("[sort] wants one value for [missing]")
        if way not in ("asc", "desc"):
            raise parse_error(f"Unknown SortOrder [{way[:SHOWN_CHARS]}]")
        if strangers := set(options) - {"order", "missing", "unmapped_type", "mode"}:
            raise parse_error(f"[sort] does not support [{min(strangers)[:SHOWN_CHARS]}]")
        orders.append((field, way == "desc", options.get("missing", "_last")))
    return orders


def _sort(found: list[Found], field: str, descends: bool, missing: Any) -> None:
    """One order over another: equal ones keep their places."""
    if field == DOC:
        return

    def key(hit: Found) -> tuple[int, int, Any]:
        value = _sort_value(hit, field, descends, missing)
        if value is None:
            return (0 if (missing == "_first") != descends else 2, 0, 0)
        return (1, *_comparable(value))

    found.sort(key=key, reverse=descends)


def _sort_value(hit: Found, field: str, descends: bool, missing: Any) -> Any:
    if field == SCORE:
        return hit[1]
    values = [each for each in values_of(hit[0], field) if not isinstance(each, (dict, list))]
    if not values:
        return None if missing in ("_last", "_first") else missing
    return (max if descends else min)(values, key=_comparable)


def _comparable(value: Any) -> tuple[int, Any]:
    """Numbers before texts."""
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


# -- what a hit shows -------------------------------------------------------------------------------------------------


def _hit(found: Found, shape: _Shape, orders: list[tuple[str, bool, Any]] | None, index: str) -> dict[str, Any]:
    document, score = found
    hit: dict[str, Any] = {
        "_index": index, "_id": document.id, "_version": document.version, "_seq_no": document.seq_no,
        "_primary_term": 1, "_score": score if orders is None else None,
    }  # fmt: skip
    if shape.is_shown:
        hit["_source"] = shape.of(document.source)
    if orders is not None:
        hit["sort"] = [None if field == DOC else _sort_value(found, field, down, gap) for field, down, gap in orders]
    return hit


class _Shape:
    """Which members of a document are shown: `_source` as a search has it."""

    def __init__(self, asked: Any) -> None:
        """Raises: InvalidInput."""
        self.is_shown = asked is not False
        options = asked if isinstance(asked, Mapping) else {"includes": asked if isinstance(asked, (str, list)) else []}
        if asked is not None and not isinstance(asked, (bool, str, list, Mapping)):
            raise parse_error(f"[_source] is true, false, names or an object, not [{shown(asked)}]")
        if strangers := set(options) - {"includes", "excludes", "include", "exclude"}:
            raise parse_error(f"[_source] does not support [{min(strangers)[:SHOWN_CHARS]}]")
        self._wanted = _patterns(options.get("includes", options.get("include")))
        self._unwanted = _patterns(options.get("excludes", options.get("exclude")))

    def of(self, source: dict[str, Any], place: str = "") -> dict[str, Any]:
        if not self._wanted and not self._unwanted:
            return source
        shown: dict[str, Any] = {}
        for name, value in source.items():
            path = f"{place}{name}"
            if any(_covers(each, path) for each in self._unwanted):
                continue
            if isinstance(value, dict):
                inner = self.of(value, f"{path}.")
                if inner or self._is_wanted(path):
                    shown[name] = inner
            elif self._is_wanted(path):
                shown[name] = value
        return shown

    def _is_wanted(self, path: str) -> bool:
        return not self._wanted or any(_covers(each, path) for each in self._wanted)


def _patterns(value: Any) -> list[str]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise parse_error("[_source] wants names")
    return names


def _covers(pattern: str, path: str) -> bool:
    """A pattern names a member, or an object that holds it."""
    return fits(pattern, path) or any(fits(pattern, path[:at]) for at, letter in enumerate(path) if letter == ".")
