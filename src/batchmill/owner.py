"""Open a data directory as its owner: database, services, workers and jobs, in this order.

They are closed in reverse order, also if opening fails in the middle. `open_store` opens the database; `open_owner`
opens all that runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

from msgspec import Struct

from batchmill.children.offload import Children
from batchmill.config import BackupsEntry, Config
from batchmill.control.admin import ClusterHandlers, ConnectorHandlers, JobHandlers, KeyHandlers, SecretHandlers
from batchmill.control.app import ControlApp
from batchmill.control.listener import ControlListener
from batchmill.control.models import AdapterHandlers, FunctionHandlers, LlmHandlers, ModelHandlers
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidConfig, TermOver
from batchmill.executors.local import LocalExecutor
from batchmill.imports import import_large
from batchmill.jobs.intake import preview
from batchmill.jobs.job_space import JobSpace
from batchmill.jobs.ledger.commits import CommitLog
from batchmill.jobs.ledger.files import PARTIAL
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.pools.dispatcher import Dispatcher, Sharing
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.resources import Resources
from batchmill.jobs.service import JobService
from batchmill.models import devices, redaction
from batchmill.models.isolation import isolation_of_config
from batchmill.models.worker_environment import chosen, of_placed_worker, of_worker
from batchmill.object_store.credentials import settings_of
from batchmill.optional import require
from batchmill.owned_files import OwnedFiles
from batchmill.ports.clock import Clock
from batchmill.ports.executors import ClusterExecutor, Executor
from batchmill.prepared import PreparedProcesses
from batchmill.services.adapters.service import AdapterService
from batchmill.services.data_dirs import salvage as salvaging
from batchmill.services.data_dirs.backups import Backups, keep_backups
from batchmill.services.data_dirs.data_dirs import SOCKET, prepare_data_dir, try_lock
from batchmill.services.data_dirs.databases import describe, file_of, open_database
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.functions.deploying import Trials, VersionBuilder
from batchmill.services.functions.versions import ModelVersions, Warm
from batchmill.services.keys import KeyService
from batchmill.services.llms.controller import Calls, Engines
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.remote_services import RemoteServices, make_remote
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import OwnerProvisions, Vault
from batchmill.store.disk_room import DiskQuota
from batchmill.store.file_log import FileLog
from batchmill.store.sql.database import Database
from batchmill.store.stored_files import LocalFiles, StoredFiles
from batchmill.types import SalvageReport
from batchmill.types.connectors import Storage

log = logging.getLogger("batchmill.owner")

STORED = "batchmill.store.object_files"  # needs obstore
CLAIM_PREFIX = "batchmill.store.prefix_owner:claim"
STORE_VARIABLES = ("AWS_*", "GOOGLE_*", "AZURE_*", "STORAGE_EMULATOR_HOST")  # that clients of object stores read
LEFTOVER_S = 86_400.0  # the command of a preview of this age has ended

Close = Callable[[bool], Awaitable[None]]  # True: at once


def close_last(stack: contextlib.AsyncExitStack, close: Close) -> None:
    """Make `stack` call `close` on exit; with True (close at once) if the exit is a cancellation. If the close itself
    is cancelled, it is called again with True.
    """

    async def leave(kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            await close(kind is not None and issubclass(kind, asyncio.CancelledError))
        except asyncio.CancelledError:
            await close(True)
            raise

    stack.push_async_exit(leave)


# -- the database -----------------------------------------------------------------------------------------------------


class Store(Struct, frozen=True, eq=False):
    """The database of a data directory, and the services that need only the database."""

    config: Config
    clock: Clock
    database: Database
    disk_quota: DiskQuota
    vault: Vault
    keys: KeyService
    stored: StoredFiles


def salvage(config: Config, progress: Callable[[str], None]) -> SalvageReport:
    """Rebuild a damaged or missing database from what can still be read.

    Raises: InvalidConfig while another process owns the data directory.
    """
    if config.database.url is not None:
        raise InvalidConfig(
            "the ledger is in a PostgreSQL database, whose pages batchmill cannot salvage: restore it from a copy of "
            "pg_dump or of its server's own backups; `batchmill ledger rebuild JOB` then adopts what jobs wrote since"
        )
    prepare_data_dir(config.data_dir)
    lock = try_lock(config.data_dir)
    if lock is None:
        raise InvalidConfig(
            f"another process owns the data directory {config.data_dir}: stop it first, so that nothing writes to the "
            "database meanwhile",
            code="data_dir_owned",
        )
    try:
        return salvaging.salvage(config.data_dir, progress)
    finally:
        os.close(lock)


@contextlib.asynccontextmanager
async def open_store(config: Config, lock: int, database: Database | None = None) -> AsyncIterator[Store]:
    """Open the database. Args:
        lock: the data directory's lock, from `try_lock`; it is always released at the end.
        database: the database if it is open already; it is always closed at the end.

    Raises: InvalidConfig if the database is damaged, or another version of batchmill has written it.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, lock)
        redaction.guard_logs()
        if database is None:
            if config.database.url is None:
                await asyncio.to_thread(salvaging.make_ready, config.data_dir)
            database = open_database(config)  # not in a thread: a cancellation could lose what it opened
        stack.callback(database.close)
        stored = await _open_stored(stack, config, database)
        yield Store(
            config,
            clock,
            database,
            disk_quota=DiskQuota(database, config.data_dir, config.project_quotas),
            vault=Vault(
                database, SecretBox(config.secrets_key, OwnedFiles(database.term)), clock, config.project_quotas
            ),
            keys=KeyService(database, clock, config.project_quotas),
            stored=stored,
        )


