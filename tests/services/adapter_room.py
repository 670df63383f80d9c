"""A data directory with adapters, and models of a configuration that they are for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fakes.databases import open_database
from fakes.held_clock import HeldClock
from fakes.lora_files import write_base

from batchmill.config import KEY_FILE, Config, DeploymentsEntry, ModelEntry, ProjectEntry
from batchmill.services.adapters.service import AdapterService
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import Caller, Scope

US, THEM, SMALL = Caller("default", Scope.ADMIN), Caller("other", Scope.ADMIN), Caller("small", Scope.ADMIN)


class AdapterRoom:
    """`again` opens it as the next process does. Models: `tiny` and `twin`, alike, and `far`, which takes none."""

    def __init__(self, folder: Path, **entry: Any) -> None:
        self.folder, self.clock = folder, HeldClock()
        write_base(folder / "tiny")
        self.config = Config(
            data_dir=folder / "data",
            base=folder,
            models={
                "tiny": ModelEntry(engine="vllm", source="tiny"),
                "twin": ModelEntry(engine="vllm", source="tiny"),
                "far": ModelEntry(engine="openai", source="s", base_url="http://127.0.0.1:9/v1", adapters={"a": "a"}),
            },
            projects={"small": ProjectEntry(models=["twin"])},
            deployments=DeploymentsEntry(**entry),
        )
        self.config.data_dir.mkdir()
        self.home = self.config.data_dir / "adapters"
        self.database: Database | None = None

    async def again(self, *, resumes: bool = True) -> AdapterService:
        await self._shut()
        self.database = await asyncio.to_thread(open_database, self.config.data_dir / "batchmill.db")
        self.vault = Vault(self.database, SecretBox(self.config.data_dir / KEY_FILE), self.clock)
        self.directory = ModelDirectory(ConfiguredModels(self.config))
        self.adapters = AdapterService(self.database, self.clock, self.directory, config=self.config, vault=self.vault)
        await self.adapters.load(resumes=resumes)
        return self.adapters

    def folders(self) -> list[str]:
        """What lies there of adapters, and what is on its way."""
        found = [path for path in self.home.glob("*") if path.name != "staging"] if self.home.is_dir() else []
        return sorted(path.name for path in [*found, *self.home.glob("staging/*")])

    async def _shut(self) -> None:
        if self.database is not None:
            await self.adapters.close()
            self.database.close()

    close = _shut
