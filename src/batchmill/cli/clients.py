"""The SDK over the connection to the owner of a data directory: the machine's user asks as others ask a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from msgspec.structs import replace

from batchmill.client.asynchronous import AsyncClient
from batchmill.client.messages import OwnerGone, Reply, Request
from batchmill.client.streams import Stream
from batchmill.connection import OwnerConnection
from batchmill.control.operations import PROJECT

T = TypeVar("T")


class MachineClient(AsyncClient):
    """Asks the owner, whoever that is by then. Args: project: on whose behalf; None: as each operation says."""

    def __init__(self, connection: OwnerConnection, project: str | None = None) -> None:
        self._connection = connection
        self._headers = {} if project is None else {PROJECT: project}

    async def close(self) -> None:
        """The connection is another's to close."""

    def _told(self, request: Request) -> Request:
        return replace(request, headers=request.headers | self._headers)

    async def _send(self, request: Request, content: object) -> Reply:
        return await self._connection.send(self._told(request))

    async def read(self, stream: Stream[T]) -> AsyncIterator[T]:
        while not stream.is_over:
            with contextlib.suppress(OwnerGone):
                async with self._connection.stream(self._told(stream.request())) as reply:
                    stream.begin(200, {"content-type": reply.media})
                    async for piece in reply.pieces:
                        for item in stream.feed(piece):
                            yield item
                    for item in stream.end():
                        yield item
