"""Read V2 inference requests from bodies: JSON, JSON followed by binary tensors, or one raw tensor.

This module knows the protocol, not the function; `tensor_binary` checks whether tensors fit a function. Elements may be
flat or nested, and each is checked against its datatype; integers never pass through a float. msgspec alone reads valid
data; only invalid data are read again, to find the reason.
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
from batchmill.wire.tensors.datatypes import (
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
EMPTY_MAX = 65_536  # empty lists: they cost a client nothing, but the worker memory
HEAD_MAX = 2**31 - 1
CHARS_SHOWN = 80
SEQUENCE_CHARS_MAX = 128  # of a sequence_id that is a string
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


class InputTensor(Struct):
    """One input tensor: its elements as JSON or as bytes."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: Raw | None = None
    buffer: memoryview | None = None

    @property
    def elements(self) -> int:
        return elements_of(self.shape)


class RequestedOutput(Struct, frozen=True):
    """One requested output."""

    name: str
    binary: bool | None = None  # None: the request's own setting
    classes: int = 0  # for the classification extension; 0: the tensor itself


class TensorRequest(Struct):
    inputs: list[InputTensor]
    id: str | None = None
    requested_outputs: list[RequestedOutput] | None = None  # None: every output
    binary: bool = False  # for outputs without a setting of their own
    timeout_s: float | None = None


_request = msgspec.json.Decoder(_Request)


def read_request(body: bytes, head: bytes, interface: Interface) -> TensorRequest:
    """Read a request. `head` is the value of Inference-Header-Content-Length, or empty.

    Raises: InvalidInput, TooLarge.
    """
    length = _length_of_json(head, len(body))
    if length == 0:
        return _raw(body, interface)
    view = memoryview(body)
    text, rest = (body, view[:0]) if length is None else (view[:length], view[length:])
    decoded: _Request = parse(_request, text)
    if len(decoded.inputs) > INPUTS_MAX:
        raise TooLarge(f"the request has {len(decoded.inputs)} inputs; at most {INPUTS_MAX} are supported")
    request = TensorRequest(_inputs(decoded.inputs, rest), decoded.id, _requested_outputs(decoded.outputs))
    _apply_parameters(request, decoded.parameters or {})
    return request


def _length_of_json(head: bytes, size: int) -> int | None:
    """Parse the header. Raises: InvalidInput if it is not the length of a part of this body."""
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


def _inputs(decoded: list[_Input], rest: memoryview) -> list[InputTensor]:
    inputs, names, at = [], set(), 0
    for each in decoded:
        if each.name in names:
            raise InvalidInput(f"input '{each.name}' already exists in request", code="repeated_parameter")
        names.add(each.name)
        input_tensor = InputTensor(each.name, _datatype(each), _shape(each))
        size = _source(each, input_tensor)
        if size is not None:
            if size > len(rest) - at:
                message = (
                    f"unexpected size for input '{each.name}': {size} bytes of binary data, but got {len(rest) - at}"
                )
                raise InvalidInput(message, code="shape_mismatch")
            input_tensor.buffer = rest[at : at + size]
            at += size
        inputs.append(input_tensor)
    if at != len(rest):
        message = f"unexpected additional input data: {len(rest) - at} bytes belong to no input"
        raise InvalidInput(message, code="shape_mismatch")
    return inputs


def _datatype(each: _Input) -> Datatype:
    datatype = DATATYPES.get(each.datatype) if isinstance(each.datatype, str) else None
    if datatype is None:
        shown = msgspec.json.encode(each.datatype).decode()[:CHARS_SHOWN]
        names = ", ".join(name for name in DATATYPES if name != "STRING")
        raise InvalidInput(
            f"invalid datatype for input '{each.name}': {shown}; there are {names}", code="invalid_datatype"
        )
    return datatype


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
        raise InvalidInput(f"{message}; at most {RANK_MAX} and {ELEMENTS_MAX} are supported", code="invalid_shape")
    if 0 in shape and elements_of([dimension for dimension in shape if dimension]) > EMPTY_MAX:
        message = f"input '{each.name}' has no elements, and more than {EMPTY_MAX} rows of them: {shape}"
        raise InvalidInput(message, code="invalid_shape")
    return shape


