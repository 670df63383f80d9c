"""Write results of a function as a V2 inference response: datatypes, shapes, and outputs as JSON or binary tensors.

The values of many rows become one tensor. If a function declares no datatype, its plain numbers get the datatype of the
request's numbers, since Python has only one integer and one float type. Arrays keep their own.
Source: Inferless' runtime and its messages; the Open Inference Protocol with Triton's binary extension.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import BatchmillError, InvalidInput, ModelFailed
from batchmill.types import Interface, Tensor
from batchmill.wire.tensors import binary as tensor_binary
from batchmill.wire.tensors.binary import FLAT, NONE, Layout
from batchmill.wire.tensors.datatypes import (
    DATATYPES,
    FLOAT,
    INT,
    INT64_MAX,
    INT64_MIN,
    TEXT,
    UINT64_MAX,
    Datatype,
    elements_of,
    wire_name,
)
from batchmill.wire.tensors.requests import InputTensor, RequestedOutput

ARRAY, OBJECT = "$array", "$object"
DEFAULT_OUTPUT = "output"  # the name of a result that is not a dict
ROW_TYPES = {bool: DATATYPES["BOOL"], int: DATATYPES["INT64"], float: DATATYPES["FP64"], str: DATATYPES["BYTES"]}
PIECE_BYTES_MIN = 64 * 1024  # of an array: joining it with the rest of a body would cost a copy
Buffers = list[bytes | memoryview]


class Output(Struct):
    """One output tensor: its elements as Python values in row-major order, or as bytes."""

    name: str
    datatype: Datatype
    shape: list[int]
    flat: list[Any] | None = None
    buffer: bytes | memoryview | None = None
    is_plain: bool = False  # Python's own numbers, which have no datatype

    def values(self) -> list[Any]:
        """The elements; those of BYTES may be bytes."""
        if self.flat is None:
            assert self.buffer is not None
            if self.datatype.kind == TEXT:
                self.flat = _texts(self.name, self.buffer)
            else:
                self.flat = tensor_binary.values_of(self.buffer, self.datatype)
        return self.flat

    def data(self) -> bytes | memoryview:
        if self.buffer is None:
            assert self.flat is not None
            self.buffer = tensor_binary.pack(self.flat, self.datatype)
        return self.buffer


def bad_return(message: str) -> BatchmillError:
    return ModelFailed(message, code="bad_return")


def outputs_of_columns(columns: dict[str, Any], buffers: Buffers, interface: Interface, layout: Layout) -> list[Output]:
    """Make outputs of arrays whose first axis is the row."""
    outputs = []
    for name, marker in columns.items():
        output = _array_output(name, marker, buffers)
        shape = output.shape
        if not shape or shape[0] != layout.rows:
            raise bad_return(f"Output {name} has shape {shape} for {layout.rows} rows")
        if layout.axis == NONE:
            output.shape = shape[1:] or [1]
        elif len(shape) == 1 and layout.axis != FLAT:
            output.shape = [*shape, 1]
        outputs.append(_as_declared(output, _declaration(name, interface), interface))
    return _in_order(outputs, interface)


def outputs_of_rows(rows: list[Any], buffers: Buffers, interface: Interface, layout: Layout) -> list[Output]:
    """Make outputs of each row's value, which is a dict of outputs or one value. Raises: ModelFailed bad_return."""
    results = [_by_name(row, interface) for row in rows]
    names = list(results[0])
    cells: dict[str, list[Output]] = {name: [] for name in names}
    for number, result in enumerate(results):
        if result.keys() != cells.keys():
            first, other = sorted(cells), sorted(result)
            raise bad_return(
                f"the rows of this request have different outputs: row 1 {first}, row {number + 1} {other}"
            )
        for name, value in result.items():
            cells[name].append(_cell_output(name, value, buffers, _declaration(name, interface)))
    outputs = [_join(name, cells[name], layout) for name in names]
    return _in_order([_as_declared(each, _declaration(each.name, interface), interface) for each in outputs], interface)


def _is_app(interface: Interface) -> bool:
    """Whether the outputs are declared by a schema, not by a type hint."""
    return interface.takes != "arguments" and interface.outputs is not None


