"""Tensors as bytes: little-endian, row-major; BYTES with a u32 length before each element. Bytes are not copied."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from batchmill.errors import InvalidInput
from batchmill.wire.datatypes import TEXT, Datatype
from batchmill.wire.tensor_request import Received

_length = struct.Struct("<I")
Buffer = bytes | memoryview


def check_size(received: Received) -> None:
    """Raises: InvalidInput where a tensor's bytes are not as many as its shape needs."""
    assert received.buffer is not None
    datatype, size = received.datatype, len(received.buffer)
    if datatype.kind == TEXT:
        return
    expected = received.elements * datatype.size
    if size != expected:
        place = f"input '{received.name}', {received.datatype.name} {received.shape}"
        message = f"unexpected size for {place}, expecting {expected} bytes and got {size}"
        raise InvalidInput(message, code="shape_mismatch")
    if datatype.name == "BOOL" and size and np.frombuffer(received.buffer, np.uint8).max() > 1:
        raise InvalidInput(f"input '{received.name}': a BOOL is one byte, 0 or 1", code="invalid_value")


def read_texts(received: Received) -> list[bytes]:
    """The elements of binary BYTES. Raises: InvalidInput where lengths and bytes do not agree."""
    assert received.buffer is not None
    found = split_texts(received.buffer)
    if found is None or len(found) != received.elements:
        came = "lengths that do not agree with its bytes" if found is None else f"{len(found)} elements"
        message = f"unexpected size for input '{received.name}', expecting {received.elements} elements and got {came}"
        raise InvalidInput(message, code="shape_mismatch")
    return found


def split_texts(buffer: Buffer) -> list[bytes] | None:
    """The elements of BYTES; None: they are not so many bytes as their lengths say."""
    view, found, at, end = memoryview(buffer), [], 0, len(buffer)
    while at < end:
        if end - at < 4:
            return None
        (size,) = _length.unpack_from(view, at)
        at += 4
        if size > end - at:
            return None
        found.append(bytes(view[at : at + size]))
        at += size
    return found


def join_texts(elements: Iterable[bytes]) -> bytes:
    pieces = []
    for each in elements:
        pieces += (_length.pack(len(each)), each)
    return b"".join(pieces)


def values_of(buffer: Buffer, datatype: Datatype) -> list[Any]:
    """The elements as Python values, in row-major order; not of BYTES."""
    return _array(buffer, datatype).tolist()


def is_finite(buffer: Buffer, datatype: Datatype) -> bool:
    return bool(np.isfinite(_array(buffer, datatype)).all())


def pack(flat: list[Any], datatype: Datatype) -> bytes:
    """The bytes of these values, which are within the datatype's range."""
    if datatype.kind == TEXT:
        return join_texts(each if isinstance(each, bytes) else each.encode() for each in flat)
    if datatype.name == "BF16":
        return _to_bf16(np.array(flat, np.float32))
    return np.array(flat, datatype.numpy).tobytes()


def converted(buffer: Buffer, datatype: Datatype, wanted: Datatype) -> Buffer | None:
    """The array as another datatype; None where values would change their kind or not fit."""
    if datatype.kind == TEXT or wanted.kind == TEXT:
        return buffer if datatype.kind == wanted.kind else None
    array = _array(buffer, datatype)
    if wanted.name == "BF16":
        return _to_bf16(array.astype(np.float32)) if datatype.kind != "bool" else None
    if not np.can_cast(array.dtype, wanted.numpy, "same_kind") and not (datatype.kind == wanted.kind == "int"):
        return None
    if wanted.kind == "int" and array.size and not (wanted.low <= int(array.min()) and int(array.max()) <= wanted.high):
        return None
    with np.errstate(over="ignore"):
        return array.astype(wanted.numpy).tobytes()


def _array(buffer: Buffer, datatype: Datatype) -> np.ndarray:
    found = np.frombuffer(buffer, datatype.numpy)
    if datatype.name == "BF16":
        return (found.astype("<u4") << 16).view("<f4")
    return found


def _to_bf16(values: np.ndarray) -> bytes:
    """Rounded to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
