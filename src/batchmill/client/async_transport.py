"""How a client's requests reach a server: the protocol of a transport, and the one over httpx2."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import BinaryIO, Protocol

import httpx2
from msgspec import Struct

from batchmill.client.connection import Address, address, broken, timeout, trusted
from batchmill.client.messages import HttpReply, HttpRequest
from batchmill.client.pairs import async_pieces


class AsyncReplyStream(Struct, frozen=True):
    """A reply whose body is read piece by piece. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]


class AsyncTransport(Protocol):
    """Sends requests. It repeats nothing and interprets no status: the client does.

    Raises, everywhere: Broken when no whole reply arrives.
    """

    async def send(self, request: HttpRequest, file: BinaryIO | None = None) -> HttpReply:
        """Send a request, with the rest of `file` as its body where there is one; returns the whole reply."""
        ...

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[AsyncReplyStream]:
        """Send a request; the reply's body is read inside the context."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class AsyncHttpTransport:
    """Sends requests to one server over HTTP."""

    def __init__(self, server: Address, timeout_s: float) -> None:
        self._address, self._timeout_s = server, timeout_s
        self._http = httpx2.AsyncClient(
            base_url=server.base_url, headers=server.headers, verify=trusted(server.base_url)
        )

    @classmethod
    def to(cls, base_url: str | None, api_key: str | None, timeout_s: float) -> AsyncHttpTransport:
        """Raises: InvalidInput if there is no address, or an invalid one."""
        return cls(address(base_url, api_key), timeout_s)

    async def send(self, request: HttpRequest, file: BinaryIO | None = None) -> HttpReply:
        try:
            response = await self._http.request(
                request.method, request.path, params=request.query, headers=request.headers,
                content=request.body if file is None else async_pieces(file),
                timeout=timeout(request, self._timeout_s),
            )  # fmt: skip
        except httpx2.TransportError as error:
            raise broken(error, self._address.base_url) from error
        return HttpReply(response.status_code, response.headers, response.content)

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[AsyncReplyStream]:
        try:
            async with self._http.stream(
                request.method, request.path, params=request.query, headers=request.headers,
                timeout=timeout(request, self._timeout_s),
            ) as response:  # fmt: skip
                yield AsyncReplyStream(response.status_code, dict(response.headers), response.aiter_raw())
        except httpx2.TransportError as error:
            raise broken(error, self._address.base_url) from error

    async def close(self) -> None:
        await self._http.aclose()
