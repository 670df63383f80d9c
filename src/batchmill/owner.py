"""What a process that owns a data directory has open: database, services, workers and jobs, opened in this order and
closed in the reverse order, also when opening fails on the way.

`open_store` has the database; `open_owner`, over it, all that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec import Struct

from batchmill.config import Config
from batchmill.control.admin import ConnectorHandlers, JobHandlers, KeyHandlers, SecretHandlers
from batchmill.control.app import ControlApp
from batchmill.control.listener import ControlListener
from batchmill.control.models import AdapterHandlers, FunctionHandlers, LlmHandlers, ModelHandlers
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.intake import preview
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.pools.dispatcher import Dispatcher, Sharing
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.resources import Resources
from batchmill.jobs.service import JobService
from batchmill.models import devices, redaction
from batchmill.models.isolation import of_config
from batchmill.models.worker_environment import of_worker
from batchmill.ports import Clock
from batchmill.services import salvage
from batchmill.services.adapters.service import AdapterService
from batchmill.services.backups import Backups, keep_backups
from batchmill.services.configured_models import ConfiguredModels
from batchmill.services.data_dirs import SOCKET
from batchmill.services.directory import ModelDirectory
from batchmill.services.functions.deploying import Trials, VersionBuilder
from batchmill.services.functions.versions import ModelVersions, Warm
from batchmill.services.keys import KeyService
from batchmill.services.llms.controller import Calls, Engines
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.remote_services import RemoteServices, make_remote
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import OwnerProvisions, Vault
from batchmill.store.database import NAME as DATABASE
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskQuota

log = logging.getLogger("batchmill.owner")

LEFTOVER_S = 86_400.0  # a preview that is so old has no command any more

Close = Callable[[bool], Awaitable[None]]  # True: at once


def close_last(stack: contextlib.AsyncExitStack, close: Close) -> None:
    """Have `stack` call `close` when it comes to it: at once where it is left by cancellation. A close that is itself
    cancelled is called again, to end at once."""

    async def leave(kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            await close(kind is not None and issubclass(kind, asyncio.CancelledError))
        except asyncio.CancelledError:
            await close(True)
            raise

    stack.push_async_exit(leave)


# -- the database -----------------------------------------------------------------------------------------------------


class Store(Struct, frozen=True, eq=False):
    """The database of a data directory, and the services that need nothing else."""

    config: Config
    clock: Clock
    database: Database
    room: DiskQuota
    vault: Vault
    keys: KeyService


@contextlib.asynccontextmanager
async def open_store(config: Config, lock: int) -> AsyncIterator[Store]:
    """Args: lock: of the data directory, from `try_lock`; it is given back at the end, however that comes.

    Raises: InvalidConfig for a database that is damaged, or that another version of batchmill has written.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, lock)
        redaction.guard_logs()
        await asyncio.to_thread(salvage.make_ready, config.data_dir)
        database = Database(config.data_dir / DATABASE)
        stack.callback(database.close)
        yield Store(
            config,
            clock,
            database,
            room=DiskQuota(database, config.data_dir, config.project_quotas),
            vault=Vault(database, SecretBox(config.secrets_key), clock, config.project_quotas),
            keys=KeyService(database, clock, config.project_quotas),
        )


# -- what is served ---------------------------------------------------------------------------------------------------


class ModelServices(Struct, frozen=True, eq=False):
    """What has names: of the configuration, or deployed or registered over an API."""

    directory: ModelDirectory
    versions: ModelVersions
    remote: RemoteServices
    llms: LlmService
    adapters: AdapterService


async def _make_provisions(store: Store, environ: Mapping[str, str] | None = None) -> OwnerProvisions:
    """What workers are given. Raises: InvalidConfig for isolation that was asked for and cannot be had."""
    config = store.config
    isolation = await asyncio.to_thread(of_config, config.functions, config.data_dir)
    return OwnerProvisions(store.vault, config.server.private_hosts, environ, isolation)


def _make_versions(store: Store, provisions: OwnerProvisions, directory: ModelDirectory, warm: Warm) -> ModelVersions:
    """The deployed functions; `load` comes next."""
    config = store.config
    builder = VersionBuilder(config.data_dir, Trials(provisions), config.functions, provisions.isolation)
    return ModelVersions(
        store.database, store.clock, directory, builder=builder, quotas=config.project_quotas, warm=warm,
    )  # fmt: skip


async def _open_models(
    stack: contextlib.AsyncExitStack, store: Store, directory: ModelDirectory, versions: ModelVersions, *,
    engines: Engines, calls: Calls, quarantine: Quarantine, gpus: int | None = None,
) -> ModelServices:  # fmt: skip
    """All of it loaded, but for the adapters."""
    config = store.config
    await versions.load()
    remote = make_remote(config, store.database, store.vault, store.clock, directory)
    close_last(stack, lambda _: remote.close())
    await remote.load()
    llms = LlmService(
        store.database, store.vault, directory, store.clock, engines=engines, calls=calls, quarantine=quarantine,
        gpus=gpus,
    )  # fmt: skip
    await llms.load()
    adapters = AdapterService(store.database, store.clock, directory, config=config, vault=store.vault, room=store.room)
    close_last(stack, lambda _: adapters.close())
    return ModelServices(directory, versions, remote, llms, adapters)


