"""The composition root: a data directory is opened here, as its owner or as a guest of the process that owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
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
from batchmill.models.worker_environment import of_worker
from batchmill.ports import Jobs
from batchmill.services import salvage
from batchmill.services.adapters.door import AdapterDoor
from batchmill.services.adapters.opening import late_bases, make_adapters
from batchmill.services.adapters.service import AdapterService
from batchmill.services.backups import Backups, keep_backups
from batchmill.services.catalogue import Catalogue
from batchmill.services.data_dirs import (
    ADAPTERS_DOOR,
    CONNECTORS_DOOR,
    DATABASE,
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
from batchmill.services.functions.door import ModelDoor
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.key_door import KeyDoor
from batchmill.services.keys import KeyService
from batchmill.services.llms.door import LlmDoor
from batchmill.services.llms.opening import look_around, make_llms
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.connector_door import ConnectorDoor
from batchmill.services.remote.opening import RemoteServices, make_remote
from batchmill.services.secrets.door import SecretDoor
from batchmill.services.secrets.vault import Vault
from batchmill.services.usage import QuotaDoor
from batchmill.states import JobState, PauseReason
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom
from batchmill.types import Amendment, JobOrder, JobQuery, JobView, LedgerReport, ModelSpec, RemoteJob, Submitted, Wait
from batchmill.wire.previews import Estimate, Explanation, SealReport

log = logging.getLogger("batchmill.owner")

LEFTOVER_S = 86_400.0  # a preview that is so old has no command any more

Progress = Callable[[float], None]


class Owner:
    """This process owns the data directory."""

    def __init__(self, config: Config, lock: int, *, serves: bool = False, catalogue: Catalogue | None = None) -> None:
        """
        Args:
            serves: it is a server, whose jobs go on by themselves and whose models stay.
            catalogue: of a server; None: what the configuration names is resolved once that matters.
        """
        self._data_dir, self._lock = config.data_dir, lock
        self._told, self._config = config, config if serves else None
        self.jobs: JobService | None = None
        self.database: Database | None = None
        self.vault: Vault | None = None
        self.room: DiskRoom | None = None
        self.keys: KeyService | None = None
        self.versions: ModelVersions | None = None
        self.remote: RemoteServices | None = None
        self.adapters: AdapterService | None = None
        self.llms: LlmService | None = None
        self.backups: Backups | None = None
        self._catalogue = catalogue
        self._server: ControlServer | None = None

    async def open(self) -> None:
        redaction.guard_logs()
        await asyncio.to_thread(salvage.make_ready, self._data_dir)
        preview.sweep(self._data_dir, LEFTOVER_S)
        for leftover in self._data_dir.glob("jobs/*/partial-*.jsonl"):
            leftover.unlink()
        executor = LocalExecutor(self._data_dir / "workers", self._worker_environ if self._config is not None else None)
        executor.sweep()
        ledger = await asyncio.to_thread(open_ledger, self._data_dir / DATABASE)
        self.database = ledger.database
        self.backups = Backups(self._data_dir, SystemClock(), self._told.backups)
        await keep_backups(self.backups)
        self.room = DiskRoom(self.database, self._data_dir, self._told.project_quotas)
        config = self._config
        self.vault = open_vault(self._told, self.database)
        environ = os.environ if config is not None else None  # workers of a command have it themselves
        provisions = await open_provisions(self._told, self.vault, environ)
        self.jobs = JobService(
            self._data_dir,
            ledger,
            executor,
            SystemClock(),
            weights={} if config is None else {name: project.weight for name, project in config.projects.items()},
            linger_s=0.0 if config is None else config.server.idle_unload_s,
            provisions=provisions,
            room=self.room,
        )
        self.jobs.retention.entry = self._told.retention
        self.jobs.dispatcher.quarantine.settings = self._told.quarantine
        gpus = devices.shared(self._told.machine.gpus, os.environ)
        self.jobs.dispatcher.share(Machine(self._told.machine.memory_bytes, gpus))
        self.vault.on_change.append(lambda _: self.jobs.dispatcher.provide())
        self.versions = open_versions(self._data_dir, self.database, provisions, self._told, serves=config is not None)
        await self.versions.load()
        self.remote = make_remote(self._told, self.database, self.vault, SystemClock())
        await self.remote.load()
        await self._open_llms(self.jobs, None if gpus is None else len(gpus))
        await self.jobs.recover(resume_doors=config is not None)
        if config is None:  # a server has its rounds
            await self.jobs.retention.sweep()
        self.keys = KeyService(self.database, SystemClock(), self._told.project_quotas)
        doors = {
            KEYS_DOOR: KeyDoor(self.keys).answer,
            MODELS_DOOR: ModelDoor(self.versions).answer,
            SECRETS_DOOR: SecretDoor(self.vault).answer,
            CONNECTORS_DOOR: ConnectorDoor(self.remote).answer,
            ADAPTERS_DOOR: AdapterDoor(self.adapters).answer,
            LLMS_DOOR: LlmDoor(self.llms).answer,
            QUOTAS_DOOR: QuotaDoor(self.room, SystemClock()).answer,
        }
        self._server = ControlServer(self.jobs, self._data_dir / SOCKET, doors)
        await self._server.open()

    def _worker_environ(self, model: ModelSpec) -> dict[str, str]:
        return of_worker(model, os.environ, self._told.server.worker_environment)

    async def _open_llms(self, jobs: JobService, gpus: int | None) -> None:
        """Language models that were deployed, and adapters: each has to know of the other."""
        assert self.database is not None and self.vault is not None, "they come first"
        assert self.versions is not None and self.remote is not None, "they come first"
        told, catalogue, remote = self._told, self._catalogue, self.remote.models
        self.llms = make_llms(
            told, self.database, self.vault, SystemClock(), engines=jobs.dispatcher, calls=jobs.live, gpus=gpus
        )
        self.llms.quarantine = jobs.dispatcher.quarantine
        await self.llms.load()
        bases = catalogue or late_bases(told, self.versions, remote, self.llms)
        self.adapters = jobs.adapters = make_adapters(told, self.database, self.vault, bases, self.room)
        if catalogue is None:
            look_around(self.llms, told, self.versions, remote, self.adapters)
        else:
            catalogue.attach_llms(self.llms)
        await self.adapters.load()

    async def close(self, *, at_once: bool, drain_s: float | None = None) -> None:
        """Pause what runs; guests notice and one of them takes over. Rows in flight may end, in `drain_s` at most.

        Cancelled, it ends at once; whoever calls it again finds nothing left to do.
        """
        if self._lock < 0:
            return
        try:
            if self._server is not None:
                await self._server.close()
            if self.llms is not None:
                await self.llms.close()
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

    async def fail_rows(self, job_id: str) -> JobView:
        return await self._steer("fail_rows", job_id)

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

    async def remove(self, job_id: str, by: str = "") -> JobView:
        return await self._ask("remove", job_id)

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
