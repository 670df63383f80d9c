"""The composition root of `batchmill serve`: owner of a data directory, and HTTP on the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from socket import socket
from typing import TYPE_CHECKING

from msgspec import Struct

from batchmill.app import Owner
from batchmill.config import Config
from batchmill.dialects import FALLBACK, load_dialects, load_grpc
from batchmill.engines.clock import SystemClock
from batchmill.errors import BatchmillError, InvalidConfig
from batchmill.ports import Clock
from batchmill.server import access_log, openapi
from batchmill.server.admission.admission import Admission
from batchmill.server.auth import Gate
from batchmill.server.health import Health
from batchmill.server.hosts import Hosts, is_loopback
from batchmill.server.http import HttpRoot
from batchmill.server.lane import Lane
from batchmill.server.listening import Listener, bind, url_of
from batchmill.server.observers import Observers
from batchmill.server.own import Own
from batchmill.services import salvage
from batchmill.services.catalogue import Catalogue
from batchmill.services.data_dirs import prepare_data_dir, try_lock
from batchmill.services.datasets.service import DatasetService
from batchmill.services.files import FileService
from batchmill.services.functions.calls import FunctionCalls
from batchmill.services.functions.late_replies import LateReplies
from batchmill.services.job_desk import JobDesk
from batchmill.services.keys import KeyService
from batchmill.services.links import LinkService
from batchmill.services.live_calls import LiveCalls
from batchmill.services.remote.job_tasks import JobTasks
from batchmill.services.remote.tasks import RemoteTasks
from batchmill.services.services import Services
from batchmill.services.uploads import UploadService
from batchmill.services.webhooks import WebhookService
from batchmill.store.database import NAME as DATABASE
from batchmill.store.database import Database

if TYPE_CHECKING:
    from batchmill.dialects.open_inference.grpc.server import GrpcServer

log = logging.getLogger("batchmill.server")

OWNER_WAIT_S = 10.0  # for a process that owns the data directory and is ending
OWNER_LOOK_S = 0.1
REQUESTS_DRAIN_S = 10  # requests under way may end in so long when the server stops
ROWS_DRAIN_S = 20.0  # and rows in flight, after them
SWEEP_S = 60.0


class Running(Struct, frozen=True):
    """A server that answers."""

    url: str
    services: Services
    grpc: str | None = None  # HOST:PORT


@contextlib.asynccontextmanager
async def serve(config: Config, *, rows_drain_s: float = ROWS_DRAIN_S) -> AsyncIterator[Running]:
    """A server for as long as the context lasts. Leaving it drains; leaving it by cancellation does so at once.

    Raises: InvalidConfig when the address is taken, a model cannot be resolved, the data directory belongs to another
    process, or an address beyond this machine would be open to everybody.
    """
    catalogue = Catalogue(config, config.base)
    prepare_data_dir(config.data_dir)
    _raise_file_limit()
    sock = bind(config.server.host, config.server.port)
    try:
        lock = await _take_lock(config)
    except BaseException:
        sock.close()
        raise
    server = _Server(config, catalogue, sock, lock, rows_drain_s)
    try:
        yield await server.open()
    except asyncio.CancelledError:
        await server.close(at_once=True)
        raise
    except BaseException:
        await server.close(at_once=True)
        raise
    try:
        await server.close(at_once=False)
    except asyncio.CancelledError:  # a second signal
        await server.close(at_once=True)
        raise


async def _take_lock(config: Config) -> int:
    clock = SystemClock()
    until = clock.monotonic() + OWNER_WAIT_S
    while (lock := try_lock(config.data_dir)) is None:
        if clock.monotonic() > until:
            raise InvalidConfig(
                f"another process owns the data directory {config.data_dir}: a server or a command that runs a job "
                "there; end it, or choose another --data-dir",
                code="data_dir_owned",
            )
        await clock.sleep(OWNER_LOOK_S)
    return lock


class _Server:
    """What is open of a server; `close` ends whatever there is, in the reverse order."""

    def __init__(self, config: Config, catalogue: Catalogue, sock: socket, lock: int, rows_drain_s: float) -> None:
        self._config, self._catalogue, self._sock, self._rows_drain_s = config, catalogue, sock, rows_drain_s
        self._clock: Clock = SystemClock()
        self._owner = Owner(config, lock, serves=True, catalogue=catalogue)
        self._stopping = asyncio.Event()
        self._listener: Listener | None = None
        self._grpc: GrpcServer | None = None
        self._root: HttpRoot | None = None
        self._health: Health | None = None
        self._observers: Observers | None = None
        self._functions: FunctionCalls | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._late: LateReplies | None = None
        self._tasks: RemoteTasks | None = None
        self._datasets: DatasetService | None = None
        self._files: FileService | None = None

    async def open(self) -> Running:
        config, clock = self._config, self._clock
        if not is_loopback(config.server.host):
            await _refuse_open_door(config, clock)
        await self._owner.open()
        assert self._owner.jobs is not None and self._owner.database is not None and self._owner.backups is not None
        database = self._owner.database
        services = await self._services(database)
        jobs = self._owner.jobs
        self._health = Health(database, config.data_dir, clock, jobs)
        observers = self._observers = Observers(
            services, database=database, jobs=jobs, dispatcher=jobs.dispatcher, environ=os.environ
        )
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        admission = Admission(config.server, files=files, clock=asyncio.get_running_loop().time)
        gate = Gate(services.keys, clock, config.server.requests_per_minute, admission.proxies)
        own = Own(self._health, gate, observers.metrics.render, services.catalogue.sees)
        dialects = load_dialects(services)
        fallback = next(each for each in dialects if each.name == FALLBACK)
        self._root = HttpRoot(
            dialects,
            fallback=fallback,
            own=own.operations(),
            gate=gate,
            hosts=Hosts(config.server.host, config.server.allowed_hosts),
            clock=clock,
            admission=admission,
            programs=services.programs,
        )
        own.document = openapi.document(self._root.routes.all())
        self._sweeping = asyncio.create_task(
            _sweep_for_ever(services, clock, self._owner.backups.sweep, jobs.retention.sweep)
        )
        self._late = services.late
        self._late.open()
        self._tasks = services.remote_tasks
        await self._tasks.open()
        self._datasets = services.datasets
        await self._datasets.open()
        app = observers.open(self._root)
        lane = Lane(self._root) if app is self._root else None  # the span of a traced request is made on the normal way
        self._listener = Listener(app, self._sock, root=self._root, drain_s=REQUESTS_DRAIN_S, lane=lane)
        await self._listener.open()
        if config.server.grpc_port is not None:
            self._grpc = load_grpc(services, gate, admission, [access_log.write, observers.metrics.served])
            await self._grpc.open()
        return Running(url_of(self._sock), services, self._grpc and self._grpc.address)

    async def _services(self, database: Database) -> Services:
        config, clock, jobs = self._config, self._clock, self._owner.jobs
        assert jobs is not None
        assert self._owner.keys is not None
        vault = self._owner.vault
        assert vault is not None
        versions = self._owner.versions
        assert versions is not None
        remote = self._owner.remote
        assert remote is not None
        adapters = self._owner.adapters
        assert adapters is not None
        self._catalogue.attach(versions, remote.models)
        self._catalogue.attach_adapters(adapters)
        llms = self._owner.llms
        assert llms is not None
        llms.open()
        functions = self._functions = FunctionCalls(jobs.live, versions, self._catalogue, clock)
        versions.warm = functions.replace
        quotas = config.project_quotas
        files = self._files = FileService(database, config.data_dir, clock, config.server, quotas, self._owner.room)
        webhooks = WebhookService(database, clock, config, vault.box)
        await files.sweep()
        desk = JobDesk(jobs, files, self._catalogue)
        links = LinkService(database, clock, vault.box, quotas)
        tasks = RemoteTasks(
            database,
            remote.models,
            remote.calls,
            JobTasks(database, desk, quotas),
            clock=clock,
            entry=config.ml_commons,
        )
        return Services(
            jobs=desk,
            files=files,
            uploads=UploadService(database, files, clock),
            links=links,
            datasets=DatasetService(database, files, links, clock, config),
            keys=self._owner.keys,
            catalogue=self._catalogue,
            live=LiveCalls(jobs.live, self._catalogue, clock),
            functions=functions,
            versions=versions,
            webhooks=webhooks,
            vault=vault,
            connectors=remote.connectors,
            groups=remote.groups,
            remote_models=remote.models,
            programs=remote.programs,
            remote_tasks=tasks,
            adapters=adapters,
            llms=llms,
            late=LateReplies(database, clock, functions, webhooks.courier, quotas),
            config=config,
            clock=clock,
            stopping=self._stopping,
            gauges=jobs.dispatcher.gauges,
        )

    async def _close_http(self, at_once: bool) -> None:
        if self._listener is not None:
            await self._listener.close(at_once=at_once)
        else:
            self._sock.close()

    async def _close_grpc(self, at_once: bool) -> None:
        if self._grpc is not None:
            await self._grpc.close(drain_s=0 if at_once else REQUESTS_DRAIN_S)

    async def close(self, *, at_once: bool) -> None:
        """Requests under way end first, then rows in flight; neither is waited for without a bound."""
        self._stopping.set()
        if self._health is not None:
            self._health.is_stopping = True
        await asyncio.gather(self._close_http(at_once), self._close_grpc(at_once))
        if self._root is not None:
            await self._root.close()
        if self._late is not None:
            await self._late.close(at_once=at_once)
        if self._tasks is not None:
            await self._tasks.close()
        if self._datasets is not None:
            await self._datasets.close()
        if self._functions is not None:
            await self._functions.close()
        if self._observers is not None:
            await self._observers.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
        await self._owner.close(at_once=at_once, drain_s=self._rows_drain_s)
        if self._files is not None:
            self._files.close()


async def _refuse_open_door(config: Config, clock: Clock) -> None:
    """An address that other machines can reach needs a key. Before anything runs."""
    await asyncio.to_thread(salvage.make_ready, config.data_dir)
    database = await asyncio.to_thread(Database, config.data_dir / DATABASE)
    try:
        if await KeyService(database, clock).any_exist():
            return
    finally:
        database.close()
    raise InvalidConfig(
        f"{config.server.host} can be reached from other machines, and no key exists: make one with "
        "`batchmill keys create --name NAME`, or listen on 127.0.0.1",
        code="no_keys",
    )


async def _sweep_for_ever(services: Services, clock: Clock, *more: Callable[[], Awaitable[object]]) -> None:
    """What has had its time goes, and what was only remembered is written down."""
    duties: list[Callable[[], Awaitable[object]]] = [
        services.files.sweep, services.uploads.sweep, services.keys.write_uses, services.datasets.sweep,
        services.links.sweep, services.adapters.sweep, services.llms.sweep, *more,
    ]  # fmt: skip
    while True:
        await clock.sleep(SWEEP_S)
        for duty in duties:
            try:
                await duty()
            except (BatchmillError, OSError) as error:  # the next round may do better
                log.warning("%s: %s", duty.__qualname__, error)


def _raise_file_limit() -> None:
    """Every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
