"""Tensors as bytes, and as rows of a function's calls. Little-endian, row-major; BYTES with a u32 length before each.

Bytes are not copied. A request is one row when its shapes are those of the function's inputs. One axis more counts
rows. Of a function that takes many rows at once, without a schema, the first axis always counts rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.datatypes import DATATYPES, FLOAT, INT, TEXT, Datatype, wire_name
from batchmill.wire.tensor_request import Received, TensorRequest

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


NONE, LEADING, FLAT = "none", "leading", "flat"  # axis of the rows: there is none; before the shape; in its stead


class Layout(Struct, frozen=True):
    """`axis` says how outputs get their shapes back."""

    rows: int = 1
    axis: str = NONE

    def dimensions(self, received: Received) -> list[int]:
        """The shape of one row of this input."""
        if self.axis == NONE:
            return received.shape
        return received.shape[1:] if self.axis == LEADING and len(received.shape) > 1 else [1]


def pair(request: TensorRequest, interface: Interface) -> list[tuple[Received, Tensor | None]]:
    """Each tensor with the input that it is; None for one that only a function of any argument takes.

    Raises: InvalidInput, with Triton's words, where an input is missing or nobody knows one.
    """
    known = {each.name: each for each in interface.inputs}
    came = [each.name for each in request.inputs]
    unknown = [name for name in came if name not in known]
    if unknown and not interface.takes_more:
        message = f"unexpected inference input '{unknown[0]}'; the function takes {list(known)}"
        raise InvalidInput(message, code="unknown_argument")
    missing = [name for name, each in known.items() if each.required and name not in came]
    if missing:
        raise InvalidInput(_missing(known, came, missing), code="missing_argument")
    return [(each, known.get(each.name)) for each in request.inputs]


def _missing(known: dict[str, Tensor], came: list[str], missing: list[str]) -> str:
    least = sum(each.required for each in known.values())
    expected = f"{least}" if least == len(known) else f"between {least} and {len(known)}"
    return (
        f"expected {expected} inputs but got {len(came)} inputs. Got input(s) {came}, but missing required input(s)"
        f" {missing}. Please provide all required input(s)."
    )


def lay(pairs: list[tuple[Received, Tensor | None]], interface: Interface, *, received_shapes: bool) -> Layout:
    """Raises: InvalidInput where a shape does not fit, or inputs do not have equally many rows."""
    options = []
    for received, tensor in pairs:
        found = _options(received.shape, tensor, interface)
        if not found:
            assert tensor is not None
            raise _misfit(received, tensor)
        options.append(found)
    if received_shapes or all(NONE in found for found in options):
        return Layout()
    for axis in (LEADING, FLAT):
        if all(axis in found for found in options):
            return _with_axis(axis, pairs)
    if all(LEADING in found or FLAT in found for found in options):
        return _with_axis(LEADING, pairs)
    names = ", ".join(f"'{received.name}' {received.shape}" for received, _ in pairs)
    raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")


def _with_axis(axis: str, pairs: list[tuple[Received, Tensor | None]]) -> Layout:
    counts = {received.shape[0] for received, _ in pairs}
    if len(counts) > 1:
        names = ", ".join(f"'{received.name}' {received.shape}" for received, _ in pairs)
        raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")
    rows = counts.pop()
    if rows == 0:
        raise InvalidInput("the batch has no rows: the first dimension of its tensors is 0", code="invalid_shape")
    return Layout(rows, axis)


def _options(shape: list[int], tensor: Tensor | None, interface: Interface) -> set[str]:
    """What the first axis of this tensor can be."""
    rank = len(shape)
    if tensor is None or (not interface.has_schema and (tensor.datatype is None or tensor.is_array)):
        return _untyped(rank, interface)
    declared, found = tensor.shape, set()
    if fits(shape, declared):
        found.add(NONE)
    if rank and fits(shape[1:], declared) and rank > 1:
        found.add(LEADING)
    if interface.has_schema:
        return found
    many = interface.calls != "row"
    if declared == [1] and rank == 1:
        found = {FLAT} if many else found | {FLAT}
    if not found:  # a hint is no rule
        found = {LEADING} if rank > len(declared) and rank > 1 else {NONE}
    return found


def _untyped(rank: int, interface: Interface) -> set[str]:
    if interface.calls == "row":
        return {NONE, LEADING} if rank > 1 else ({NONE, FLAT} if rank else {NONE})
    return {LEADING} if rank > 1 else ({FLAT} if rank else {NONE})


def fits(shape: list[int], declared: list[int]) -> bool:
    """Whether a shape is one that a declaration, of which -1 is any dimension, allows. No dimension is one value."""
    shape = shape or [1]
    return len(shape) == len(declared) and all(there in (-1, here) for here, there in zip(shape, declared, strict=True))


def declared_datatype(tensor: Tensor | None) -> Datatype | None:
    return None if tensor is None else DATATYPES.get(tensor.datatype or "")


def _misfit(received: Received, tensor: Tensor) -> InvalidInput:
    message = (
        f"unexpected shape for input '{tensor.name}': expected {tensor.shape}, or rows of it {[-1, *tensor.shape]},"
        f" got {received.shape}"
    )
    return InvalidInput(message, code="invalid_shape")


def check_datatype(received: Received, tensor: Tensor | None, *, has_schema: bool = True) -> None:
    """Raises: InvalidInput where a tensor has another datatype than its input declares; a hint means any width."""
    declared = declared_datatype(tensor)
    if tensor is None or declared is None:
        return
    here, there = wire_name(received.datatype.name), wire_name(declared.name)
    kinds = (received.datatype.kind, declared.kind)
    is_hinted = not has_schema and (kinds[0] == kinds[1] or kinds == (INT, FLOAT))
    if here != there and not is_hinted:
        message = f"unexpected datatype for input '{tensor.name}': expected {there}, got {here}"
        raise InvalidInput(message, code="invalid_datatype")
