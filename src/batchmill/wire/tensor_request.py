"""A V2 inference request as it stands in a body: JSON, JSON with binary tensors behind it, or one raw tensor.

It knows the protocol and no function: whether tensors fit one is `tensor_binary`'s to say. Elements are flat or nested,
and checked against their datatype one by one; integers never pass through a float. msgspec alone reads good data; only
bad data are looked at again, to say why.
Source: the Open Inference Protocol, and Triton's binary-tensor, classification and schedule-policy extensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw, Struct

from batchmill.errors import InvalidInput, TooLarge
from batchmill.types import Interface
from batchmill.wire.calls import parse
from batchmill.wire.datatypes import (
    BOOL,
    DATATYPES,
    EXACT_FLOAT_MAX,
    FLOAT,
    INT,
    INT64_MIN,
    TEXT,
    UINT64_MAX,
    Datatype,
    elements_of,
)

INPUTS_MAX = 1024
RANK_MAX = 32
ELEMENTS_MAX = 2**31 - 1
EMPTY_MAX = 65_536  # lists without elements, which cost a request nothing and the worker memory
HEAD_MAX = 2**31 - 1
CHARS_SHOWN = 80
SEQUENCE_CHARS_MAX = 128  # of a sequence that is named by a text
Scalar = str | bool | int | float
_NONE = Raw(b"null")


class _Input(Struct):
    name: str
    shape: list[int]
    datatype: Any = None
    parameters: dict[str, Scalar] | None = None
    data: Raw = _NONE


class _Output(Struct):
    name: str
    parameters: dict[str, Scalar] | None = None


class _Request(Struct):
    inputs: list[_Input] = []
    id: str | None = None
    parameters: dict[str, Scalar] | None = None
    outputs: list[_Output] | None = None


class Received(Struct):
    """One input tensor: its elements as JSON or as bytes."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: Raw | None = None
    buffer: memoryview | None = None

    @property
    def elements(self) -> int:
        return elements_of(self.shape)


class Wanted(Struct, frozen=True):
    """One output as the request asks for it."""

    name: str
    binary: bool | None = None  # None: as the request says for all
    classes: int = 0  # of the classification extension; 0: the tensor itself


class TensorRequest(Struct):
    inputs: list[Received]
    id: str | None = None
    wanted: list[Wanted] | None = None  # None: every output
    binary: bool = False  # of outputs that do not say it themselves
    timeout_s: float | None = None


_request = msgspec.json.Decoder(_Request)


def read_request(body: bytes, head: bytes, interface: Interface) -> TensorRequest:
    """`head` is the value of Inference-Header-Content-Length, or empty. Raises: InvalidInput, TooLarge."""
    length = _length_of_json(head, len(body))
    if length == 0:
        return _raw(body, interface)
    view = memoryview(body)
    text, rest = (body, view[:0]) if length is None else (view[:length], view[length:])
    found: _Request = parse(_request, text)
    if len(found.inputs) > INPUTS_MAX:
        raise TooLarge(f"{len(found.inputs)} inputs are more than the {INPUTS_MAX} that a request may have")
    request = TensorRequest(_inputs(found.inputs, rest), found.id, _wanted(found.outputs))
    _heed(request, found.parameters or {})
    return request


def _length_of_json(head: bytes, size: int) -> int | None:
    """Raises: InvalidInput for a header that is no length of a part of this body."""
    if not head:
        return None
    text = bytes(head).strip()
    if not text.isdigit() or len(text) > 12 or int(text) > HEAD_MAX:
        shown = text[:CHARS_SHOWN].decode(errors="replace")
        raise InvalidInput(
            f"Inference-Header-Content-Length must be 0 to {HEAD_MAX}, not {shown!r}", code="invalid_header"
        )
    if int(text) > size:
        message = f"Inference-Header-Content-Length is {int(text)}, and the whole body has {size} bytes"
        raise InvalidInput(message, code="invalid_header")
    return int(text)


def _inputs(found: list[_Input], rest: memoryview) -> list[Received]:
    inputs, names, at = [], set(), 0
    for each in found:
        if each.name in names:
            raise InvalidInput(f"input '{each.name}' already exists in request", code="repeated_parameter")
        names.add(each.name)
        received = Received(each.name, _datatype(each), _shape(each))
        size = _source(each, received)
        if size is not None:
            if size > len(rest) - at:
                message = (
                    f"unexpected size for input '{each.name}': {size} bytes of binary data, and {len(rest) - at} came"
                )
                raise InvalidInput(message, code="shape_mismatch")
            received.buffer = rest[at : at + size]
            at += size
        inputs.append(received)
    if at != len(rest):
        message = f"unexpected additional input data: {len(rest) - at} bytes belong to no input"
        raise InvalidInput(message, code="shape_mismatch")
    return inputs


