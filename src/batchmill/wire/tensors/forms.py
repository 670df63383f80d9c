"""The forms "tensors" and "inferless_tensors": V2 inference requests and replies, with JSON or binary tensors.

Source: the Open Inference Protocol, REST; Triton's binary-tensor and classification extensions.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire.calls import COLUMNS, FunctionResults, ParsedCalls, failure
from batchmill.wire.tensors import binary as tensor_binary
from batchmill.wire.tensors.binary import NONE, Layout, check_datatype, declared_datatype, find_layout, match_inputs
from batchmill.wire.tensors.datatypes import BOOL, DATATYPES, FLOAT, INT, INT64_MAX, TEXT, Datatype, wire_name
from batchmill.wire.tensors.requests import (
    InputTensor,
    RequestedOutput,
    elements,
    elements_leniently,
    nest,
    read_request,
)
from batchmill.wire.tensors.results import (
    ARRAY,
    Buffers,
    NumberDatatypes,
    Output,
    check_names,
    find_number_datatypes,
    outputs_of_columns,
    outputs_of_rows,
    reply_of,
    with_number_datatype,
)

_encode = msgspec.json.Encoder().encode
_any = msgspec.json.Decoder()


class _State(Struct, gc=False):
    """The part of a request that its reply needs."""

    id: str | None
    requested: list[RequestedOutput] | None
    binary: bool
    layout: Layout
    interface: Interface
    number_datatypes: NumberDatatypes


class _Column(Struct):
    """One input: a value for each row, or an array whose first axis is the row."""

    values: Any = None
    shape: list[int] = []
    datatype: Datatype | None = None
    buffer: bytes | memoryview | None = None

    def to_json(self, buffers: Buffers) -> bytes:
        """Encode the column as JSON; an array's bytes are added to `buffers`."""
        if self.datatype is None or self.buffer is None:
            return _encode(self.values)
        buffers.append(self.buffer)
        return _encode({ARRAY: [len(buffers) - 1, wire_name(self.datatype.name), self.shape]})


class TensorsForm:
    """The strict form: a tensor must match its own datatype, shape and range, and those that its input declares."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """`head` is the value of Inference-Header-Content-Length. Raises: InvalidInput, naming input and value."""
        request = read_request(body, head, interface)
        pairs = match_inputs(request, interface)
        layout = find_layout(pairs, interface, received_shapes=received_shapes)
        _check_requested(request.requested_outputs, interface)
        buffers: Buffers = []
        members = []
        for input_tensor, tensor in pairs:
            self._check(input_tensor, tensor, has_schema=interface.has_schema)
            column = self._column(input_tensor, tensor, layout, received_shapes=received_shapes)
            members.append(_encode(input_tensor.name) + b":" + column.to_json(buffers))
        state = _State(
            request.id,
            request.requested_outputs,
            request.binary,
            layout,
            interface,
            self._number_datatypes(pairs, interface),
        )
        calls = b"{" + b",".join(members) + b"}"
        return ParsedCalls(layout.rows, COLUMNS, calls, buffers, timeout_s=request.timeout_s, state=state)

    def write(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[bytes, bytes]:
        """Write the reply, and the length of its JSON as digits if binary tensors follow it.

        Raises: ModelFailed, InvalidInput for a failed row, a result that is not a tensor, or a missing output.
        """
        pieces, head = self.write_pieces(request, results, spec_name, version)
        return b"".join(pieces), head

    def write_pieces(
        self, request: ParsedCalls, results: FunctionResults, spec_name: str, version: str
    ) -> tuple[list[bytes], bytes]:
        """As `write`, with the tensors in pieces of their own if one is large."""
        state: _State = request.state
        if results.errors:
            row = min(results.errors)
            row_name = f"row {row + 1} of {request.rows}" if request.rows > 1 else ""
            raise failure(results.errors[row], row_name)
        outputs = _outputs(state, results.values, results.columns, results.buffers)
        head: dict[str, Any] = {"model_name": spec_name, "model_version": version}
        if state.id is not None:
            head["id"] = state.id
        return reply_of(head, outputs, state.requested, binary=state.binary)

    def event(self, request: ParsedCalls, values: bytes, buffers: Buffers) -> bytes:
        """Write `{"outputs": […]}`, always as JSON."""
        state: _State = request.state
        outputs = _outputs(state, b"[" + values + b"]", b"", buffers)
        head = {} if state.id is None else {"id": state.id}
        requested = state.requested and [RequestedOutput(each.name, None, each.classes) for each in state.requested]
        return b"".join(reply_of(head, outputs, requested, binary=False)[0])

    def _number_datatypes(
        self, pairs: list[tuple[InputTensor, Tensor | None]], interface: Interface
    ) -> NumberDatatypes:
        """Return the datatypes for plain numbers in the reply."""
        return find_number_datatypes(pairs, interface)

    def _check(self, input_tensor: InputTensor, tensor: Tensor | None, *, has_schema: bool) -> None:
        check_datatype(input_tensor, tensor, has_schema=has_schema)

    def _elements(self, input_tensor: InputTensor, tensor: Tensor | None) -> tuple[list[Any], Datatype]:
        """Read the elements from the JSON, and return them with a datatype that holds them."""
        return elements(input_tensor), input_tensor.datatype

    def _column(
        self, input_tensor: InputTensor, tensor: Tensor | None, layout: Layout, *, received_shapes: bool
    ) -> _Column:
        if tensor is not None and tensor.is_array:
            return self._array(
                input_tensor, tensor, [1, *input_tensor.shape] if layout.axis == NONE else input_tensor.shape
            )
        shape = _of_lists([layout.rows, *layout.dimensions(input_tensor)], tensor, received_shapes=received_shapes)
        if input_tensor.buffer is None:
            return _Column(nest(self._elements(input_tensor, tensor)[0], shape))
        tensor_binary.check_size(input_tensor)
        if input_tensor.datatype.kind == TEXT:
            texts = _decode_texts(input_tensor, tensor_binary.read_texts(input_tensor), tensor)
            if texts is not None:
                return _Column(nest(texts, shape))
        elif input_tensor.datatype.kind != FLOAT or tensor_binary.is_finite(input_tensor.buffer, input_tensor.datatype):
            return _Column(nest(tensor_binary.values_of(input_tensor.buffer, input_tensor.datatype), shape))
        return _Column(shape=shape, datatype=input_tensor.datatype, buffer=input_tensor.buffer)

    def _array(self, input_tensor: InputTensor, tensor: Tensor, shape: list[int]) -> _Column:
        """Make the column of a function that takes a numpy array. Binary data are not copied."""
        if input_tensor.buffer is None:
            flat, datatype = self._elements(input_tensor, tensor)
            return _Column(shape=shape, datatype=datatype, buffer=tensor_binary.pack(flat, datatype))
        tensor_binary.check_size(input_tensor)
        if input_tensor.datatype.kind == TEXT:
            _decode_texts(input_tensor, tensor_binary.read_texts(input_tensor), tensor)
        return _Column(shape=shape, datatype=input_tensor.datatype, buffer=input_tensor.buffer)


class InferlessTensorsForm(TensorsForm):
    """The lenient form for Inferless' tools: integers wider than declared and numbers of another width are allowed."""

    def _number_datatypes(
        self, pairs: list[tuple[InputTensor, Tensor | None]], interface: Interface
    ) -> NumberDatatypes:
        """Return none: Inferless' tools declare every integer as INT32."""
        return {}

    def _check(self, input_tensor: InputTensor, tensor: Tensor | None, *, has_schema: bool) -> None:
        declared = declared_datatype(tensor)
        if declared is None:
            return
        kinds = {declared.kind, input_tensor.datatype.kind}
        is_json = input_tensor.buffer is None
        if len(kinds) > 1 and not kinds <= {INT, FLOAT} and not (is_json and kinds == {INT, BOOL}):
            check_datatype(input_tensor, tensor)

    def _elements(self, input_tensor: InputTensor, tensor: Tensor | None) -> tuple[list[Any], Datatype]:
        """Read by the kind that the input declares. true and false are allowed for integers, BOOL, or no datatype."""
        datatype = declared_datatype(tensor) or input_tensor.datatype
        may_be_bool = input_tensor.datatype.kind == INT and (tensor is None or tensor.datatype is None)
        flat = elements_leniently(input_tensor, datatype.kind, may_be_bool=may_be_bool)
        return flat, widen(flat, datatype)


