"""The methods of the service. What is told of models is what the HTTP side of this dialect tells, field by field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import ParseDict
from starlette.responses import Response

from batchmill.dialects.open_inference.grpc.bodies import body_of, is_raw, response_of
from batchmill.dialects.open_inference.grpc.calls import call_of
from batchmill.dialects.open_inference.grpc.conversations import Conversation
from batchmill.dialects.open_inference.grpc.door import Action, Door, Messages, Write
from batchmill.dialects.open_inference.grpc.messages import METHODS, Message
from batchmill.dialects.open_inference.grpc.settings import SettingCalls
from batchmill.dialects.open_inference.inference import FORM
from batchmill.dialects.open_inference.metadata import Metadata
from batchmill.dialects.open_inference.repository import Index, Load, Repository, Unload, UnloadParameters
from batchmill.dialects.open_inference.statistics import StatisticsCalls
from batchmill.errors import InvalidInput, UnknownName
from batchmill.server.operations import Call
from batchmill.services.functions.paths import locate
from batchmill.services.services import Services
from batchmill.types import Caller, Scope

Handler = Callable[[Call], Awaitable[Response]]


class Service:
    def __init__(self, services: Services, door: Door) -> None:
        self._functions, self._door = services.functions, door
        self._bytes_max = services.config.server.body_bytes_max
        self._metadata, self._statistics = Metadata(services), StatisticsCalls(services)
        self._repository, self._settings = Repository(services), SettingCalls(services)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Every method of the service by its name."""
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
        found = {name: self._door.unary(METHODS[name], scope, action) for name, (scope, action) in unary.items()}
        streamed = METHODS["ModelStreamInfer"]
        return found | {streamed.name: self._door.stream(streamed, Scope.SUBMIT, self.converse)}

    # -- calls --------------------------------------------------------------------------------------------------------

    async def infer(self, caller: Caller, request: Any) -> bytes:
        target = locate(self._functions, caller, request.model_name, request.model_version or None)
        if target.interface.streams:
            raise InvalidInput(
                f"ModelInfer RPC doesn't support models with decoupled transaction policy: {target.name} answers in "
                "events; call ModelStreamInfer",
                code="streams_only",
            )
        body, head = body_of(request, self._bytes_max)
        # The client's deadline is grpc's to keep: it cancels this call, rows that have not begun never run, and a
        # function that is at work goes on for those who are more patient.
        answer = await self._functions.ask(caller, target, FORM, body, head=head)
        return response_of(answer.body, answer.head, raw=is_raw(request))

    async def converse(self, caller: Caller, requests: Messages, write: Write) -> None:
        conversation = Conversation(
            self._functions, caller, write,
            form=FORM, bytes_max=self._bytes_max, spend=self._door.spend, told=self._door.told,
        )  # fmt: skip
        await conversation.hold(requests)

    # -- what there is ------------------------------------------------------------------------------------------------

    async def live(self, caller: Caller, request: Any) -> Message:
        return METHODS["ServerLive"].response(live=True)

    async def ready(self, caller: Caller, request: Any) -> Message:
        reply = await self._metadata.ready(call_of(caller))
        return METHODS["ServerReady"].response(ready=reply.status_code == 200)

    async def server_metadata(self, caller: Caller, request: Any) -> Message:
        return await _told("ServerMetadata", self._metadata.server, call_of(caller))

    async def model_ready(self, caller: Caller, request: Any) -> Message:
        """False for a model that there is not, too: it is what a client waits for that polls until it is deployed."""
        try:
            reply = await self._metadata.model_ready(_call_of_model(caller, request))
        except UnknownName:
            return METHODS["ModelReady"].response(ready=False)
        return METHODS["ModelReady"].response(ready=reply.status_code == 200)

    async def model_metadata(self, caller: Caller, request: Any) -> Message:
        return await _told("ModelMetadata", self._metadata.model, _call_of_model(caller, request))

    async def model_config(self, caller: Caller, request: Any) -> Message:
        reply = await self._metadata.model_config(_call_of_model(caller, request))
        return _message("ModelConfig", {"config": msgspec.json.decode(reply.body)})

    async def statistics(self, caller: Caller, request: Any) -> Message:
        if not request.name:
            return await _told("ModelStatistics", self._statistics.all, call_of(caller))
        handler = self._statistics.version if request.version else self._statistics.model
        return await _told("ModelStatistics", handler, _call_of_model(caller, request))

    # -- the repository -----------------------------------------------------------------------------------------------

    async def index(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        reply = await self._repository.index(call_of(caller, body=Index(ready=request.ready)))
        return _message("RepositoryIndex", {"models": msgspec.json.decode(reply.body)})

    async def load(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        body = Load(parameters=dict.fromkeys(request.parameters, ""))  # what they hold is refused by its name
        await self._repository.load(call_of(caller, body=body, model=request.model_name))
        return METHODS["RepositoryModelLoad"].response()

    async def unload(self, caller: Caller, request: Any) -> Message:
        _only_repository(request.repository_name)
        told = {name: value.bool_param for name, value in request.parameters.items()}
        try:
            parameters = msgspec.convert(told, UnloadParameters)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the parameters of an unload: {error}", code="parameter_not_allowed") from None
        await self._repository.unload(call_of(caller, body=Unload(parameters), model=request.model_name))
        return METHODS["RepositoryModelUnload"].response()


def _only_repository(name: str) -> None:
    if name:
        raise InvalidInput(
            f"there is one repository, which has no name; {name[:80]!r} is none", code="unknown_repository"
        )


def _call_of_model(caller: Caller, request: Any) -> Call:
    named = {"model": request.name, "version": request.version}
    return call_of(caller, **{key: value for key, value in named.items() if value})


async def _told(method: str, handler: Handler, call: Call) -> Message:
    return _message(method, msgspec.json.decode((await handler(call)).body))


def _message(method: str, told: Any) -> Message:
    """JSON as the message of the same fields; what only HTTP has room for is left out."""
    return ParseDict(told, METHODS[method].response(), ignore_unknown_fields=True)
