"""Keys asked for by another process of this user, through the owner's control socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from batchmill.services.keys import KeyRecord, KeyService, NewKey, Revoked
from batchmill.types import Scope


class _Create(Struct, frozen=True, tag="create"):
    name: str
    project: str
    scope: Scope
    models: list[str] | None
    requests_per_minute: int | None
    expires: float | None


class _List(Struct, frozen=True, tag="list"):
    project: str | None


class _Revoke(Struct, frozen=True, tag="revoke"):
    key_id: str
    project: str | None
    with_minted: bool = False


_call = msgspec.msgpack.Decoder(_Create | _List | _Revoke)
_pack = msgspec.msgpack.encode


class KeyDoor:
    """The owner's side: `answer` takes a message and gives the reply to it."""

    def __init__(self, keys: KeyService) -> None:
        self._keys = keys

    async def answer(self, message: bytes) -> bytes:
        match _call.decode(message):
            case _Create() as asked:
                told = msgspec.structs.asdict(asked)
                told["models"] = None if asked.models is None else frozenset(asked.models)
                return _pack(await self._keys.create(**told))
            case _List(project):
                return _pack(await self._keys.list(project))
            case _Revoke(key_id, project, with_minted):
                return _pack(await self._keys.revoke(key_id, project, with_minted=with_minted))


class KeyClient:
    """The other side: as `KeyService`, over `tell`, which carries a message to the owner and its reply back."""

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def create(
        self,
        *,
        name: str,
        project: str,
        scope: Scope,
        models: frozenset[str] | None = None,
        requests_per_minute: int | None = None,
        expires: float | None = None,
    ) -> NewKey:
        listed = None if models is None else sorted(models)
        asked = _Create(name, project, scope, listed, requests_per_minute, expires)
        return msgspec.msgpack.decode(await self._tell(_pack(asked)), type=NewKey)

    async def list(self, project: str | None) -> list[KeyRecord]:
        return msgspec.msgpack.decode(await self._tell(_pack(_List(project))), type=list[KeyRecord])

    async def revoke(self, key_id: str, project: str | None, *, with_minted: bool = False) -> Revoked:
        told = await self._tell(_pack(_Revoke(key_id, project, with_minted)))
        return msgspec.msgpack.decode(told, type=Revoked)
