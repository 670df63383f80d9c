"""The client of the control socket: HTTP to the owner in another process. It needs httpx2."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx2
import msgspec

from batchmill.client.messages import HttpReply, HttpRequest, OwnerGone
from batchmill.control import operations as own
from batchmill.control.app import LAST_EVENT, Pieces
from batchmill.errors import InvalidConfig
from batchmill.services.data_dirs.data_dirs import owner_pid
from batchmill.wire.error_statuses import Raised
from batchmill.wire.operations import EVENTS

REPLY_S = 15.0
PING = HttpRequest(own.PING.method, own.PING.path)


class ControlClient:
    """Sends requests to the owner that listens at `path`. Raises: OwnerGone when the owner has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The kernel accepts at most 107 bytes in a socket's name, so the name uses the folder's descriptor.
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        transport = httpx2.AsyncHTTPTransport(uds=f"/proc/self/fd/{self._folder}/{path.name}", verify=False)
        self._http = httpx2.AsyncClient(
            transport=transport, base_url="http://owner", timeout=None, trust_env=False,
            headers={"accept-encoding": "identity"},
        )  # fmt: skip

    async def close(self) -> None:
        await self._http.aclose()
        os.close(self._folder)

    async def check(self) -> None:
        """Check that the owner answers. Raises: InvalidConfig if it has the socket open and does not answer."""
        try:
            async with asyncio.timeout(REPLY_S):
                await self.send(PING)
        except TimeoutError:
            pid = owner_pid(self._path.parent)
            raise InvalidConfig(
                f"process {pid}, which owns {self._path.parent}, has not answered for {REPLY_S:.0f} s. If a signal has "
                f"stopped it, `kill -CONT {pid}` resumes it; if it hangs, `kill -9 {pid}` ends it and finished rows "
                "are kept"
            ) from None

    async def send(self, request: HttpRequest) -> HttpReply:
        """Send a request and return the whole reply. Raises: the error that the owner raised."""
        async with self.stream(request) as reply:
            body = b"".join([piece async for piece in reply.pieces])
        return HttpReply(200, {"content-type": reply.media}, body)

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[Pieces]:
        """Send a request and stream the reply. Raises: the error that the owner raised."""
        try:
            async with self._http.stream(
                request.method, request.path, params=request.query, headers=request.headers, content=request.body
            ) as response:
                if response.is_error:
                    raise msgspec.json.decode(await response.aread(), type=Raised).error()
                media = response.headers.get("content-type", "")
                pieces = self._pieces(response)
                yield Pieces(self._events(pieces) if media == EVENTS else pieces, media)
        except httpx2.ConnectError as error:
            raise self._gone(was_sent=False) from error
        except httpx2.TransportError as error:
            raise self._gone() from error

    async def _pieces(self, response: httpx2.Response) -> AsyncGenerator[bytes]:
        try:
            async for piece in response.aiter_raw():
                yield piece
        except httpx2.TransportError as error:
            raise self._gone() from error

    async def _events(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """A stopping owner ends a stream without the last event."""
        end = b""
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                end = (end + piece)[-len(LAST_EVENT) :]
                yield piece
        if end != LAST_EVENT:
            raise self._gone()

    def _gone(self, *, was_sent: bool = True) -> OwnerGone:
        return OwnerGone(
            f"the process that owned {self._path.parent} ended before it replied: it may have carried out the request",
            was_sent=was_sent,
        )