def _by_name(row: Any, interface: Interface) -> dict[str, Any]:
    """Return a result as outputs by name, without optional ones that are None."""
    is_dict = isinstance(row, dict) and ARRAY not in row
    if not is_dict:
        if interface.takes == "dict" or (interface.takes == "rows" and interface.has_schema):
            raise bad_return(f"infer must return a dictionary of outputs, and returned {_kind(row)}")
        declared = interface.outputs or []
        if len(declared) > 1:
            names = [each.name for each in declared]
            raise bad_return(f"the function must return a dictionary of its outputs {names}, and returned {_kind(row)}")
        return {declared[0].name if declared else DEFAULT_OUTPUT: row}
    outputs = row.get(OBJECT, row)
    optional = {each.name for each in interface.outputs or [] if not each.required}
    return {name: value for name, value in outputs.items() if value is not None or name not in optional}


def _declaration(name: str, interface: Interface) -> Tensor | None:
    return next((each for each in interface.outputs or [] if each.name == name), None)


def _cell_output(name: str, value: Any, buffers: Buffers, declared: Tensor | None) -> Output:
    """Make a tensor of one value."""
    if isinstance(value, dict) and ARRAY in value:
        output = _array_output(name, value, buffers)
        output.shape = output.shape or [1]
        return output
    if isinstance(value, list):
        return _list_output(name, value, buffers, declared)
    datatype = ROW_TYPES.get(type(value))
    if datatype is None:
        raise _type_error(name, value, "")
    wide = _int_datatype(name, [value]) if datatype.kind == INT else datatype
    return Output(name, wide, [1], [value], is_plain=True)


def _list_output(name: str, items: list[Any], buffers: Buffers, declared: Tensor | None) -> Output:
    shape, flat = [len(items)], items
    while flat and isinstance(flat[0], list):
        length = len(flat[0])
        for each in flat:
            if not isinstance(each, list) or len(each) != length:
                raise bad_return(f"Output {name} is a nested list whose parts have different lengths")
        shape.append(length)
        flat = list(chain.from_iterable(flat))
    if not flat:
        datatype = DATATYPES.get((declared.datatype if declared else None) or "")
        if datatype is None:
            message = (
                f"Output {name} is an empty list, so its type is unknown. Please provide a non-empty list as output."
            )
            raise bad_return(message)
        return Output(name, datatype, shape, [])
    if any(isinstance(each, dict) for each in flat):
        return _list_of_arrays(name, flat, shape, buffers)
    datatype = _type_of_all(name, flat)
    return Output(name, datatype, shape, list(map(float, flat)) if datatype.kind == FLOAT else flat, is_plain=True)


def _type_of_all(name: str, flat: list[Any]) -> Datatype:
    """Return the common datatype of these values; integers mixed with floats are floats."""
    kinds = set(map(type, flat))
    if kinds == {int}:
        return _int_datatype(name, flat)
    if kinds == {float} or kinds == {int, float}:
        return ROW_TYPES[float]
    if len(kinds) == 1 and flat[0] is not None and type(flat[0]) in ROW_TYPES:
        return ROW_TYPES[type(flat[0])]
    first = type(flat[0])
    for at, value in enumerate(flat):
        if type(value) not in ROW_TYPES:
            raise _type_error(name, value, f" at index {at}")
        if type(value) is not first and {type(value), first} != {int, float}:
            message = f"Output {name} mixes types: item {at} is {_kind(value)}, and the first one is {_kind(flat[0])}"
            raise bad_return(message)
    raise bad_return(f"Output {name} mixes types: {sorted(kind.__name__ for kind in kinds)}")


def _int_datatype(name: str, flat: list[int]) -> Datatype:
    low, high = min(flat), max(flat)
    if low >= INT64_MIN and high <= INT64_MAX:
        return ROW_TYPES[int]
    if low < 0 or high > UINT64_MAX:
        raise bad_return(
            f"Output {name} has the value {high if high > UINT64_MAX else low}, which does not fit in 64 bits"
        )
    return DATATYPES["UINT64"]


def _list_of_arrays(name: str, flat: list[Any], shape: list[int], buffers: Buffers) -> Output:
    """Make a tensor of a list with arrays: numpy's scalars, bytes, numbers that JSON lacks, or arrays of one shape."""
    parts = []
    for at, value in enumerate(flat):
        if isinstance(value, dict) and ARRAY not in value:
            raise _type_error(name, value, f" at index {at}")
        is_array = isinstance(value, dict)
        parts.append(_array_output(name, value, buffers) if is_array else _cell_output(name, value, buffers, None))
        if not is_array:
            parts[-1].shape = []
    inner = parts[0].shape
    if any(part.shape != inner for part in parts):
        raise bad_return(f"Output {name} is a list of arrays of different shapes")
    datatype = _common_datatype(name, [part.datatype for part in parts])
    flat = list(chain.from_iterable(part.values() for part in parts))
    flat = list(map(float, flat)) if datatype.kind == FLOAT else flat
    return Output(name, datatype, [*shape, *inner], flat, is_plain=all(part.is_plain for part in parts))