def _datatype(each: _Input) -> Datatype:
    found = DATATYPES.get(each.datatype) if isinstance(each.datatype, str) else None
    if found is None:
        shown = msgspec.json.encode(each.datatype).decode()[:CHARS_SHOWN]
        known = ", ".join(name for name in DATATYPES if name != "STRING")
        raise InvalidInput(
            f"invalid datatype for input '{each.name}': {shown}; there are {known}", code="invalid_datatype"
        )
    return found


def _shape(each: _Input) -> list[int]:
    shape = each.shape
    if any(dimension < 0 for dimension in shape):
        message = (
            f"Unable to parse 'shape' of input '{each.name}': attempt to access JSON non-unsigned-integer as"
            f" unsigned-integer; {shape} has a negative dimension"
        )
        raise InvalidInput(message, code="invalid_shape")
    if len(shape) > RANK_MAX or elements_of(shape) > ELEMENTS_MAX:
        message = f"input '{each.name}' has {len(shape)} dimensions and {elements_of(shape)} elements"
        raise InvalidInput(f"{message}; at most {RANK_MAX} and {ELEMENTS_MAX} are taken", code="invalid_shape")
    if 0 in shape and elements_of([dimension for dimension in shape if dimension]) > EMPTY_MAX:
        message = f"input '{each.name}' has no elements, and more than {EMPTY_MAX} rows of them: {shape}"
        raise InvalidInput(message, code="invalid_shape")
    return shape


def _source(each: _Input, received: Received) -> int | None:
    """Where its elements are: in `received.data`, or None with so many bytes behind the JSON."""
    parameters = each.parameters or {}
    _refuse_reserved(parameters, f"input '{each.name}'")
    if parameters.get("content_type") == "base64":
        raise InvalidInput(
            f"input '{each.name}': send bytes as binary data, not as base64", code="unsupported_parameter"
        )
    data = None if bytes(each.data) == b"null" else each.data
    size = parameters.get("binary_data_size")
    if data is None and size is None and received.elements == 0:
        data = Raw(b"[]")
    if (data is None) == (size is None):
        said = "no field was set" if size is None else "both were set"
        message = f"Input '{each.name}' must set only one of 'data' and 'binary_data_size' in 'parameters', but {said}"
        raise InvalidInput(message, code="invalid_field")
    received.data = data
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidInput(
            f"input '{each.name}': binary_data_size must be 0 or more, not {size!r}", code="invalid_field"
        )
    return size


def _refuse_reserved(parameters: dict[str, Scalar], place: str) -> None:
    for name in parameters:
        if name.startswith("triton_"):
            message = f"{place}: parameter keys starting with 'triton_' are reserved: {name!r}"
            raise InvalidInput(message, code="unsupported_parameter")
        if name.startswith("shared_memory_"):
            raise InvalidInput(f"{place}: shared memory is not supported ({name!r})", code="unsupported_parameter")


def _wanted(found: list[_Output] | None) -> list[Wanted] | None:
    if not found:  # as Triton has it, who names none wants all
        return None
    wanted: dict[str, Wanted] = {}
    for each in found:
        place, parameters = f"output '{each.name}'", each.parameters or {}
        if each.name in wanted:
            raise InvalidInput(f"output '{each.name}' already exists in request", code="repeated_parameter")
        _refuse_reserved(parameters, place)
        binary, classes = parameters.get("binary_data"), parameters.get("classification", 0)
        if binary is not None and type(binary) is not bool:
            raise InvalidInput(f"{place}: binary_data must be true or false, not {binary!r}", code="invalid_field")
        if type(classes) is not int or classes < 0:
            raise InvalidInput(
                f"{place}: classification must be a number of classes, not {classes!r}", code="invalid_field"
            )
        wanted[each.name] = Wanted(each.name, binary, classes)
    return list(wanted.values())


