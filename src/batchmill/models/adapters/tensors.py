"""Reads the header of a safetensors file: names, types and shapes of its tensors. It reads no tensor data.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.wire.json_bytes import shallow

LENGTH_BYTES = 8  # before the header
HEAD_BYTES_MAX = 100_000_000  # the limit of safetensors
METADATA = "__metadata__"
WIDTHS = {  # of the types, in bits
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
FLOATS = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
)  # types whose shape is that of the values, unlike packed ones
SHOWN_CHARS = 120


class TensorHead(Struct, frozen=True):
    """One tensor of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_heads(path: Path) -> dict[str, TensorHead]:
    """The tensors of a file, by name. Raises: InvalidInput for an incomplete or invalid safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(HEAD_BYTES_MAX, size - LENGTH_BYTES):
                raise _invalid(path, f"its header is longer than the file or than {HEAD_BYTES_MAX:,} bytes")
            data = file.read(length)
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from None
    try:
        fields = msgspec.json.decode(shallow(data), type=dict[str, msgspec.Raw])
        fields.pop(METADATA, None)
        heads = {name: msgspec.json.decode(raw, type=TensorHead) for name, raw in fields.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(path, f"its header cannot be read: {error}") from None
    _check_offsets(path, heads, size - LENGTH_BYTES - length)
    return heads


def _check_offsets(path: Path, heads: dict[str, TensorHead], size: int) -> None:
    """Check that each tensor has the bytes of its shape, and that together they are the rest of the file."""
    offset = 0
    for name, head in sorted(heads.items(), key=lambda item: item[1].data_offsets):
        if head.dtype not in WIDTHS:
            raise _invalid(path, f"the tensor {name[:SHOWN_CHARS]!r} is of the unknown type {head.dtype[:SHOWN_CHARS]}")
        values = 1
        for length in head.shape:
            values *= length
        start, end = head.data_offsets
        if start != offset or min(head.shape, default=0) < 0 or (end - start) * 8 != values * WIDTHS[head.dtype]:
            raise _invalid(path, f"the bytes of the tensor {name[:SHOWN_CHARS]!r} do not match its shape")
        offset = end
    if offset != size:
        raise _invalid(path, f"it has {size:,} bytes of tensors, and its header lists {offset:,}: it is incomplete")


def _invalid(path: Path, why: str) -> InvalidInput:
    return InvalidInput(f"{path.name} is not a valid safetensors file: {why}", code="invalid_adapter")
