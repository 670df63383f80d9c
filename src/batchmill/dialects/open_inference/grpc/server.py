"""The gRPC service. Each request becomes the equivalent HTTP call, so that one handler answers both.

A stream carries many requests at once. Replies of functions with one answer keep the order of their requests; answers
of streaming functions are sent as they come. Source: Triton's gRPC streaming and its decoupled responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import ParseDict
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from batchmill.dialects.open_inference.dialect import FORM
from batchmill.dialects.open_inference.grpc.bodies import (
    IS_LAST,
    METHODS,
    SENDS_EMPTY_LAST,
    SERVICE,
    InferResponse,
    Message,
    body_of,
    is_raw,
    message,
    response_of,
    varint,
)
from batchmill.dialects.open_inference.grpc.call_gate import Action, CallGate, Messages, Write
from batchmill.dialects.open_inference.models import (
    Index,
    Load,
    MetadataHandlers,
    Repository,
    SettingsHandlers,
    StatisticsCalls,
    Unload,
    UnloadParameters,
)
from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, UnknownName
from batchmill.server.access_log import RequestRecord
from batchmill.server.admission_control import Admission
from batchmill.server.auth import Gate
from batchmill.server.operations import Call
from batchmill.services.functions.calls import FunctionCalls, VersionTarget
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.services import Services
from batchmill.types import Caller, Scope


def call_of(caller: Caller, *, body: Struct | None = None, json: Any = None, **path: str) -> Call:
    """Make an HTTP call. Args: body: a parsed body; json: a body that the handler parses; path: path parameters."""
    raw = b"" if json is None else msgspec.json.encode(json)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [], "path_params": path}
    return Call(Request(scope, receive), caller, "", body=body, raw=raw)


UNANSWERED_MAX = 64  # limit of requests of one stream that are read and not yet answered
INFER_RESPONSE = b"\x12"  # tag of infer_response in ModelStreamInferResponse: field 2, length-delimited
EVENT_END, DATA = b"\n\n", b"data: "
_StreamResponse = message("ModelStreamInferResponse")


class Conversation:
    """One stream of one caller. `spend` counts a request; `describe` returns an error's message for the client."""

    def __init__(
        self,
        functions: FunctionCalls,
        caller: Caller,
        write: Write,
        *,
        form: str,
        bytes_max: int,
        spend: Callable[[Caller], None],
        describe: Callable[[BatchmillError], str],
    ) -> None:
        self._functions, self._caller, self._write = functions, caller, write
        self._form, self._bytes_max, self._spend, self._describe = form, bytes_max, spend, describe
        self._writing = asyncio.Lock()

    async def run(self, requests: AsyncIterator[tuple[Any, Callable[[], None]]]) -> None:
        """Answer all requests until the client closes its side. Each request comes with a callback for its end.

        Raises: InvalidInput for a message that is not a request.
        """
        try:
            async with asyncio.TaskGroup() as group:
                await self._read(requests, group)
        except BaseExceptionGroup as group_error:  # the caller handles the error itself, not the group
            raise group_error.exceptions[0] from None

    async def _read(self, requests: AsyncIterator[tuple[Any, Callable[[], None]]], group: asyncio.TaskGroup) -> None:
        slots = asyncio.Semaphore(UNANSWERED_MAX)
        previous: asyncio.Task[None] | None = None
        async for request, done in requests:
            await slots.acquire()
            target, error = self._find(request)
            if target is not None and target.interface.streams:
                task = group.create_task(self._answer_many(request, target))
            else:
                task = previous = group.create_task(self._answer_one(request, target, error, previous))
            task.add_done_callback(partial(_end_request, slots, done))

    def _find(self, request: Any) -> tuple[VersionTarget | None, BatchmillError | None]:
        try:
            self._spend(self._caller)
            return self._functions.locate(self._caller, request.model_name, request.model_version or None), None
        except BatchmillError as error:
            return None, error

    async def _answer_one(
        self,
        request: Any,
        target: VersionTarget | None,
        error: BatchmillError | None,
        previous: asyncio.Task[None] | None,
    ) -> None:
        """Send one answer, after the answer to the previous request."""
        if target is None:
            assert error is not None, "a request has a target or an error"
            reply = self._error(request, error)
        else:
            reply = await self._call(request, target)
        if previous is not None:
            await asyncio.wait({previous})
        await self._send(reply)

    async def _call(self, request: Any, target: VersionTarget) -> bytes:
        try:
            body, head = body_of(request, self._bytes_max)
            answer = await self._functions.call(self._caller, target, self._form, body, head=head)
            return _stream_response(response_of(answer.body, answer.head, raw=is_raw(request), is_last=True))
        except BatchmillError as error:
            return self._error(request, error)

    async def _answer_many(self, request: Any, target: VersionTarget) -> None:
        """Send an answer for each value that the function yields, then an empty one if the client asked for it."""
        try:
            body, head = body_of(request, self._bytes_max)
            _, pieces = await self._functions.stream(self._caller, target, self._form, body, head)
            try:
                async for event in _events(pieces):
                    await self._send(_stream_response(response_of(event, b"", raw=is_raw(request), is_last=False)))
            finally:
                await pieces.aclose()
        except BatchmillError as error:
            await self._send(self._error(request, error))
            return
        if request.parameters[SENDS_EMPTY_LAST].bool_param if SENDS_EMPTY_LAST in request.parameters else False:
            last = InferResponse(model_name=target.name, model_version=target.version, id=request.id)
            last.parameters[IS_LAST].bool_param = True
            await self._send(_stream_response(last.SerializeToString()))

    def _error(self, request: Any, error: BatchmillError) -> bytes:
        """Return an error reply. It ends its request, and the stream continues."""
        reply = _StreamResponse(error_message=self._describe(error) or error.code)
        reply.infer_response.id = request.id
        reply.infer_response.model_name = request.model_name
        reply.infer_response.parameters[IS_LAST].bool_param = True
        return reply.SerializeToString()

    async def _send(self, data: bytes) -> None:
        async with self._writing:
            await self._write(data)


