"""Commands that work on this machine: the connection to the owner of a data directory as an `App`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from batchmill import connection
from batchmill.cli.clients import MachineClient
from batchmill.cli.session import App, ResultFile, Session
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.calls import ask
from batchmill.config import Config
from batchmill.control import operations as own
from batchmill.errors import InvalidInput
from batchmill.services import data_dirs
from batchmill.services.configured_models import ConfiguredModels
from batchmill.services.functions.deploying import SENT
from batchmill.types import JobView, ModelSpec
from batchmill.wire.native import DeployReply, ModelInfo, ModelList

PIECE_BYTES = 1024 * 1024


class LocalApp:
    open_jobs = staticmethod(connection.open_jobs)
    preview_validate = staticmethod(connection.preview_validate)
    preview_plan = staticmethod(connection.preview_plan)
    preview_estimate = staticmethod(connection.preview_estimate)
    partial_results = staticmethod(connection.partial_results)
    salvage = staticmethod(data_dirs.salvage)

    @contextlib.asynccontextmanager
    async def open(self, config: Config, project: str | None = None) -> AsyncIterator[AsyncClient]:
        async with connection.connect(config) as owner:
            yield MachineClient(owner, project)

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
        configured = ConfiguredModels(config)
        await asyncio.to_thread(configured.check)
        specs = [configured.get(name) for name in configured.names]
        found = [ModelInfo(each.name, each.engine, list(each.adapters), each.price) for each in specs]
        if not data_dirs.has_models(config):
            return found
        async with self.open(config) as opened:
            return (await opened.call(ask(own.LIST_ALL_MODELS, body=ModelList(found)))).models

    async def deploy(self, opened: AsyncClient, config: Config, bundle: BinaryIO) -> DeployReply:
        """Whoever owns the data directory reads the archive where it is put here."""
        data_dirs.prepare_data_dir(config.data_dir)
        with tempfile.TemporaryDirectory(prefix=SENT, dir=config.data_dir) as folder:
            path = Path(folder, "bundle.tar.gz")
            with path.open("wb") as file:
                await asyncio.to_thread(shutil.copyfileobj, bundle, file)
            return await opened.call(ask(own.DEPLOY_ARCHIVE, body=own.LocalFile(str(path))))

    async def deployed(self, config: Config, name: str) -> ModelSpec | None:
        if not data_dirs.has_models(config):
            return None
        async with self.open(config) as opened:
            return (await opened.call(ask(own.FIND_MODEL, name))).model

    async def adapted(self, config: Config, model: ModelSpec) -> ModelSpec:
        if model.engine != "llm" or model.name not in config.models or not data_dirs.has_models(config):
            return model
        async with self.open(config) as opened:
            found = (await opened.call(ask(own.ADAPT_MODEL, body=own.FoundModel(model)))).model
        assert found is not None, "it was asked about"
        return found


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def app(session: Session) -> App:
    return LocalApp()
