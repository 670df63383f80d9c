"""Commands that work on this machine: `batchmill.app` as an `App`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import BinaryIO

from msgspec.structs import replace

from batchmill import connection as root
from batchmill import doors
from batchmill.cli.local_adapters import PROJECT, LocalAdapters
from batchmill.cli.local_llms import LocalLlms
from batchmill.cli.local_models import LocalModels
from batchmill.cli.session import App, ResultFile, Session
from batchmill.config import Config
from batchmill.errors import InvalidInput
from batchmill.services import data_dirs
from batchmill.services.adapters import merging
from batchmill.services.adapters.records import READY
from batchmill.services.catalogue import Catalogue
from batchmill.types import JobView, ModelSpec
from batchmill.wire.native import ModelInfo, QuotaInfo

PIECE_BYTES = 1024 * 1024
FUNCTION = "function_process"  # the engine of what is deployed
CONNECTOR, LLM = "connector", "llm"  # and of what was registered; of a language model that was


class LocalApp:
    open_jobs = staticmethod(root.open_jobs)
    open_keys = staticmethod(doors.open_keys)
    open_secrets = staticmethod(doors.open_secrets)
    open_connectors = staticmethod(doors.open_connectors)
    preview_validate = staticmethod(root.preview_validate)
    preview_plan = staticmethod(root.preview_plan)
    preview_estimate = staticmethod(root.preview_estimate)
    partial_results = staticmethod(root.partial_results)
    salvage = staticmethod(data_dirs.salvage)

    @contextlib.asynccontextmanager
    async def results(self, config: Config, view: JobView, *, errors: bool) -> AsyncIterator[ResultFile]:
        path = view.errors_output if errors else view.output
        assert path is not None, "the command looks first"
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise InvalidInput(f"the results in {path} cannot be read: {error.strerror}", code="no_file") from None
        with file:
            yield ResultFile(path, _pieces(file))

    async def models(self, config: Config) -> list[ModelInfo]:
        catalogue = await asyncio.to_thread(Catalogue, config, config.base)
        found = [ModelInfo(each.name, each.engine, list(each.adapters), each.price) for each in catalogue.models()]
        if not doors.has_models(config):
            return found
        async with doors.open_models(config) as models:
            found += [ModelInfo(name, FUNCTION, []) for name in await models.names()]
        found = await self._with_adapters(config, found)
        async with doors.open_llms(config) as llms:
            own = [each for each in (await llms.list(PROJECT)).llms if not each.is_configured]
        found += [ModelInfo(each.name, LLM, each.adapters, each.price) for each in own]
        async with doors.open_connectors(config) as connectors:
            for each in await connectors.models():
                spec = await connectors.find(each.name)  # a name of several groups means none of them
                names = [each.id] if spec is None or spec.name != each.id else [each.id, each.name]
                found += [ModelInfo(name, CONNECTOR, []) for name in names]
        return found

    async def _with_adapters(self, config: Config, models: list[ModelInfo]) -> list[ModelInfo]:
        """Models with the names of what was registered for them."""
        async with doors.open_adapters(config) as adapters:
            records = [each for each in await adapters.list(PROJECT) if each.state == READY]
        named = {
            model.name: merging.names_of([each for each in records if each.base == model.name], lambda name: True)
            for model in models
        }
        return [replace(model, adapters=[*model.adapters, *named[model.name]]) for model in models]

    @contextlib.asynccontextmanager
    async def open_models(self, config: Config) -> AsyncIterator[LocalModels]:
        async with doors.open_models(config) as models:
            yield LocalModels(models, config)

    async def deployed(self, config: Config, name: str) -> ModelSpec | None:
        if not doors.has_models(config):
            return None
        async with doors.open_models(config) as models:
            if (found := await models.find(name)) is not None:
                return found
        async with doors.open_llms(config) as llms:
            if (deployed := await llms.find(PROJECT, name)) is not None:
                return deployed
        async with doors.open_connectors(config) as connectors:
            return await connectors.find(name)

    async def usage(self, config: Config, project: str | None) -> list[QuotaInfo]:
        async with doors.open_quotas(config) as quotas:
            return await quotas.usage(project or PROJECT)

    @contextlib.asynccontextmanager
    async def open_llms(self, config: Config, project: str | None) -> AsyncIterator[LocalLlms]:
        async with doors.open_llms(config) as llms:
            yield LocalLlms(llms, project)

    @contextlib.asynccontextmanager
    async def open_adapters(self, config: Config, project: str | None) -> AsyncIterator[LocalAdapters]:
        async with doors.open_adapters(config) as adapters:
            yield LocalAdapters(adapters, project)

    async def adapted(self, config: Config, model: ModelSpec) -> ModelSpec:
        if model.engine != "llm" or model.name not in config.models or not doors.has_models(config):
            return model
        async with doors.open_adapters(config) as adapters:
            found = await adapters.ready(PROJECT, model.name)
        return merging.with_room(merging.with_all(model, found.records, lambda name: True), found.rank)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def app(session: Session) -> App:
    return LocalApp()
