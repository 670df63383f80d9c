"""Deployed language models of this machine, with what commands see of them: the same as at a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.secrets import KINDS
from batchmill.services.llms.door import LlmClient
from batchmill.types import EngineEvent
from batchmill.wire.native_llms import LlmChange, LlmInfo, LlmList, NewLlm, QuarantinedRequest, QuarantinedRequests

PROJECT = "default"
T = TypeVar("T", NewLlm, LlmChange)


class LocalLlms:
    """See `session.Llms`."""

    def __init__(self, llms: LlmClient, project: str | None) -> None:
        self._llms, self._project = llms, project or PROJECT
        self._named = project

    async def create(self, asked: NewLlm) -> LlmInfo:
        return await self._llms.create(self._project, _referring(asked))

    async def update(self, name: str, asked: LlmChange) -> LlmInfo:
        return await self._llms.update(self._project, name, _referring(asked))

    async def list(self) -> LlmList:
        return await self._llms.list(self._project)

    async def show(self, name: str) -> LlmInfo:
        return await self._llms.show(self._project, name)

    async def delete(self, name: str) -> LlmInfo:
        return await self._llms.delete(self._project, name)

    async def start(self, name: str) -> LlmInfo:
        return await self._llms.start(self._project, name)

    async def stop(self, name: str) -> LlmInfo:
        return await self._llms.stop(self._project, name)

    async def events(self, name: str) -> list[EngineEvent]:
        return await self._llms.events(self._project, name)

    async def quarantined(self, digest: str | None = None, *, clear: bool = False) -> list[QuarantinedRequest]:
        """Of all projects, unless one is named."""
        found = await self._llms.quarantined(self._named, digest, clear=clear)
        return QuarantinedRequests.of(found).requests


def _referring(asked: T) -> T:
    """With a token by reference, a file's by its absolute path: whoever owns the data directory runs elsewhere."""
    token = asked.hf_token
    if not isinstance(token, str):
        return asked
    refuse_plain(token)
    if token.startswith("file:"):
        token = f"file:{os.path.abspath(Path(token.removeprefix('file:')).expanduser())}"
    return replace(asked, hf_token=token)


def refuse_plain(token: str) -> None:
    """A key on a command line is seen by everybody on the machine."""
    if not token.startswith(KINDS):
        raise InvalidInput(
            '--hf-token is "env:NAME", "file:PATH" or "secret:NAME", never the token itself', code="invalid_secret"
        )
