"""Adapters of a server, over the SDK: those of the project that the caller's key belongs to."""

from __future__ import annotations

import os

from batchmill.client.asynchronous import AsyncClient
from batchmill.wire.native_adapters import AdapterInfo


class RemoteAdapters:
    """See `session.Adapters`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def add(self, name: str, source: str, *, base: str, token: str | None) -> AdapterInfo:
        return await self._client.add_adapter(name, os.path.expanduser(source), base=base, token=token)

    async def list(self, base: str | None) -> list[AdapterInfo]:
        return await self._client.adapters(base)

    async def show(self, name: str, version: int | None) -> AdapterInfo:
        return await self._client.adapter(name, version)

    async def remove(self, name: str, version: int | None) -> list[AdapterInfo]:
        return await self._client.remove_adapter(name, version)
