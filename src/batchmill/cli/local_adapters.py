"""Adapters of this machine, with what commands see of them: the same as at a server."""

from __future__ import annotations

import os
from pathlib import Path

from batchmill.errors import ModelFailed
from batchmill.services.adapters.door import AdapterClient
from batchmill.services.adapters.records import FAILED
from batchmill.services.adapters.views import adapter_info
from batchmill.wire.native_adapters import AdapterInfo

PROJECT = "default"


class LocalAdapters:
    """See `session.Adapters`. Args: `project`, None where a listing is of all."""

    def __init__(self, adapters: AdapterClient, project: str | None) -> None:
        self._adapters, self._project = adapters, project

    async def add(self, name: str, source: str, *, base: str, token: str | None) -> AdapterInfo:
        if Path(source).expanduser().is_dir() or source.startswith((".", "~")):
            source = os.path.abspath(Path(source).expanduser())  # whoever owns the data directory runs elsewhere
        if token is not None and token.startswith("file:"):
            token = f"file:{os.path.abspath(Path(token.removeprefix('file:')).expanduser())}"
        record = await self._adapters.add(name, source, base=base, token=token, project=self._project or PROJECT)
        if record.state == FAILED:
            raise ModelFailed(f"the adapter {record.own_name} cannot be used: {record.message}", code="adapter_failed")
        return adapter_info(record)

    async def list(self, base: str | None) -> list[AdapterInfo]:
        return [adapter_info(each) for each in await self._adapters.list(self._project, base)]

    async def show(self, name: str, version: int | None) -> AdapterInfo:
        return adapter_info(await self._adapters.show(self._project or PROJECT, name, version))

    async def remove(self, name: str, version: int | None) -> list[AdapterInfo]:
        return [adapter_info(each) for each in await self._adapters.remove(self._project or PROJECT, name, version)]
