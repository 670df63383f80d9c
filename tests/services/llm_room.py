"""A data directory with deployments of language models, over engines that do as they are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.config import KEY_FILE, load
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.llms.service import LlmService
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import Caller, EngineEvent, EngineState, EngineView, LiveHead, Scope

CONFIG = """
[models.tiny]
engine = "vllm"
source = "org/tiny"
engine_args = { max-model-len = 1024 }

[models.far]
engine = "openai"
source = "s"
base_url = "http://127.0.0.1:9/v1"

[deployments]
hub_models = ["Qwen/*"]
base_models = { small = "org/small" }
default_price = 0.5
"""
US, THEM = Caller("default", Scope.ADMIN), Caller("other", Scope.ADMIN)
TOKEN = "hf_canary0123456789abcdef"
STOPPED, READY = EngineView(), EngineView(EngineState.READY, 1, 1, 1, events=[EngineEvent(1.0, "ready")])


class ScriptedEngines:
    """Engines by the name of their model and its `max-model-len`: as `states` says, kept as they are told."""

    def __init__(self) -> None:
        self.states: dict[object, EngineView] = {}
        self.kept: list[object] = []
        self.failures: dict[object, Exception] = {}
        self.hold = asyncio.Event()  # loading waits for it
        self.hold.set()
        self.asked: list[str | None] = []

    @staticmethod
    def key(model) -> object:
        return model.name, model.engine_args.get("max-model-len")

    def engine_of(self, model) -> EngineView:
        return self.states.get(self.key(model), STOPPED)

    def pin(self, model) -> None:
        if self.key(model) not in self.kept and model.scaling is not None and model.scaling.replicas_min:
            self.kept.append(self.key(model))

    def unpin(self, model) -> None:
        if self.key(model) in self.kept:
            self.kept.remove(self.key(model))

    async def load(self, model) -> None:
        await self.hold.wait()
        if (failure := self.failures.get(self.key(model))) is not None:
            raise failure
        self.states[self.key(model)] = READY

    def unload(self, model) -> None:
        """Nothing is held."""

    async def warm(self, model) -> None:
        await self.load(model)

    async def predict(self, model, request):
        self.asked.append(request.adapter)
        yield LiveHead(200, "application/json")
        yield b"{}"


class LlmRoom:
    """`again` opens it as the next process does."""

    def __init__(self, folder: Path, text: str = CONFIG) -> None:
        self.folder, self.clock, self.engines = folder, HeldClock(), ScriptedEngines()
        (folder / "batchmill.toml").write_text(text)
        self.config = load(environ={"HOME": str(folder)}, cwd=folder)
        self.config.data_dir.mkdir(parents=True, exist_ok=True)
        self.database: Database | None = None

    async def again(self, *, opens: bool = True) -> LlmService:
        if self.database is not None:
            await self.llms.close()
            self.database.close()
        self.database = open_database(self.folder / "batchmill.db")
        self.vault = Vault(self.database, SecretBox(self.folder / KEY_FILE), self.clock)
        self.directory = ModelDirectory(ConfiguredModels(self.config))
        self.llms = LlmService(
            self.database,
            self.vault,
            self.directory,
            self.clock,
            engines=self.engines,
            calls=self.engines,
            gpus=2,
            quarantine=Quarantine(self.clock),
        )
        await self.llms.load()
        if opens:
            self.llms.open()
        return self.llms

    async def close(self) -> None:
        if self.database is not None:
            await self.llms.close()
            self.database.close()
