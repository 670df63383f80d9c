"""Tensors as bytes (little-endian, row-major; BYTES has a u32 length before each element), and their split into rows.

Bytes are not copied. A request is one row if its shapes equal those of the function's inputs. With one more axis, the
first axis is the rows. A function that takes many rows at once and has no schema always has rows as the first axis.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.tensors.datatypes import DATATYPES, FLOAT, INT, TEXT, Datatype, wire_name
from batchmill.wire.tensors.requests import InputTensor, TensorRequest

_length = struct.Struct("<I")
Buffer = bytes | memoryview


def check_size(input_tensor: InputTensor) -> None:
    """Raises: InvalidInput if a tensor has another number of bytes than its shape needs."""
    assert input_tensor.buffer is not None
    datatype, size = input_tensor.datatype, len(input_tensor.buffer)
    if datatype.kind == TEXT:
        return
    expected = input_tensor.elements * datatype.size
    if size != expected:
        subject = f"input '{input_tensor.name}', {input_tensor.datatype.name} {input_tensor.shape}"
        message = f"unexpected size for {subject}, expecting {expected} bytes and got {size}"
        raise InvalidInput(message, code="shape_mismatch")
    if datatype.name == "BOOL" and size and np.frombuffer(input_tensor.buffer, np.uint8).max() > 1:
        raise InvalidInput(f"input '{input_tensor.name}': a BOOL is one byte, 0 or 1", code="invalid_value")


def read_texts(input_tensor: InputTensor) -> list[bytes]:
    """Split binary BYTES into elements. Raises: InvalidInput if lengths and bytes do not match."""
    assert input_tensor.buffer is not None
    texts = split_texts(input_tensor.buffer)
    if texts is None or len(texts) != input_tensor.elements:
        actual = "lengths that do not match its bytes" if texts is None else f"{len(texts)} elements"
        expected = f"expecting {input_tensor.elements} elements and got {actual}"
        message = f"unexpected size for input '{input_tensor.name}', {expected}"
        raise InvalidInput(message, code="shape_mismatch")
    return texts


def split_texts(buffer: Buffer) -> list[bytes] | None:
    """Split BYTES into elements; None: the lengths do not match the bytes."""
    view, texts, at, end = memoryview(buffer), [], 0, len(buffer)
    while at < end:
        if end - at < 4:
            return None
        (size,) = _length.unpack_from(view, at)
        at += 4
        if size > end - at:
            return None
        texts.append(bytes(view[at : at + size]))
        at += size
    return texts


def join_texts(elements: Iterable[bytes]) -> bytes:
    pieces = []
    for each in elements:
        pieces += (_length.pack(len(each)), each)
    return b"".join(pieces)


def values_of(buffer: Buffer, datatype: Datatype) -> list[Any]:
    """Return the elements as Python values, in row-major order. Not for BYTES."""
    return _array(buffer, datatype).tolist()


def is_finite(buffer: Buffer, datatype: Datatype) -> bool:
    return bool(np.isfinite(_array(buffer, datatype)).all())


def pack(flat: list[Any], datatype: Datatype) -> bytes:
    """Pack values, which must be within the datatype's range."""
    if datatype.kind == TEXT:
        return join_texts(each if isinstance(each, bytes) else each.encode() for each in flat)
    if datatype.name == "BF16":
        return _to_bf16(np.array(flat, np.float32))
    return np.array(flat, datatype.numpy).tobytes()


def convert(buffer: Buffer, datatype: Datatype, target: Datatype) -> Buffer | None:
    """Convert an array to another datatype; None: values would change their kind or do not fit."""
    if datatype.kind == TEXT or target.kind == TEXT:
        return buffer if datatype.kind == target.kind else None
    array = _array(buffer, datatype)
    if target.name == "BF16":
        return _to_bf16(array.astype(np.float32)) if datatype.kind != "bool" else None
    if not np.can_cast(array.dtype, target.numpy, "same_kind") and not (datatype.kind == target.kind == "int"):
        return None
    if target.kind == "int" and array.size and not (target.low <= int(array.min()) and int(array.max()) <= target.high):
        return None
    with np.errstate(over="ignore"):
        return array.astype(target.numpy).tobytes()


def _array(buffer: Buffer, datatype: Datatype) -> np.ndarray:
    array = np.frombuffer(buffer, datatype.numpy)
    if datatype.name == "BF16":
        return (array.astype("<u4") << 16).view("<f4")
    return array