def _source(each: _Input, input_tensor: InputTensor) -> int | None:
    """Find the elements. Returns None if they are in `received.data`, else their size in bytes after the JSON."""
    parameters = each.parameters or {}
    _refuse_reserved(parameters, f"input '{each.name}'")
    if parameters.get("content_type") == "base64":
        raise InvalidInput(
            f"input '{each.name}': send bytes as binary data, not as base64", code="unsupported_parameter"
        )
    data = None if bytes(each.data) == b"null" else each.data
    size = parameters.get("binary_data_size")
    if data is None and size is None and input_tensor.elements == 0:
        data = Raw(b"[]")
    if (data is None) == (size is None):
        detail = "no field was set" if size is None else "both were set"
        message = (
            f"Input '{each.name}' must set only one of 'data' and 'binary_data_size' in 'parameters', but {detail}"
        )
        raise InvalidInput(message, code="invalid_field")
    input_tensor.data = data
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise InvalidInput(
            f"input '{each.name}': binary_data_size must be 0 or more, not {size!r}", code="invalid_field"
        )
    return size


def _refuse_reserved(parameters: dict[str, Scalar], subject: str) -> None:
    for name in parameters:
        if name.startswith("triton_"):
            message = f"{subject}: parameter keys starting with 'triton_' are reserved: {name!r}"
            raise InvalidInput(message, code="unsupported_parameter")
        if name.startswith("shared_memory_"):
            raise InvalidInput(f"{subject}: shared memory is not supported ({name!r})", code="unsupported_parameter")


def _requested_outputs(decoded: list[_Output] | None) -> list[RequestedOutput] | None:
    if not decoded:  # as in Triton, no names mean all outputs
        return None
    requested: dict[str, RequestedOutput] = {}
    for each in decoded:
        subject, parameters = f"output '{each.name}'", each.parameters or {}
        if each.name in requested:
            raise InvalidInput(f"output '{each.name}' already exists in request", code="repeated_parameter")
        _refuse_reserved(parameters, subject)
        binary, classes = parameters.get("binary_data"), parameters.get("classification", 0)
        if binary is not None and type(binary) is not bool:
            raise InvalidInput(f"{subject}: binary_data must be true or false, not {binary!r}", code="invalid_field")
        if type(classes) is not int or classes < 0:
            raise InvalidInput(
                f"{subject}: classification must be a number of classes, not {classes!r}", code="invalid_field"
            )
        requested[each.name] = RequestedOutput(each.name, binary, classes)
    return list(requested.values())


def _apply_parameters(request: TensorRequest, parameters: dict[str, Scalar]) -> None:
    """Apply the request's own parameters. Parameters for models are accepted, and have no effect."""
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
    """Check the parameters of Triton's sequence and priority schedulers, which have no effect here.

    Source: Triton's sequence and schedule policy extensions.
    """
    name = parameters.get("sequence_id", 0)
    if isinstance(name, str):
        if len(name) > SEQUENCE_CHARS_MAX:
            raise InvalidInput(
                f"sequence_id has {len(name):,} characters; at most {SEQUENCE_CHARS_MAX} are supported",
                code="invalid_field",
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
    """Read a raw request: the body is the function's only input."""
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
            [InputTensor(tensor.name, datatype, _raw_text_shape(tensor.shape), buffer=memoryview(data))], binary=True
        )
    shape = _raw_shape(tensor.name, tensor.shape, datatype, len(body))
    return TensorRequest([InputTensor(tensor.name, datatype, shape, buffer=memoryview(body))], binary=True)


def _raw_text_shape(shape: list[int]) -> list[int]:
    if any(dimension not in (1, -1) for dimension in shape):
        raise InvalidInput(f"Raw request holds one element, and the input's shape is {shape}", code="invalid_request")
    return [1] * max(1, len(shape))


