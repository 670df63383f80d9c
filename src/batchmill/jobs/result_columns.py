"""Which columns a table of results has, and what kind of values lie in those that have no type of their own."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Raw

from batchmill.errors import InvalidInput
from batchmill.jobs.gathering import TableSource
from batchmill.wire.forms import TableForm

COLUMNS_MAX = 10_000
OUTPUT, ERROR, FOLDED_FROM = TableForm.reserved
_EXACT = 2**53  # integers up to here are floats without loss
_INT64 = 2**63


class ColumnNames:
    """The input's columns in order, then what else the rows have, then what batchmill adds."""

    def __init__(self, source: TableSource) -> None:
        self._names = dict.fromkeys(source.columns)
        self._added = [OUTPUT, ERROR, *([FOLDED_FROM] if source.folds else [])]

    def note(self, names: Iterable[str]) -> None:
        """Take the columns of a row in. Raises: InvalidInput beyond COLUMNS_MAX of them."""
        for name in names:
            if name not in self._names and name not in self._added:
                if len(self._names) >= COLUMNS_MAX:
                    raise InvalidInput(
                        f"the rows have more than {COLUMNS_MAX} columns: name the output .jsonl, which needs none",
                        code="too_many_columns",
                    )
                self._names[name] = None

    def all(self) -> list[str]:
        return [*self._names, *self._added]

    def input(self) -> list[str]:
        return list(self._names)


class Kind(StrEnum):
    """What the values of a column are. JSON: too different from each other; each stands as its own JSON text."""

    NULL = "null"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    VECTOR = "vector"  # list of numbers
    JSON = "json"
    LARGE = "large int"  # no float has it exactly


class ColumnKinds:
    """Learns the kind of each column from its values; they need not come all at once."""

    def __init__(self) -> None:
        self._seen: dict[str, set[Kind]] = {}
        self._decode = msgspec.json.Decoder().decode

    def note(self, name: str, value: Raw) -> None:
        kinds = self._seen.setdefault(name, set())
        if Kind.JSON not in kinds:
            kinds.add(self._kind_of(bytes(value)))

    def kind(self, name: str) -> Kind:
        """The one kind that holds every value seen."""
        seen = self._seen.get(name, set()) - {Kind.NULL}
        if not seen:
            return Kind.TEXT
        if len(seen) == 1:
            only = seen.pop()
            return Kind.INT if only is Kind.LARGE else only
        if seen <= {Kind.INT, Kind.LARGE}:
            return Kind.INT
        return Kind.FLOAT if seen == {Kind.INT, Kind.FLOAT} else Kind.JSON

    def _kind_of(self, data: bytes) -> Kind:
        first = data[:1]
        if first == b'"':
            return Kind.TEXT
        if first in b"tf":
            return Kind.BOOL
        if first == b"n":
            return Kind.NULL
        if first == b"{":
            return Kind.JSON
        try:
            return _kind_of_value(self._decode(data))
        except msgspec.ValidationError:  # a number that no machine number holds: its digits are kept as text
            return Kind.JSON


def _kind_of_value(value: Any) -> Kind:
    match value:
        case float():
            return Kind.FLOAT
        case int() if abs(value) <= _EXACT:
            return Kind.INT
        case int():
            return Kind.LARGE if -_INT64 <= value < _INT64 else Kind.JSON
        case list() if all(type(item) in (int, float) for item in value):
            return Kind.VECTOR
        case _:
            return Kind.JSON
