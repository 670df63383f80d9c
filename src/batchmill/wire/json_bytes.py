"""JSON as bytes: objects whose numbers keep their exact digits, and checks for JSON that parsers read differently."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Raw

DIGITS_MAX = 4_300  # of an integer: Python's own limit; above it Python's parser refuses the whole line
FLOAT_DIGITS = 309  # a double cannot hold a number with more digits before the point
SHOWN_CHARS = 40
_RUN = b"0" * FLOAT_DIGITS
_START = b"0" * 24  # a faster search, which seldom matches
# Digits become 0, both exponent letters become e, a plus is unchanged, and everything else becomes a blank.
_NUMBERS = bytes(
    48 if 48 <= each <= 57 else 101 if each in (69, 101) else 43 if each == 43 else 32 for each in range(256)
)
_decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode


def oddity(data: bytes, *, names: bool = True) -> str | None:
    """Describe why parsers may read this decodable JSON differently; None: they read it alike.

    Args: names: also look for repeated names.
    """
    if _is_plain(data) if names else not has_odd_numbers(data):
        return None
    try:
        json.loads(data, object_pairs_hook=_refuse_repeated if names else None, parse_int=_integer, parse_float=_float)
    except _Oddity as odd:
        return str(odd)
    except (ValueError, RecursionError):
        return None  # it is not JSON: its decoder reports that
    return None


def has_odd_numbers(text: bytes) -> bool:
    """Whether some number may be too large. Works on many lines at once. Digits inside strings count too."""
    numbers = text.translate(_NUMBERS)
    return b"0e000" in numbers or b"0e+000" in numbers or (_START in numbers and _RUN in numbers)


def _is_plain(data: bytes) -> bool:
    """Whether the JSON certainly has no repeated names and no oversized numbers.

    A decoder keeps one of two equal names, so the encoded result has fewer quotes than the input. It refuses numbers
    that are too large.
    """
    if b"u0022" in data:  # an escaped quote, which would be encoded as another number of quotes
        return False
    try:
        return _encode(_decode(data)).count(b'"') == data.count(b'"')
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return False


class _Oddity(Exception):
    """A finding of `oddity`."""


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _Oddity(f"the name {name[:SHOWN_CHARS]!r} is used twice in one object")
        seen.add(name)


def _integer(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise _Oddity(f"a number has {len(text):,} digits; at most {DIGITS_MAX:,} are supported")
    return 0


def _float(text: str) -> float:
    if float(text) in (float("inf"), float("-inf")):
        raise _Oddity(f"the number {text[:SHOWN_CHARS]} is larger than a double can hold")
    return 0.0


# Nesting that every process can decode. Interpreters differ: in 3.11 the decoder shares Python's limit of a thousand
# frames with its callers; later ones decode ten thousand levels. So the levels are counted.
DEPTH_MAX = 500
PIECE_BYTES = 1024 * 1024  # counted at once

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level more or less, as signed bytes

_object = msgspec.json.Decoder(dict[str, Raw])
_string = msgspec.json.Decoder(str)
encode = msgspec.json.encode
decode = msgspec.json.decode


def split_object(data: bytes) -> dict[str, Raw]:
    """Return the members of a JSON object; each value keeps its exact bytes."""
    return _object.decode(data)


def join_object(members: dict[str, Any]) -> bytes:
    """Encode a JSON object with these members; `Raw` values keep their exact bytes."""
    return encode(members)


def text_of(value: Raw) -> str:
    """Render a JSON value as plain text: strings without quotes, null as empty, the rest as JSON."""
    data = bytes(value).strip()
    if data[:1] == b'"':
        return _string.decode(data)
    return "" if data == b"null" else data.decode()


def append_members(data: bytes, members: bytes) -> bytes:
    """Append the text `members` ('"a":1,"b":2') to the JSON object `data`."""
    head = data.rstrip()[:-1].rstrip()
    return head + (b"" if head == b"{" else b",") + members + b"}"


def shallow(data: bytes | memoryview, depth_max: int = DEPTH_MAX) -> bytes | memoryview:
    """Return the JSON unchanged. Raises: msgspec.DecodeError if it nests deeper than `depth_max`."""
    if is_too_deep(data, depth_max):
        raise msgspec.DecodeError(f"JSON is nested deeper than {depth_max} levels")
    return data


def is_too_deep(text: bytes | memoryview, depth_max: int = DEPTH_MAX) -> bool:
    """Whether JSON nests deeper than `depth_max`. Cheap if it has few brackets."""
    if len(text) <= depth_max:
        return False
    data = bytes(text)
    return openings(data) > depth_max and _depth_exceeds(data, depth_max)


def openings(text: bytes) -> int:
    """Count opening brackets. `replace` finds them with memchr, and is five times faster here than `count`."""
    return 2 * len(text) - len(text.replace(b"[", b"")) - len(text.replace(b"{", b""))


def _depth_exceeds(text: bytes, depth_max: int) -> bool:
    """Whether brackets outside of strings nest deeper. Cutting strings out takes half the time of a regex."""
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
