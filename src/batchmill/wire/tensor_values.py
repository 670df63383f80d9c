"""The elements of a tensor that stand in a body as JSON: flat or nested, checked against its datatype one by one.

Integers never pass through a float. Good data are read by msgspec alone; only bad ones are looked at again, to say why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec

from batchmill.errors import InvalidInput
from batchmill.wire.call_errors import parse
from batchmill.wire.datatypes import BOOL, EXACT_FLOAT_MAX, FLOAT, INT, INT64_MIN, TEXT, UINT64_MAX, Datatype
from batchmill.wire.tensor_request import Received

DEPTH_MAX = 8  # of nesting that is read by a decoder of its own
CHARS_SHOWN = 60
_TYPES = {BOOL: bool, INT: int, FLOAT: float, TEXT: str}
_WORDS = {BOOL: "true or false", INT: "an integer", FLOAT: "a number", TEXT: "a string"}
_opening = re.compile(rb"(?:\s*\[)+").match
_any = msgspec.json.Decoder()


def elements(received: Received) -> list[Any]:
    """Its elements in row-major order, as the datatype has them. Raises: InvalidInput, naming the first bad one."""
    datatype = received.datatype
    found = _read(received, datatype.kind)
    if found is None:
        found = [_element(value, received, datatype.kind, at) for at, value in enumerate(_walk(received))]
    _check_count(received, len(found))
    if datatype.kind in (INT, FLOAT) and found:
        _check_range(received, found, datatype)
    return found


def elements_leniently(received: Received, kind: str, *, may_be_bool: bool) -> list[Any]:
    """Its elements by their own JSON types, as Inferless' tools send them: an integer wider than declared passes.

    `kind` is what the function's input declares, or else the tensor's. True and false are 1 and 0 of an integer; with
    `may_be_bool` they stay what they are.
    """
    found = _read(received, kind)
    if found is None:
        found = []
        for at, value in enumerate(_walk(received)):
            if isinstance(value, bool) and (may_be_bool or kind == INT):
                found.append(value if may_be_bool else int(value))
            else:
                found.append(_element(value, received, kind, at))
    _check_count(received, len(found))
    if kind == INT and found:
        for value in (min(found), max(found)):
            if not INT64_MIN <= value <= UINT64_MAX:
                raise _out_of_range(received, value, "64 bits")
    return found


def nest(flat: list[Any], shape: list[int]) -> Any:
    """The nested lists of this shape; of no dimension, the one element itself."""
    if not shape:
        return flat[0]
    for dimension in reversed(shape[1:]):
        if dimension == 0:
            return _empty(shape)
        flat = [flat[at : at + dimension] for at in range(0, len(flat), dimension)]
    return flat


def _empty(shape: list[int]) -> list[Any]:
    return [_empty(shape[1:]) for _ in range(shape[0])] if len(shape) > 1 else []


@lru_cache(maxsize=64)
def _decoder(kind: str, depth: int) -> msgspec.json.Decoder:
    wanted: Any = _TYPES[kind]
    for _ in range(depth):
        wanted = list[wanted]
    return msgspec.json.Decoder(wanted)


def _read(received: Received, kind: str) -> list[Any] | None:
    """All elements, where they are of this kind and evenly nested; None: they need a closer look."""
    data = received.data
    assert data is not None
    opening = _opening(data)
    if opening is None:
        raise InvalidInput(f"the data of input '{received.name}' must be an array", code="invalid_value")
    depth = opening[0].count(b"[")
    if depth > DEPTH_MAX:
        return None
    try:
        found = _decoder(kind, depth).decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return parse(_any, data, f"the data of input '{received.name}'")
    for _ in range(depth - 1):
        found = list(chain.from_iterable(found))
    return found


def _walk(received: Received) -> Iterator[Any]:
    """The leaves of the data, however they are nested."""
    stack = [iter(parse(_any, received.data, f"the data of input '{received.name}'"))]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _element(value: Any, received: Received, kind: str, at: int) -> Any:
    """One element, converted where nothing is lost by it."""
    if type(value) is _TYPES[kind]:
        return value
    if kind == FLOAT and type(value) is int:
        return float(value) if abs(value) <= EXACT_FLOAT_MAX or abs(value) < 1e308 else value
    if kind == INT and type(value) is float and value.is_integer() and abs(value) <= EXACT_FLOAT_MAX:
        return int(value)
    shown = msgspec.json.encode(value).decode()[:CHARS_SHOWN]
    wanted = _WORDS[kind] if kind != received.datatype.kind else f"{received.datatype.name} ({_WORDS[kind]})"
    message = f"input '{received.name}': element {at} is {shown}, which is not {wanted}"
    raise InvalidInput(message, code="invalid_value")


def _check_count(received: Received, count: int) -> None:
    if count != received.elements:
        message = (
            f"Failed to parse 'data' of input '{received.name}': shape {received.shape} of {received.elements} elements"
            f" does not match true shape of 'data' field, which has {count}"
        )
        raise InvalidInput(message, code="shape_mismatch")


def _check_range(received: Received, found: list[Any], datatype: Datatype) -> None:
    for value in (min(found), max(found)):
        if not datatype.low <= value <= datatype.high:
            raise _out_of_range(received, value, f"{datatype.name}, {datatype.low} to {datatype.high}")


def _out_of_range(received: Received, value: Any, expected: str) -> InvalidInput:
    shown = str(value)[:CHARS_SHOWN]
    return InvalidInput(f"input '{received.name}': {shown} is out of range of {expected}", code="number_out_of_range")
