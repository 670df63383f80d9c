"""The composition root: a data directory is opened here, as its owner or as a guest of the process that owns it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from batchmill.config import Config
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidConfig, InvalidTransition
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import preview
from batchmill.jobs.control import ControlClient, ControlServer, OwnerGone
from batchmill.jobs.ledger import open_ledger
from batchmill.jobs.machine import Machine
from batchmill.jobs.service import JobService
from batchmill.models import devices, redaction
from batchmill.ports import Jobs, Provisions
from batchmill.services.adapters.door import AdapterClient, AdapterDoor
from batchmill.services.adapters.opening import late_bases, make_adapters
from batchmill.services.adapters.service import AdapterService, Bases
from batchmill.services.functions.deploying import Workshop
from batchmill.services.functions.door import ModelClient, ModelDoor
from batchmill.services.functions.trial import Trials
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.key_door import KeyClient, KeyDoor
from batchmill.services.keys import KeyService
from batchmill.services.remote.connector_door import ConnectorClient, ConnectorDoor
from batchmill.services.remote.opening import RemoteServices, make_remote
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.door import SecretClient, SecretDoor
from batchmill.services.secrets.provisions import OwnerProvisions
from batchmill.services.secrets.vault import Vault
from batchmill.states import JobState, PauseReason
from batchmill.store.database import Database
from batchmill.types import Amendment, JobOrder, JobQuery, JobView, LedgerReport, RemoteJob, Submitted, Wait
from batchmill.wire.previews import Estimate, Explanation, SealReport

log = logging.getLogger("batchmill.owner")

DATABASE, LOCK, SOCKET = "batchmill.db", "owner.lock", "control.sock"
KEYS_DOOR, MODELS_DOOR, SECRETS_DOOR, CONNECTORS_DOOR = "keys", "models", "secrets", "connectors"
ADAPTERS_DOOR = "adapters"
TAKEOVER_S = 0.1  # between two tries while one owner ends and another begins
TAKEOVER_TRIES = 1200
LEFTOVER_S = 86_400.0  # a preview that is so old has no command any more

Progress = Callable[[float], None]


class Owner:
    """This process owns the data directory."""

    def __init__(self, config: Config, lock: int, *, serves: bool = False, bases: Bases | None = None) -> None:
        """
        Args:
            serves: it is a server, whose jobs go on by themselves and whose models stay.
            bases: the models that adapters may be for; None: those of the configuration.
        """
        self._data_dir, self._lock = config.data_dir, lock
        self._told, self._config = config, config if serves else None
        self.jobs: JobService | None = None
        self.database: Database | None = None
        self.vault: Vault | None = None
        self.keys: KeyService | None = None
        self.versions: ModelVersions | None = None
        self.remote: RemoteServices | None = None
        self.adapters: AdapterService | None = None
        self._bases = bases
        self._server: ControlServer | None = None

    async def open(self) -> None:
        redaction.guard_logs()
        for leftover in self._data_dir.glob("preview-*"):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(leftover)  # of a command that was killed
        for leftover in self._data_dir.glob("jobs/*/partial-*.jsonl"):
            leftover.unlink()
        executor = LocalExecutor(self._data_dir / "workers")
        executor.sweep()
        ledger = await asyncio.to_thread(open_ledger, self._data_dir / DATABASE)
        self.database = ledger.database
        config = self._config
        self.vault = open_vault(self._told, self.database)
        provisions = OwnerProvisions(self.vault, self._told.server.private_hosts)
        self.jobs = JobService(
            self._data_dir,
            ledger,
            executor,
            SystemClock(),
            weights={} if config is None else {name: project.weight for name, project in config.projects.items()},
            linger_s=0.0 if config is None else config.server.idle_unload_s,
            provisions=provisions,
        )
        gpus = devices.shared(self._told.machine.gpus, os.environ)
        self.jobs.dispatcher.share(Machine(self._told.machine.memory_bytes, gpus))
        self.vault.on_change.append(lambda _: self.jobs.dispatcher.provide())
        self.versions = open_versions(self._data_dir, self.database, provisions, config)
        await self.versions.load()
        self.remote = make_remote(self._told, self.database, self.vault, SystemClock())
        await self.remote.load()
        bases = self._bases or late_bases(self._told, self.versions, self.remote.models)
        self.adapters = self.jobs.adapters = make_adapters(self._told, self.database, self.vault, bases)
        await self.adapters.load()
        await self.jobs.recover(resume_doors=config is not None)
        self.keys = KeyService(self.database, SystemClock())
        doors = {
            KEYS_DOOR: KeyDoor(self.keys).answer,
            MODELS_DOOR: ModelDoor(self.versions).answer,
            SECRETS_DOOR: SecretDoor(self.vault).answer,
            CONNECTORS_DOOR: ConnectorDoor(self.remote).answer,
            ADAPTERS_DOOR: AdapterDoor(self.adapters).answer,
        }
        self._server = ControlServer(self.jobs, self._data_dir / SOCKET, doors)
        await self._server.open()

    async def close(self, *, at_once: bool, drain_s: float | None = None) -> None:
        """Pause what runs; guests notice and one of them takes over. Rows in flight may end, in `drain_s` at most.

        Cancelled, it ends at once; whoever calls it again finds nothing left to do.
        """
        if self._lock < 0:
            return
        try:
            if self._server is not None:
                await self._server.close()
            if self.remote is not None:
                await self.remote.close()
            if self.adapters is not None:
                await self.adapters.close()
            if self.jobs is not None:
                await self._close_jobs(self.jobs, at_once=at_once, drain_s=drain_s)
        finally:
            (self._data_dir / SOCKET).unlink(missing_ok=True)
            lock, self._lock = self._lock, -1
            os.close(lock)

    @staticmethod
    async def _close_jobs(jobs: JobService, *, at_once: bool, drain_s: float | None) -> None:
        try:
            async with asyncio.timeout(None if at_once else drain_s):
                await jobs.close(at_once=at_once)
        except TimeoutError:
            log.warning("rows in flight did not end within %g s: they run again next time", drain_s)
            await jobs.close(at_once=True)
        except asyncio.CancelledError:  # nobody waits any more: what is finished is kept all the same
            await jobs.close(at_once=True)
            raise


class OpenJobs:
    """`ports.Jobs` that outlives owners: when the one it speaks to ends, it becomes the owner itself and goes on."""

    def __init__(self, config: Config) -> None:
        self._config, self._data_dir = config, config.data_dir
        self._owner: Owner | None = None
        self._client = ControlClient(self._data_dir / SOCKET)
        self._opening = asyncio.Lock()

    async def _jobs(self) -> Jobs:
        """The service of this process, or the client of the owner's."""
        async with self._opening:
            for _ in range(TAKEOVER_TRIES):
                if self._owner is not None:
                    assert self._owner.jobs is not None
                    return self._owner.jobs
                lock = try_lock(self._data_dir)
                if lock is not None:
                    owner = Owner(self._config, lock)
                    self._owner = owner
                    await owner.open()
                    continue
                with contextlib.suppress(OwnerGone):
                    await self._client.check()
                    return self._client
                await asyncio.sleep(TAKEOVER_S)
        raise InvalidConfig(
            f"{self._data_dir} is locked by a process that does not answer on its control socket; end that process"
        )

    async def _ask(self, verb: str, *args: object):
        while True:
            jobs = await self._jobs()
            with contextlib.suppress(OwnerGone):
                return await getattr(jobs, verb)(*args)

    async def _steer(self, verb: str, job_id: str) -> JobView:
        """Ask for another state of a job. An owner may end with that very job, before its answer has arrived."""
        was_asked = False
        while True:
            jobs = await self._jobs()
            try:
                return await getattr(jobs, verb)(job_id)
            except OwnerGone:
                was_asked = True
            except InvalidTransition:
                if not was_asked:
                    raise
                return await self.show(job_id)  # it was done: only the answer was lost

    async def submit(self, order: JobOrder) -> Submitted:
        return await self._ask("submit", order)

    async def answered(self, key: str) -> None:
        await self._ask("answered", key)

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        return await self._ask("list", query)

    async def show(self, job_id: str) -> JobView:
        return await self._ask("show", job_id)

    async def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        while True:
            jobs = await self._jobs()
            try:
                if _was_interrupted(await jobs.show(job_id)):
                    await jobs.resume(job_id)  # the process that ran it ended, and another owns the directory now
                async for view in jobs.watch(job_id, interval_s):
                    if not isinstance(jobs, JobService) and _was_interrupted(view):
                        break  # the owner is ending and has paused its jobs
                    yield view
                else:
                    return
            except OwnerGone:
                continue
            await asyncio.sleep(TAKEOVER_S)

    async def pause(self, job_id: str) -> JobView:
        return await self._steer("pause", job_id)

    async def resume(self, job_id: str) -> JobView:
        return await self._steer("resume", job_id)

    async def cancel(self, job_id: str) -> JobView:
        return await self._steer("cancel", job_id)

    async def retry(self, job_id: str) -> JobView:
        return await self._steer("retry", job_id)

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        return await self._ask("amend", job_id, change)

    async def explain(self, job_id: str) -> Wait:
        return await self._ask("explain", job_id)

    async def partial(self, job_id: str) -> str:
        return await self._ask("partial", job_id)

    async def remote(self, job_id: str) -> list[RemoteJob]:
        return await self._ask("remote", job_id)

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        return await self._ask("settle_remote", job_id, tag, remote_id)

    async def verify(self, job_id: str) -> LedgerReport:
        return await self._ask("verify", job_id)

    async def rebuild(self, job_id: str) -> LedgerReport:
        return await self._ask("rebuild", job_id)

    async def close(self, *, at_once: bool) -> None:
        if self._owner is not None:
            await self._owner.close(at_once=at_once)