def _raw_shape(name: str, shape: list[int], datatype: Datatype, size: int) -> list[int]:
    """Return the declared shape, with its one variable dimension computed from the body's size."""
    if shape.count(-1) > 1:
        message = f"Raw request may have 1 variable dimension, and input '{name}' has shape {shape}"
        raise InvalidInput(message, code="invalid_request")
    unit = datatype.size * elements_of([dimension for dimension in shape if dimension != -1])
    filled = [size // unit if dimension == -1 and unit else dimension for dimension in shape]
    if elements_of(filled) * datatype.size != size:
        message = f"unexpected size for input '{name}': {size} bytes do not fill {datatype.name} {shape}"
        raise InvalidInput(message, code="shape_mismatch")
    return filled


DEPTH_MAX = 8  # deeper nesting has no typed decoder
VALUE_CHARS_SHOWN = 60
_TYPES = {BOOL: bool, INT: int, FLOAT: float, TEXT: str}
_WORDS = {BOOL: "true or false", INT: "an integer", FLOAT: "a number", TEXT: "a string"}
_opening = re.compile(rb"(?:\s*\[)+").match
_any = msgspec.json.Decoder()


def elements(input_tensor: InputTensor) -> list[Any]:
    """Read the elements in row-major order, by the datatype. Raises: InvalidInput, naming the first invalid one."""
    datatype = input_tensor.datatype
    flat = _read(input_tensor, datatype.kind)
    if flat is None:
        flat = [_element(value, input_tensor, datatype.kind, at) for at, value in enumerate(_walk(input_tensor))]
    _check_count(input_tensor, len(flat))
    if datatype.kind in (INT, FLOAT) and flat:
        _check_range(input_tensor, flat, datatype)
    return flat


def elements_leniently(input_tensor: InputTensor, kind: str, *, may_be_bool: bool) -> list[Any]:
    """Read the elements by their JSON types, as Inferless' tools send them: integers wider than declared are allowed.

    `kind` is declared by the function's input, or else by the tensor. In an integer tensor, true and false become 1 and
    0; with `may_be_bool` they are unchanged.
    """
    flat = _read(input_tensor, kind)
    if flat is None:
        flat = []
        for at, value in enumerate(_walk(input_tensor)):
            if isinstance(value, bool) and (may_be_bool or kind == INT):
                flat.append(value if may_be_bool else int(value))
            else:
                flat.append(_element(value, input_tensor, kind, at))
    _check_count(input_tensor, len(flat))
    if kind == INT and flat:
        for value in (min(flat), max(flat)):
            if not INT64_MIN <= value <= UINT64_MAX:
                raise _out_of_range(input_tensor, value, "64 bits")
    return flat


def nest(flat: list[Any], shape: list[int]) -> Any:
    """Build nested lists of this shape; for no dimensions, return the one element."""
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
    element_type: Any = _TYPES[kind]
    for _ in range(depth):
        element_type = list[element_type]
    return msgspec.json.Decoder(element_type)


def _read(input_tensor: InputTensor, kind: str) -> list[Any] | None:
    """Decode all elements if they are of this kind and evenly nested; None: they must be read one by one."""
    data = input_tensor.data
    assert data is not None
    opening = _opening(data)
    if opening is None:
        raise InvalidInput(f"the data of input '{input_tensor.name}' must be an array", code="invalid_value")
    depth = opening[0].count(b"[")
    if depth > DEPTH_MAX:
        return None
    try:
        values = _decoder(kind, depth).decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return parse(_any, data, f"the data of input '{input_tensor.name}'")
    for _ in range(depth - 1):
        values = list(chain.from_iterable(values))
    return values


def _walk(input_tensor: InputTensor) -> Iterator[Any]:
    """Yield the leaves of the data, at any nesting."""
    stack = [iter(parse(_any, input_tensor.data, f"the data of input '{input_tensor.name}'"))]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _element(value: Any, input_tensor: InputTensor, kind: str, at: int) -> Any:
    """Check one element, and convert it if nothing is lost."""
    if type(value) is _TYPES[kind]:
        return value
    if kind == FLOAT and type(value) is int:
        return float(value) if abs(value) <= EXACT_FLOAT_MAX or abs(value) < 1e308 else value
    if kind == INT and type(value) is float and value.is_integer() and abs(value) <= EXACT_FLOAT_MAX:
        return int(value)
    shown = msgspec.json.encode(value).decode()[:VALUE_CHARS_SHOWN]
    expected = _WORDS[kind] if kind != input_tensor.datatype.kind else f"{input_tensor.datatype.name} ({_WORDS[kind]})"
    message = f"input '{input_tensor.name}': element {at} is {shown}, which is not {expected}"
    raise InvalidInput(message, code="invalid_value")


def _check_count(input_tensor: InputTensor, count: int) -> None:
    if count != input_tensor.elements:
        message = (
            f"Failed to parse 'data' of input '{input_tensor.name}': shape {input_tensor.shape} of"
            f" {input_tensor.elements} elements does not match true shape of 'data' field, which has {count}"
        )
        raise InvalidInput(message, code="shape_mismatch")


def _check_range(input_tensor: InputTensor, flat: list[Any], datatype: Datatype) -> None:
    for value in (min(flat), max(flat)):
        if not datatype.low <= value <= datatype.high:
            raise _out_of_range(input_tensor, value, f"{datatype.name}, {datatype.low} to {datatype.high}")


def _out_of_range(input_tensor: InputTensor, value: Any, expected: str) -> InvalidInput:
    shown = str(value)[:VALUE_CHARS_SHOWN]
    return InvalidInput(
        f"input '{input_tensor.name}': {shown} is out of range of {expected}", code="number_out_of_range"
    )
