"""The composition root: a data directory is opened here, as its owner or as a guest of the process that owns it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from batchmill.config import Config
from batchmill.control.admin import ConnectorHandlers, KeyHandlers, SecretHandlers
from batchmill.control.app import ControlApp
from batchmill.control.jobs import JobHandlers
from batchmill.control.listener import ControlListener
from batchmill.control.models import AdapterHandlers, FunctionHandlers, LlmHandlers, ModelHandlers
from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import preview
from batchmill.jobs.ledger import open_ledger
from batchmill.jobs.machine import Machine
from batchmill.jobs.service import JobService
from batchmill.models import devices, redaction
from batchmill.models.worker_environment import of_worker
from batchmill.services import salvage
from batchmill.services.adapters.opening import late_bases, make_adapters
from batchmill.services.adapters.service import AdapterService
from batchmill.services.backups import Backups, keep_backups
from batchmill.services.catalogue import Catalogue
from batchmill.services.data_dirs import (
    SOCKET,
    open_provisions,
    open_vault,
    open_versions,
)
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.keys import KeyService
from batchmill.services.llms.opening import look_around, make_llms
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.opening import RemoteServices, make_remote
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import NAME as DATABASE
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom
from batchmill.types import ModelSpec

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
        self.control: ControlApp = ControlApp([])  # what the machine's user may ask
        self._listener: ControlListener | None = None

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
        self.versions = open_versions(self._data_dir, self.database, provisions, self._told)
        await self.versions.load()
        self.remote = make_remote(self._told, self.database, self.vault, SystemClock())
        await self.remote.load()
        await self._open_llms(self.jobs, None if gpus is None else len(gpus))
        await self.jobs.recover(resume_doors=config is not None)
        if config is None:  # a server has its rounds
            await self.jobs.retention.sweep()
        self.keys = KeyService(self.database, SystemClock(), self._told.project_quotas)
        self.control = self._control(self.jobs, self.versions, self.remote, self.llms, self.adapters)
        self._listener = ControlListener(self.control, self._data_dir / SOCKET)
        await self._listener.open()

    def _control(
        self, jobs: JobService, versions: ModelVersions, remote: RemoteServices, llms: LlmService,
        adapters: AdapterService,
    ) -> ControlApp:  # fmt: skip
        """What the machine's user may ask."""
        assert self.keys is not None and self.vault is not None and self.room is not None, "they come first"
        server = self._told.server
        groups = (
            JobHandlers(jobs),
            KeyHandlers(self.keys, self.room, SystemClock()),
            SecretHandlers(self.vault),
            ConnectorHandlers(remote),
            ModelHandlers(versions, llms, adapters, remote.models),
            FunctionHandlers(versions, f"http://{server.host}:{server.port}"),
            LlmHandlers(llms),
            AdapterHandlers(adapters),
        )
        return ControlApp(each for group in groups for each in group.handlers())

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
            if self._listener is not None:
                await self._listener.close()
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
