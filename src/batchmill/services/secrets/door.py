"""Secrets put in by another process of this user, through the owner's control socket. None comes out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from batchmill.services.secrets.vault import Rotated, SecretInfo, Vault


class _Put(Struct, frozen=True, tag="put"):
    name: str
    value: str

    def __repr__(self) -> str:
        return f"_Put({self.name})"


class _Remove(Struct, frozen=True, tag="remove"):
    name: str


class _List(Struct, frozen=True, tag="list"):
    pass


class _Rotate(Struct, frozen=True, tag="rotate"):
    pass


_call = msgspec.msgpack.Decoder(_Put | _Remove | _List | _Rotate)
_pack = msgspec.msgpack.encode


class SecretDoor:
    """The owner's side: `answer` takes a message and gives the reply to it."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def answer(self, message: bytes) -> bytes:
        match _call.decode(message):
            case _Put(name, value):
                return _pack(await self._vault.put(name, value))
            case _Remove(name):
                return _pack(await self._vault.remove(name))
            case _List():
                return _pack(await self._vault.list())
            case _Rotate():
                return _pack(await self._vault.rotate())


class SecretClient:
    """The other side: as `Vault`, over `tell`, which carries a message to the owner and its reply back."""

    def __init__(self, tell: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._tell = tell

    async def put(self, name: str, value: str) -> None:
        await self._tell(_pack(_Put(name, value)))

    async def remove(self, name: str) -> None:
        await self._tell(_pack(_Remove(name)))

    async def list(self) -> list[SecretInfo]:
        return msgspec.msgpack.decode(await self._tell(_pack(_List())), type=list[SecretInfo])

    async def rotate(self) -> Rotated:
        return msgspec.msgpack.decode(await self._tell(_pack(_Rotate())), type=Rotated)