def _common_datatype(name: str, datatypes: list[Datatype]) -> Datatype:
    """Return the common datatype of several: mixed numbers become floats, or the widest integers."""
    if all(each == datatypes[0] for each in datatypes):
        return datatypes[0]
    kinds = {each.kind for each in datatypes}
    if kinds == {INT}:
        low, high = min(each.low for each in datatypes), max(each.high for each in datatypes)
        fitting = [each for each in DATATYPES.values() if each.kind == INT and each.low <= low and high <= each.high]
        return min(fitting, key=lambda each: each.size) if fitting else DATATYPES["INT64"]
    if kinds <= {INT, FLOAT}:
        return DATATYPES["FP64"]
    if kinds == {TEXT}:
        return DATATYPES["BYTES"]
    raise bad_return(f"Output {name} mixes types: {sorted({each.name for each in datatypes})}")


def _join(name: str, cells: list[Output], layout: Layout) -> Output:
    """Join the values of all rows into one tensor; its first axis is the row if the request had such an axis."""
    first = cells[0]
    if layout.axis == NONE:
        return first
    for row, cell in enumerate(cells):
        if cell.shape != first.shape:
            message = f"Output {name} has shape {first.shape} in row 1 and {cell.shape} in row {row + 1} of one request"
            raise bad_return(message)
    shape = [len(cells)] if layout.axis == FLAT and first.shape == [1] else [len(cells), *first.shape]
    datatype, is_plain = _common_datatype(name, [cell.datatype for cell in cells]), all(cell.is_plain for cell in cells)
    if all(cell.buffer is not None and cell.datatype == datatype for cell in cells):
        joined = b"".join([cell.data() for cell in cells])
        return Output(name, datatype, shape, buffer=joined, is_plain=is_plain)
    flat = list(chain.from_iterable(cell.values() for cell in cells))
    if datatype.kind == INT:
        datatype = (
            datatype if all(datatype.low <= value <= datatype.high for value in flat) else _int_datatype(name, flat)
        )
    flat = list(map(float, flat)) if datatype.kind == FLOAT else flat
    return Output(name, datatype, shape, flat, is_plain=is_plain)


def _as_declared(output: Output, declared: Tensor | None, interface: Interface) -> Output:
    """Convert an output to its declared datatype. A type hint only turns integers to floats; a schema must fit."""
    target = DATATYPES.get((declared.datatype if declared else None) or "")
    if target is None or target == output.datatype or (target.kind == TEXT and output.datatype.kind == TEXT):
        return output
    is_widening = target.kind == FLOAT and output.datatype.kind == INT and output.buffer is None
    if not interface.has_schema and not _is_app(interface) and not is_widening:
        return output
    if output.buffer is not None:
        convert = tensor_binary.convert(output.buffer, output.datatype, target)
        if convert is not None:
            return Output(output.name, target, output.shape, buffer=convert)
    elif (flat := _convert(output.values(), output.datatype, target)) is not None:
        return Output(output.name, target, output.shape, flat)
    if not _is_app(interface):
        return output
    message = f"Output {output.name} is {output.datatype.name}, which does not fit the declared {target.name}"
    raise bad_return(message)


def _convert(flat: list[Any], datatype: Datatype, target: Datatype) -> list[Any] | None:
    """Convert values to another datatype; None: a value would change."""
    if datatype.kind not in (INT, FLOAT) or target.kind not in (INT, FLOAT):
        return None
    if target.kind == FLOAT:
        return (
            None
            if any(abs(each) > target.high and abs(each) != float("inf") for each in flat)
            else list(map(float, flat))
        )
    whole = [int(each) for each in flat if each == each and abs(each) != float("inf") and int(each) == each]
    return whole if len(whole) == len(flat) and all(target.low <= each <= target.high for each in whole) else None


def _in_order(outputs: list[Output], interface: Interface) -> list[Output]:
    """Check that all required outputs are there. Raises: ModelFailed if one that the schema lists is missing."""
    if _is_app(interface):
        names = {each.name for each in outputs}
        for each in interface.outputs or []:
            if each.required and each.name not in names:
                raise bad_return(f"{each.name} not found in the inference response, which has {sorted(names)}")
    return outputs


def _array_output(name: str, marker: dict[str, Any], buffers: Buffers) -> Output:
    number, datatype, shape, *plain = marker[ARRAY]
    return Output(name, DATATYPES[datatype], list(shape), buffer=buffers[number], is_plain=bool(plain))


