"""Services that still speak for themselves: a message to one, and its reply, are carried as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchmill.control.app import Call, Handler
from batchmill.control.operations import PREFIX
from batchmill.types import Scope
from batchmill.wire.operations import Endpoint


class Message(Struct, frozen=True):
    """In the service's own words."""

    data: bytes


TELL = Endpoint("tell", "POST", f"{PREFIX}/tell/{{door}}", "Tell a service", Scope.DEPLOY, Message, body=Message)


class DoorHandlers:
    def __init__(self, doors: Mapping[str, Callable[[bytes], Awaitable[bytes]]]) -> None:
        self._doors = doors

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return ((TELL, self.tell),)

    async def tell(self, call: Call) -> Message:
        return Message(await self._doors[call.name](call.body.data))