async def _open_stored(stack: contextlib.AsyncExitStack, config: Config, database: Database) -> StoredFiles:
    """Open the object store of `[storage]`.

    Raises: InvalidConfig if the key file would be lost with the cache, or for a prefix of another database.
    """
    if config.storage.objects is None:
        file_log = FileLog(database, config.data_dir)
        await stack.enter_async_context(file_log.open())
        return LocalFiles(file_log)
    if config.loses_key_file:
        raise InvalidConfig(
            f"with [storage] objects the data directory {config.data_dir} is a cache that may be deleted, and the key "
            f"file of the secrets {config.secrets_key} is in it: set secrets.key_file to a path outside of it, and "
            "give every machine that may run the server this file"
        )
    which = await file_of(config, database)
    claim_prefix = require(CLAIM_PREFIX, "[storage] objects")
    claimed = await claim_prefix(database, config.storage.objects, describe(config), which)
    stored = require(STORED, "[storage] objects").open_files(
        database, config.data_dir, config.storage.objects, config.storage.cache_bytes, claimed.term,
        has_nodes=config.cluster.executor is not None,
    )  # fmt: skip
    await stack.enter_async_context(claimed.renewing())
    await stored.open()
    stack.push_async_callback(stored.close)
    return stored


# -- what is served ---------------------------------------------------------------------------------------------------


class ModelServices(Struct, frozen=True, eq=False):
    """The models and adapters: of the configuration, or deployed or registered over an API."""

    directory: ModelDirectory
    versions: ModelVersions
    remote: RemoteServices
    llms: LlmService
    adapters: AdapterService


async def _make_provisions(store: Store, environ: Mapping[str, str] | None = None) -> OwnerProvisions:
    """Make the provisions of workers. Raises: InvalidConfig if the configured isolation is not available."""
    config = store.config
    isolation = await asyncio.to_thread(isolation_of_config, config.functions, config.data_dir)
    storage = _storage_of(config, environ)
    return OwnerProvisions(store.vault, config.server.private_hosts, environ, isolation, storage, store.stored.term)


