"""The deployed language models of a data directory, opened by its owner."""

from __future__ import annotations

from collections.abc import Sequence

from batchmill.config import Config
from batchmill.jobs.quarantine import Quarantine
from batchmill.ports import Clock
from batchmill.services.adapters.service import AdapterService
from batchmill.services.catalogue import Catalogue
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.llms.bases import Bases
from batchmill.services.llms.keeping import Calls, Engines
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.models import RemoteModels
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.types import Caller, ModelSpec


def make_llms(
    config: Config,
    database: Database,
    vault: Vault,
    clock: Clock,
    *,
    engines: Engines,
    calls: Calls,
    quarantine: Quarantine,
    gpus: int | None = None,
) -> LlmService:
    """Those of a data directory that this process owns; `load` comes next, and `open` where engines are to run."""
    return LlmService(
        database, vault, Bases(config), clock, engines=engines, calls=calls, quarantine=quarantine, gpus=gpus
    )


def look_around(
    llms: LlmService, config: Config, versions: ModelVersions, remote: RemoteModels, adapters: AdapterService
) -> None:
    """Have a command know what else has names, and which adapters: its models are resolved once that matters."""
    llms.around = _Late(llms, config, versions, remote, adapters)


class _Late:
    """`service.Around`, in whose place the catalogue steps. Raises: InvalidConfig for a model that is not there."""

    def __init__(
        self,
        llms: LlmService,
        config: Config,
        versions: ModelVersions,
        remote: RemoteModels,
        adapters: AdapterService,
    ) -> None:
        self._llms, self._config, self._versions = llms, config, versions
        self._remote, self._adapters = remote, adapters

    @property
    def revision(self) -> int:
        return self._adapters.revision

    def _catalogue(self) -> Catalogue:
        made = Catalogue(self._config, self._config.base)
        made.attach(self._versions, self._remote)
        made.attach_adapters(self._adapters)
        made.attach_llms(self._llms)
        return made

    def holder(self, project: str, name: str) -> str:
        return self._catalogue().holder(project, name)

    def sees(self, caller: Caller, name: str) -> bool:
        return self._catalogue().sees(caller, name)

    def adapted(self, project: str, base: str, model: ModelSpec) -> ModelSpec:
        return self._catalogue().adapted(project, base, model)

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        return self._catalogue().limited(caller, model, names)