def widen(flat: list[Any], datatype: Datatype) -> Datatype:
    """Return the datatype, or a wider one if these integers do not fit."""
    if datatype.kind != INT or not flat or (datatype.low <= min(flat) and max(flat) <= datatype.high):
        return datatype
    return DATATYPES["UINT64" if max(flat) > INT64_MAX else "INT64"]


def _of_lists(shape: list[int], tensor: Tensor | None, *, received_shapes: bool) -> list[int]:
    """Return the shape of a column's nested lists; a row of one value has no list of its own."""
    rows, row = shape[:1], shape[1:] or [1]
    is_single = row == [1] and (received_shapes or tensor is None or tensor.shape == [1])
    return rows if is_single else rows + row


def _decode_texts(input_tensor: InputTensor, texts: list[bytes], tensor: Tensor | None) -> list[str] | None:
    """Decode texts as UTF-8; None: they are not UTF-8. Raises: InvalidInput if the input is STRING."""
    try:
        return [each.decode() for each in texts]
    except UnicodeDecodeError as error:
        if "STRING" in (input_tensor.datatype.name, tensor.datatype if tensor is not None else None):
            message = f"input '{input_tensor.name}' is STRING, but its data are not UTF-8: {error}"
            raise InvalidInput(message, code="invalid_encoding") from None
        return None


def _check_requested(requested: list[RequestedOutput] | None, interface: Interface) -> None:
    """Refuse requested outputs that the schema lacks, before anything runs."""
    if requested is None or interface.takes == "arguments" or interface.outputs is None:
        return
    check_names([each.name for each in requested], [each.name for each in interface.outputs])


def _outputs(state: _State, values: bytes, columns: bytes, buffers: Buffers) -> list[Output]:
    if columns:
        return outputs_of_columns(_any.decode(columns), buffers, state.interface, state.layout)
    outputs = outputs_of_rows(_any.decode(values), buffers, state.interface, state.layout)
    return (
        [with_number_datatype(each, state.number_datatypes) for each in outputs] if state.number_datatypes else outputs
    )
