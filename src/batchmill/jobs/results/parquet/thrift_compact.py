"""Thrift's compact protocol, as far as footers of Parquet files use it: structs of which only some fields are known.

What is read and written again is the same value, whatever its fields mean.
Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _MAP, STRUCT = range(1, 13)
INTEGERS = frozenset([I16, I32, I64])
DEPTH_MAX = 16
VARINT_BITS_MAX = 64
_SHORT_LIST, _SHORT_STEP = 15, 15  # from here on a length, or a step between field numbers, is a varint

Fields = dict[int, "Value"]  # of a struct, by number


class Value(NamedTuple):
    """A value and its kind. Of a struct: Fields; of a list: a `ListOf`; of BINARY: bytes."""

    kind: int
    value: Any


class ListOf(NamedTuple):
    """The items of a list, without their kind."""

    kind: int
    items: list[Any]


class NotThrift(ValueError):
    """The bytes are no struct, or one with something that Parquet's footers do not have."""


def read_struct(data: bytes) -> Fields:
    """The struct that `data` is, to the last byte. Raises: NotThrift."""
    reader = _Reader(data)
    try:
        fields = reader.struct(0)
    except (IndexError, struct.error):
        raise NotThrift("the bytes end within a value") from None
    if reader.at != len(data):
        raise NotThrift(f"{len(data) - reader.at} bytes follow the struct")
    return fields


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int) -> Fields:
        if depth > DEPTH_MAX:
            raise NotThrift(f"structs within {DEPTH_MAX} others")
        fields: Fields = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 0xF
            number = number + step if step else self._integer()
            fields[number] = Value(kind, self._value(kind, depth))
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in INTEGERS:
            return self._integer()
        if kind == BINARY:
            return self._take(self._varint())
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            return self._list(depth + 1)
        if kind == DOUBLE:
            return struct.unpack("<d", self._take(8))[0]
        if kind == BYTE:
            return self._byte()
        raise NotThrift(f"a value of the kind {kind}")

    def _list(self, depth: int) -> ListOf:
        head = self._byte()
        size, kind = head >> 4, head & 0xF
        if size == _SHORT_LIST:
            size = self._varint()
        if kind in (TRUE, FALSE) or size > len(self._data) - self.at or depth > DEPTH_MAX:
            raise NotThrift(f"a list of {size} values of the kind {kind}")
        return ListOf(kind, [self._value(kind, depth) for _ in range(size)])

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise NotThrift("the bytes end within a value")
        self.at += size
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while shift < VARINT_BITS_MAX:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80 and value < 1 << VARINT_BITS_MAX:
                return value
            shift += 7
        raise NotThrift("an integer of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


def write_struct(fields: Fields) -> bytes:
    """The bytes of a struct."""
    out = bytearray()
    _write_fields(out, fields)
    return bytes(out)


def _write_fields(out: bytearray, fields: Fields) -> None:
    before = 0
    for number in sorted(fields):
        kind, value = fields[number]
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = number - before
        if 0 < step <= _SHORT_STEP:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            _write_integer(out, number)
        _write_value(out, kind, value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in INTEGERS:
        _write_integer(out, value)
    elif kind == BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind == STRUCT:
        _write_fields(out, value)
    elif kind in (LIST, SET):
        size = len(value.items)
        out.append(min(size, _SHORT_LIST) << 4 | value.kind)
        if size >= _SHORT_LIST:
            _write_varint(out, size)
        for item in value.items:
            _write_value(out, value.kind, item)
    elif kind == DOUBLE:
        out += struct.pack("<d", value)
    elif kind == BYTE:
        out.append(value)


def _write_integer(out: bytearray, value: int) -> None:
    _write_varint(out, (value << 1) ^ (value >> 63))


def _write_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
