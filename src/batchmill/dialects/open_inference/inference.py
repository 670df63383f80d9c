"""Inference with tensors: JSON, or JSON and binary behind it. Reads no body: the function's worker does.

Source: the Open Inference Protocol over REST with Triton's binary data extension; `infer_stream` is MLServer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.open_inference.urls import MODEL_PATHS
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.server.error_replies import Envelope
from batchmill.server.function_replies import (
    OCTETS,
    FastCalls,
    answer,
    as_accepted,
    body_of,
    head_of,
    stream,
)
from batchmill.server.operations import Call, Content, Operation
from batchmill.server.piece_reply import EVENTS
from batchmill.services.functions.paths import locate
from batchmill.services.places import Places
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.json_bytes import encode

FORM = "tensors"
_PARAMETERS = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "parameters": _PARAMETERS,
        "data": {"type": "array"},
    },
    "additionalProperties": True,
}
REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
                "additionalProperties": True,
            },
        },
    },
    "additionalProperties": True,
}
RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "outputs"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": {"type": "object"}},
    },
}
_BODY = Content("application/json", REQUEST)
_REPLY = Content("application/json", RESPONSE)


class Inference:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions
        self._bytes_max = services.config.server.body_bytes_max
        self._hide = Places(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        fast_handler = FastCalls(self._functions, FORM, packs=True)
        found = []
        for suffix, path in MODEL_PATHS:
            found += [
                Operation(
                    f"inferModel{suffix}", "POST", f"{path}/infer", "Call a function with tensors", Scope.SUBMIT,
                    self.infer, body=_BODY, reply=(_REPLY, Content(OCTETS)), errors=(404, 504), is_raw=True,
                    body_bytes_max=None, fast_handler=fast_handler,
                ),
                Operation(
                    f"inferModelStream{suffix}", "POST", f"{path}/infer_stream", "Hear a function event by event",
                    Scope.SUBMIT, self.infer_stream, body=_BODY, reply=Content(EVENTS, {"type": "string"}),
                    errors=(404, 504), is_raw=True, body_bytes_max=None,
                ),
            ]  # fmt: skip
        return found

    async def infer(self, call: Call) -> Response:
        """One answer, whatever the request's batch: see `wire.call_forms`."""
        target = locate(self._functions, call.caller, call.path["model"], call.path.get("version"))
        if target.interface.streams:
            raise InvalidInput(
                f"the HTTP end point doesn't support models with decoupled transaction policy: {target.name} "
                "answers in events; POST to its infer_stream or generate_stream",
                code="streams_only",
            )
        sent = (await body_of(call, self._bytes_max), head_of(call))
        return await as_accepted(call, await answer(call, self._functions, target, FORM, sent))

    async def infer_stream(self, call: Call) -> Response:
        """An event for each value that a function yields: the reply of `infer`, without a binary part."""
        target = locate(self._functions, call.caller, call.path["model"], call.path.get("version"))
        require_stream(target.interface.streams, target.name)
        sent = (await body_of(call, self._bytes_max), head_of(call))
        return await stream(call, self._functions, target, FORM, sent, say=self.say)

    def say(self, error: BatchmillError) -> bytes:
        """The JSON of an error that comes as an event."""
        return encode(Envelope(self._hide(error.message)))


def require_stream(streams: bool, name: str) -> None:
    """Raises: InvalidInput for a function that answers in one piece."""
    if not streams:
        raise InvalidInput(
            f"{name} answers in one piece: leave `_stream` out, or write the function with `yield`",
            code="streaming_not_supported",
        )