def _to_bf16(values: np.ndarray) -> bytes:
    """Convert to BF16, rounding to the nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()


NONE, LEADING, FLAT = "none", "leading", "flat"  # the axis of the rows: none; before the shape; instead of the shape


class Layout(Struct, frozen=True):
    """How a request is split into rows. Outputs get their shapes back by `axis`."""

    rows: int = 1
    axis: str = NONE

    def dimensions(self, input_tensor: InputTensor) -> list[int]:
        """The shape of one row of this input."""
        if self.axis == NONE:
            return input_tensor.shape
        return input_tensor.shape[1:] if self.axis == LEADING and len(input_tensor.shape) > 1 else [1]


def match_inputs(request: TensorRequest, interface: Interface) -> list[tuple[InputTensor, Tensor | None]]:
    """Match each tensor with the function's input of its name; None for a tensor without one, if that is allowed.

    Raises: InvalidInput, with Triton's message, for a missing or an unknown input.
    """
    inputs = {each.name: each for each in interface.inputs}
    names = [each.name for each in request.inputs]
    unknown = [name for name in names if name not in inputs]
    if unknown and not interface.takes_more:
        message = f"unexpected inference input '{unknown[0]}'; the function takes {list(inputs)}"
        raise InvalidInput(message, code="unknown_argument")
    missing = [name for name, each in inputs.items() if each.required and name not in names]
    if missing:
        raise InvalidInput(_missing(inputs, names, missing), code="missing_argument")
    return [(each, inputs.get(each.name)) for each in request.inputs]


def _missing(inputs: dict[str, Tensor], names: list[str], missing: list[str]) -> str:
    least = sum(each.required for each in inputs.values())
    expected = f"{least}" if least == len(inputs) else f"between {least} and {len(inputs)}"
    return (
        f"expected {expected} inputs but got {len(names)} inputs. Got input(s) {names}, but missing required input(s)"
        f" {missing}. Please provide all required input(s)."
    )


def find_layout(
    pairs: list[tuple[InputTensor, Tensor | None]], interface: Interface, *, received_shapes: bool
) -> Layout:
    """Find the layout of a request.

    Raises: InvalidInput if a shape does not fit, or the inputs have different numbers of rows.
    """
    options = []
    for input_tensor, tensor in pairs:
        axes = _options(input_tensor.shape, tensor, interface)
        if not axes:
            assert tensor is not None
            raise _shape_error(input_tensor, tensor)
        options.append(axes)
    if received_shapes or all(NONE in axes for axes in options):
        return Layout()
    for axis in (LEADING, FLAT):
        if all(axis in axes for axes in options):
            return _layout_with_axis(axis, pairs)
    if all(LEADING in axes or FLAT in axes for axes in options):
        return _layout_with_axis(LEADING, pairs)
    names = ", ".join(f"'{input_tensor.name}' {input_tensor.shape}" for input_tensor, _ in pairs)
    raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")


def _layout_with_axis(axis: str, pairs: list[tuple[InputTensor, Tensor | None]]) -> Layout:
    counts = {input_tensor.shape[0] for input_tensor, _ in pairs}
    if len(counts) > 1:
        names = ", ".join(f"'{input_tensor.name}' {input_tensor.shape}" for input_tensor, _ in pairs)
        raise InvalidInput(f"the inputs do not have equally many rows: {names}", code="shape_mismatch")
    rows = counts.pop()
    if rows == 0:
        raise InvalidInput("the batch has no rows: the first dimension of its tensors is 0", code="invalid_shape")
    return Layout(rows, axis)


def _options(shape: list[int], tensor: Tensor | None, interface: Interface) -> set[str]:
    """Return the axes that the rows of this tensor can have."""
    rank = len(shape)
    if tensor is None or (not interface.has_schema and (tensor.datatype is None or tensor.is_array)):
        return _untyped(rank, interface)
    declared, axes = tensor.shape, set()
    if fits(shape, declared):
        axes.add(NONE)
    if rank and fits(shape[1:], declared) and rank > 1:
        axes.add(LEADING)
    if interface.has_schema:
        return axes
    many = interface.calls != "row"
    if declared == [1] and rank == 1:
        axes = {FLAT} if many else axes | {FLAT}
    if not axes:  # a shape from a type hint is not enforced
        axes = {LEADING} if rank > len(declared) and rank > 1 else {NONE}
    return axes


def _untyped(rank: int, interface: Interface) -> set[str]:
    if interface.calls == "row":
        return {NONE, LEADING} if rank > 1 else ({NONE, FLAT} if rank else {NONE})
    return {LEADING} if rank > 1 else ({FLAT} if rank else {NONE})


def fits(shape: list[int], declared: list[int]) -> bool:
    """Whether a declared shape, in which -1 is any dimension, allows a shape. A scalar counts as [1]."""
    shape = shape or [1]
    return len(shape) == len(declared) and all(
        expected in (-1, size) for size, expected in zip(shape, declared, strict=True)
    )


def declared_datatype(tensor: Tensor | None) -> Datatype | None:
    return None if tensor is None else DATATYPES.get(tensor.datatype or "")


def _shape_error(input_tensor: InputTensor, tensor: Tensor) -> InvalidInput:
    message = (
        f"unexpected shape for input '{tensor.name}': expected {tensor.shape}, or rows of it {[-1, *tensor.shape]},"
        f" got {input_tensor.shape}"
    )
    return InvalidInput(message, code="invalid_shape")


def check_datatype(input_tensor: InputTensor, tensor: Tensor | None, *, has_schema: bool = True) -> None:
    """Raises: InvalidInput if a tensor has another datatype than its input declares; a type hint allows any width."""
    declared = declared_datatype(tensor)
    if tensor is None or declared is None:
        return
    actual, expected = wire_name(input_tensor.datatype.name), wire_name(declared.name)
    kinds = (input_tensor.datatype.kind, declared.kind)
    is_hinted = not has_schema and (kinds[0] == kinds[1] or kinds == (INT, FLOAT))
    if actual != expected and not is_hinted:
        message = f"unexpected datatype for input '{tensor.name}': expected {expected}, got {actual}"
        raise InvalidInput(message, code="invalid_datatype")
