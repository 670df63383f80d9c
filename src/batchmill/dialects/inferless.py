"""Inferless' API: one URL for each app, which takes tensors in the form that Inferless' clients send.

Source: inferless 0.2.15, and the templates that Inferless publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.errors import BatchmillError
from batchmill.server.function_replies import FastCalls, answer, body_of, head_of, stream
from batchmill.server.operations import Call, Content, Operation
from batchmill.server.replies import EVENTS, SCHEMA, Envelope, text_reply
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.json_bytes import encode

FORM = "inferless_tensors"  # an integer may be wider than the datatype of its tensor
PATHS = (("", "/api/v1/{model}/infer"), ("Version", "/api/v1/{model}/versions/{version}/infer"))
_BODY = Content(
    "application/json",
    {
        "type": "object",
        "properties": {
            "inputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "shape", "datatype", "data"],
                    "properties": {
                        "name": {"type": "string"},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "datatype": {"type": "string"},
                        "optional": {"type": "boolean"},
                        "data": {"type": "array"},
                    },
                    "additionalProperties": True,
                },
            }
        },
        "additionalProperties": True,
    },
)
_REPLY = Content(
    "application/json",
    {
        "type": "object",
        "required": ["outputs"],
        "properties": {"outputs": {"type": "array", "items": {"type": "object"}}},
    },
)


class InferlessDialect:
    name = "inferless"

    def __init__(self, services: Services) -> None:
        self._functions = services.functions
        self._bytes_max = services.config.server.body_bytes_max
        self._hide = PathRedactor(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        fast_handler = FastCalls(self._functions, FORM)
        return [
            Operation(
                f"callInferlessApp{suffix}", "POST", path, "Call an app with tensors", Scope.SUBMIT, self.infer,
                body=_BODY, reply=(_REPLY, Content(EVENTS, {"type": "string"})), errors=(404, 504), is_raw=True,
                body_bytes_max=None, fast_handler=fast_handler,
            )
            for suffix, path in PATHS
        ]  # fmt: skip

    async def infer(self, call: Call) -> Response:
        """Reply with the outputs of an app. An app that streams is answered with server-sent events."""
        target = self._functions.locate(call.caller, call.path["model"], call.path.get("version"))
        request = (await body_of(call, self._bytes_max), head_of(call))
        if target.interface.streams:
            return await stream(call, self._functions, target, FORM, request, say=self.say)
        return await answer(call, self._functions, target, FORM, request)

    def say(self, error: BatchmillError) -> bytes:
        """Return the JSON of an error that is sent as an event."""
        return encode(Envelope(self._hide(error.message)))

    def refusal(self, error: BatchmillError) -> Response:
        return text_reply(error, self._hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
