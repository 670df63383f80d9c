"""What the machine's user may ask of an owner, whichever process that is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from remote_room import THEM, RemoteRoom, at

from batchmill.cli.clients import OwnerClient
from batchmill.client.calls import typed_request
from batchmill.control import operations as own
from batchmill.control.admin import ConnectorHandlers, KeyHandlers, SecretHandlers
from batchmill.control.app import ControlApp
from batchmill.control.operations import ConnectorFields, NewRemoteModel, SecretValue
from batchmill.engines.clock import SystemClock
from batchmill.errors import Conflict, InvalidInput, Unauthenticated, UnknownName
from batchmill.services.keys import KeyService, key_info
from batchmill.store.disk_room import DiskQuota
from batchmill.types import ProjectQuotas, Scope
from batchmill.wire.native import NewKey

SECRET = "sk-0123456789abcdefghij"


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[RemoteRoom]:
    room = RemoteRoom(tmp_path)
    await room.again()
    yield room
    await room.close()


async def test_connectors_of_the_machines_user(room: RemoteRoom) -> None:
    """The machine's user makes trusted connectors, sees those of all projects, and makes models of them."""
    app = ControlApp(ConnectorHandlers(room.remote).handlers())
    client, other = OwnerClient(app), OwnerClient(app, "other")
    fields = ConnectorFields(at("http://127.0.0.1:8000", credential={"openAI_key": "env:KEY"}))
    made = await other.call(typed_request(own.CREATE_CONNECTOR, body=fields))
    assert made.connector.is_trusted
    assert room.remote.connectors.get(THEM, made.id) == made
    assert [each.id for each in (await client.call(typed_request(own.LIST_CONNECTORS))).connectors] == [made.id]
    assert (await OwnerClient(app, "default").call(typed_request(own.LIST_CONNECTORS))).connectors == []
    changed = typed_request(own.CHANGE_CONNECTOR, made.id, body=ConnectorFields({"description": "x"}))
    assert (await client.call(changed)).revision == 2
    model = await client.call(typed_request(own.REGISTER_MODEL, made.id, body=NewRemoteModel("embeddings")))
    assert (await client.call(typed_request(own.LIST_CONNECTORS))).models == [model]
    with pytest.raises(UnknownName):
        await client.call(typed_request(own.SHOW_CONNECTOR, "nobody"))
    again = ConnectorFields({"description": "y"})
    with pytest.raises(InvalidInput, match="undeploy the models first"):
        await client.call(typed_request(own.CHANGE_CONNECTOR, made.id, body=again))
    redeployed = await client.call(typed_request(own.CHANGE_CONNECTOR, made.id, body=again, redeploy=True))
    assert redeployed.connector.description == "y"
    assert room.remote.models.get(THEM, model.id).is_deployed
    with pytest.raises(Conflict):
        await client.call(typed_request(own.DELETE_CONNECTOR, made.id))
    assert (await client.call(typed_request(own.DELETE_CONNECTOR, made.id, with_models=True))).id == made.id
    assert (await client.call(typed_request(own.LIST_CONNECTORS))).models == []


async def test_secrets_go_in_and_none_comes_out(room: RemoteRoom) -> None:
    """Secrets are put, listed, rotated and removed; no reply holds one."""
    app = ControlApp(SecretHandlers(room.vault).handlers())
    replies = []

    async def call(endpoint, *names, body=None):
        replies.append(reply := await app.send(typed_request(endpoint, *names, body=body).request))
        return reply.body

    await call(own.PUT_SECRET, "openai", body=SecretValue(SECRET))
    assert b'"openai"' in await call(own.LIST_SECRETS)
    assert b'"rewrapped":1' in await call(own.ROTATE_SECRETS)
    assert await room.vault.reveal("openai") == SECRET
    await call(own.REMOVE_SECRET, "openai")
    with pytest.raises(UnknownName):
        await call(own.REMOVE_SECRET, "openai")
    assert not any(SECRET.encode() in each.body for each in replies)


async def test_keys_of_every_project(room: RemoteRoom, tmp_path: Path) -> None:
    """Keys of any project and scope are made, listed and revoked."""
    keys = KeyService(room.database, SystemClock())
    disk = DiskQuota(room.database, tmp_path, ProjectQuotas())
    client = OwnerClient(ControlApp(KeyHandlers(keys, disk, SystemClock()).handlers()))
    made = await client.create_key(NewKey("n", Scope.DEPLOY, "one", ["m"]))
    assert (await keys.authenticate(made.key)).models == frozenset({"m"})
    assert await client.keys() == [key_info(each) for each in await keys.list(None)]
    await client.revoke_key(made.record.id)
    with pytest.raises(Unauthenticated):
        await keys.authenticate(made.key)
