"""A data directory as a command finds it: whoever owns it is asked, or it is ours for a moment.

What is asked through the owner's control socket, it knows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from batchmill.config import Config
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidConfig, of_system
from batchmill.jobs.control import ControlClient, OwnerGone
from batchmill.jobs.quarantine import Quarantine
from batchmill.models.isolation import of_config
from batchmill.services import salvage as salvaging
from batchmill.services.adapters.door import AdapterClient, AdapterDoor
from batchmill.services.adapters.opening import late_bases, make_adapters
from batchmill.services.adapters.service import AdapterService
from batchmill.services.data_dir_modes import make_private
from batchmill.services.functions.deploying import Workshop
from batchmill.services.functions.door import ModelClient, ModelDoor
from batchmill.services.functions.trial import Trials
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.key_door import KeyClient
from batchmill.services.keys import KeyService
from batchmill.services.llms.door import LlmClient, LlmDoor
from batchmill.services.llms.opening import look_around, make_llms
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.connector_door import ConnectorClient, ConnectorDoor
from batchmill.services.remote.opening import make_remote
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.door import SecretClient
from batchmill.services.secrets.provisions import OwnerProvisions
from batchmill.services.secrets.vault import Vault
from batchmill.services.usage import QuotaClient, QuotaDoor
from batchmill.store.database import NAME as DATABASE
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom
from batchmill.store.segments import sync_folder
from batchmill.types import SalvageReport

log = logging.getLogger("batchmill.owner")

LOCK, SOCKET = "owner.lock", "control.sock"
KEYS_DOOR, MODELS_DOOR, SECRETS_DOOR, CONNECTORS_DOOR = "keys", "models", "secrets", "connectors"
ADAPTERS_DOOR, LLMS_DOOR, QUOTAS_DOOR = "adapters", "llms", "quotas"
TAKEOVER_S = 0.1  # between two tries while one owner ends and another begins
TAKEOVER_TRIES = 1200


@contextlib.asynccontextmanager
async def open_keys(config: Config) -> AsyncIterator[KeyService | KeyClient]:
    """The keys of a data directory: those of the process that owns it, so that it knows them at once, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield KeyClient(lambda message: client.tell(KEYS_DOOR, message))
        else:
            yield KeyService(database, SystemClock(), config.project_quotas)


def open_vault(config: Config, database: Database) -> Vault:
    """The secrets of a data directory that this process owns."""
    return Vault(database, SecretBox(config.secrets_key), SystemClock(), config.project_quotas)


@contextlib.asynccontextmanager
async def open_secrets(config: Config) -> AsyncIterator[Vault | SecretClient]:
    """The secrets of a data directory: those of the process that owns it, so that it knows them at once, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield SecretClient(lambda message: client.tell(SECRETS_DOOR, message))
        else:
            yield open_vault(config, database)


@contextlib.asynccontextmanager
async def open_connectors(config: Config) -> AsyncIterator[ConnectorClient]:
    """The connectors of a data directory, and the models made of them: those of the process that owns it, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield ConnectorClient(lambda message: client.tell(CONNECTORS_DOOR, message))
            return
        remote = make_remote(config, database, open_vault(config, database), SystemClock())
        await remote.load()
        yield ConnectorClient(ConnectorDoor(remote).answer)


@contextlib.asynccontextmanager
async def open_adapters(config: Config) -> AsyncIterator[AdapterClient]:
    """The adapters of a data directory: as `open_llms`."""
    async with _owned(config) as (database, client):
        if database is None:
            yield AdapterClient(lambda message: client.tell(ADAPTERS_DOOR, message))
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
            yield LlmClient(lambda message: client.tell(LLMS_DOOR, message))
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
            yield QuotaClient(lambda message: client.tell(QUOTAS_DOOR, message))
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


async def open_provisions(config: Config, vault: Vault, environ: Mapping[str, str] | None = None) -> OwnerProvisions:
    """What workers are given. Raises: InvalidConfig for isolation that was asked for and cannot be had."""
    isolation = await asyncio.to_thread(of_config, config.functions, config.data_dir)
    return OwnerProvisions(vault, config.server.private_hosts, environ, isolation)


def open_versions(
    data_dir: Path, database: Database, provisions: OwnerProvisions, config: Config, *, serves: bool = True
) -> ModelVersions:
    """The deployed functions of a data directory that this process owns; `load` comes next."""
    taken = frozenset(config.models) if serves else frozenset()
    workshop = Workshop(data_dir, Trials(provisions), config.functions, provisions.isolation)
    return ModelVersions(database, SystemClock(), workshop=workshop, taken=taken, quotas=config.project_quotas)


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
            yield ModelClient(lambda message: client.tell(MODELS_DOOR, message))
            return
        provisions = await open_provisions(config, open_vault(config, database))
        versions = open_versions(config.data_dir, database, provisions, config)
        await versions.load()
        yield ModelClient(ModelDoor(versions).answer)


@contextlib.asynccontextmanager
async def _owned(config: Config) -> AsyncIterator[tuple[Database | None, ControlClient]]:
    """The database of a data directory, or None and a way to the process that owns it."""
    prepare_data_dir(config.data_dir)
    client = ControlClient(config.data_dir / SOCKET)
    for _ in range(TAKEOVER_TRIES):
        if (lock := try_lock(config.data_dir)) is not None:
            database = None
            try:
                await asyncio.to_thread(salvaging.make_ready, config.data_dir)
                database = await asyncio.to_thread(Database, config.data_dir / DATABASE)
                yield database, client
            finally:
                if database is not None:
                    database.close()
                os.close(lock)
            return
        with contextlib.suppress(OwnerGone):
            await client.check()
            yield None, client
            return
        await asyncio.sleep(TAKEOVER_S)
    raise InvalidConfig(f"{config.data_dir} is locked by a process that does not answer on its control socket; end it")


def salvage(config: Config, progress: Callable[[str], None]) -> SalvageReport:
    """Make another database of what can be had of one that is damaged or gone.

    Raises: InvalidConfig while another process uses the data directory.
    """
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    if lock is None:
        raise InvalidConfig(
            f"another process owns the data directory {config.data_dir}: end it first, so that nothing writes to the "
            "database meanwhile",
            code="data_dir_owned",
        )
    try:
        return salvaging.salvage(config.data_dir, progress)
    finally:
        os.close(lock)


def prepare_data_dir(data_dir: Path) -> None:
    """Have the folder there, and to ourselves. Raises: InvalidConfig where it cannot be used, or is another user's."""
    try:
        make_durable(data_dir)
        if make_private(data_dir):
            log.warning("the data directory %s could be opened by other users: it is now this user's alone", data_dir)
        probe = data_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        refused = InvalidConfig(
            f"the data directory {data_dir} cannot be written: {error.strerror}; choose another with --data-dir"
        )
        raise of_system(error) or refused from None


def make_durable(folder: Path) -> None:
    """Have a folder there that a power cut does not take with all that it holds: each one that is made is synced."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True, mode=0o700 if each == folder else 0o777)
        with contextlib.suppress(PermissionError):  # it may be written to and not be read
            sync_folder(each.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def try_lock(data_dir: Path) -> int | None:
    """The owner's lock, held until its descriptor is closed; None while another process holds it."""
    fd = os.open(data_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd
