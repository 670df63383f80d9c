"""Runs OpenSearch searches over documents in memory: query, sort order and source filtering. Pure."""

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
    """Compile a query to a scoring function. Raises: InvalidInput (`parsing_exception`) for an unsupported query."""
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
    """Check the total number of clauses, in nested lists too. Raises: InvalidInput."""
    count, pending = 0, [query]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, list):
            nested = [each for each in node if isinstance(each, Mapping)]
            count += len(nested)
            pending += nested
        if count > CLAUSES_MAX:
            raise parse_error(f"too many clauses: more than {CLAUSES_MAX} in all")


# -- queries of one field ---------------------------------------------------------------------------------------------


def _match_all(body: Any) -> Score:
    boost = boost_of(_options(body, "match_all", {"boost"}), "match_all")
    return lambda document: boost


def _match_none(body: Any) -> Score:
    _options(body, "match_none", {"boost"})
    return lambda document: None


def _term(body: Any) -> Score:
    field, options = _field(body, "term", "value", {"boost", "case_insensitive"})
    term, whole = options["value"], field.endswith(KEYWORD)
    if options.get("case_insensitive"):
        lower = text_of(term).lower()
        return having(field, lambda value: text_of(value).lower() == lower)
    return having(field, lambda value: is_same(value, term, whole=whole))


def _terms(body: Any) -> Score:
    boost_of(_object(body, "terms"), "terms")
    fields = {name: value for name, value in body.items() if name != "boost"}
    field, terms = _single(fields, "terms")
    if not isinstance(terms, list) or len(terms) > CLAUSES_MAX:
        raise parse_error(f"[terms] query requires a list of at most {CLAUSES_MAX} values for [{field[:SHOWN_CHARS]}]")
    if any(isinstance(each, (list, Mapping)) for each in terms):
        raise parse_error(f"[terms] query requires single values for [{field[:SHOWN_CHARS]}]")
    whole = field.endswith(KEYWORD)
    return having(field, lambda value: any(is_same(value, each, whole=whole) for each in terms))


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
        raise parse_error("[multi_match] query requires [query] and a list of [fields]")
    if options["query"] is None or isinstance(options["query"], (list, Mapping)):
        raise parse_error("[multi_match] query requires one value for [query]")
    if not all(isinstance(each, str) for each in fields):
        raise parse_error("[multi_match] query requires a list of names as [fields]")
    make = phrase if options.get("type") == "phrase" else match_words
    if options.get("type", "best_fields") not in ("best_fields", "most_fields", "phrase"):
        raise parse_error(f"[multi_match] query does not support type [{shown(options['type'])}] here")
    return best([make(field.partition("^")[0], options["query"]) for field in fields])


def _prefix(body: Any) -> Score:
    field, options = _field(body, "prefix", "value", {"boost", "case_insensitive"})
    return having(field, _text_test(field, options, lambda text, target: text.startswith(target)))


def _wildcard(body: Any) -> Score:
    field, options = _field(body, "wildcard", "value", {"boost", "case_insensitive", "wildcard"})
    return having(field, _text_test(field, options, lambda text, target: fits(target, text)))


def _text_test(field: str, options: Mapping[str, Any], test: Callable[[str, str], bool]) -> Callable[[Any], bool]:
    """Return a test of the whole value, and for a field that is not a keyword field also of its words."""
    target, ignores_case = text_of(options["value"]), bool(options.get("case_insensitive"))
    target = target.lower() if ignores_case else target

    def matches(value: Any) -> bool:
        text = text_of(value)
        if test(text.lower() if ignores_case else text, target):
            return True
        return not field.endswith(KEYWORD) and any(test(word, target) for word in words(value))

    return matches


def _exists(body: Any) -> Score:
    field = _options(body, "exists", {"field", "boost"}).get("field")
    if not isinstance(field, str):
        raise parse_error("[exists] must be provided with a [field]")
    return having(field, lambda value: True)


