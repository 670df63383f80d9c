"""Messages of the gRPC service, translated to and from the bodies of the HTTP API, so that one parser checks both.

Messages are made from the descriptor beside this file, because it works with all versions of protobuf, and generated
code with few. The descriptor pool is separate, so that it does not conflict with a client's copy of the protocol in
this process. A request becomes a JSON head followed by its tensors' bytes, as in the binary extension.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct

from batchmill.errors import InvalidInput, LedgerBroken, TooLarge

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

__all__ = ["METHODS", "SERVICE", "DecodeError", "Message", "Method", "message"]


class Method(Struct, frozen=True):
    """One method of the service."""

    name: str
    request: type[Message]
    response: type[Message]
    streams: bool  # in both directions


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    data = files(__package__).joinpath("open_inference.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """Return the class of a message, such as "ModelInferRequest" or "ModelInferRequest.InferInputTensor"."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


METHODS = {
    each.name: Method(
        each.name, GetMessageClass(each.input_type), GetMessageClass(each.output_type), bool(each.server_streaming)
    )
    for each in _POOL.FindServiceByName(SERVICE).methods
}


InferResponse = message("ModelInferResponse")
IS_LAST = "triton_final_response"
SENDS_EMPTY_LAST = "triton_enable_empty_final_response"
RAW_FIELD = b"\x32"  # tag of raw_output_contents in ModelInferResponse: field 6, length-delimited

# datatype -> the field of InferTensorContents, and the type code of its elements for `struct` and `array`
CONTENTS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
ELEMENTS_MAX = 1_000_000  # of a tensor sent as a list, which is read on the event loop
# Parameters that the translation sets itself. A client's values are ignored.
INTERNAL_PARAMETERS = frozenset({"binary_data", "binary_data_size", "binary_data_output", SENDS_EMPTY_LAST})