def _was_interrupted(view: JobView) -> bool:
    return view.state == JobState.PAUSED and view.reason == PauseReason.INTERRUPTED


@contextlib.asynccontextmanager
async def open_jobs(config: Config) -> AsyncIterator[OpenJobs]:
    """The jobs of a data directory. Leaving it pauses what this process runs; leaving it by cancellation, at once.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    prepare_data_dir(config.data_dir)
    jobs = OpenJobs(config)
    at_once = False
    try:
        yield jobs
    except asyncio.CancelledError:
        at_once = True
        raise
    finally:
        await jobs.close(at_once=at_once)


@contextlib.asynccontextmanager
async def open_keys(config: Config) -> AsyncIterator[KeyService | KeyClient]:
    """The keys of a data directory: those of the process that owns it, so that it knows them at once, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield KeyClient(lambda message: client.tell(KEYS_DOOR, message))
        else:
            yield KeyService(database, SystemClock())


def open_vault(config: Config, database: Database) -> Vault:
    """The secrets of a data directory that this process owns."""
    return Vault(database, SecretBox(config.secrets_key), SystemClock())


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
    """The adapters of a data directory: those of the process that owns it, or our own.

    Raises: InvalidConfig when the data directory cannot be used.
    """
    async with _owned(config) as (database, client):
        if database is None:
            yield AdapterClient(lambda message: client.tell(ADAPTERS_DOOR, message))
            return
        vault = open_vault(config, database)
        versions = open_versions(config.data_dir, database, OwnerProvisions(vault, config.server.private_hosts), config)
        remote = make_remote(config, database, vault, SystemClock())
        await versions.load()
        await remote.load()
        adapters = make_adapters(config, database, vault, late_bases(config, versions, remote.models))
        await adapters.load(resumes=False)  # a command is over soon
        try:
            yield AdapterClient(AdapterDoor(adapters).answer)
        finally:
            await adapters.close()


