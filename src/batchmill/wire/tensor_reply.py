"""A V2 inference response: outputs chosen as the request wants them, as JSON or as binary tensors behind it."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from batchmill.errors import InvalidInput
from batchmill.wire.datatypes import DATATYPES, TEXT, elements_of, wire_name
from batchmill.wire.tensor_request import Wanted
from batchmill.wire.tensor_results import Output, bad_return

_encode = msgspec.json.Encoder().encode


def reply_of(
    head: dict[str, Any], outputs: list[Output], wanted: list[Wanted] | None, *, binary: bool
) -> tuple[bytes, bytes]:
    """The body, and the length of its JSON as digits; empty where the body is nothing else.

    Raises: InvalidInput for an output that the function did not return.
    """
    written, buffers = [], []
    for output, want in _chosen(outputs, wanted):
        if want.classes:
            output = classified(output, want.classes)
        member: dict[str, Any] = {
            "name": output.name,
            "datatype": wire_name(output.datatype.name),
            "shape": output.shape,
        }
        if binary if want.binary is None else want.binary:
            data = output.data()
            member["parameters"] = {"binary_data_size": len(data)}
            buffers.append(data)
        else:
            member["data"] = _json_values(output)
        written.append(member)
    text = _encode({**head, "outputs": written})
    if not buffers:
        return text, b""
    return b"".join([text, *buffers]), b"%d" % len(text)


def check_names(wanted: list[str], there: list[str]) -> None:
    """Raises: InvalidInput where an output is wanted that is not there."""
    for name in wanted:
        if name not in there:
            raise InvalidInput(f"unexpected inference output '{name}'; there are {there}", code="unknown_output")


def _chosen(outputs: list[Output], wanted: list[Wanted] | None) -> list[tuple[Output, Wanted]]:
    if wanted is None:
        return [(each, Wanted(each.name)) for each in outputs]
    named = {each.name: each for each in outputs}
    check_names([each.name for each in wanted], list(named))
    return [(named[each.name], each) for each in wanted]


def _json_values(output: Output) -> list[Any]:
    """The elements as JSON has them: NaN and infinities are written as null."""
    values = output.values()
    if output.datatype.kind != TEXT:
        return values
    try:
        return [each if isinstance(each, str) else each.decode() for each in values]
    except UnicodeDecodeError as error:
        message = f"Output {output.name} holds bytes that are not UTF-8, which only a binary reply can hold: {error}"
        raise bad_return(message) from None


def classified(output: Output, classes: int) -> Output:
    """The largest values of each vector along the last axis, as "value:index". Source: Triton, classification."""
    if output.datatype.kind == TEXT:
        raise InvalidInput(f"output '{output.name}' is BYTES and cannot be classified", code="unsupported_parameter")
    length = output.shape[-1]
    values, best = output.values(), []
    count = min(classes, length)
    for at in range(0, elements_of(output.shape), length or 1):
        vector = values[at : at + length]
        order = sorted(range(length), key=lambda index: _rank(vector[index]), reverse=True)
        best += [f"{_shown(vector[index])}:{index}" for index in order[:count]]
    return Output(output.name, DATATYPES["BYTES"], [*output.shape[:-1], count], best)


def _rank(value: float) -> float:
    return -math.inf if value != value else value


def _shown(value: Any) -> str:
    return f"{value:f}" if isinstance(value, float) else str(int(value))
