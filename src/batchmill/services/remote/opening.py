"""Connectors, the models made of them, their groups and their calls: what belongs together, opened in one place."""

from __future__ import annotations

from msgspec import Struct

from batchmill.children.programs import Programs
from batchmill.config import Config
from batchmill.models.addresses import read_private
from batchmill.ports import Clock
from batchmill.services.remote.calls import RemoteCalls
from batchmill.services.remote.connector_urls import Endpoints
from batchmill.services.remote.connectors import ConnectorService
from batchmill.services.remote.forced import ForcedEndings
from batchmill.services.remote.groups import ModelGroups
from batchmill.services.remote.models import RemoteModels
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database


class RemoteServices(Struct, frozen=True):
    connectors: ConnectorService
    groups: ModelGroups
    models: RemoteModels
    calls: RemoteCalls
    forced: ForcedEndings
    programs: Programs  # of callers

    async def load(self) -> None:
        """Read what there is."""
        await self.connectors.load()
        await self.groups.load()
        await self.models.load()

    async def close(self) -> None:
        await self.calls.close()
        await self.programs.close()


def make_remote(config: Config, database: Database, vault: Vault, clock: Clock) -> RemoteServices:
    """Those of a data directory that this process owns; `load` comes next. Raises: InvalidConfig."""
    entry, programs = config.ml_commons, Programs(clock)
    private = read_private(config.server.private_hosts)
    endpoints = Endpoints(private, entry.trusted_connector_endpoints)
    connectors = ConnectorService(database, vault, endpoints, clock, programs)
    groups = ModelGroups(database, clock, connectors.changes, config.project_quotas)
    models = RemoteModels(database, connectors, groups, clock, auto_deploy=entry.model_auto_deploy)
    calls = RemoteCalls(vault, clock, private=private, endpoints=endpoints, programs=programs)
    forced = ForcedEndings(database, models, calls, clock)
    return RemoteServices(connectors, groups, models, calls, forced, programs)
