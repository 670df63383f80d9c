"""Searches as OpenSearch clients send them, over documents in memory: which, in what order, how much of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.services.documents.matching import Document, Score, fits, parse_error, values_of
from batchmill.services.documents.numbers import shown, whole_number
from batchmill.services.documents.queries import compile_query

__all__ = ["Document", "search"]

SIZE = 10
WINDOW_MAX = 10_000
SORTS_MAX = 16
TOTAL_MAX = 10_000  # counted exactly unless track_total_hits says otherwise
SHOWN_CHARS = 80
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
    for field, told in asked.items():
        options = told if isinstance(told, Mapping) else {"order": told}
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
        told = asked if isinstance(asked, Mapping) else {"includes": asked if isinstance(asked, (str, list)) else []}
        if asked is not None and not isinstance(asked, (bool, str, list, Mapping)):
            raise parse_error(f"[_source] is true, false, names or an object, not [{shown(asked)}]")
        if strangers := set(told) - {"includes", "excludes", "include", "exclude"}:
            raise parse_error(f"[_source] does not support [{min(strangers)[:SHOWN_CHARS]}]")
        self._wanted = _patterns(told.get("includes", told.get("include")))
        self._unwanted = _patterns(told.get("excludes", told.get("exclude")))

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


def _patterns(told: Any) -> list[str]:
    names = [] if told is None else [told] if isinstance(told, str) else told
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise parse_error("[_source] wants names")
    return names


def _covers(pattern: str, path: str) -> bool:
    """A pattern names a member, or an object that holds it."""
    return fits(pattern, path) or any(fits(pattern, path[:at]) for at, letter in enumerate(path) if letter == ".")