def _heed(request: TensorRequest, parameters: dict[str, Scalar]) -> None:
    """Take the request's own parameters over. What the protocol leaves to a model is a scalar, and means nothing."""
    _refuse_reserved(parameters, "the request")
    if parameters.get("headers"):
        raise InvalidInput("the parameter headers is not supported: it is reserved", code="unsupported_parameter")
    _check_scheduling(parameters)
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise InvalidInput(f"timeout must be microseconds, 0 or more, not {timeout!r}", code="invalid_field")
    binary = parameters.get("binary_data_output", False)
    if type(binary) is not bool:
        raise InvalidInput(f"binary_data_output must be true or false, not {binary!r}", code="invalid_field")
    request.timeout_s = timeout / 1e6 if timeout else None
    request.binary = binary


def _check_scheduling(parameters: dict[str, Scalar]) -> None:
    """What Triton's schedulers of sequences and priorities read, of which a model without them has no use.

    Source: Triton's sequence and schedule policy extensions.
    """
    name = parameters.get("sequence_id", 0)
    if isinstance(name, str):
        if len(name) > SEQUENCE_CHARS_MAX:
            raise InvalidInput(
                f"sequence_id has {len(name):,} characters; there may be {SEQUENCE_CHARS_MAX}", code="invalid_field"
            )
    elif type(name) is not int or not 0 <= name < 2**64:
        raise InvalidInput(f"sequence_id must be an unsigned integer or a string, not {name!r}", code="invalid_field")
    for key in ("sequence_start", "sequence_end"):
        value = parameters.get(key, False)
        if type(value) is not bool:
            raise InvalidInput(f"{key} must be true or false, not {value!r}", code="invalid_field")
    priority = parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority < 2**64:
        raise InvalidInput(f"priority must be an unsigned integer, not {priority!r}", code="invalid_field")


def _raw(body: bytes, interface: Interface) -> TensorRequest:
    """A body that is the one input of the function, and nothing else."""
    inputs = interface.inputs
    if len(inputs) != 1:
        names = [each.name for each in inputs]
        message = f"Raw request must only have 1 input to be deduced but got {len(inputs)} inputs: {names}"
        raise InvalidInput(message, code="invalid_request")
    tensor = inputs[0]
    datatype = DATATYPES.get(tensor.datatype or "")
    if datatype is None:
        message = f"Raw request needs an input with a datatype, and '{tensor.name}' has none"
        raise InvalidInput(message, code="invalid_request")
    if datatype.kind == TEXT:
        data = len(body).to_bytes(4, "little") + body
        return TensorRequest(
            [Received(tensor.name, datatype, _raw_text_shape(tensor.shape), buffer=memoryview(data))], binary=True
        )
    shape = _raw_shape(tensor.name, tensor.shape, datatype, len(body))
    return TensorRequest([Received(tensor.name, datatype, shape, buffer=memoryview(body))], binary=True)


def _raw_text_shape(shape: list[int]) -> list[int]:
    if any(dimension not in (1, -1) for dimension in shape):
        raise InvalidInput(f"Raw request holds one element, and the input's shape is {shape}", code="invalid_request")
    return [1] * max(1, len(shape))


