"""Which functions there are, and whether they are to be held ready. Source: Triton's model repository extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.dialects.open_inference.shelf import targets_of
from batchmill.errors import InvalidInput
from batchmill.server.function_replies import json_of
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.functions.paths import locate
from batchmill.services.services import Services
from batchmill.types import Scope

UNLOADED = "unloaded"


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """`ready` true: only those that can be called now."""

    ready: bool = False


class IndexEntry(Struct, frozen=True):
    name: str
    version: str
    state: str  # READY, UNAVAILABLE
    reason: str


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` may hold nothing: a version's code and settings never change."""

    parameters: dict[str, Any] = {}


class UnloadParameters(Struct, frozen=True, forbid_unknown_fields=True):
    unload_dependents: bool = False  # clients always send it; no function depends on another, so it has no effect


class Unload(Struct, frozen=True, forbid_unknown_fields=True):
    parameters: UnloadParameters = UnloadParameters()


class Repository:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions = services.functions, services.versions

    def operations(self) -> Sequence[Operation]:
        path = "/v2/repository/models/{model}"
        return [
            Operation(
                "getModelRepository", "POST", "/v2/repository/index", "Which functions there are", Scope.READ,
                self.index, body=Index, reply=list[IndexEntry], body_is_optional=True, is_raw=True,
            ),
            Operation(
                "loadModel", "POST", f"{path}/load", "Start the workers of a function", Scope.ADMIN,
                self.load, body=Load, errors=(404, 504), body_is_optional=True, is_raw=True,
            ),
            Operation(
                "unloadModel", "POST", f"{path}/unload", "End the workers of a function", Scope.ADMIN,
                self.unload, body=Unload, errors=(404,), body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    async def index(self, call: Call) -> Response:
        """Every version of branch main that can be called, or could be once it is loaded."""
        asked, found = await json_of(call, Index), []
        for target in targets_of(self._functions, call.caller):
            is_ready = self._functions.is_ready(target)
            if is_ready or not asked.ready:
                state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", UNLOADED)
                found.append(IndexEntry(target.name, target.version, state, reason))
        return json_reply(found)

    async def load(self, call: Call) -> Response:
        """Returns once a worker can answer. Raises: ModelFailed where none can be started."""
        asked = await json_of(call, Load)
        if asked.parameters:
            name = next(iter(asked.parameters))
            raise InvalidInput(
                f"the parameter {name[:80]!r} is not taken: a version's code and settings never change; deploy a new "
                "one with `batchmill deploy`",
                code="parameter_not_allowed",
            )
        await self._functions.load(locate(self._functions, call.caller, call.path["model"]))
        return Response(status_code=200)

    async def unload(self, call: Call) -> Response:
        """All versions of a name, or the one that its label means. They are called again once they are loaded."""
        await json_of(call, Unload)
        name = call.path["model"]
        target = locate(self._functions, call.caller, name)
        self._versions.own(target.name, call.caller)  # nobody stops another project's calls
        alone = [target] if "@" in name else targets_of(self._functions, call.caller, target.name)
        for each in alone:
            await self._functions.unload(each)
        return Response(status_code=200)
