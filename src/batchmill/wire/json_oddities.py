"""JSON that parsers read differently, or not at all: a name twice in an object, numbers that hardly anything can hold.

A line that has such lets a result through that its reader cannot open, or understands otherwise than its engine did.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

DIGITS_MAX = 4_300  # of an integer; as Python has it, whose parser refuses the whole line
FLOAT_DIGITS = 309  # more before the point are more than a double can hold
SHOWN_CHARS = 40
_RUN = b"0" * FLOAT_DIGITS
_START = b"0" * 24  # found sooner, and seldom there
# Digits become 0, both letters of an exponent e; a plus stays, and everything else is a blank.
_NUMBERS = bytes(
    48 if 48 <= each <= 57 else 101 if each in (69, 101) else 43 if each == 43 else 32 for each in range(256)
)
_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode


def oddity(data: bytes, *, names: bool = True) -> str | None:
    """What is odd about JSON that a decoder has taken, in words; None: nothing.

    Args: names: look for names that are there twice, too.
    """
    if _is_plain(data) if names else not has_odd_numbers(data):
        return None
    try:
        json.loads(data, object_pairs_hook=_once if names else None, parse_int=_integer, parse_float=_float)
    except _Odd as odd:
        return str(odd)
    except (ValueError, RecursionError):
        return None  # no JSON: whoever decodes it says so
    return None


def has_odd_numbers(text: bytes) -> bool:
    """Whether some number may be too large; of many lines at once. What stands in texts counts, too."""
    numbers = text.translate(_NUMBERS)
    return b"0e000" in numbers or b"0e+000" in numbers or (_START in numbers and _RUN in numbers)


def _is_plain(data: bytes) -> bool:
    """Surely nothing is odd. A decoder keeps one of two names that are the same, and so their quotes are missed when
    what it read is written again; numbers that are too large it refuses itself."""
    if b"u0022" in data:  # a quote that is written as one afterwards
        return False
    try:
        return _encode(_decode(data)).count(b'"') == data.count(b'"')
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return False


class _Odd(Exception):
    """What was found."""


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Odd(f"the name {twice[:SHOWN_CHARS]!r} stands twice in one object")


def _integer(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise _Odd(f"a number has {len(text):,} digits, and {DIGITS_MAX:,} is the most that is read")
    return 0


def _float(text: str) -> float:
    if float(text) in (float("inf"), float("-inf")):
        raise _Odd(f"the number {text[:SHOWN_CHARS]} is larger than a double can hold")
    return 0.0
