"""Datatypes through a function that declares none: its plain numbers go back in the datatype in which numbers came.

Python knows one kind of integer and one of float; as numpy has it, what is made of FP32 is FP32. Arrays have a datatype
of their own and keep it.
"""

from __future__ import annotations

import math

from batchmill.types import Interface, Tensor
from batchmill.wire.datatypes import FLOAT, INT, Datatype
from batchmill.wire.tensor_request import Received
from batchmill.wire.tensor_results import Output

Kept = dict[str, Datatype]  # kind -> the one datatype in which numbers of it came


def kept_of(pairs: list[tuple[Received, Tensor | None]], interface: Interface) -> Kept:
    """Empty for a function that says what it takes or returns, or where numbers came in several datatypes."""
    if interface.has_schema or interface.outputs or interface.takes != "arguments":
        return {}
    if any(tensor is not None and tensor.datatype is not None for _, tensor in pairs):
        return {}
    kept: Kept = {}
    for kind in (INT, FLOAT):
        came = {received.datatype.name: received.datatype for received, _ in pairs if received.datatype.kind == kind}
        if len(came) == 1:
            kept[kind] = next(iter(came.values()))
    return kept


def as_received(output: Output, kept: Kept) -> Output:
    """An output of plain numbers in the datatype in which its kind came; as it is where that does not hold them."""
    datatype = kept.get(output.datatype.kind)
    if datatype is None or not output.is_plain or datatype == output.datatype:
        return output
    flat = output.values()
    if not all(datatype.low <= each <= datatype.high for each in flat if math.isfinite(each)):
        return output
    return Output(output.name, datatype, output.shape, flat)
