"""Convert the string cells of a CSV table to the types that a function takes. Other columns stay strings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchmill.errors import InvalidRow
from batchmill.types import Tensor
from batchmill.wire.tensors.datatypes import BOOL, DATATYPES, FLOAT, INT, TEXT, Datatype

SHOWN_CHARS = 60  # of a wrong cell, in a message
INT_CHARS_MAX = 20  # of an integer: no datatype has more digits
FLOAT_CHARS_MAX = 400
WORDS = {"true": True, "1": True, "false": False, "0": False}
KINDS = {BOOL: "true, false, 1 or 0", INT: "a whole number", FLOAT: "a number"}
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class CellReader:
    """Converts the cells of one function's inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._typed = [each for each in inputs if not _is_string(each)]

    @property
    def is_needed(self) -> bool:
        """Whether some inputs are not strings."""
        return bool(self._typed)

    def read(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the cells of a row. An empty cell of an optional argument is left out.

        Raises: InvalidRow (`invalid_argument`), naming the column, for a cell that does not fit its type.
        """
        row = dict(cells)
        for each in self._typed:
            cell = row.get(each.name)
            if not isinstance(cell, str):
                continue
            if not cell.strip() and not each.required:
                del row[each.name]
            else:
                row[each.name] = _list(each, cell) if each.shape != [1] else _value(each, cell)
        return row


def _is_string(tensor: Tensor) -> bool:
    """Whether the function takes the string unchanged."""
    return tensor.shape == [1] and (tensor.datatype is None or DATATYPES[tensor.datatype].kind == TEXT)


def _value(tensor: Tensor, cell: str) -> Any:
    assert tensor.datatype is not None, "other columns are not read"
    kind, text = DATATYPES[tensor.datatype], cell.strip()
    if kind.kind == BOOL:
        value = WORDS.get(text.lower())
    elif kind.kind == INT:
        value = int(text) if len(text) <= INT_CHARS_MAX and _INT.fullmatch(text) else None
    else:
        value = float(text) if len(text) <= FLOAT_CHARS_MAX and _FLOAT.fullmatch(text) else None
    if value is None:
        raise _refusal(tensor, cell, f"{KINDS[kind.kind]} ({tensor.datatype})")
    if kind.kind != BOOL and not _fits(value, kind):
        raise _refusal(tensor, cell, f"{tensor.datatype}, which is from {kind.low:g} to {kind.high:g}")
    return value


def _fits(value: float, kind: Datatype) -> bool:
    return math.isfinite(value) and kind.low <= value <= kind.high


def _list(tensor: Tensor, cell: str) -> Any:
    """Parse a list from JSON."""
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise _refusal(tensor, cell, "a JSON list")
    return value


def _refusal(tensor: Tensor, cell: str, expected: str) -> InvalidRow:
    shown = repr(cell if len(cell) <= SHOWN_CHARS else cell[: SHOWN_CHARS - 1] + "…")
    what = f"the cell {shown} is not" if cell.strip() else "the cell is empty, and the function needs"
    return InvalidRow(f"the column {tensor.name!r}: {what} {expected}", code="invalid_argument")
