"""The messages of the service, made from the descriptor beside this file.

Not protobuf's generated code: that runs with few versions of the library, and a descriptor with all of them. The pool
is our own, so that another copy of the same protocol in this process (a client's) is in nobody's way.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

__all__ = ["METHODS", "SERVICE", "DecodeError", "Message", "Method", "message"]


class Method(Struct, frozen=True):
    """One method of the service."""

    name: str
    request: type[Message]
    response: type[Message]
    streams: bool  # both ways


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    data = files(__package__).joinpath("open_inference.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message: "ModelInferRequest", "ModelInferRequest.InferInputTensor"."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


METHODS = {
    each.name: Method(
        each.name, GetMessageClass(each.input_type), GetMessageClass(each.output_type), bool(each.server_streaming)
    )
    for each in _POOL.FindServiceByName(SERVICE).methods
}
