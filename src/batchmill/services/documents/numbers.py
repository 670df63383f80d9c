"""The numbers of a search: refused, as OpenSearch does, where they are none or too large. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from batchmill.errors import InvalidInput
from batchmill.services.documents.matching import parse_error

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


def boost_of(told: Mapping[str, Any], name: str) -> float:
    """The `boost` of a query, 1 where there is none. Raises: InvalidInput."""
    value = told.get("boost", 1.0)
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