def _raw_shape(name: str, shape: list[int], datatype: Datatype, size: int) -> list[int]:
    """The declared shape, its one variable dimension found from the body's size."""
    if shape.count(-1) > 1:
        message = f"Raw request may have 1 variable dimension, and input '{name}' has shape {shape}"
        raise InvalidInput(message, code="invalid_request")
    unit = datatype.size * elements_of([dimension for dimension in shape if dimension != -1])
    filled = [size // unit if dimension == -1 and unit else dimension for dimension in shape]
    if elements_of(filled) * datatype.size != size:
        message = f"unexpected size for input '{name}': {size} bytes do not fill {datatype.name} {shape}"
        raise InvalidInput(message, code="shape_mismatch")
    return filled


DEPTH_MAX = 8  # of nesting that is read by a decoder of its own
VALUE_CHARS_SHOWN = 60
_TYPES = {BOOL: bool, INT: int, FLOAT: float, TEXT: str}
_WORDS = {BOOL: "true or false", INT: "an integer", FLOAT: "a number", TEXT: "a string"}
_opening = re.compile(rb"(?:\s*\[)+").match
_any = msgspec.json.Decoder()


def elements(received: Received) -> list[Any]:
    """Its elements in row-major order, as the datatype has them. Raises: InvalidInput, naming the first bad one."""
    datatype = received.datatype
    found = _read(received, datatype.kind)
    if found is None:
        found = [_element(value, received, datatype.kind, at) for at, value in enumerate(_walk(received))]
    _check_count(received, len(found))
    if datatype.kind in (INT, FLOAT) and found:
        _check_range(received, found, datatype)
    return found


def elements_leniently(received: Received, kind: str, *, may_be_bool: bool) -> list[Any]:
    """Its elements by their own JSON types, as Inferless' tools send them: an integer wider than declared passes.

    `kind` is what the function's input declares, or else the tensor's. True and false are 1 and 0 of an integer; with
    `may_be_bool` they stay what they are.
    """
    found = _read(received, kind)
    if found is None:
        found = []
        for at, value in enumerate(_walk(received)):
            if isinstance(value, bool) and (may_be_bool or kind == INT):
                found.append(value if may_be_bool else int(value))
            else:
                found.append(_element(value, received, kind, at))
    _check_count(received, len(found))
    if kind == INT and found:
        for value in (min(found), max(found)):
            if not INT64_MIN <= value <= UINT64_MAX:
                raise _out_of_range(received, value, "64 bits")
    return found


def nest(flat: list[Any], shape: list[int]) -> Any:
    """The nested lists of this shape; of no dimension, the one element itself."""
    if not shape:
        return flat[0]
    for dimension in reversed(shape[1:]):
        if dimension == 0:
            return _empty(shape)
        flat = [flat[at : at + dimension] for at in range(0, len(flat), dimension)]
    return flat


def _empty(shape: list[int]) -> list[Any]:
    return [_empty(shape[1:]) for _ in range(shape[0])] if len(shape) > 1 else []


@lru_cache(maxsize=64)
def _decoder(kind: str, depth: int) -> msgspec.json.Decoder:
    wanted: Any = _TYPES[kind]
    for _ in range(depth):
        wanted = list[wanted]
    return msgspec.json.Decoder(wanted)


def _read(received: Received, kind: str) -> list[Any] | None:
    """All elements, where they are of this kind and evenly nested; None: they need a closer look."""
    data = received.data
    assert data is not None
    opening = _opening(data)
    if opening is None:
        raise InvalidInput(f"the data of input '{received.name}' must be an array", code="invalid_value")
    depth = opening[0].count(b"[")
    if depth > DEPTH_MAX:
        return None
    try:
        found = _decoder(kind, depth).decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return parse(_any, data, f"the data of input '{received.name}'")
    for _ in range(depth - 1):
        found = list(chain.from_iterable(found))
    return found


def _walk(received: Received) -> Iterator[Any]:
    """The leaves of the data, however they are nested."""
    stack = [iter(parse(_any, received.data, f"the data of input '{received.name}'"))]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _element(value: Any, received: Received, kind: str, at: int) -> Any:
    """One element, converted where nothing is lost by it."""
    if type(value) is _TYPES[kind]:
        return value
    if kind == FLOAT and type(value) is int:
        return float(value) if abs(value) <= EXACT_FLOAT_MAX or abs(value) < 1e308 else value
    if kind == INT and type(value) is float and value.is_integer() and abs(value) <= EXACT_FLOAT_MAX:
        return int(value)
    shown = msgspec.json.encode(value).decode()[:VALUE_CHARS_SHOWN]
    wanted = _WORDS[kind] if kind != received.datatype.kind else f"{received.datatype.name} ({_WORDS[kind]})"
    message = f"input '{received.name}': element {at} is {shown}, which is not {wanted}"
    raise InvalidInput(message, code="invalid_value")


def _check_count(received: Received, count: int) -> None:
    if count != received.elements:
        message = (
            f"Failed to parse 'data' of input '{received.name}': shape {received.shape} of {received.elements} elements"
            f" does not match true shape of 'data' field, which has {count}"
        )
        raise InvalidInput(message, code="shape_mismatch")


def _check_range(received: Received, found: list[Any], datatype: Datatype) -> None:
    for value in (min(found), max(found)):
        if not datatype.low <= value <= datatype.high:
            raise _out_of_range(received, value, f"{datatype.name}, {datatype.low} to {datatype.high}")


def _out_of_range(received: Received, value: Any, expected: str) -> InvalidInput:
    shown = str(value)[:VALUE_CHARS_SHOWN]
    return InvalidInput(f"input '{received.name}': {shown} is out of range of {expected}", code="number_out_of_range")
