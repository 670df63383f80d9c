"""Connectors asked for by another process of this user, through the owner's control socket: these are trusted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.services.remote.connector_records import ConnectorRecord
from batchmill.services.remote.connectors import unknown_connector
from batchmill.services.remote.model_records import RemoteModel
from batchmill.services.remote.opening import RemoteServices
from batchmill.types import Caller, ModelSpec, Scope


class _Create(Struct, frozen=True, tag="create"):
    project: str
    fields: dict[str, Any]

    def __repr__(self) -> str:  # they may hold credentials
        return f"_Create({self.project})"


class _Update(Struct, frozen=True, tag="update"):
    connector_id: str
    fields: dict[str, Any]
    redeploy: bool = False

    def __repr__(self) -> str:
        return f"_Update({self.connector_id})"


class _List(Struct, frozen=True, tag="list"):
    project: str | None


class _Show(Struct, frozen=True, tag="show"):
    connector_id: str


class _Delete(Struct, frozen=True, tag="delete"):
    connector_id: str
    with_models: bool = False


class _Register(Struct, frozen=True, tag="register"):
    connector_id: str
    name: str


class _Models(Struct, frozen=True, tag="models"):
    pass


class _Find(Struct, frozen=True, tag="find"):
    name: str


_call = msgspec.msgpack.Decoder(_Create | _Update | _List | _Show | _Delete | _Register | _Models | _Find)
_pack = msgspec.msgpack.encode


class ConnectorDoor:
    """The owner's side: `answer` takes a message and gives the reply to it."""

    def __init__(self, remote: RemoteServices) -> None:
        self._connectors, self._models, self._forced = remote.connectors, remote.models, remote.forced

    async def answer(self, message: bytes) -> bytes:
        connectors = self._connectors
        match _call.decode(message):
            case _Create(project, fields):
                return _pack(await connectors.create(_caller(project), fields, is_trusted=True))
            case _Update(connector_id, fields, redeploy):
                return _pack(await self._update(connector_id, fields, redeploy))
            case _List(project):
                return _pack([each for each in connectors.every() if project in (None, each.project)])
            case _Show(connector_id):
                return _pack(connectors.get(self._owner(connector_id), connector_id))
            case _Delete(connector_id, with_models):
                return _pack(await self._delete(connector_id, with_models))
            case _Register(connector_id, name):
                fields = {"name": name, "function_name": "remote", "connector_id": connector_id}
                return _pack(await self._models.register(self._owner(connector_id), fields, deploy=True))
            case _Models():
                return _pack(self._models.every())
            case _Find(name):
                found = self._models.find(name)
                return _pack(None if found is None else self._models.for_job(found))

    async def _update(self, connector_id: str, fields: dict[str, Any], redeploy: bool) -> ConnectorRecord:
        """`redeploy`: the models that use it are undeployed for as long as it takes."""
        who = self._owner(connector_id)
        down = [each for each in self._models_of(connector_id) if redeploy and each.is_deployed]
        try:
            for model in down:
                await self._models.undeploy(who, model.id)
            return await self._connectors.update(who, connector_id, fields, is_trusted=True)
        finally:
            for model in down:
                await self._models.deploy(who, model.id)

    async def _delete(self, connector_id: str, with_models: bool) -> ConnectorRecord:
        who = self._owner(connector_id)
        for model in self._models_of(connector_id) if with_models else ():
            await self._forced.cancel_all(model)
            await self._models.undeploy(who, model.id)
            await self._models.delete(who, model.id)
        return await self._connectors.delete(who, connector_id)

    def _models_of(self, connector_id: str) -> list[RemoteModel]:
        return [each for each in self._models.every() if each.connector == connector_id]

    def _owner(self, connector_id: str) -> Caller:
        """Somebody of the project that a connector belongs to."""
        for record in self._connectors.every():
            if record.id == connector_id:
                return _caller(record.project)
        raise unknown_connector(connector_id)


class ConnectorClient:
    """The other side, over `tell`, which carries a message to the owner and its reply back.

    Raises: what `ConnectorService` and `RemoteModels` raise.
    """

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def _ask(self, message: Struct, kind: object):
        return msgspec.msgpack.decode(await self._tell(_pack(message)), type=kind)

    async def create(self, project: str, fields: Mapping[str, Any]) -> ConnectorRecord:
        return await self._ask(_Create(project, dict(fields)), ConnectorRecord)

    async def update(self, connector_id: str, fields: Mapping[str, Any], *, redeploy: bool = False) -> ConnectorRecord:
        return await self._ask(_Update(connector_id, dict(fields), redeploy), ConnectorRecord)

    async def list(self, project: str | None) -> list[ConnectorRecord]:
        return await self._ask(_List(project), list[ConnectorRecord])

    async def show(self, connector_id: str) -> ConnectorRecord:
        return await self._ask(_Show(connector_id), ConnectorRecord)

    async def delete(self, connector_id: str, *, with_models: bool = False) -> ConnectorRecord:
        return await self._ask(_Delete(connector_id, with_models), ConnectorRecord)

    async def register(self, connector_id: str, name: str) -> RemoteModel:
        """Make a model of a connector, deployed."""
        return await self._ask(_Register(connector_id, name), RemoteModel)

    async def models(self) -> list[RemoteModel]:
        """The models that are connectors, of all projects."""
        return await self._ask(_Models(), list[RemoteModel])

    async def find(self, name: str) -> ModelSpec | None:
        """The model with this id or name, as a job has it; None: there is none."""
        return await self._ask(_Find(name), ModelSpec | None)


def _caller(project: str) -> Caller:
    return Caller(project, Scope.ADMIN)
