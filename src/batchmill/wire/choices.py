"""The values that a field may have, for messages about one that it may not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct
from msgspec.structs import fields

_OUTER_FIELD = re.compile(r"(\w+)(\[(\d+|\.\.\.)\])*")


def values_at(kind: type[Struct], path: str) -> list[str]:
    """The literals of a struct's field, or of the items of one; none if the path leads further down.

    Args: path: as msgspec writes it, without the "$.": "fail_on[0]".
    """
    if (match := _OUTER_FIELD.fullmatch(path)) is None:
        return []
    return [value for each in fields(kind) if each.encode_name == match[1] for value in _literals(each.type)]


def _literals(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
        return
    for inner in get_args(kind):
        yield from _literals(inner)
