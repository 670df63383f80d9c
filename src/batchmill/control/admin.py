"""Keys, secrets, quotas and connectors, looked after by the machine's user: those of every project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from batchmill.control import operations as own
from batchmill.control.app import Call, Handler
from batchmill.control.operations import (
    ChangeConnector,
    ConnectorFields,
    ConnectorList,
    DeleteConnector,
    NewRemoteModel,
    Secret,
    SecretList,
)
from batchmill.ports import Clock
from batchmill.services.keys import KeyService, key_info
from batchmill.services.remote.connector_records import ConnectorRecord
from batchmill.services.remote.connectors import unknown_connector
from batchmill.services.remote.model_records import RemoteModel
from batchmill.services.remote.remote_services import RemoteServices
from batchmill.services.secrets.vault import Rotated, Vault
from batchmill.services.usage import usage
from batchmill.store.disk_room import DiskRoom
from batchmill.types import Caller, Scope
from batchmill.wire import operations as table
from batchmill.wire.native import KeyInfo, KeyList, MadeKey, NewKey, QuotaList, RevokeKey
from batchmill.wire.operations import Endpoint

PROJECT = "default"


def user_of(project: str | None) -> Caller:
    """The machine's user, on behalf of a project."""
    return Caller(project or PROJECT, Scope.ADMIN)


class KeyHandlers:
    def __init__(self, keys: KeyService, room: DiskRoom, clock: Clock) -> None:
        self._keys, self._room, self._clock = keys, room, clock

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (table.CREATE_KEY, self.create),
            (table.LIST_KEYS, self.list),
            (table.REVOKE_KEY, self.revoke),
            (table.LIST_QUOTAS, self.quotas),
        )

    async def create(self, call: Call) -> MadeKey:
        asked: NewKey = call.body
        made = await self._keys.create(
            name=asked.name, project=asked.project or PROJECT, scope=asked.scope,
            models=None if asked.models is None else frozenset(asked.models),
            requests_per_minute=asked.requests_per_minute, expires=asked.expires,
        )  # fmt: skip
        return MadeKey(made.key, key_info(made.record))

    async def list(self, call: Call) -> KeyList:
        return KeyList([key_info(each) for each in await self._keys.list(call.project)])

    async def revoke(self, call: Call) -> KeyInfo:
        asked: RevokeKey = call.query
        done = await self._keys.revoke(call.name, call.project, with_minted=asked.with_minted)
        return replace(key_info(done.record), minted=done.minted)

    async def quotas(self, call: Call) -> QuotaList:
        return QuotaList(await usage(self._room, call.project or PROJECT, self._clock.now()))


class SecretHandlers:
    """No secret comes out again."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.LIST_SECRETS, self.list),
            (own.PUT_SECRET, self.put),
            (own.REMOVE_SECRET, self.remove),
            (own.ROTATE_SECRETS, self.rotate),
        )

    async def list(self, call: Call) -> SecretList:
        return SecretList(await self._vault.list())

    async def put(self, call: Call) -> None:
        secret: Secret = call.body
        await self._vault.put(call.name, secret.value)

    async def remove(self, call: Call) -> None:
        await self._vault.remove(call.name)

    async def rotate(self, call: Call) -> Rotated:
        return await self._vault.rotate()


class ConnectorHandlers:
    """Connectors that the machine's user makes are trusted: they may call any address."""

    def __init__(self, remote: RemoteServices) -> None:
        self._connectors, self._models, self._forced = remote.connectors, remote.models, remote.forced

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.CREATE_CONNECTOR, self.create),
            (own.LIST_CONNECTORS, self.list),
            (own.SHOW_CONNECTOR, self.show),
            (own.CHANGE_CONNECTOR, self.change),
            (own.DELETE_CONNECTOR, self.delete),
            (own.REGISTER_MODEL, self.register),
        )

    async def create(self, call: Call) -> ConnectorRecord:
        asked: ConnectorFields = call.body
        return await self._connectors.create(user_of(call.project), asked.fields, is_trusted=True)

    async def list(self, call: Call) -> ConnectorList:
        found = [each for each in self._connectors.every() if call.project in (None, each.project)]
        return ConnectorList(found, self._models.every())

    async def show(self, call: Call) -> ConnectorRecord:
        return self._connectors.get(self._owner(call.name), call.name)

    async def change(self, call: Call) -> ConnectorRecord:
        asked: ConnectorFields = call.body
        query: ChangeConnector = call.query
        who = self._owner(call.name)
        down = [each for each in self._models_of(call.name) if query.redeploy and each.is_deployed]
        try:
            for model in down:
                await self._models.undeploy(who, model.id)
            return await self._connectors.update(who, call.name, asked.fields, is_trusted=True)
        finally:
            for model in down:
                await self._models.deploy(who, model.id)

    async def delete(self, call: Call) -> ConnectorRecord:
        query: DeleteConnector = call.query
        who = self._owner(call.name)
        for model in self._models_of(call.name) if query.with_models else ():
            await self._forced.cancel_all(model)
            await self._models.undeploy(who, model.id)
            await self._models.delete(who, model.id)
        return await self._connectors.delete(who, call.name)

    async def register(self, call: Call) -> RemoteModel:
        asked: NewRemoteModel = call.body
        fields = {"name": asked.name, "function_name": "remote", "connector_id": call.name}
        return await self._models.register(self._owner(call.name), fields, deploy=True)

    def _models_of(self, connector_id: str) -> list[RemoteModel]:
        return [each for each in self._models.every() if each.connector == connector_id]

    def _owner(self, connector_id: str) -> Caller:
        """Somebody of the project that a connector belongs to."""
        for record in self._connectors.every():
            if record.id == connector_id:
                return user_of(record.project)
        raise unknown_connector(connector_id)