def _end_request(slots: asyncio.Semaphore, done: Callable[[], None], _: asyncio.Task[None]) -> None:
    slots.release()
    done()


def _stream_response(response: bytes) -> bytes:
    return b"".join([INFER_RESPONSE, varint(len(response)), response])


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the JSON of each server-sent event."""
    buffer = b""
    async for piece in pieces:
        *whole, buffer = (buffer + piece).split(EVENT_END)
        for event in whole:
            yield event.removeprefix(DATA)


LISTS = frozenset({"trace_level"})  # settings with several values


class SettingCalls:
    def __init__(self, services: Services) -> None:
        self._settings = SettingsHandlers(services)

    def actions(self) -> dict[str, tuple[Scope, Action]]:
        """Return the methods with the scope that each needs. They only show settings, so READ is enough."""
        actions: dict[str, tuple[Scope, Action]] = {
            "LogSettings": (Scope.READ, self.log),
            "TraceSetting": (Scope.READ, self.trace),
        }
        for kind in ("System", "Cuda"):
            actions |= {
                f"{kind}SharedMemoryStatus": (Scope.READ, self._no_regions(kind)),
                f"{kind}SharedMemoryRegister": (Scope.SUBMIT, self.register),
                f"{kind}SharedMemoryUnregister": (Scope.SUBMIT, self._unregister(kind)),
            }
        return actions

    async def log(self, caller: Caller, request: Any) -> Message:
        settings = {name: _single(value) for name, value in request.settings.items()}
        reply = await self._settings.change_logging(call_of(caller, json=settings))
        response = METHODS["LogSettings"].response()
        for name, value in msgspec.json.decode(reply.body).items():
            match value:
                case bool():
                    response.settings[name].bool_param = value
                case int():
                    response.settings[name].uint32_param = value
                case _:
                    response.settings[name].string_param = value
        return response

    async def trace(self, caller: Caller, request: Any) -> Message:
        settings = {name: _values(name, value.value) for name, value in request.settings.items()}
        path = {"model": request.model_name} if request.model_name else {}
        reply = await self._settings.change_trace(call_of(caller, json=settings, **path))
        response = METHODS["TraceSetting"].response()
        fields: Mapping[str, Any] = msgspec.json.decode(reply.body)
        for name, value in fields.items():
            response.settings[name].value.extend(value if isinstance(value, list) else [value])
        return response

    def _no_regions(self, kind: str) -> Action:
        async def status(caller: Caller, request: Any) -> Message:
            if request.name:
                await self._settings.no_region(call_of(caller, region=request.name))
            return METHODS[f"{kind}SharedMemoryStatus"].response()

        return status

    async def register(self, caller: Caller, request: Any) -> bytes:
        """Refuse to register a region."""
        reply = await self._settings.no_region(call_of(caller, region=request.name))
        return bytes(reply.body)

    def _unregister(self, kind: str) -> Action:
        async def unregister(caller: Caller, request: Any) -> Message:
            await self._settings.unregister(call_of(caller))
            return METHODS[f"{kind}SharedMemoryUnregister"].response()

        return unregister


def _single(value: Any) -> Any:
    """Return a setting's value; None for its default."""
    choice = value.WhichOneof("parameter_choice")
    return None if choice is None else getattr(value, choice)


