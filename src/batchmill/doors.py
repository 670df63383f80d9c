"""Services of a data directory as a command finds them: whoever owns it is asked, or it is ours for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

from batchmill.client import calls
from batchmill.client.messages import OwnerGone
from batchmill.client.replies import value_of
from batchmill.config import Config
from batchmill.control.doors import TELL, Message
from batchmill.control.guest import Guest
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidConfig
from batchmill.jobs.quarantine import Quarantine
from batchmill.services import salvage as salvaging
from batchmill.services.adapters.door import AdapterClient, AdapterDoor
from batchmill.services.adapters.opening import late_bases, make_adapters
from batchmill.services.adapters.service import AdapterService
from batchmill.services.data_dirs import (
    ADAPTERS_DOOR,
    CONNECTORS_DOOR,
    KEYS_DOOR,
    LLMS_DOOR,
    MODELS_DOOR,
    QUOTAS_DOOR,
    SECRETS_DOOR,
    SOCKET,
    TAKEOVER_S,
    TAKEOVER_TRIES,
    open_provisions,
    open_vault,
    open_versions,
    prepare_data_dir,
    try_lock,
)
from batchmill.services.functions.door import ModelClient, ModelDoor
from batchmill.services.key_door import KeyClient
from batchmill.services.keys import KeyService
from batchmill.services.llms.door import LlmClient, LlmDoor
from batchmill.services.llms.opening import look_around, make_llms
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.connector_door import ConnectorClient, ConnectorDoor
from batchmill.services.remote.opening import make_remote
from batchmill.services.secrets.door import SecretClient
from batchmill.services.secrets.provisions import OwnerProvisions
from batchmill.services.secrets.vault import Vault
from batchmill.services.usage import QuotaClient, QuotaDoor
from batchmill.store.database import NAME as DATABASE
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom

log = logging.getLogger("batchmill.owner")


@contextlib.asynccontextmanager
async def open_keys(config: Config) -> AsyncIterator[KeyService | KeyClient]:
    """The keys of a data directory: those of the process that owns it, so that it knows them at once, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield KeyClient(lambda message: tell(client, KEYS_DOOR, message))
        else:
            yield KeyService(database, SystemClock(), config.project_quotas)


@contextlib.asynccontextmanager
async def open_secrets(config: Config) -> AsyncIterator[Vault | SecretClient]:
    """The secrets of a data directory: those of the process that owns it, so that it knows them at once, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield SecretClient(lambda message: tell(client, SECRETS_DOOR, message))
        else:
            yield open_vault(config, database)


@contextlib.asynccontextmanager
async def open_connectors(config: Config) -> AsyncIterator[ConnectorClient]:
    """The connectors of a data directory, and the models made of them: those of the process that owns it, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield ConnectorClient(lambda message: tell(client, CONNECTORS_DOOR, message))
            return
        remote = make_remote(config, database, open_vault(config, database), SystemClock())
        await remote.load()
        yield ConnectorClient(ConnectorDoor(remote).answer)


@contextlib.asynccontextmanager
async def open_adapters(config: Config) -> AsyncIterator[AdapterClient]:
    """The adapters of a data directory: as `open_llms`."""
    async with _owned(config) as (database, client):
        if database is None:
            yield AdapterClient(lambda message: tell(client, ADAPTERS_DOOR, message))
            return
        async with _alone(config, database) as (_, adapters):
            yield AdapterClient(AdapterDoor(adapters).answer)


@contextlib.asynccontextmanager
async def open_llms(config: Config) -> AsyncIterator[LlmClient]:
    """The deployed language models of a data directory: those of the process that owns it, or our own, whose engines
    start with the next server.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield LlmClient(lambda message: tell(client, LLMS_DOOR, message))
            return
        async with _alone(config, database) as (llms, _):
            yield LlmClient(LlmDoor(llms).answer)


@contextlib.asynccontextmanager
async def open_quotas(config: Config) -> AsyncIterator[QuotaClient]:
    """What projects have of their quotas, as the process knows it that owns the data directory, or as we find it.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield QuotaClient(lambda message: tell(client, QUOTAS_DOOR, message))
        else:
            room = DiskRoom(database, config.data_dir, config.project_quotas)
            yield QuotaClient(QuotaDoor(room, SystemClock()).answer)


@contextlib.asynccontextmanager
async def _alone(config: Config, database: Database) -> AsyncIterator[tuple[LlmService, AdapterService]]:
    """Language models and adapters of a command that owns the data directory for a moment."""
    vault = open_vault(config, database)
    versions = open_versions(config.data_dir, database, OwnerProvisions(vault, config.server.private_hosts), config)
    remote = make_remote(config, database, vault, SystemClock())
    await versions.load()
    await remote.load()
    llms = make_llms(config, database, vault, SystemClock())
    llms.quarantine = Quarantine(SystemClock(), database, config.quarantine)
    await llms.quarantine.load()
    await llms.load()
    adapters = make_adapters(config, database, vault, late_bases(config, versions, remote.models, llms))
    look_around(llms, config, versions, remote.models, adapters)
    await adapters.load(resumes=False)  # a command is over soon
    try:
        yield llms, adapters
    finally:
        await adapters.close()
        await llms.quarantine.close()


def has_models(config: Config) -> bool:
    """Something may have been deployed here: there is something to look at."""
    return (config.data_dir / DATABASE).exists()


@contextlib.asynccontextmanager
async def open_models(config: Config) -> AsyncIterator[ModelClient]:
    """The deployed functions of a data directory: those of the process that owns it, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield ModelClient(lambda message: tell(client, MODELS_DOOR, message))
            return
        provisions = await open_provisions(config, open_vault(config, database))
        versions = open_versions(config.data_dir, database, provisions, config)
        await versions.load()
        yield ModelClient(ModelDoor(versions).answer)


@contextlib.asynccontextmanager
async def _owned(config: Config) -> AsyncIterator[tuple[Database | None, Guest | None]]:
    """The database of a data directory, or None and a way to the process that owns it."""
    prepare_data_dir(config.data_dir)
    for _ in range(TAKEOVER_TRIES):
        if (lock := try_lock(config.data_dir)) is not None:
            database = None
            try:
                await asyncio.to_thread(salvaging.make_ready, config.data_dir)
                database = await asyncio.to_thread(Database, config.data_dir / DATABASE)
                yield database, None
            finally:
                if database is not None:
                    database.close()
                os.close(lock)
            return
        client = Guest(config.data_dir / SOCKET)
        try:
            with contextlib.suppress(OwnerGone):
                await client.check()
                yield None, client
                return
        finally:
            await client.close()
        await asyncio.sleep(TAKEOVER_S)
    raise InvalidConfig(f"{config.data_dir} is locked by a process that does not answer on its control socket; end it")


async def tell(guest: Guest | None, door: str, message: bytes) -> bytes:
    assert guest is not None
    what = calls.ask(TELL, door, body=Message(message))
    return value_of(what, await guest.send(what.request)).data
