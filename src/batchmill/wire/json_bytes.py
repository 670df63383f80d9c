"""JSON handled as bytes: objects whose numbers keep their exact digits, and texts that parsers read differently."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Raw

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


# Levels that every process can read. Interpreters differ: under 3.11 the decoder shares Python's stack, of a thousand,
# with its callers; later ones read ten thousand levels. So levels are counted.
DEPTH_MAX = 500
PIECE_BYTES = 1024 * 1024  # whose brackets are counted at once

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level more or less, as signed bytes

_object = msgspec.json.Decoder(dict[str, Raw])
_string = msgspec.json.Decoder(str)
encode = msgspec.json.encode
decode = msgspec.json.decode


def split_object(data: bytes) -> dict[str, Raw]:
    """The members of a JSON object, each value still as its own bytes."""
    return _object.decode(data)


def join_object(members: dict[str, Any]) -> bytes:
    """The JSON object with these members; values that are `Raw` go out as they came in."""
    return encode(members)


def text_of(value: Raw) -> str:
    """A JSON value as a person would write it: strings bare, null empty, the rest as its JSON text."""
    data = bytes(value).strip()
    if data[:1] == b'"':
        return _string.decode(data)
    return "" if data == b"null" else data.decode()


def append_members(data: bytes, members: bytes) -> bytes:
    """The JSON object `data` with the text `members` ('"a":1,"b":2') added at its end."""
    head = data.rstrip()[:-1].rstrip()
    return head + (b"" if head == b"{" else b",") + members + b"}"


def shallow(data: bytes | memoryview, depth_max: int = DEPTH_MAX) -> bytes | memoryview:
    """The same JSON, for a decoder. Raises: msgspec.DecodeError where it nests deeper than `depth_max`."""
    if is_too_deep(data, depth_max):
        raise msgspec.DecodeError(f"JSON is nested deeper than {depth_max} levels")
    return data


def is_too_deep(text: bytes | memoryview, depth_max: int = DEPTH_MAX) -> bool:
    """Whether JSON nests deeper than `depth_max`. Cheap where it has few brackets."""
    if len(text) <= depth_max:
        return False
    data = bytes(text)
    return openings(data) > depth_max and _depth_exceeds(data, depth_max)


def openings(text: bytes) -> int:
    """How many brackets open. `replace` finds them with memchr and is five times faster here than `count`."""
    return 2 * len(text) - len(text.replace(b"[", b"")) - len(text.replace(b"{", b""))


def _depth_exceeds(text: bytes, depth_max: int) -> bool:
    """Whether brackets outside of strings nest deeper. Strings are cut out at half of what a pattern takes."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth, is_inside = 0, 0
    for at in range(0, len(text), PIECE_BYTES):
        parts = text[at : at + PIECE_BYTES].split(b'"')
        steps = b"".join(parts[is_inside::2]).translate(_STEPS, _NO_BRACKETS)
        if max(accumulate(memoryview(steps).cast("b"), initial=depth)) > depth_max:
            return True
        depth += steps.count(1) - steps.count(255)
        is_inside ^= (len(parts) - 1) & 1
    return False
