"""A data directory with connectors, models and tasks as a server has them, over a clock that stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.config import Config, MlCommonsEntry, ServerEntry
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.remote.job_tasks import JobTasks
from batchmill.services.remote.remote_services import make_remote
from batchmill.services.remote.tasks import RemoteTasks
from batchmill.services.repeats import RepeatedOrders
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import Vault
from batchmill.types import Caller, Scope

ANN, BOB = Caller("ann", Scope.ADMIN), Caller("bob", Scope.ADMIN)
LOOPBACK = ["127.0.0.0/8"]


class TaskRoom:
    """Use it as an async context manager. `reopen` is what a restart does; `kill` leaves what a kill leaves."""

    def __init__(self, data_dir: Path, **entry: Any) -> None:
        self.data_dir, self.clock = data_dir, HeldClock()
        self.entry = MlCommonsEntry(**entry)

    async def __aenter__(self) -> TaskRoom:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        server = ServerEntry(private_hosts=LOOPBACK)
        config = Config(self.data_dir, self.data_dir, server=server, ml_commons=self.entry)
        self.database = open_database(self.data_dir / "batchmill.db")
        self.vault = Vault(self.database, SecretBox(self.data_dir / "secrets.key"), self.clock)
        self.remote = make_remote(
            config, self.database, self.vault, self.clock, ModelDirectory(ConfiguredModels(config))
        )
        self.connectors, self.models = self.remote.connectors, self.remote.models
        self.repeats = RepeatedOrders(self.database, self.clock)
        jobs = JobTasks(self.database, None, self.repeats)  # type: ignore[arg-type]  # no task of these tests has a job
        self.tasks = RemoteTasks(
            self.database, self.models, self.remote.calls, jobs, clock=self.clock, entry=self.entry
        )  # fmt: skip
        await self.remote.load()

    async def close(self) -> None:
        await self.tasks.close()
        await self.remote.close()
        self.database.close()

    async def reopen(self) -> None:
        await self.close()
        await self.open()
        await self.tasks.recover()

    async def model(self, connector: dict[str, Any], caller: Caller = ANN) -> str:
        """The id of a model that is the connector with these fields."""
        made = await self.connectors.create(caller, connector)
        fields = {"name": "m", "function_name": "remote", "connector_id": made.id}
        return (await self.models.register(caller, fields, deploy=True)).id
