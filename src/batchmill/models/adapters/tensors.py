"""The head of a safetensors file: which tensors it holds, of what type and shape. No tensor is read.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import shallow

LENGTH_BYTES = 8  # before the head
HEAD_BYTES_MAX = 100_000_000  # as safetensors has it
METADATA = "__metadata__"
WIDTHS = {  # of the types, in bits
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})  # whose shape is that of what they stand for
SHOWN_CHARS = 120


class TensorHead(Struct, frozen=True):
    """One tensor of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_heads(path: Path) -> dict[str, TensorHead]:
    """The tensors of a file, by name. Raises: InvalidInput for what is no whole safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(HEAD_BYTES_MAX, size - LENGTH_BYTES):
                raise _invalid(path, "its head is longer than the file, or than any may be")
            data = file.read(length)
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from None
    try:
        fields = msgspec.json.decode(shallow(data), type=dict[str, msgspec.Raw])
        fields.pop(METADATA, None)
        heads = {name: msgspec.json.decode(raw, type=TensorHead) for name, raw in fields.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(path, f"its head cannot be read: {error}") from None
    _check_places(path, heads, size - LENGTH_BYTES - length)
    return heads


def _check_places(path: Path, heads: dict[str, TensorHead], size: int) -> None:
    """Each tensor has the bytes of its shape, and together they are the rest of the file."""
    at = 0
    for name, head in sorted(heads.items(), key=lambda item: item[1].data_offsets):
        if head.dtype not in WIDTHS:
            raise _invalid(path, f"the tensor {name[:SHOWN_CHARS]!r} is of the unknown type {head.dtype[:SHOWN_CHARS]}")
        values = 1
        for length in head.shape:
            values *= length
        begin, end = head.data_offsets
        if begin != at or min(head.shape, default=0) < 0 or (end - begin) * 8 != values * WIDTHS[head.dtype]:
            raise _invalid(path, f"the bytes of the tensor {name[:SHOWN_CHARS]!r} are not those of its shape")
        at = end
    if at != size:
        raise _invalid(path, f"it has {size:,} bytes of tensors where its head tells of {at:,}: it is not whole")


def _invalid(path: Path, why: str) -> InvalidInput:
    return InvalidInput(f"{path.name} is no safetensors file: {why}", code="invalid_adapter")