def _texts(name: str, buffer: bytes | memoryview) -> list[Any]:
    texts = tensor_binary.split_texts(buffer)
    assert texts is not None, f"the bytes of output {name} are broken"
    return texts


def _type_error(name: str, value: Any, position: str) -> BatchmillError:
    if isinstance(value, dict | list):
        message = (
            f"Output {name}{position} is of type dictionary or tuple which is currently not supported."
            f" You can try json.dumps({name})"
        )
        return bad_return(message)
    return bad_return(f"Output {name}{position} is {_kind(value)}, which has no datatype")


def _kind(value: Any) -> str:
    if isinstance(value, dict) and ARRAY in value:
        return "an array"
    return {dict: "dict", list: "list", type(None): "None"}.get(type(value), type(value).__name__)


_encode = msgspec.json.Encoder().encode


def reply_of(
    head: dict[str, Any], outputs: list[Output], requested: list[RequestedOutput] | None, *, binary: bool
) -> tuple[list[bytes], bytes]:
    """Return the pieces of the body, and the length of its JSON as digits; empty if the body is JSON only.

    A body with an array of PIECE_BYTES_MIN is in several pieces, any other one in one.

    Raises: InvalidInput for an output that the function did not return.
    """
    members, buffers = [], []
    for output, request in _select(outputs, requested):
        if request.classes:
            output = classified(output, request.classes)
        member: dict[str, Any] = {
            "name": output.name,
            "datatype": wire_name(output.datatype.name),
            "shape": output.shape,
        }
        if binary if request.binary is None else request.binary:
            data = output.data()
            member["parameters"] = {"binary_data_size": len(data)}
            buffers.append(data)
        else:
            member["data"] = _json_values(output)
        members.append(member)
    text = _encode({**head, "outputs": members})
    if not buffers:
        return [text], b""
    pieces = [text, *buffers]
    is_large = max(map(len, buffers)) >= PIECE_BYTES_MIN
    return pieces if is_large else [b"".join(pieces)], b"%d" % len(text)


def check_names(requested: list[str], available: list[str]) -> None:
    """Raises: InvalidInput for a requested output that does not exist."""
    for name in requested:
        if name not in available:
            raise InvalidInput(f"unexpected inference output '{name}'; there are {available}", code="unknown_output")


def _select(outputs: list[Output], requested: list[RequestedOutput] | None) -> list[tuple[Output, RequestedOutput]]:
    if requested is None:
        return [(each, RequestedOutput(each.name)) for each in outputs]
    named = {each.name: each for each in outputs}
    check_names([each.name for each in requested], list(named))
    return [(named[each.name], each) for each in requested]


def _json_values(output: Output) -> list[Any]:
    """Return the elements for JSON, in which NaN and infinities become null."""
    values = output.values()
    if output.datatype.kind != TEXT:
        return values
    try:
        return [each if isinstance(each, str) else each.decode() for each in values]
    except UnicodeDecodeError as error:
        message = f"Output {output.name} has bytes that are not UTF-8, which need a binary reply: {error}"
        raise bad_return(message) from None


def classified(output: Output, classes: int) -> Output:
    """Return the largest values of each vector along the last axis as "value:index". Source: Triton, classification."""
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


NumberDatatypes = dict[str, Datatype]  # kind of number -> the one datatype that the request uses for it


def find_number_datatypes(pairs: list[tuple[InputTensor, Tensor | None]], interface: Interface) -> NumberDatatypes:
    """Find the datatypes of the request's numbers. A kind with several datatypes has none, and the result is empty for
    a function that declares its inputs or outputs.
    """
    if interface.has_schema or interface.outputs or interface.takes != "arguments":
        return {}
    if any(tensor is not None and tensor.datatype is not None for _, tensor in pairs):
        return {}
    result: NumberDatatypes = {}
    for kind in (INT, FLOAT):
        datatypes = {each.datatype.name: each.datatype for each, _ in pairs if each.datatype.kind == kind}
        if len(datatypes) == 1:
            result[kind] = next(iter(datatypes.values()))
    return result


def with_number_datatype(output: Output, number_datatypes: NumberDatatypes) -> Output:
    """Convert an output of plain numbers to the request's datatype of its kind; unchanged if the values do not fit."""
    datatype = number_datatypes.get(output.datatype.kind)
    if datatype is None or not output.is_plain or datatype == output.datatype:
        return output
    flat = output.values()
    if not all(datatype.low <= each <= datatype.high for each in flat if math.isfinite(each)):
        return output
    return Output(output.name, datatype, output.shape, flat)
