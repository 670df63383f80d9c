"""The forms "tensors" and "inferless_tensors": V2 inference requests and their replies, as JSON and as binary tensors.

Source: the Open Inference Protocol, REST; Triton's binary-tensor and classification extensions.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from batchmill.errors import InvalidInput
from batchmill.types import Interface, Tensor
from batchmill.wire import tensor_binary
from batchmill.wire.calls import COLUMNS, FunctionResults, ParsedCalls, failure
from batchmill.wire.datatypes import BOOL, DATATYPES, FLOAT, INT, INT64_MAX, TEXT, Datatype, wire_name
from batchmill.wire.tensor_binary import NONE, Layout, check_datatype, declared_datatype, lay, pair
from batchmill.wire.tensor_request import Received, Wanted, elements, elements_leniently, nest, read_request
from batchmill.wire.tensor_results import (
    ARRAY,
    Buffers,
    Kept,
    Output,
    as_received,
    check_names,
    kept_of,
    outputs_of_columns,
    outputs_of_rows,
    reply_of,
)

_encode = msgspec.json.Encoder().encode
_any = msgspec.json.Decoder()


class _State(Struct, gc=False):
    """Of the request, for its reply."""

    id: str | None
    wanted: list[Wanted] | None
    binary: bool
    layout: Layout
    interface: Interface
    kept: Kept


class _Column(Struct):
    """One input: a value for each row, or an array whose first axis is the row."""

    values: Any = None
    shape: list[int] = []
    datatype: Datatype | None = None
    buffer: bytes | memoryview | None = None

    def written(self, buffers: Buffers) -> bytes:
        """Its JSON; an array's bytes are added to `buffers`."""
        if self.datatype is None or self.buffer is None:
            return _encode(self.values)
        buffers.append(self.buffer)
        return _encode({ARRAY: [len(buffers) - 1, wire_name(self.datatype.name), self.shape]})


class TensorsForm:
    """Strict: a tensor has the datatype, the shape and the range that it says, and that its input declares."""

    def read(self, body: bytes, head: bytes, interface: Interface, *, received_shapes: bool = False) -> ParsedCalls:
        """`head` is the value of Inference-Header-Content-Length. Raises: InvalidInput, naming input and value."""
        request = read_request(body, head, interface)
        pairs = pair(request, interface)
        layout = lay(pairs, interface, received_shapes=received_shapes)
        _check_wanted(request.wanted, interface)
        buffers: Buffers = []
        members = []
        for received, tensor in pairs:
            self._check(received, tensor, has_schema=interface.has_schema)
            column = self._column(received, tensor, layout, received_shapes=received_shapes)
            members.append(_encode(received.name) + b":" + column.written(buffers))
        state = _State(request.id, request.wanted, request.binary, layout, interface, self._kept(pairs, interface))
        calls = b"{" + b",".join(members) + b"}"
        return ParsedCalls(layout.rows, COLUMNS, calls, buffers, timeout_s=request.timeout_s, state=state)

    def write(self, asked: ParsedCalls, results: FunctionResults, spec_name: str, version: str) -> tuple[bytes, bytes]:
        """The reply, and the length of its JSON as digits where binary tensors follow it.

        Raises: ModelFailed, InvalidInput for a row that failed, a result that is no tensor, an output nobody returned.
        """
        state: _State = asked.state
        if results.errors:
            row = min(results.errors)
            place = f"row {row + 1} of {asked.rows}" if asked.rows > 1 else ""
            raise failure(results.errors[row], place)
        outputs = _outputs(state, results.values, results.columns, results.buffers)
        head: dict[str, Any] = {"model_name": spec_name, "model_version": version}
        if state.id is not None:
            head["id"] = state.id
        return reply_of(head, outputs, state.wanted, binary=state.binary)

    def event(self, asked: ParsedCalls, values: bytes, buffers: Buffers) -> bytes:
        """`{"outputs": […]}`, always JSON."""
        state: _State = asked.state
        outputs = _outputs(state, b"[" + values + b"]", b"", buffers)
        head = {} if state.id is None else {"id": state.id}
        wanted = state.wanted and [Wanted(each.name, None, each.classes) for each in state.wanted]
        return reply_of(head, outputs, wanted, binary=False)[0]

    def _kept(self, pairs: list[tuple[Received, Tensor | None]], interface: Interface) -> Kept:
        """The datatypes in which plain numbers go back."""
        return kept_of(pairs, interface)

    def _check(self, received: Received, tensor: Tensor | None, *, has_schema: bool) -> None:
        check_datatype(received, tensor, has_schema=has_schema)

    def _elements(self, received: Received, tensor: Tensor | None) -> tuple[list[Any], Datatype]:
        """The elements that stand in the JSON, and the datatype that holds them."""
        return elements(received), received.datatype

    def _column(self, received: Received, tensor: Tensor | None, layout: Layout, *, received_shapes: bool) -> _Column:
        if tensor is not None and tensor.is_array:
            return self._array(received, tensor, [1, *received.shape] if layout.axis == NONE else received.shape)
        shape = _of_lists([layout.rows, *layout.dimensions(received)], tensor, received_shapes=received_shapes)
        if received.buffer is None:
            return _Column(nest(self._elements(received, tensor)[0], shape))
        tensor_binary.check_size(received)
        if received.datatype.kind == TEXT:
            texts = _decoded(received, tensor_binary.read_texts(received), tensor)
            if texts is not None:
                return _Column(nest(texts, shape))
        elif received.datatype.kind != FLOAT or tensor_binary.is_finite(received.buffer, received.datatype):
            return _Column(nest(tensor_binary.values_of(received.buffer, received.datatype), shape))
        return _Column(shape=shape, datatype=received.datatype, buffer=received.buffer)

    def _array(self, received: Received, tensor: Tensor, shape: list[int]) -> _Column:
        """The column of a function that takes a numpy array: binary data as they came."""
        if received.buffer is None:
            flat, datatype = self._elements(received, tensor)
            return _Column(shape=shape, datatype=datatype, buffer=tensor_binary.pack(flat, datatype))
        tensor_binary.check_size(received)
        if received.datatype.kind == TEXT:
            _decoded(received, tensor_binary.read_texts(received), tensor)
        return _Column(shape=shape, datatype=received.datatype, buffer=received.buffer)


