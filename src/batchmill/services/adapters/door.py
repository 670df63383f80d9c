"""Adapters asked for by another process of this user, through the owner's control socket: it may name any place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.services.adapters.records import AdapterRecord
from batchmill.services.adapters.service import AdapterService
from batchmill.types import Caller, Scope


class _Add(Struct, frozen=True, tag="add"):
    project: str
    base: str
    name: str
    source: str
    token: str | None


class _List(Struct, frozen=True, tag="list"):
    project: str | None
    base: str | None


class _Show(Struct, frozen=True, tag="show"):
    project: str
    name: str
    version: int | None


class _Remove(Struct, frozen=True, tag="remove"):
    project: str
    name: str
    version: int | None


class _Ready(Struct, frozen=True, tag="ready"):
    project: str
    base: str


_call = msgspec.msgpack.Decoder(_Add | _List | _Show | _Remove | _Ready)
_pack = msgspec.msgpack.encode


class Ready(Struct, frozen=True):
    """The adapters of a project for a base, and the room for ranks that its engine needs for everybody's."""

    records: list[AdapterRecord]
    rank: int


class AdapterDoor:
    """The owner's side: `answer` takes a message and gives the reply to it."""

    def __init__(self, adapters: AdapterService) -> None:
        self._adapters = adapters

    async def answer(self, message: bytes) -> bytes:
        adapters = self._adapters
        match _call.decode(message):
            case _Add(project, base, name, source, token):
                who = Caller(project, Scope.ADMIN)
                record = await adapters.register(who, base, name, source, token=token, is_trusted=True)
                return _pack(await adapters.wait(record))
            case _List(project, base):
                found = adapters.every() if project is None else adapters.list(project)
                return _pack([each for each in found if base in (None, each.base)])
            case _Show(project, name, version):
                return _pack(adapters.get(project, name, version))
            case _Remove(project, name, version):
                return _pack(await adapters.remove(project, name, version))
            case _Ready(project, base):
                return _pack(Ready(adapters.ready(project, base), adapters.rank_of([base])))


class AdapterClient:
    """The other side, over `tell`, which carries a message to the owner and its reply back.

    Raises: what `AdapterService` raises.
    """

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def _ask(self, message: Struct, kind: object):
        return msgspec.msgpack.decode(await self._tell(_pack(message)), type=kind)

    async def add(
        self, name: str, source: Path | str, *, base: str, token: str | None = None, project: str = "default"
    ) -> AdapterRecord:
        """Register an adapter and wait for it. `source`: as `AdapterService.register`."""
        return await self._ask(_Add(project, base, name, str(source), token), AdapterRecord)

    async def list(self, project: str | None, base: str | None = None) -> list[AdapterRecord]:
        return await self._ask(_List(project, base), list[AdapterRecord])

    async def show(self, project: str, name: str, version: int | None) -> AdapterRecord:
        return await self._ask(_Show(project, name, version), AdapterRecord)

    async def remove(self, project: str, name: str, version: int | None) -> list[AdapterRecord]:
        return await self._ask(_Remove(project, name, version), list[AdapterRecord])

    async def ready(self, project: str, base: str) -> Ready:
        return await self._ask(_Ready(project, base), Ready)
