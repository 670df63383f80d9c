"""Deployed functions of this machine, with what commands see of them: the same as at a server."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from batchmill.config import Config
from batchmill.services.functions import views
from batchmill.services.functions.deploying import SENT
from batchmill.services.functions.door import ModelClient
from batchmill.wire.native import (
    AliasInfo,
    DeployReply,
    FunctionDetail,
    Merge,
    NewAlias,
    Restart,
    Rollback,
    VersionInfo,
)
from batchmill.wire.native_logs import LogPage, LogQuery


class LocalModels:
    """See `session.Models`."""

    def __init__(self, models: ModelClient, config: Config) -> None:
        self._models, self._config = models, config

    async def deploy(self, bundle: BinaryIO) -> DeployReply:
        """Whoever owns the data directory reads the archive where it is put here."""
        with tempfile.TemporaryDirectory(prefix=SENT, dir=self._config.data_dir) as folder:
            path = Path(folder, "bundle.tar.gz")
            with path.open("wb") as file:
                await asyncio.to_thread(shutil.copyfileobj, bundle, file)
            return views.deploy_reply(await self._models.deploy(path))

    async def show(self, name: str) -> FunctionDetail:
        versions, routes = await self._models.show(name)
        server = self._config.server
        return views.detail(name, versions, routes, f"http://{server.host}:{server.port}")

    async def log(self, name: str, branch: str | None, version: str) -> str:
        return await self._models.log(name, branch, version)

    async def calls(self, name: str, query: LogQuery) -> LogPage:
        return await self._models.calls(name, query)

    async def rollback(self, name: str, asked: Rollback) -> VersionInfo:
        return views.version_info(await self._models.rollback(name, asked.branch, asked.number))

    async def merge(self, name: str, asked: Merge) -> VersionInfo:
        return views.version_info(await self._models.merge(name, asked.source, asked.into))

    async def restart(self, name: str, asked: Restart) -> VersionInfo:
        return views.version_info(await self._models.restart(name, asked.branch))

    async def set_alias(self, name: str, alias: str, asked: NewAlias) -> AliasInfo:
        backends, mirrors = views.backends_of(asked.backends), views.backends_of(asked.mirrors)
        return views.alias_info(await self._models.set_alias(name, alias, backends, mirrors))

    async def remove_alias(self, name: str, alias: str) -> None:
        await self._models.remove_alias(name, alias)

    async def remove(self, name: str, branch: str | None, version: str | None) -> list[VersionInfo]:
        return [views.version_info(each) for each in await self._models.remove(name, branch, version)]