def _values(name: str, values: Any) -> Any:
    if not values:
        return None
    return list(values) if name in LISTS or len(values) > 1 else values[0]


Handler = Callable[[Call], Awaitable[Response]]


class Service:
    def __init__(self, services: Services, call_gate: CallGate) -> None:
        self._functions, self._call_gate = services.functions, call_gate
        self._bytes_max = services.config.server.body_bytes_max
        self._metadata, self._statistics = MetadataHandlers(services), StatisticsCalls(services)
        self._repository, self._settings = Repository(services), SettingCalls(services)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return a handler for each method of the service."""
        unary: dict[str, tuple[Scope | None, Action]] = {
            "ModelInfer": (Scope.SUBMIT, self.infer),
            "ServerLive": (None, self.live),
            "ServerReady": (None, self.ready),
            "ServerMetadata": (Scope.READ, self.server_metadata),
            "ModelReady": (Scope.READ, self.model_ready),
            "ModelMetadata": (Scope.READ, self.model_metadata),
            "ModelConfig": (Scope.READ, self.model_config),
            "ModelStatistics": (Scope.READ, self.statistics),
            "RepositoryIndex": (Scope.READ, self.index),
            "RepositoryModelLoad": (Scope.ADMIN, self.load),
            "RepositoryModelUnload": (Scope.ADMIN, self.unload),
            **self._settings.actions(),
        }
        handlers = {
            name: self._call_gate.unary(METHODS[name], scope, action) for name, (scope, action) in unary.items()
        }
        stream = METHODS["ModelStreamInfer"]
        return handlers | {stream.name: self._call_gate.stream(stream, Scope.SUBMIT, self.converse)}

    # -- calls --------------------------------------------------------------------------------------------------------

    async def infer(self, caller: Caller, request: Any) -> bytes:
        target = self._functions.locate(caller, request.model_name, request.model_version or None)
        if target.interface.streams:
            raise InvalidInput(
                f"ModelInfer RPC doesn't support models with decoupled transaction policy: {target.name} answers in "
                "events; call ModelStreamInfer",
                code="streams_only",
            )
        body, head = body_of(request, self._bytes_max)
        # grpc cancels this call at the client's deadline. Rows that have not begun never run, and a running function
        # continues for the other rows of its batch.
        answer = await self._functions.call(caller, target, FORM, body, head=head)
        return response_of(answer.body, answer.head, raw=is_raw(request))

    async def converse(self, caller: Caller, requests: Messages, write: Write) -> None:
        conversation = Conversation(
            self._functions, caller, write,
            form=FORM, bytes_max=self._bytes_max, spend=self._call_gate.spend, describe=self._call_gate.message_of,
        )  # fmt: skip
        await conversation.run(requests)

    # -- metadata -----------------------------------------------------------------------------------------------------

    async def live(self, caller: Caller, request: Any) -> Message:
        return METHODS["ServerLive"].response(live=True)

    async def ready(self, caller: Caller, request: Any) -> Message:
        reply = await self._metadata.ready(call_of(caller))
        return METHODS["ServerReady"].response(ready=reply.status_code == 200)

    async def server_metadata(self, caller: Caller, request: Any) -> Message:
        return await _reply("ServerMetadata", self._metadata.server, call_of(caller))

    async def model_ready(self, caller: Caller, request: Any) -> Message:
        """Report readiness; also False for an unknown model, because clients poll until it is deployed."""
        try:
            reply = await self._metadata.model_ready(_call_of_model(caller, request))
        except UnknownName:
            return METHODS["ModelReady"].response(ready=False)
        return METHODS["ModelReady"].response(ready=reply.status_code == 200)

    async def model_metadata(self, caller: Caller, request: Any) -> Message:
        return await _reply("ModelMetadata", self._metadata.model, _call_of_model(caller, request))

    async def model_config(self, caller: Caller, request: Any) -> Message:
        reply = await self._metadata.model_config(_call_of_model(caller, request))
        return _message("ModelConfig", {"config": msgspec.json.decode(reply.body)})

    async def statistics(self, caller: Caller, request: Any) -> Message:
        if not request.name:
            return await _reply("ModelStatistics", self._statistics.all, call_of(caller))
        handler = self._statistics.version if request.version else self._statistics.model
        return await _reply("ModelStatistics", handler, _call_of_model(caller, request))

    # -- the repository -----------------------------------------------------------------------------------------------

    async def index(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        reply = await self._repository.index(call_of(caller, body=Index(ready=request.ready)))
        return _message("RepositoryIndex", {"models": msgspec.json.decode(reply.body)})

    async def load(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        body = Load(parameters=dict.fromkeys(request.parameters, ""))  # every parameter is refused by its name
        await self._repository.load(call_of(caller, body=body, model=request.model_name))
        return METHODS["RepositoryModelLoad"].response()

    async def unload(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        fields = {name: value.bool_param for name, value in request.parameters.items()}
        try:
            parameters = msgspec.convert(fields, UnloadParameters)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the parameters of an unload: {error}", code="parameter_not_allowed") from None
        await self._repository.unload(call_of(caller, body=Unload(parameters), model=request.model_name))
        return METHODS["RepositoryModelUnload"].response()


def _only_repository(name: str) -> None:
    if name:
        raise InvalidInput(
            f"the repository {name[:80]!r} does not exist: there is one repository, without a name; leave the name out",
            code="unknown_repository",
        )


def _call_of_model(caller: Caller, request: Any) -> Call:
    path = {"model": request.name, "version": request.version}
    return call_of(caller, **{key: value for key, value in path.items() if value})


async def _reply(method: str, handler: Handler, call: Call) -> Message:
    return _message(method, msgspec.json.decode((await handler(call)).body))


def _message(method: str, decoded: Any) -> Message:
    """Convert decoded JSON to the message with the same fields; fields that only HTTP has are left out."""
    return ParseDict(decoded, METHODS[method].response(), ignore_unknown_fields=True)


STREAMS_MAX = 1000  # limit of calls under way on one connection; its client queues the others
HANDSHAKE_S = 15  # from a connection to HTTP/2
IDLE_S = 300  # a connection without calls is closed after this time; the client reconnects for its next call
OVERHEAD_BYTES = 64 * 1024  # how much larger a message may be than an HTTP body of the same tensors


class GrpcServer:
    """The gRPC server. It calls `watchers` at the end of every call."""

    def __init__(
        self, services: Services, gate: Gate, admission: Admission, watchers: Sequence[Callable[[RequestRecord], None]]
    ) -> None:
        config = services.config.server
        limit = config.body_bytes_max + OVERHEAD_BYTES
        self._host, self._configured_port = config.host, config.grpc_port or 0
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),  # another limit applies to the value that a function returns
            ("grpc.max_concurrent_streams", STREAMS_MAX),
            ("grpc.max_allowed_incoming_connections", max(1, admission.connections_max // 4)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ("grpc.so_reuseport", 0),  # an address in use is an error, as for HTTP
        ]
        self._server = grpc.aio.server(options=options)
        hide = PathRedactor(services.config.data_dir).hide
        call_gate = CallGate(gate, services.clock, hide=hide, watchers=watchers, admission=admission, bytes_max=limit)
        handlers = Service(services, call_gate).handlers()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = 0

    @property
    def address(self) -> str:
        """The address for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def open(self) -> None:
        """Start to listen. Raises: InvalidConfig if the address is in use."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self._configured_port}")
        except RuntimeError:
            raise InvalidConfig(
                f"cannot listen on {host}:{self._configured_port} for gRPC: stop the program that listens there, "
                "or choose another --grpc-port"
            ) from None
        await self._server.start()

    async def close(self, *, drain_s: float) -> None:
        """Refuse new calls, and let calls under way end within `drain_s`."""
        await self._server.stop(drain_s)
