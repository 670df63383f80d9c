"""The adapters of a data directory, opened by its owner. A command resolves its models only where it comes to
registering an adapter."""

from __future__ import annotations

from batchmill.config import Config
from batchmill.engines.clock import SystemClock
from batchmill.services.adapters.service import AdapterService, Bases
from batchmill.services.catalogue import Catalogue
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.models import RemoteModels
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.store.disk_room import DiskRoom
from batchmill.types import Caller, ModelSpec

FOLDER = "adapters"  # in the data directory


def make_adapters(
    config: Config, database: Database, vault: Vault, bases: Bases, room: DiskRoom | None = None
) -> AdapterService:
    """Those of a data directory that this process owns; `load` comes next."""
    home = config.data_dir / FOLDER
    return AdapterService(database, SystemClock(), home=home, bases=bases, config=config, vault=vault, room=room)


def late_bases(config: Config, versions: ModelVersions, remote: RemoteModels, llms: LlmService | None = None) -> Bases:
    """The models of the configuration, and the names that are taken."""
    return _LateBases(config, versions, remote, llms)


class _LateBases:
    """Raises, everywhere: InvalidConfig for a model of the configuration that cannot be resolved."""

    def __init__(self, config: Config, versions: ModelVersions, remote: RemoteModels, llms: LlmService | None) -> None:
        self._config, self._versions, self._remote, self._llms = config, versions, remote, llms
        self._made: Catalogue | None = None

    @property
    def _catalogue(self) -> Catalogue:
        if self._made is None:
            self._made = Catalogue(self._config, self._config.base)
            self._made.attach(self._versions, self._remote)
            if self._llms is not None:
                self._made.know_llms(self._llms)  # this catalogue knows of no adapters
        return self._made

    def base(self, caller: Caller, name: str) -> ModelSpec:
        return self._catalogue.base(caller, name)

    def is_taken(self, project: str, name: str) -> bool:
        return self._catalogue.is_taken(project, name)