def _storage_of(config: Config, environ: Mapping[str, str] | None) -> Storage | None:
    """The store that workers write to. Those of a command have its environment: `environ` is None."""
    if (url := config.storage.objects) is None:
        return None
    variables = {} if environ is None else chosen(environ, STORE_VARIABLES)
    settings = settings_of(variables)
    return Storage(url, settings, {name: value for name, value in variables.items() if name not in settings})


def _children_of(prepared: PreparedProcesses | None) -> Children | None:
    return None if prepared is None else prepared.children


def _runs_openly(executor: Executor, provisions: OwnerProvisions, *, serves: bool) -> bool:
    """Whether code of projects would run on nodes that others use, and not isolated."""
    is_isolated = provisions.isolation is not None
    return serves and not is_isolated and isinstance(executor, ClusterExecutor) and not executor.is_local


def _make_versions(
    store: Store, provisions: OwnerProvisions, directory: ModelDirectory, warm: Warm, runs_openly: Callable[[], bool]
) -> ModelVersions:
    """Make the service of deployed functions. It is not loaded yet."""
    config = store.config
    builder = VersionBuilder(
        config.data_dir, Trials(provisions), config.functions, provisions.isolation, store.stored,
        OwnedFiles(store.database.term),
    )  # fmt: skip
    provisions.restore_with(builder.restore)
    return ModelVersions(
        store.database, store.clock, directory, builder=builder, quotas=config.project_quotas, warm=warm,
        runs_openly=runs_openly,
    )  # fmt: skip


async def _open_models(
    stack: contextlib.AsyncExitStack, store: Store, directory: ModelDirectory, versions: ModelVersions, *,
    engines: Engines, calls: Calls, quarantine: Quarantine, gpus: int | None = None,
) -> ModelServices:  # fmt: skip
    """Open the model services. All are loaded, except the adapters."""
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
    adapters = AdapterService(
        store.database,
        store.clock,
        directory,
        config=config,
        vault=store.vault,
        disk_quota=store.disk_quota,
        stored=store.stored,
    )
    close_last(stack, lambda _: adapters.close())
    return ModelServices(directory, versions, remote, llms, adapters)


# -- jobs -------------------------------------------------------------------------------------------------------------


class Owner(Struct, frozen=True, eq=False):
    """The parts of the process that owns the data directory, runs its jobs, and answers other commands."""

    store: Store
    models: ModelServices
    backups: Backups
    dispatcher: Dispatcher
    jobs: JobService
    control: ControlApp  # the operations of the control socket