# -- jobs -------------------------------------------------------------------------------------------------------------


class Owner(Struct, frozen=True, eq=False):
    """This process owns the data directory, runs its jobs, and answers other commands."""

    store: Store
    models: ModelServices
    backups: Backups
    dispatcher: Dispatcher
    jobs: JobService
    control: ControlApp  # what the machine's user may ask


@contextlib.asynccontextmanager
async def open_owner(
    store: Store, *, configured: ConfiguredModels | None = None, drain_s: float | None = None
) -> AsyncIterator[Owner]:
    """Jobs, and what they run on. Leaving it pauses what runs: guests notice, and one of them takes over.

    Args:
        configured: of a server, whose jobs go on by themselves and whose models stay; None: of a command, which
            resolves what the configuration names once that matters.
        drain_s: rows in flight may take so long to end; None: as long as they may when a job is paused.
    """
    config, clock, serves = store.config, store.clock, configured is not None
    async with contextlib.AsyncExitStack() as stack:
        stack.callback((config.data_dir / SOCKET).unlink, missing_ok=True)
        _sweep(config)
        executor = LocalExecutor(
            config.data_dir / "workers",
            (lambda model: of_worker(model, os.environ, config.server.worker_environment)) if serves else None,
        )
        executor.sweep()
        backups = Backups(config.data_dir, clock, config.backups)
        await keep_backups(backups)
        # Workers of a command have its environment themselves.
        provisions = await _make_provisions(store, os.environ if serves else None)
        gpus = devices.shared(config.machine.gpus, os.environ)
        commit_log = CommitLog(Ledger(store.database))
        stack.callback(commit_log.close)
        dispatcher = Dispatcher(
            config.data_dir,
            commit_log,
            executor,
            clock,
            sharing=Sharing(
                {name: project.weight for name, project in config.projects.items()} if serves else {},
                Resources(config.machine.memory_bytes, gpus),
            ),
            linger_s=config.server.idle_unload_s if serves else 0.0,
            provisions=provisions,
            quarantine=Quarantine(clock, store.database, config.quarantine),
        )
        close_last(stack, lambda _: dispatcher.close(at_once=True))  # jobs, which come after it, end its workers
        store.vault.listen(lambda _: dispatcher.provide())
        directory = ModelDirectory(configured or ConfiguredModels(config))
        versions = _make_versions(store, provisions, directory, dispatcher.live.replace)
        models = await _open_models(
            stack, store, directory, versions, engines=dispatcher,
            calls=dispatcher.live, quarantine=dispatcher.quarantine,
            gpus=None if gpus is None else len(gpus),
        )  # fmt: skip
        await models.adapters.load()
        if serves:
            directory.check()
        jobs = JobService(
            config.data_dir, commit_log, dispatcher, clock, room=store.room, adapters=models.adapters,
            retention=config.retention,
        )  # fmt: skip
        close_last(stack, lambda at_once: _close_jobs(jobs, at_once=at_once, drain_s=drain_s))
        await jobs.recover(resume_server_jobs=serves)
        if not serves:  # a server has its rounds
            await jobs.retention.sweep()
        control = _control(store, models, jobs)
        listener = ControlListener(control, config.data_dir / SOCKET)
        close_last(stack, lambda at_once: listener.close(at_once=at_once))
        await listener.open()
        yield Owner(store, models, backups, dispatcher, jobs, control)


def _sweep(config: Config) -> None:
    """Remove what processes that were killed left."""
    preview.sweep(config.data_dir, LEFTOVER_S)
    for leftover in config.data_dir.glob("jobs/*/partial-*.jsonl"):
        leftover.unlink()


def _control(store: Store, models: ModelServices, jobs: JobService) -> ControlApp:
    """What the machine's user may ask."""
    server = store.config.server
    groups = (
        JobHandlers(jobs),
        KeyHandlers(store.keys, store.room, store.clock),
        SecretHandlers(store.vault),
        ConnectorHandlers(models.remote),
        ModelHandlers(models.versions, models.llms, models.adapters, models.remote.models),
        FunctionHandlers(models.versions, f"http://{server.host}:{server.port}"),
        LlmHandlers(models.llms),
        AdapterHandlers(models.adapters),
    )
    return ControlApp(each for group in groups for each in group.handlers())


async def _close_jobs(jobs: JobService, *, at_once: bool, drain_s: float | None) -> None:
    try:
        async with asyncio.timeout(None if at_once else drain_s):
            await jobs.close(at_once=at_once)
    except TimeoutError:
        log.warning("rows in flight did not end within %g s: they run again next time", drain_s)
        await jobs.close(at_once=True)
