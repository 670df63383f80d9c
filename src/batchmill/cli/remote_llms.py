"""Deployed language models of a server, over the SDK: those of the project that the caller's key belongs to."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from batchmill.cli.local_llms import refuse_plain
from batchmill.client import llm_calls
from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import InvalidInput
from batchmill.models import secrets
from batchmill.types import EngineEvent
from batchmill.wire.native_llms import LlmChange, LlmInfo, LlmList, NewLlm, QuarantinedRequest

T = TypeVar("T", NewLlm, LlmChange)


class RemoteLlms:
    """See `session.Llms`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(self, asked: NewLlm) -> LlmInfo:
        return await self._client.call(llm_calls.create(_revealed(asked)))

    async def update(self, name: str, asked: LlmChange) -> LlmInfo:
        return await self._client.call(llm_calls.change(name, _revealed(asked)))

    async def list(self) -> LlmList:
        return await self._client.call(llm_calls.llms())

    async def show(self, name: str) -> LlmInfo:
        return await self._client.llm(name)

    async def delete(self, name: str) -> LlmInfo:
        return await self._client.remove_llm(name)

    async def start(self, name: str) -> LlmInfo:
        return await self._client.start_llm(name)

    async def stop(self, name: str) -> LlmInfo:
        return await self._client.stop_llm(name)

    async def events(self, name: str) -> list[EngineEvent]:
        return await self._client.llm_events(name)

    async def quarantined(self, digest: str | None = None, *, clear: bool = False) -> list[QuarantinedRequest]:
        return await (self._client.clear_quarantine(digest) if clear else self._client.quarantine())


def _revealed(asked: T) -> T:
    """With the token itself, read here: the server keeps it."""
    token = asked.hf_token
    if not isinstance(token, str):
        return asked
    refuse_plain(token)
    if token.startswith("secret:"):
        raise InvalidInput(
            'a server\'s secrets are not for its callers: --hf-token is "env:NAME" or "file:PATH" of this machine',
            code="invalid_secret",
        )
    return replace(asked, hf_token=secrets.resolve(token).reveal())
