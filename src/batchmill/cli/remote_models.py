"""Deployed functions of a server, over the SDK."""

from __future__ import annotations

import os
from typing import BinaryIO

from batchmill.client import calls, procedures
from batchmill.client.asynchronous import AsyncClient
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


class RemoteModels:
    """See `session.Models`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def deploy(self, bundle: BinaryIO) -> DeployReply:
        size_bytes = bundle.seek(0, os.SEEK_END)
        bundle.seek(0)
        return await self._client.run(procedures.send_bundle(bundle, size_bytes))

    async def show(self, name: str) -> FunctionDetail:
        return await self._client.model(name).show()

    async def log(self, name: str, branch: str | None, version: str) -> str:
        return await self._client.model(name).log(branch=branch, version=version)

    async def calls(self, name: str, query: LogQuery) -> LogPage:
        return await self._client.call(calls.model_calls(name, query))

    async def rollback(self, name: str, asked: Rollback) -> VersionInfo:
        return await self._client.call(calls.rollback(name, asked))

    async def merge(self, name: str, asked: Merge) -> VersionInfo:
        return await self._client.call(calls.merge(name, asked))

    async def restart(self, name: str, asked: Restart) -> VersionInfo:
        return await self._client.call(calls.restart(name, asked))

    async def set_alias(self, name: str, alias: str, asked: NewAlias) -> AliasInfo:
        return await self._client.call(calls.set_alias(name, alias, asked))

    async def remove_alias(self, name: str, alias: str) -> None:
        await self._client.call(calls.remove_alias(name, alias))

    async def remove(self, name: str, branch: str | None, version: str | None) -> list[VersionInfo]:
        return (await self._client.call(calls.remove_model(name, branch=branch, version=version))).versions
