"""The Open Inference Protocol (V2) over HTTP, with Triton's extensions: infer, generate and the error form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.open_inference.models import (
    MODEL_PATHS,
    MetadataHandlers,
    Repository,
    SettingsHandlers,
    StatisticsCalls,
)
from batchmill.errors import BatchmillError, InvalidInput
from batchmill.server.bodies import InvalidField
from batchmill.server.function_replies import (
    CLIENT_LEFT,
    JSON,
    OCTETS,
    FastCalls,
    answer,
    as_accepted,
    body_of,
    head_of,
    stream,
)
from batchmill.server.operations import Call, Content, Operation
from batchmill.server.replies import EVENTS, SCHEMA, Envelope, run_until_disconnect, text_reply
from batchmill.services.functions.calls import VersionTarget
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.json_bytes import encode, join_object, shallow, split_object

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


class InferHandlers:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions
        self._bytes_max = services.config.server.body_bytes_max
        self._hide = PathRedactor(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        fast_handler = FastCalls(self._functions, FORM, packs=True)
        operations: list[Operation] = []
        for suffix, path in MODEL_PATHS:
            operations += [
                Operation(
                    f"inferModel{suffix}", "POST", f"{path}/infer", "Call a function with tensors", Scope.SUBMIT,
                    self.infer, body=_BODY, reply=(_REPLY, Content(OCTETS)), errors=(404, 504), is_raw=True,
                    body_bytes_max=None, fast_handler=fast_handler,
                ),
                Operation(
                    f"inferModelStream{suffix}", "POST", f"{path}/infer_stream",
                    "Call a function with tensors, and stream its answers",
                    Scope.SUBMIT, self.infer_stream, body=_BODY, reply=Content(EVENTS, {"type": "string"}),
                    errors=(404, 504), is_raw=True, body_bytes_max=None,
                ),
            ]  # fmt: skip
        return operations

    async def infer(self, call: Call) -> Response:
        """Reply with one answer for the whole batch of a request: see `wire.call_forms`."""
        target = self._functions.locate(call.caller, call.path["model"], call.path.get("version"))
        if target.interface.streams:
            raise InvalidInput(
                f"the HTTP end point doesn't support models with decoupled transaction policy: {target.name} "
                "streams its answers; POST to its infer_stream or generate_stream",
                code="streams_only",
            )
        request = (await body_of(call, self._bytes_max), head_of(call))
        return await as_accepted(call, await answer(call, self._functions, target, FORM, request))

    async def infer_stream(self, call: Call) -> Response:
        """Send an event for each value that a function yields, in the JSON form of `infer`."""
        target = self._functions.locate(call.caller, call.path["model"], call.path.get("version"))
        require_stream(target.interface.streams, target.name)
        request = (await body_of(call, self._bytes_max), head_of(call))
        return await stream(call, self._functions, target, FORM, request, say=self.say)

    def say(self, error: BatchmillError) -> bytes:
        """Return the JSON of an error that is sent as an event."""
        return encode(Envelope(self._hide(error.message)))


def require_stream(streams: bool, name: str) -> None:
    """Raises: InvalidInput for a function that does not stream."""
    if not streams:
        raise InvalidInput(
            f"{name} does not stream: leave `_stream` out, or write the function with `yield`",
            code="streaming_not_supported",
        )


GENERATION_FORM = "arguments"
TEXT_OUTPUT = "text_output"  # the name of a returned value that is not a dict
RESERVED = ("id", "parameters")  # members that are not arguments, unless the function has inputs of these names
_DATA, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"
_GENERATION_BODY = Content("application/json", {"type": "object", "additionalProperties": True})
_GENERATION_REPLY = Content("application/json", {"type": "object", "required": ["model_name", "model_version"]})

_id = msgspec.json.Decoder(str).decode


class GenerateHandlers:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions
        self._bytes_max = services.config.server.body_bytes_max
        self._hide = PathRedactor(services.config.data_dir).hide

    def operations(self) -> Sequence[Operation]:
        operations: list[Operation] = []
        for suffix, path in MODEL_PATHS:
            operations += [
                Operation(
                    f"generate{suffix}", "POST", f"{path}/generate", "Call a function with arguments by name",
                    Scope.SUBMIT, self.generate, body=_GENERATION_BODY, reply=_GENERATION_REPLY, errors=(404, 504),
                    is_raw=True, body_bytes_max=None,
                ),
                Operation(
                    f"generateStream{suffix}", "POST", f"{path}/generate_stream",
                    "Call a function with arguments by name, and stream",
                    Scope.SUBMIT, self.stream, body=_GENERATION_BODY, reply=Content(EVENTS, {"type": "string"}),
                    errors=(404, 504), is_raw=True, body_bytes_max=None,
                ),
            ]  # fmt: skip
        return operations

    async def generate(self, call: Call) -> Response:
        target = self._target(call)
        if target.interface.streams:
            raise InvalidInput(
                "generate expects model to produce exactly 1 response, use generate_stream for models that generate "
                f"various number of responses: {target.name} streams its answers",
                code="streams_only",
            )
        head, body = await self._read(call, target)
        reply = await run_until_disconnect(call, self._functions.call(call.caller, target, GENERATION_FORM, body))
        if reply is None:
            return Response(status_code=CLIENT_LEFT)
        return await as_accepted(call, Response(_render_answer(head, reply.body), media_type=JSON))

    async def stream(self, call: Call) -> Response:
        target = self._target(call)
        require_stream(target.interface.streams, target.name)
        head, body = await self._read(call, target)
        return await stream(
            call,
            self._functions,
            target,
            GENERATION_FORM,
            (body, b""),
            say=self.say,
            encode_pieces=partial(_events, head),
        )

    def say(self, error: BatchmillError) -> bytes:
        """Return the JSON of an error that is sent as an event."""
        return encode(Envelope(self._hide(error.message)))

    def _target(self, call: Call) -> VersionTarget:
        return self._functions.locate(call.caller, call.path["model"], call.path.get("version"))

    async def _read(self, call: Call, target: VersionTarget) -> tuple[dict[str, Any], bytes]:
        """Return the first members of each answer, and the arguments as a JSON object.

        Raises: InvalidField for a body that is not an object, or that sets an argument twice.
        """
        members = _members(await body_of(call, self._bytes_max), "the body")
        input_names = {each.name for each in target.interface.inputs}
        reserved = {name: members.pop(name) for name in RESERVED if name in members and name not in input_names}
        head: dict[str, Any] = {}
        if "id" in reserved:
            try:
                head["id"] = _id(reserved["id"])
            except msgspec.ValidationError:
                raise InvalidField("`id` must be a string", code="invalid_value", param="id") from None
        head |= {"model_name": target.name, "model_version": target.version}
        for name, value in _members(bytes(reserved.get("parameters", b"{}")), "`parameters`").items():
            if name in members:
                raise InvalidField(f"{name[:80]!r} is in the body and in `parameters`", code="repeated_parameter")
            members[name] = value
        return head, join_object(members)


def _members(data: bytes, what: str) -> dict[str, Raw]:
    try:
        return split_object(shallow(data))
    except msgspec.ValidationError:
        raise InvalidField(f"{what} must be a JSON object", code="invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"{what} is not JSON: {error}", code="invalid_json") from None


def _render_answer(head: dict[str, Any], value: bytes) -> bytes:
    """Return an answer: `head` and the members of a returned dict; any other value becomes `text_output`."""
    is_dict = value.lstrip()[:1] == b"{"
    members = split_object(value) if is_dict else {TEXT_OUTPUT: Raw(value)}
    return join_object(head | {name: each for name, each in members.items() if name not in head})


async def _events(head: dict[str, Any], pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield each event with `head`. The end marker of OpenAI's streams is left out."""
    buffer = b""
    try:
        async for piece in pieces:
            *whole, buffer = (buffer + piece).split(_END)
            for event in whole:
                value = event.removeprefix(_DATA)
                if value != _DONE:
                    yield _DATA + _render_answer(head, value) + _END
    finally:
        await pieces.aclose()


MESSAGES = {"unknown_url": "Not Found", "method_not_allowed": "Method Not Allowed"}  # Triton's messages


class OpenInferenceDialect:
    name = "open_inference"

    def __init__(self, services: Services) -> None:
        self._hide = PathRedactor(services.config.data_dir).hide
        self._groups = (
            InferHandlers(services),
            MetadataHandlers(services),
            StatisticsCalls(services),
            Repository(services),
            GenerateHandlers(services),
            SettingsHandlers(services),
        )

    def operations(self) -> Sequence[Operation]:
        """Return all operations. They ignore the query, like Triton: its clients send queries for proxies."""
        return [replace(operation, has_free_query=True) for group in self._groups for operation in group.operations()]

    def refusal(self, error: BatchmillError) -> Response:
        return text_reply(error, MESSAGES.get(error.code) or self._hide(error.message))

    def error_schema(self) -> dict[str, Any]:
        return SCHEMA
