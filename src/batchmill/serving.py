"""`batchmill serve`: the owner of a data directory with an HTTP server, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from socket import gethostname, socket
from typing import TypeVar

from msgspec import Struct

from batchmill.config import Config
from batchmill.dialects import FALLBACK, load_dialects, load_grpc
from batchmill.engines.clock import SystemClock
from batchmill.errors import BatchmillError, DatabaseOwned, DatabaseUnavailable, InvalidConfig, TermOver
from batchmill.owner import Close, Owner, Store, close_last, open_owner, open_store
from batchmill.owner_term import Term
from batchmill.ports.clock import Clock
from batchmill.server import access_log, openapi
from batchmill.server.admission_control import Admission
from batchmill.server.auth import Gate, Hosts, is_loopback
from batchmill.server.connection import Listener, bind, url_of
from batchmill.server.fast_path import FastPath
from batchmill.server.http import HttpRoot
from batchmill.server.metrics import Observers
from batchmill.server.standby import Standby
from batchmill.server.system_routes import Health, SystemRoutes
from batchmill.services.data_dirs.data_dirs import owner_pid, prepare_data_dir, take_lock_of_stopped, try_lock
from batchmill.services.data_dirs.databases import end_replaced, open_backend, process_name
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.files.files import FileService
from batchmill.services.files.uploads import UploadService
from batchmill.services.functions.calls import FunctionCalls
from batchmill.services.functions.late_replies import LateReplies
from batchmill.services.links import LinkService
from batchmill.services.live_calls import LiveCalls
from batchmill.services.named_datasets import DatasetService
from batchmill.services.project_jobs import ProjectJobs
from batchmill.services.remote.job_tasks import JobTasks
from batchmill.services.remote.tasks import RemoteTasks
from batchmill.services.repeats import RepeatedOrders
from batchmill.services.services import Services
from batchmill.services.webhooks.endpoints import WebhookService
from batchmill.store.sql.database import Database
from batchmill.store.sql.owner_row import check_data_dir

T = TypeVar("T")

log = logging.getLogger("batchmill.server")

OWNER_WAIT_S = 10.0  # how long to wait for a stopping owner of the data directory
OWNER_POLL_S = 0.1
PREDECESSOR_S = 1.0  # the same where the database says that this server is its owner
STANDBY_POLL_S = 0.5
REQUESTS_DRAIN_S = 10  # how long requests under way may take to end when the server stops
ROWS_DRAIN_S = 20.0  # the same for rows in flight, after the requests
SWEEP_S = 60.0


class Running(Struct, frozen=True):
    """A running server."""

    url: str
    services: Services
    wait_failed: Callable[[], Awaitable[None]]  # returns once no job goes on any more: then the server is to end
    grpc: str | None = None  # HOST:PORT


@contextlib.asynccontextmanager
async def serve(config: Config, *, rows_drain_s: float = ROWS_DRAIN_S) -> AsyncIterator[Running]:
    """Run a server while the context lasts. Leaving it drains the server; by cancellation it stops at once.

    Raises: InvalidConfig if the address is in use, a model cannot be resolved, another process owns the data directory,
    or other machines could reach the address without a key.
    """
    configured = ConfiguredModels(config)
    configured.check()
    prepare_data_dir(config.data_dir)
    _raise_file_limit()
    async with contextlib.AsyncExitStack() as stack:
        sock = bind(config.server.host, config.server.port)
        stack.callback(sock.close)
        database = await _stand_by(config, sock)
        try:
            lock = await (_take_lock(config) if database is None else _take_lock_of_predecessor(config))
        except BaseException:
            if database is not None:
                database.close()
            raise
        store = await stack.enter_async_context(open_store(config, lock, database))
        await _refuse_open_address(store)
        owner = await stack.enter_async_context(open_owner(store, configured=configured, drain_s=rows_drain_s))
        stopping = asyncio.Event()
        services = await _open_services(stack, owner, stopping)
        health = Health(store.database, config.data_dir, store.clock, owner.jobs, stopping)
        yield await _open_front(stack, owner, services, health, sock)


async def _stand_by(config: Config, sock: socket) -> Database | None:
    """Wait until this process owns the PostgreSQL database, and answer requests meanwhile. None: a file is used."""
    if config.database.url is None:
        return None
    clock, address = SystemClock(), url_of(sock, shown=gethostname())
    database = Database(backend := await _finished(open_backend, config.database))
    standby = Standby(sock, database, clock)
    is_open = False
    try:
        while True:
            try:
                lease = await _finished(backend.claim, process_name(), address, str(config.data_dir))
                break
            except DatabaseOwned as error:
                check_data_dir(error.data_dir, str(config.data_dir))
                standby.owner = error.address
                if not is_open:
                    log.info("standing by: %s; this server takes over when it ends", error.message)
                    await standby.open()
                    is_open = True
            except DatabaseUnavailable as error:
                log.warning("standing by: %s", error.message)
            await clock.sleep(STANDBY_POLL_S)
        lease.on_lost(end_replaced)
        if is_open:
            log.info("this server has taken the database over")
    except BaseException:
        database.close()
        raise
    finally:
        await standby.close()
    return database


async def _finished(call: Callable[..., T], *args: object) -> T:
    """Call in a thread. A cancellation waits until the call has ended, so that nothing it opened is lost."""
    task = asyncio.create_task(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _take_lock_of_predecessor(config: Config) -> int:
    """Take the lock of the data directory, also from a stopped process, which owns the database no more."""
    clock = SystemClock()
    deadline = clock.monotonic() + PREDECESSOR_S
    while (lock := try_lock(config.data_dir)) is None:
        if clock.monotonic() > deadline:
            log.warning("process %s, which owned the database, still holds its lock", owner_pid(config.data_dir))
            return take_lock_of_stopped(config.data_dir)
        await clock.sleep(OWNER_POLL_S)
    return lock


async def _take_lock(config: Config) -> int:
    clock = SystemClock()
    deadline = clock.monotonic() + OWNER_WAIT_S
    while (lock := try_lock(config.data_dir)) is None:
        if clock.monotonic() > deadline:
            raise InvalidConfig(
                f"another process owns the data directory {config.data_dir}: a server or a command that runs a job "
                "there; stop it, or choose another --data-dir",
                code="data_dir_owned",
            )
        await clock.sleep(OWNER_POLL_S)
    return lock


async def _open_services(stack: contextlib.AsyncExitStack, owner: Owner, stopping: asyncio.Event) -> Services:
    """Open the services of the dialects, and start their background tasks."""
    store, jobs, directory = owner.store, owner.jobs, owner.models.directory
    versions, remote, adapters, llms = (
        owner.models.versions,
        owner.models.remote,
        owner.models.adapters,
        owner.models.llms,
    )
    config, clock, database, quotas = store.config, store.clock, store.database, store.config.project_quotas
    close_last(stack, lambda _: llms.close())
    llms.open()
    functions = FunctionCalls(jobs.live, directory, clock)
    close_last(stack, lambda _: functions.close())
    files = FileService(database, config.data_dir, clock, config.server, quotas, store.disk_quota, store.stored)
    stack.callback(files.close)
    jobs.listen_ends(files)
    with contextlib.suppress(TermOver):  # a regular sweep does it
        await files.sweep()
    webhooks = WebhookService(database, clock, config, store.vault.box)
    stack.callback(webhooks.close)
    project_jobs = ProjectJobs(jobs, files, directory)
    links = LinkService(database, clock, store.vault.box, quotas)
    uploads = UploadService(database, files, clock)
    datasets = DatasetService(database, files, links, clock, config)
    close_last(stack, lambda _: datasets.close())
    await datasets.open()
    sweeping = asyncio.create_task(
        _sweep_regularly(
            clock,
            database.term,
            [
                files.sweep, uploads.sweep, store.keys.write_uses, datasets.sweep, links.sweep, adapters.sweep,
                llms.sweep, owner.backups.sweep, jobs.retention.sweep,
            ],
        )
    )  # fmt: skip
    close_last(stack, lambda _: _cancel(sweeping))
    repeats = RepeatedOrders(database, clock)
    tasks = RemoteTasks(
        database,
        remote.models,
        remote.calls,
        JobTasks(database, project_jobs, repeats, quotas),
        clock=clock,
        entry=config.ml_commons,
    )
    close_last(stack, lambda _: tasks.close())
    await tasks.open()
    late = LateReplies(database, clock, functions, webhooks.webhook_sender, quotas)
    close_last(stack, lambda at_once: late.close(at_once=at_once))
    return Services(
        jobs=project_jobs, repeats=repeats, files=files, uploads=uploads, links=links, datasets=datasets,
        keys=store.keys, directory=directory,
        live=LiveCalls(jobs.live, directory, clock, admit=remote.models.admit, stored=store.stored),
        functions=functions, versions=versions, webhooks=webhooks, vault=store.vault, connectors=remote.connectors,
        groups=remote.groups, remote_models=remote.models, programs=remote.programs, remote_tasks=tasks,
        adapters=adapters, llms=llms, late=late, config=config, clock=clock, stopping=stopping,
        gauges=owner.dispatcher.gauges,
    )  # fmt: skip


async def _open_front(
    stack: contextlib.AsyncExitStack, owner: Owner, services: Services, health: Health, sock: socket
) -> Running:
    """Open HTTP and gRPC. They are closed first: requests under way get a limited time to end."""
    config, clock, jobs = services.config, services.clock, owner.jobs
    observers = Observers(
        services, database=owner.store.database, jobs=jobs, dispatcher=owner.dispatcher, environ=os.environ
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    admission = Admission(config.server, files=files, clock=asyncio.get_running_loop().time)
    gate = Gate(
        services.keys, clock, config.server.requests_per_minute, admission.proxies,
        term=owner.store.database.term,
    )  # fmt: skip
    system_routes = SystemRoutes(
        health, gate, observers.metrics.render, services.directory.sees,
        document=lambda: openapi.document(root.routes.all()),
    )  # fmt: skip
    dialects = load_dialects(services)
    root = HttpRoot(
        dialects,
        fallback=next(each for each in dialects if each.name == FALLBACK),
        own=system_routes.operations(),
        gate=gate,
        hosts=Hosts(config.server.host, config.server.allowed_hosts),
        clock=clock,
        admission=admission,
        programs=services.programs,
    )
    close_last(stack, lambda _: observers.close())
    app = observers.open(root)
    services.late.open()  # the dialects have registered how they write
    close_last(stack, lambda _: root.close())
    closing: list[Close] = []
    close_last(stack, lambda at_once: _close_front(services.stopping, closing, at_once=at_once))
    stack.callback(owner.control.stop)  # while the server drains, commands wait for the next owner
    # The normal path makes the span of a traced request.
    fast_path = FastPath(root) if app is root else None
    listener = Listener(app, sock, root=root, drain_s=REQUESTS_DRAIN_S, fast_path=fast_path)
    closing.append(lambda at_once: listener.close(at_once=at_once))
    await listener.open()
    if config.server.grpc_port is None:
        return Running(url_of(sock), services, jobs.wait_failed)
    grpc = load_grpc(services, gate, admission, [access_log.write, observers.metrics.on_request])
    closing.append(lambda at_once: grpc.close(drain_s=0 if at_once else REQUESTS_DRAIN_S))
    await grpc.open()
    return Running(url_of(sock), services, jobs.wait_failed, grpc.address)


async def _close_front(stopping: asyncio.Event, closing: Sequence[Close], *, at_once: bool) -> None:
    """Close HTTP and gRPC at the same time, so that each has the whole time for its requests."""
    stopping.set()
    await asyncio.gather(*(close(at_once) for close in closing))


async def _refuse_open_address(store: Store) -> None:
    """Refuse an address that other machines can reach while there is no key. Called before anything runs."""
    host = store.config.server.host
    if is_loopback(host) or await store.keys.any_exist():
        return
    raise InvalidConfig(
        f"other machines can reach {host}, but there is no key: create one with "
        "`batchmill keys create --name NAME`, or listen on 127.0.0.1",
        code="no_keys",
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _sweep_regularly(clock: Clock, term: Term, sweeps: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Regularly run the services' sweeps, which delete expired data and write buffered data.

    None while another process may be the owner: its files are unknown here, and look as if a crash had left them.
    """
    while True:
        await clock.sleep(SWEEP_S)
        for sweep in sweeps:
            if term.is_over():
                break
            try:
                await sweep()
            except (BatchmillError, OSError) as error:  # the next round may succeed
                log.warning("%s: %s", sweep.__qualname__, error)


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, since every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