def _ids(body: Any) -> Score:
    values = _options(body, "ids", {"values", "boost"}).get("values")
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list) or any(isinstance(each, (list, Mapping)) for each in values):
        raise parse_error("[ids] requires providing a [values] array")
    ids = {text_of(each) for each in values}
    return lambda document: 1.0 if document.id in ids else None


_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
}


def _range(body: Any) -> Score:
    field, options = _single(body, "range")
    options = _options(options, "range", {*_BOUNDS, "boost", "format", "time_zone", "relation"})
    if unknown := set(options) & {"format", "time_zone", "relation"}:
        raise parse_error(f"[range] query does not support [{min(unknown)}] here: times are milliseconds")
    if any(isinstance(options.get(name), (list, Mapping)) for name in _BOUNDS):
        raise parse_error(f"[range] query requires single values as bounds of [{field[:SHOWN_CHARS]}]")
    bounds = [(_BOUNDS[name], options[name]) for name in _BOUNDS if options.get(name) is not None]

    def matches(value: Any) -> bool:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            limits = [(test, number_of(bound)) for test, bound in bounds]
            return all(bound is not None and test(value, bound) for test, bound in limits)
        return all(test(text_of(value), text_of(bound)) for test, bound in bounds)

    return having(field, matches)


# -- compound queries -------------------------------------------------------------------------------------------------


def _constant(body: Any, depth: int) -> Score:
    options = _options(body, "constant_score", {"filter", "boost"})
    inner, boost = compile_query(options.get("filter"), depth + 1), boost_of(options, "constant_score")
    return lambda document: None if inner(document) is None else boost


def _bool(body: Any, depth: int) -> Score:
    options = _options(body, "bool", {"must", "should", "filter", "must_not", "minimum_should_match", "boost"})
    must, should, filters, must_not = (
        [compile_query(each, depth + 1) for each in _list(options.get(name))]
        for name in ("must", "should", "filter", "must_not")
    )
    return combined(
        must, should, filters, must_not, least=_minimum_should_match(options, should, bool(must or filters))
    )


def _minimum_should_match(options: Mapping[str, Any], should: list[Score], has_others: bool) -> int:
    minimum = options.get("minimum_should_match")
    if minimum is None:
        return 0 if has_others or not should else 1
    return least_of(minimum, len(should))


# -- parsing ----------------------------------------------------------------------------------------------------------


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


def _options(body: Any, name: str, supported: set[str]) -> Mapping[str, Any]:
    options = _object(body, name)
    for each in options:
        if each not in supported and each != "_name":
            raise parse_error(f"[{name}] query does not support [{each[:SHOWN_CHARS]}]")
    boost_of(options, name)
    return options