@contextlib.asynccontextmanager
async def open_owner(
    store: Store, *, configured: ConfiguredModels | None = None, drain_s: float | None = None,
    prepared: PreparedProcesses | None = None,
) -> AsyncIterator[Owner]:  # fmt: skip
    """Open jobs, and what they run on. Leaving the context pauses running jobs; a connected command then takes over.

    Args:
        configured: the models of a server, which resumes its jobs and keeps its models; None: a command, which
            resolves the configured models when it needs them.
        drain_s: how long rows in flight may take to end; None: as long as when a job is paused.
        prepared: the processes that were started for the first job of a command; None: there are none.
    """
    config, clock, serves = store.config, store.clock, configured is not None
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(_remove_socket, store)
        _sweep(store)
        executor = _make_executor(stack, store, prepared, serves=serves)
        executor.sweep()
        is_file = config.database.url is None  # otherwise its server keeps backups
        backups = Backups(config.data_dir, clock, config.backups if is_file else BackupsEntry(keep=0))
        await keep_backups(backups)
        # Workers of a command inherit its environment.
        is_clustered = config.cluster.executor is not None
        provisions = await _make_provisions(store, os.environ if serves or is_clustered else None)
        gpus = None if is_clustered else devices.shared(config.machine.gpus, os.environ)
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
            idle_timeout_s=config.server.idle_unload_s if serves else 0.0,
            provisions=provisions,
            quarantine=Quarantine(clock, store.database, config.quarantine),
        )
        close_last(stack, lambda _: dispatcher.close(at_once=True))  # its workers end before: when the jobs are closed
        store.vault.listen(lambda _: dispatcher.provide())
        directory = ModelDirectory(configured or ConfiguredModels(config))
        runs_openly = partial(_runs_openly, executor, provisions, serves=serves)
        versions = _make_versions(store, provisions, directory, dispatcher.live.replace, runs_openly)
        models = await _open_models(
            stack, store, directory, versions, engines=dispatcher,
            calls=dispatcher.live, quarantine=dispatcher.quarantine,
            gpus=None if gpus is None else len(gpus),
        )  # fmt: skip
        await models.adapters.load()
        if serves:
            directory.check()
        tasks = executor.tasks if isinstance(executor, ClusterExecutor) else None
        jobs = JobService(
            JobSpace(config.data_dir, store.disk_quota, store.stored, is_clustered, tasks, config.projects),
            commit_log, dispatcher, clock,
            adapters=models.adapters, schema_code=versions, retention=config.retention, children=_children_of(prepared),
        )  # fmt: skip
        close_last(stack, lambda at_once: _close_jobs(jobs, at_once=at_once, drain_s=drain_s))
        store.stored.term.listen(jobs.refuse_storage)
        await jobs.recover(resume_server_jobs=serves)
        if not serves:  # a server sweeps regularly
            with contextlib.suppress(TermOver):  # the next owner does it
                await jobs.retention.sweep()
        control = _control(store, models, jobs, executor)
        listener = ControlListener(control, config.data_dir / SOCKET, OwnedFiles(store.database.term))
        close_last(stack, lambda at_once: listener.close(at_once=at_once))
        await listener.open()
        yield Owner(store, models, backups, dispatcher, jobs, control)


def _make_executor(
    stack: contextlib.AsyncExitStack, store: Store, prepared: PreparedProcesses | None, *, serves: bool
) -> Executor:
    """Make what starts workers: processes of this machine, or actors of a Ray cluster."""
    config = store.config
    more, folder = config.server.worker_environment, config.data_dir / "workers"
    local = LocalExecutor(
        folder, (lambda model: of_worker(model, os.environ, more)) if serves else None,
        prepared=None if prepared is None else prepared.workers,
    )  # fmt: skip
    if config.cluster.executor is None:
        return local
    local.sweep()
    shared = None
    if (storage := _storage_of(config, os.environ)) is not None:
        shared = import_large("batchmill.executors.ray.shared_store").SharedStore(
            store.stored, storage, config.cluster.cache, config.storage.cache_bytes, config.data_dir
        )
    executor = import_large("batchmill.executors.ray.executor").RayExecutor(
        config.cluster, config.data_dir, lambda model: of_placed_worker(model, os.environ, more), store=shared,
        is_served=serves,
    )  # fmt: skip
    close_last(stack, lambda _: executor.close())
    return executor


def _remove_socket(store: Store) -> None:
    """Remove the control socket, unless it may be that of a successor."""
    with contextlib.suppress(TermOver):
        OwnedFiles(store.database.term).remove(store.config.data_dir / SOCKET)


def _sweep(store: Store) -> None:
    """Remove leftovers of killed processes, unless they may be those of a successor."""
    preview.sweep(store.config.data_dir, LEFTOVER_S)
    with contextlib.suppress(TermOver):
        OwnedFiles(store.database.term).remove_tree(store.config.data_dir / PARTIAL)


def _control(store: Store, models: ModelServices, jobs: JobService, executor: Executor) -> ControlApp:
    """Make the application of the control socket."""
    server = store.config.server
    groups = (
        JobHandlers(jobs),
        ClusterHandlers(executor),
        KeyHandlers(store.keys, store.disk_quota, store.clock),
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
        log.warning("rows in flight did not end within %g s: they run again after the next start", drain_s)
        await jobs.close(at_once=True)