class _Tensor(Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class Reply(Struct):
    """The JSON of a reply's body."""

    outputs: list[_Tensor]
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: dict[str, Any] = {}


_encode = msgspec.json.Encoder().encode
_reply = msgspec.json.Decoder(Reply, strict=True).decode


def is_raw(request: Any) -> bool:
    """True if the tensors are raw bytes or there are none. The reply then also uses raw bytes."""
    return bool(request.raw_input_contents) or not any(each.HasField("contents") for each in request.inputs)


def body_of(request: Any, bytes_max: int) -> tuple[bytes, bytes]:
    """Return a ModelInferRequest as the body of an infer request, and the length of its JSON for the header.

    Raises: InvalidInput if a tensor's elements are in the wrong field (the parser checks their values); TooLarge if
    the body would have more than `bytes_max` bytes.
    """
    inputs, buffers = _inputs(request, bytes_max)
    fields: dict[str, Any] = {
        "inputs": inputs,
        "parameters": {**_parameters(request.parameters), "binary_data_output": True},
    }
    if request.id:
        fields["id"] = request.id
    if request.outputs:
        fields["outputs"] = [
            {"name": each.name, "parameters": {**_parameters(each.parameters), "binary_data": True}}
            for each in request.outputs
        ]
    head = _encode(fields)
    return b"".join([head, *buffers]), str(len(head)).encode()


def _inputs(request: Any, bytes_max: int) -> tuple[list[dict[str, Any]], list[bytes]]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidInput(
            f"raw_input_contents has {len(raws)} items for {len(request.inputs)} inputs: send one for each input"
        )
    inputs, buffers = [], []
    for number, each in enumerate(request.inputs):
        parameters = _parameters(each.parameters)
        if "shared_memory_region" in parameters:
            raise InvalidInput(f"input '{each.name}': this server has no shared memory; send the tensor's bytes")
        if raws and each.HasField("contents"):
            raise InvalidInput(
                f"contents field must not be specified when using raw_input_contents for '{each.name}' "
                f"for model '{request.model_name}'"
            )
        fields: dict[str, Any] = {"name": each.name, "shape": list(each.shape), "datatype": each.datatype}
        data = raws[number] if raws else _elements(each, bytes_max)
        if isinstance(data, bytes):
            bytes_max -= len(data)
            parameters["binary_data_size"] = len(data)
            buffers.append(data)
        else:
            fields["data"] = data
        if parameters:
            fields["parameters"] = parameters
        inputs.append(fields)
    return inputs, buffers


def _elements(tensor: Any, bytes_max: int) -> bytes | list[int]:
    """Return a tensor's `contents` as raw bytes. Integers too large for the datatype are returned for the parser."""
    name, kind = CONTENTS.get(tensor.datatype, ("", ""))
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != name]
    if others:
        expected = name or "raw_input_contents"
        raise InvalidInput(
            f"input '{tensor.name}': {tensor.datatype} elements must be in {expected}, not in {others[0]}"
        )
    if not name:
        return b""  # the parser checks the datatype and the number of bytes
    values = getattr(tensor.contents, name)
    if len(values) > ELEMENTS_MAX:
        raise TooLarge(
            f"input '{tensor.name}': {len(values):,} elements in {name}, more than {ELEMENTS_MAX:,}: send the tensor's "
            "bytes in raw_input_contents"
        )
    size = struct.calcsize(kind) * len(values) if kind else sum(4 + len(each) for each in values)
    if size > bytes_max:
        raise TooLarge(
            f"input '{tensor.name}': {len(values):,} elements are {size:,} bytes, more than the limit of the request"
        )
    if not kind:
        return _with_lengths(values)
    if kind == "?":
        return bytes(values)
    try:
        packed = array(kind, values)
    except OverflowError:
        return list(values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _with_lengths(values: Sequence[bytes]) -> bytes:
    return b"".join(part for each in values for part in (len(each).to_bytes(4, "little"), each))


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in their JSON form."""
    values = {}
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidInput(f"parameter '{name}' has no value")
        if name not in INTERNAL_PARAMETERS:
            values[name] = getattr(value, choice)
    return values


# -- replies ---------------------------------------------------------------------------------------------------------


def read_reply(body: bytes, head: bytes = b"") -> tuple[Reply, list[bytes | memoryview | list[Any]]]:
    """Parse a reply's body. The elements of each output are bytes, or a flat list if they are in the JSON."""
    length = int(head) if head else len(body)
    view = memoryview(body)
    reply = _reply(view[:length])
    elements: list[bytes | memoryview | list[Any]] = []
    at = length
    for each in reply.outputs:
        size = each.parameters.pop("binary_data_size", None)
        if size is None:
            elements.append(each.data or [])
        else:
            elements.append(view[at : at + size])
            at += size
    if at != len(body):
        raise LedgerBroken(f"only {at} of the reply's {len(body)} bytes belong to its outputs", code="internal_error")
    return reply, elements


def response_of(body: bytes, head: bytes, *, raw: bool, is_last: bool | None = None) -> bytes:
    """Encode a reply's body as a ModelInferResponse. Copies each tensor once if `raw`.

    Args: is_last: whether it is the last answer of a streamed request; None: the request is not streamed.
    """
    reply, elements = read_reply(body, head)
    response = _response(reply)
    if is_last is not None:
        response.parameters[IS_LAST].bool_param = is_last
    if not (raw or all(each.datatype in CONTENTS for each in reply.outputs)):
        raw = True  # FP16 needs raw bytes, and all outputs must use the same form
    if not raw:
        for output, each, data in zip(response.outputs, reply.outputs, elements, strict=True):
            _fill(output.contents, each, data)
        return response.SerializeToString()
    parts: list[bytes | memoryview] = [response.SerializeToString()]
    for each, data in zip(reply.outputs, elements, strict=True):
        raw_data = _packed(each, data) if isinstance(data, list) else data
        parts += (RAW_FIELD, varint(len(raw_data)), raw_data)
    return b"".join(parts)


def _response(reply: Reply) -> Any:
    response = InferResponse(model_name=reply.model_name, model_version=reply.model_version, id=reply.id)
    set_parameters(response.parameters, reply.parameters)
    for each in reply.outputs:
        output = response.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        set_parameters(output.parameters, each.parameters)
    return response


def set_parameters(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool):
            parameters[name].bool_param = value
        elif isinstance(value, int):
            setattr(parameters[name], "int64_param" if value < 2**63 else "uint64_param", value)
        elif isinstance(value, float):
            parameters[name].double_param = value
        else:
            parameters[name].string_param = str(value)


def _fill(contents: Any, tensor: _Tensor, data: bytes | memoryview | list[Any]) -> None:
    name, kind = CONTENTS[tensor.datatype]
    if isinstance(data, list):
        values: Sequence[Any] = _as_elements(tensor, data)
    elif not kind:
        values = _split(data)
    else:
        values = struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)
    getattr(contents, name).extend(values)


def _packed(tensor: _Tensor, data: list[Any]) -> bytes:
    """Return elements of the JSON as raw bytes."""
    values = _as_elements(tensor, data)
    if tensor.datatype == "BYTES":
        return _with_lengths(values)
    if tensor.datatype == "BF16":
        return b"".join(struct.pack("<f", each)[2:] for each in values)
    kind = "e" if tensor.datatype == "FP16" else CONTENTS[tensor.datatype][1]
    return struct.pack(f"<{len(values)}{kind}", *values)


def _as_elements(tensor: _Tensor, data: list[Any]) -> list[Any]:
    """Convert elements from their JSON form: texts become bytes, and null becomes NaN."""
    if tensor.datatype == "BYTES":
        return [each.encode() for each in data]
    return [float("nan") if each is None else each for each in data]


def _split(data: bytes | memoryview) -> list[bytes]:
    values, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        values.append(bytes(data[at + 4 : end]))
        at = end
    return values


def varint(number: int) -> bytes:
    """Encode a number as protobuf's varint."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