def _field(body: Any, name: str, main: str, options: set[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the field of a query and its options: `{"field": value}`, or `{"field": {"value": value, …}}`."""
    field, body_of_field = _single(body, name)
    if not isinstance(body_of_field, Mapping):
        body_of_field = {main: body_of_field}
    body_of_field = _options(body_of_field, name, {main, *options})
    if main not in body_of_field and "wildcard" in body_of_field:  # the older name of `value`
        body_of_field = {**body_of_field, main: body_of_field["wildcard"]}
    if body_of_field.get(main) is None or isinstance(body_of_field[main], (list, Mapping)):
        raise parse_error(f"[{name}] query requires one value for [{field[:SHOWN_CHARS]}]")
    return field, body_of_field


def _list(value: Any) -> list[Any]:
    items = [] if value is None else value if isinstance(value, list) else [value]
    if len(items) > CLAUSES_MAX:
        raise parse_error(f"too many clauses: {len(items)}, at most {CLAUSES_MAX} are allowed")
    return items


_QUERIES: dict[str, Callable[[Any], Score]] = {
    "match_all": _match_all, "match_none": _match_none, "match": _match, "match_phrase": _match_phrase,
    "multi_match": _multi_match, "term": _term, "terms": _terms, "prefix": _prefix, "wildcard": _wildcard,
    "exists": _exists, "ids": _ids, "range": _range, "query_string": compile_text,
}  # fmt: skip


__all__ = ["Document", "search"]

SIZE = 10
WINDOW_MAX = 10_000
SORTS_MAX = 16
TOTAL_MAX = 10_000  # counted exactly, unless track_total_hits sets another limit
SCORE, DOC = "_score", "_doc"
# Options without effect: there is one shard, which answers at once.
_NO_EFFECT = frozenset({"timeout", "terminate_after", "version", "seq_no_primary_term", "preference", "track_scores"})
_OPTIONS = frozenset({"query", "from", "size", "sort", "_source", "track_total_hits", "min_score"}) | _NO_EFFECT

Hit = tuple[Document, float]


def search(documents: Sequence[Document], body: Mapping[str, Any] | None, *, index: str) -> dict[str, Any]:
    """Run a search and return the reply. Every hit has its version and sequence number.

    Args:
        documents: the documents, in the order of hits that sort equal.
        body: the search in OpenSearch's form; empty or None: match everything.

    Raises: InvalidInput (`parsing_exception`, `illegal_argument_exception`) for an invalid search.
    """
    request = {} if body is None else body
    if not isinstance(request, Mapping):
        raise parse_error("a search is an object")
    for name in request:
        if name not in _OPTIONS:
            raise parse_error(f"Unknown key for a search: [{name[:SHOWN_CHARS]}] is not supported here")
    first, size = _window(request)
    orders = _orders(request.get("sort"))
    source_filter = _SourceFilter(request.get("_source"))
    query = request.get("query")
    hits_found = _matching(
        documents, compile_query({"match_all": {}} if query is None else query), request.get("min_score")
    )
    for field, descends, missing in reversed(orders or [(SCORE, True, "_last")]):
        _sort(hits_found, field, descends, missing)
    hits = [_hit(each, source_filter, orders, index) for each in hits_found[first : first + size]]
    scored = [score for _, score in hits_found] if orders is None else []
    reply: dict[str, Any] = {"max_score": max(scored, default=None), "hits": hits}
    if (total := _total(len(hits_found), request.get("track_total_hits", TOTAL_MAX))) is not None:
        reply = {"total": total, **reply}
    shards = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}
    return {"took": 0, "timed_out": False, "_shards": shards, "hits": reply}


def _matching(documents: Sequence[Document], score: Score, score_min: Any) -> list[Hit]:
    if score_min is not None and (isinstance(score_min, bool) or not isinstance(score_min, (int, float))):
        raise parse_error(f"[min_score] is a number, not [{shown(score_min)}]")
    matching = [(each, value) for each in documents if (value := score(each)) is not None]
    return matching if score_min is None else [each for each in matching if each[1] >= score_min]


def _window(request: Mapping[str, Any]) -> tuple[int, int]:
    first, size = (_count(name, request.get(name), default) for name, default in (("from", 0), ("size", SIZE)))
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


def _total(count: int, tracked: Any) -> dict[str, Any] | None:
    if tracked is False:
        return None
    if tracked is True:
        return {"value": count, "relation": "eq"}
    limit = _count("track_total_hits", tracked, TOTAL_MAX)
    return {"value": min(count, limit), "relation": "eq" if count <= limit else "gte"}


# -- order ------------------------------------------------------------------------------------------------------------


def _orders(sort: Any) -> list[tuple[str, bool, Any]] | None:
    """Return field, whether it descends, and the value for missing ones; None: sort by score."""
    items = sort if isinstance(sort, list) else [] if sort is None else [sort]
    if len(items) > SORTS_MAX:
        raise parse_error(f"a search sorts by {SORTS_MAX} fields at most")
    orders = [order for each in items for order in _order(each)]
    return orders or None


def _order(sort: Any) -> list[tuple[str, bool, Any]]:
    if isinstance(sort, str):
        field, _, direction_name = sort.partition(":")
        sort = {field: direction_name} if direction_name else {field: "desc" if field == SCORE else "asc"}
    if not isinstance(sort, Mapping):
        raise parse_error(f"malformed sort: [{shown(sort)}]")
    orders = []
    for field, direction in sort.items():
        options = direction if isinstance(direction, Mapping) else {"order": direction}
        direction_name = shown(options.get("order", "desc" if field == SCORE else "asc")).lower()
        if isinstance(options.get("missing"), (list, Mapping)):
            raise parse_error("[sort] requires one value for [missing]")
        if direction_name not in ("asc", "desc"):
            raise parse_error(f"Unknown SortOrder [{direction_name[:SHOWN_CHARS]}]")
        if unknown := set(options) - {"order", "missing", "unmapped_type", "mode"}:
            raise parse_error(f"[sort] does not support [{min(unknown)[:SHOWN_CHARS]}]")
        orders.append((field, direction_name == "desc", options.get("missing", "_last")))
    return orders


def _sort(hits: list[Hit], field: str, descends: bool, missing: Any) -> None:
    """Sort by one field. The sort is stable, so that it can follow a sort by a minor field."""
    if field == DOC:
        return

    def key(hit: Hit) -> tuple[int, int, Any]:
        value = _sort_value(hit, field, descends, missing)
        if value is None:
            return (0 if (missing == "_first") != descends else 2, 0, 0)
        return (1, *_comparable(value))

    hits.sort(key=key, reverse=descends)


def _sort_value(hit: Hit, field: str, descends: bool, missing: Any) -> Any:
    if field == SCORE:
        return hit[1]
    values = [each for each in values_of(hit[0], field) if not isinstance(each, (dict, list))]
    if not values:
        return None if missing in ("_last", "_first") else missing
    return (max if descends else min)(values, key=_comparable)


def _comparable(value: Any) -> tuple[int, Any]:
    """Return a sort key that puts numbers before texts."""
    return (0, value) if isinstance(value, (int, float)) else (1, str(value))


# -- hits -------------------------------------------------------------------------------------------------------------


def _hit(
    match: Hit, source_filter: _SourceFilter, orders: list[tuple[str, bool, Any]] | None, index: str
) -> dict[str, Any]:
    document, score = match
    hit: dict[str, Any] = {
        "_index": index, "_id": document.id, "_version": document.version, "_seq_no": document.seq_no,
        "_primary_term": 1, "_score": score if orders is None else None,
    }  # fmt: skip
    if source_filter.is_shown:
        hit["_source"] = source_filter.of(document.source)
    if orders is not None:
        hit["sort"] = [
            None if field == DOC else _sort_value(match, field, descends, missing)
            for field, descends, missing in orders
        ]
    return hit


class _SourceFilter:
    """Filters the members of a document by the `_source` option of a search."""

    def __init__(self, option: Any) -> None:
        """Raises: InvalidInput."""
        self.is_shown = option is not False
        options = (
            option if isinstance(option, Mapping) else {"includes": option if isinstance(option, (str, list)) else []}
        )
        if option is not None and not isinstance(option, (bool, str, list, Mapping)):
            raise parse_error(f"[_source] is true, false, names or an object, not [{shown(option)}]")
        if unknown := set(options) - {"includes", "excludes", "include", "exclude"}:
            raise parse_error(f"[_source] does not support [{min(unknown)[:SHOWN_CHARS]}]")
        self._includes = _patterns(options.get("includes", options.get("include")))
        self._excludes = _patterns(options.get("excludes", options.get("exclude")))

    def of(self, source: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        if not self._includes and not self._excludes:
            return source
        filtered: dict[str, Any] = {}
        for name, value in source.items():
            path = f"{prefix}{name}"
            if any(_covers(each, path) for each in self._excludes):
                continue
            if isinstance(value, dict):
                inner = self.of(value, f"{path}.")
                if inner or self._is_included(path):
                    filtered[name] = inner
            elif self._is_included(path):
                filtered[name] = value
        return filtered

    def _is_included(self, path: str) -> bool:
        return not self._includes or any(_covers(each, path) for each in self._includes)


def _patterns(value: Any) -> list[str]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise parse_error("[_source] requires names")
    return names


def _covers(pattern: str, path: str) -> bool:
    """Tell whether a pattern names a member or an object that contains it."""
    return fits(pattern, path) or any(fits(pattern, path[:at]) for at, letter in enumerate(path) if letter == ".")