class InferlessTensorsForm(TensorsForm):
    """As Inferless' tools send tensors: an integer wider than declared passes, and so do numbers of another width."""

    def _kept(self, pairs: list[tuple[Received, Tensor | None]], interface: Interface) -> Kept:
        """None: its tools say INT32 of whatever integer they send."""
        return {}

    def _check(self, received: Received, tensor: Tensor | None, *, has_schema: bool) -> None:
        declared = declared_datatype(tensor)
        if declared is None:
            return
        kinds = {declared.kind, received.datatype.kind}
        is_json = received.buffer is None
        if len(kinds) > 1 and not kinds <= {INT, FLOAT} and not (is_json and kinds == {INT, BOOL}):
            check_datatype(received, tensor)

    def _elements(self, received: Received, tensor: Tensor | None) -> tuple[list[Any], Datatype]:
        """By the kind that the input declares: true and false pass where it declares integers, BOOL, or nothing."""
        datatype = declared_datatype(tensor) or received.datatype
        may_be_bool = received.datatype.kind == INT and (tensor is None or tensor.datatype is None)
        flat = elements_leniently(received, datatype.kind, may_be_bool=may_be_bool)
        return flat, holding(flat, datatype)


def holding(flat: list[Any], datatype: Datatype) -> Datatype:
    """The datatype, or a wider one that holds these integers."""
    if datatype.kind != INT or not flat or (datatype.low <= min(flat) and max(flat) <= datatype.high):
        return datatype
    return DATATYPES["UINT64" if max(flat) > INT64_MAX else "INT64"]


def _of_lists(shape: list[int], tensor: Tensor | None, *, received_shapes: bool) -> list[int]:
    """The shape of a column's nested lists: a row that is one value is none."""
    rows, row = shape[:1], shape[1:] or [1]
    is_single = row == [1] and (received_shapes or tensor is None or tensor.shape == [1])
    return rows if is_single else rows + row


def _decoded(received: Received, texts: list[bytes], tensor: Tensor | None) -> list[str] | None:
    """The texts; None where they are bytes. Raises: InvalidInput for bytes in an input that is STRING."""
    try:
        return [each.decode() for each in texts]
    except UnicodeDecodeError as error:
        if "STRING" in (received.datatype.name, tensor.datatype if tensor is not None else None):
            message = f"input '{received.name}' is STRING, and its data are not UTF-8: {error}"
            raise InvalidInput(message, code="invalid_encoding") from None
        return None


def _check_wanted(wanted: list[Wanted] | None, interface: Interface) -> None:
    """Refuse, before anything runs, outputs that a schema does not have."""
    if wanted is None or interface.takes == "arguments" or interface.outputs is None:
        return
    check_names([each.name for each in wanted], [each.name for each in interface.outputs])


def _outputs(state: _State, values: bytes, columns: bytes, buffers: Buffers) -> list[Output]:
    if columns:
        return outputs_of_columns(_any.decode(columns), buffers, state.interface, state.layout)
    found = outputs_of_rows(_any.decode(values), buffers, state.interface, state.layout)
    return [as_received(each, state.kept) for each in found] if state.kept else found
