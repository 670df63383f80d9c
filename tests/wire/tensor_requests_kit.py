"""Requests and interfaces for the tests of tensors: a request as its JSON and binary parts, and what is read of it."""

import json
from typing import Any

import numpy as np

from batchmill.types import Interface, Tensor
from batchmill.wire.calls import CALL_FORMS, FunctionResults, ParsedCalls

STRICT, LENIENT = CALL_FORMS["tensors"], CALL_FORMS["inferless_tensors"]
SEED = Interface(
    [Tensor("prompt", "STRING", [1]), Tensor("shape", "INT8", [2], required=False, example=[512, 1])],
    takes="dict",
    has_schema=True,
)
PROMPT = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["There is a fine house in the forest"]}
UNTYPED = Interface([Tensor("x")])


def schema(datatype: str | None, shape: list[int], **more: Any) -> Interface:
    """An interface with the one input x, which is checked."""
    return Interface([Tensor("x", datatype, shape, **more)], has_schema=True)


def tensor(datatype: Any, shape: list[int], data: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data, **more}


def asked(request: Any, interface: Interface, *binary: bytes, form: Any = STRICT, **more: Any) -> ParsedCalls:
    """A request of JSON with these binary tensors behind it, as the form reads it."""
    text = json.dumps(request).encode()
    head = str(len(text)).encode() if binary else b""
    return form.read(text + b"".join(binary), head, interface, **more)


def value_of(request: Any, interface: Interface, *binary: bytes, **more: Any) -> Any:
    """The value of the input x in the one row of a request of one tensor."""
    found = asked({"inputs": [request]}, interface, *binary, **more)
    assert found.rows == 1
    return column_of(found)[0]


def column_of(found: ParsedCalls, name: str = "x") -> Any:
    """The values of an input by row; of an array, as nested lists."""
    value = json.loads(found.calls)[name]
    if not isinstance(value, dict):
        return value
    number, datatype, shape = value["$array"]
    assert datatype != "BYTES"
    return np.frombuffer(found.buffers[number], NUMPY[datatype]).reshape(shape).tolist()


NUMPY = {f"{sign}INT{bits}": f"<{sign.lower() or 'i'}{bits // 8}" for sign in ("", "U") for bits in (8, 16, 32, 64)}
NUMPY |= {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


def reply(value: Any, interface: Interface = UNTYPED, **request: Any) -> dict[str, Any]:
    """The reply, as JSON, to a request whose one row has this result."""
    body, head = written(FunctionResults(json.dumps([value]).encode()), interface, **request)
    assert head == b""
    return json.loads(body)


def written(
    results: FunctionResults, interface: Interface = UNTYPED, shape: Any = (1,), **request: Any
) -> tuple[bytes, bytes]:
    """What becomes of results for a request of INT64s of this shape."""
    shape = list(shape)
    inputs = [tensor("INT64", shape, [1] * int(np.prod(shape)))] if interface.inputs else []
    return STRICT.write(asked({"inputs": inputs, **request}, interface), results, "m", "3")


def outputs(value: Any, interface: Interface = UNTYPED, **request: Any) -> list[tuple[Any, ...]]:
    """(name, datatype, shape, data) of each output."""
    found = reply(value, interface, **request)["outputs"]
    return [(each["name"], each["datatype"], each["shape"], each["data"]) for each in found]
