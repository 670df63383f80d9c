"""Deployed functions asked for by another process of this user, through the owner's control socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill.services.functions.names import LATEST, MAIN, read_reference
from batchmill.services.functions.versions import ModelVersions
from batchmill.types import ModelSpec
from batchmill.wire.deploys import Backend, Deployed, ModelVersion, Route
from batchmill.wire.native_logs import LogPage, LogQuery


class _Deploy(Struct, frozen=True, tag="deploy"):
    bundle: str  # path of an archive on this machine


class _Names(Struct, frozen=True, tag="names"):
    pass


class _Show(Struct, frozen=True, tag="show"):
    name: str


class _Log(Struct, frozen=True, tag="log"):
    name: str
    branch: str | None
    version: str


class _Calls(Struct, frozen=True, tag="calls"):
    name: str
    query: LogQuery


class _Rollback(Struct, frozen=True, tag="rollback"):
    name: str
    branch: str | None
    number: int | None


class _Merge(Struct, frozen=True, tag="merge"):
    name: str
    source: str
    into: str


class _Alias(Struct, frozen=True, tag="alias"):
    name: str
    alias: str
    backends: list[Backend]
    mirrors: list[Backend]


class _Remove(Struct, frozen=True, tag="remove"):
    name: str
    branch: str | None
    version: str | None


class _RemoveAlias(Struct, frozen=True, tag="remove_alias"):
    name: str
    alias: str


class _Restart(Struct, frozen=True, tag="restart"):
    name: str
    branch: str | None


class _Find(Struct, frozen=True, tag="find"):
    reference: str


_call = msgspec.msgpack.Decoder(
    _Deploy | _Names | _Show | _Log | _Calls | _Rollback | _Merge | _Alias | _Remove | _RemoveAlias | _Restart | _Find
)
_pack = msgspec.msgpack.encode
Shown = tuple[list[ModelVersion], list[Route]]


def spec_for_job(versions: ModelVersions, reference: str) -> ModelSpec | None:
    """The version that a text means now, as the model of a job; None: no function is called so.

    Raises: UnknownName for a version that the function does not have.
    """
    name, branch, version = read_reference(reference)
    if name not in versions.names():
        return None
    found = versions.choose(name, branch, version).version
    assert found.spec is not None, "it is ready"
    return msgspec.structs.replace(found.spec, allowed=list(dict.fromkeys((reference, name, found.reference))))


class ModelDoor:
    """The owner's side: `answer` takes a message and gives the reply to it."""

    def __init__(self, versions: ModelVersions) -> None:
        self._versions = versions

    async def answer(self, message: bytes) -> bytes:
        versions = self._versions
        match _call.decode(message):
            case _Deploy(bundle):
                return _pack(await versions.deploy(Path(bundle)))
            case _Names():
                return _pack(versions.names())
            case _Show(name):
                return _pack(versions.show(name))
            case _Log(name, branch, version):
                return _pack(await versions.log(name, branch, version))
            case _Calls(name, query):
                return _pack(await versions.calls(name, query))
            case _Rollback(name, branch, number):
                return _pack(await versions.rollback(name, branch, number))
            case _Merge(name, source, into):
                return _pack(await versions.merge(name, source, into))
            case _Alias(name, alias, backends, mirrors):
                return _pack(await versions.set_alias(name, alias, backends, mirrors))
            case _Remove(name, branch, version):
                return _pack(await versions.remove(name, branch, version))
            case _RemoveAlias(name, alias):
                return _pack(await versions.remove_alias(name, alias))
            case _Restart(name, branch):
                return _pack(await versions.restart(name, branch))
            case _Find(reference):
                return _pack(spec_for_job(versions, reference))


class ModelClient:
    """The other side: verbs of `ModelVersions` over `tell`, which carries a message to the owner and its reply back."""

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def _ask(self, message: Struct, kind: object):
        return msgspec.msgpack.decode(await self._tell(_pack(message)), type=kind)

    async def deploy(self, bundle: Path) -> Deployed:
        return await self._ask(_Deploy(str(bundle)), Deployed)

    async def names(self) -> list[str]:
        return await self._ask(_Names(), list[str])

    async def show(self, name: str) -> Shown:
        return await self._ask(_Show(name), Shown)

    async def log(self, name: str, branch: str | None = None, version: str = LATEST) -> str:
        return await self._ask(_Log(name, branch, version), str)

    async def calls(self, name: str, query: LogQuery) -> LogPage:
        return await self._ask(_Calls(name, query), LogPage)

    async def rollback(self, name: str, branch: str | None = None, number: int | None = None) -> ModelVersion:
        return await self._ask(_Rollback(name, branch, number), ModelVersion)

    async def merge(self, name: str, source: str, into: str = MAIN) -> ModelVersion:
        return await self._ask(_Merge(name, source, into), ModelVersion)

    async def set_alias(
        self, name: str, alias: str, backends: list[Backend], mirrors: list[Backend] | None = None
    ) -> Route:
        return await self._ask(_Alias(name, alias, backends, mirrors or []), Route)

    async def remove(self, name: str, branch: str | None = None, version: str | None = None) -> list[ModelVersion]:
        return await self._ask(_Remove(name, branch, version), list[ModelVersion])

    async def remove_alias(self, name: str, alias: str) -> None:
        await self._ask(_RemoveAlias(name, alias), None)

    async def restart(self, name: str, branch: str | None = None) -> ModelVersion:
        return await self._ask(_Restart(name, branch), ModelVersion)

    async def find(self, reference: str) -> ModelSpec | None:
        return await self._ask(_Find(reference), ModelSpec | None)
