"""The datatypes of the Open Inference Protocol: sizes, ranges, and their numpy names. It does not import numpy.

Source: the Open Inference Protocol, "tensor data types"; BF16 is Triton's; STRING is Inferless' name for UTF-8 BYTES.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

BOOL, INT, FLOAT, TEXT = "bool", "int", "float", "text"  # kinds of element


class Datatype(Struct, frozen=True):
    """One datatype. `low` and `high` are the smallest and largest finite value, or 0 for kinds without a range."""

    name: str
    kind: str
    size: int  # bytes of an element; 0: it varies
    numpy: str = ""  # little-endian; for BF16, which numpy lacks, the type of its raw bits
    low: int | float = 0
    high: int | float = 0


def _integers() -> list[Datatype]:
    rows = []
    for bits in (8, 16, 32, 64):
        rows.append(Datatype(f"INT{bits}", INT, bits // 8, f"<i{bits // 8}", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        rows.append(Datatype(f"UINT{bits}", INT, bits // 8, f"<u{bits // 8}", 0, 2**bits - 1))
    return rows


_FP32_MAX = 3.4028234663852886e38
_BF16_MAX = 3.3895313892515355e38
_FP64_MAX = 1.7976931348623157e308
_ROWS = [
    Datatype("BOOL", BOOL, 1, "|b1"),
    *_integers(),
    Datatype("FP16", FLOAT, 2, "<f2", -65504.0, 65504.0),
    Datatype("BF16", FLOAT, 2, "<u2", -_BF16_MAX, _BF16_MAX),
    Datatype("FP32", FLOAT, 4, "<f4", -_FP32_MAX, _FP32_MAX),
    Datatype("FP64", FLOAT, 8, "<f8", -_FP64_MAX, _FP64_MAX),
    Datatype("BYTES", TEXT, 0),
    Datatype("STRING", TEXT, 0),
]
DATATYPES: Mapping[str, Datatype] = {row.name: row for row in _ROWS}
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
EXACT_FLOAT_MAX = 2**53  # integers up to here are floats without loss


def wire_name(datatype: str) -> str:
    """The name on the wire: STRING is BYTES there."""
    return "BYTES" if datatype == "STRING" else datatype


def elements_of(shape: list[int]) -> int:
    """How many elements a tensor of this shape has; a scalar (no dimensions) has one."""
    count = 1
    for dimension in shape:
        count *= dimension
    return count