def open_versions(data_dir: Path, database: Database, provisions: Provisions, config: Config | None) -> ModelVersions:
    """The deployed functions of a data directory that this process owns; `load` comes next."""
    taken = frozenset() if config is None else frozenset(config.models)
    workshop = Workshop(data_dir, Trials(provisions))
    return ModelVersions(database, SystemClock(), workshop=workshop, taken=taken)


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
        provisions = OwnerProvisions(open_vault(config, database), config.server.private_hosts)
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
            database = await asyncio.to_thread(Database, config.data_dir / DATABASE)
            try:
                yield database, client
            finally:
                database.close()
                os.close(lock)
            return
        with contextlib.suppress(OwnerGone):
            await client.check()
            yield None, client
            return
        await asyncio.sleep(TAKEOVER_S)
    raise InvalidConfig(f"{config.data_dir} is locked by a process that does not answer on its control socket; end it")


async def preview_validate(order: JobOrder, config: Config, progress: Progress) -> SealReport:
    """Check every row of an order; none is run."""
    prepare_data_dir(config.data_dir)
    return await preview.validate(order, config.data_dir, progress)


async def preview_plan(order: JobOrder, config: Config, progress: Progress) -> tuple[SealReport, Explanation | None]:
    """Explain in which order the rows would run; no explanation where the dataset was refused."""
    prepare_data_dir(config.data_dir)
    return await preview.plan(order, config.data_dir, progress)


async def preview_estimate(order: JobOrder, config: Config, progress: Progress) -> tuple[SealReport, Estimate | None]:
    """Estimate tokens, cost and time; no estimate where the dataset was refused.

    The time is that of the newest finished job of the same models on this machine.
    """
    async with open_jobs(config) as jobs:
        views = await jobs.list()
    names = ", ".join(model.name for model in order.models)
    rates = [view.rows / view.elapsed_s for view in views if view.model == names and view.finished and view.elapsed_s]
    return await preview.estimate(order, config.data_dir, progress, rates[0] if rates else None)


async def partial_results(config: Config, job_id: str, out: BinaryIO) -> int:
    """Write the lines of every row that has its outcome, in row order; returns how many."""
    async with open_jobs(config) as jobs:
        path = Path(await jobs.partial(job_id))
    rows = 0
    try:
        with open(path, "rb") as lines:
            for line in lines:
                out.write(line)
                rows += 1
    finally:
        path.unlink()
    return rows


def prepare_data_dir(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = data_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidConfig(
            f"the data directory {data_dir} cannot be written: {error.strerror}; choose another with --data-dir"
        ) from None


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
