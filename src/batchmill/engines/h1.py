"""An HTTP/1.1 client for one service: POST a body, receive the whole reply. Nothing else of HTTP is spoken.

It exists because a general client costs four times as much for each call, and calls are what the http engine makes.
Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque

from msgspec import Struct

from batchmill.engines.h1_reply import HEAD_BYTES_MAX, BadReply, Incoming, Received, read_head

KEEPALIVE_S = 4.0  # below the 5 s after which common servers close: a call must not meet a connection being closed
ADDRESSES_S = 60.0  # how long a name's addresses are used without asking again


class Unreachable(OSError):
    """No connection could be made: the service saw nothing of the call."""


class Disconnected(OSError):
    """The connection ended before the first byte of a reply."""


class Service(Struct, frozen=True):
    """Where calls go, and the limits they keep."""

    host: str
    port: int
    is_tls: bool
    connect_timeout_s: float
    idle_timeout_s: float  # between two pieces of a reply that has begun
    body_bytes_max: int


class Client:
    """Connections to a service: as many as there are calls at a time, kept for the next ones."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tls = ssl.create_default_context() if service.is_tls else None
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._addresses: list[str] = []
        self._addresses_until = 0.0
        self._connects = 0
        self._closed = False

    async def post(self, head: bytes, body: bytes) -> Received:
        """Send a request whose head is complete but for its length. Cancelling drops the connection.

        Raises: Unreachable, Disconnected, BadReply, TimeoutError, or OSError for a connection that broke.
        """
        connection = self._take() or await self._connect()
        future = connection.send(b"%sContent-Length: %d\r\n\r\n" % (head, len(body)), body)
        try:
            received = await future
        except BaseException:
            connection.drop()
            raise
        if connection.is_reusable and not self._closed:
            connection.idle_since = connection.loop.time()
            self._idle.append(connection)
        else:
            connection.drop()
        return received

    def close(self) -> None:
        """Drop every connection; calls in flight end with Disconnected."""
        self._closed = True
        for connection in list(self._all):
            connection.drop()

    def _take(self) -> Connection | None:
        """The connection used last, which is the most likely to be open still."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.loop.time() - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.drop()
        return None

    async def _connect(self) -> Connection:
        service = self._service
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(service.connect_timeout_s):
                return await self._connect_any(await self._resolve(loop), loop)
        except TimeoutError:
            raise Unreachable(f"no connection within {service.connect_timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(str(error)) from None

    async def _connect_any(self, addresses: list[str], loop: asyncio.AbstractEventLoop) -> Connection:
        """Try the addresses one after another, each connection beginning with the next of them."""
        self._connects += 1
        first = self._connects % len(addresses)
        for n, address in enumerate(addresses[first:] + addresses[:first], start=1):
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._service, self._all),
                    address,
                    self._service.port,
                    ssl=self._tls,
                    server_hostname=self._service.host if self._tls is not None else None,
                )
            except OSError:
                if n == len(addresses):
                    self._addresses_until = 0.0
                    raise
                continue
            return connection
        raise AssertionError("a name resolves to one address at least")

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        if loop.time() >= self._addresses_until:
            found = await loop.getaddrinfo(self._service.host, self._service.port, type=socket.SOCK_STREAM)
            self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
            self._addresses_until = loop.time() + ADDRESSES_S
        return self._addresses


class Connection(asyncio.Protocol):
    """One connection with at most one call on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service, all_: set[Connection]) -> None:
        self.loop = loop
        self.idle_since = 0.0
        self.is_reusable = False
        self._service = service
        self._all = all_
        self._future: asyncio.Future[Received] | None = None
        self._buffer = b""
        self._reply: Incoming | None = None
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all.add(self)

    def send(self, head: bytes, body: bytes) -> asyncio.Future[Received]:
        """Begin a call; the future has its reply."""
        self._future = self.loop.create_future()
        self.is_reusable = False
        self._transport.write(head + body)
        return self._future

    def drop(self) -> None:
        self.is_reusable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._future is None:
            self.drop()  # bytes that nobody asked for: what follows could not be told apart from a reply
            return
        try:
            if self._reply is None:
                data = self._begin(self._buffer + data if self._buffer else data)
            if self._reply is not None and self._reply.take(data):
                self._finish(self._reply)
                return
        except BadReply as error:
            self._fail(error)
            return
        self._heard_at = self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_later(self._service.idle_timeout_s, self._check_idle)

    def eof_received(self) -> None:
        if self._reply is not None and self._reply.ends_with_connection:
            try:
                self._finish(self._reply)
            except BadReply as error:
                self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self.is_reusable = False
        if self._reply is not None:
            self._fail(BadReply("it ended before its length"))
        elif self._buffer:
            self._fail(BadReply("it ended in its head"))
        else:
            self._fail(Disconnected(str(exc) if exc else "closed without a reply"))

    def _begin(self, data: bytes) -> bytes:
        """Read a reply's head once it is there. Returns what follows it."""
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > HEAD_BYTES_MAX:
            if len(data) > HEAD_BYTES_MAX:
                raise BadReply(f"its head is longer than {HEAD_BYTES_MAX} bytes")
            self._buffer = data
            return b""
        self._buffer = b""
        status, headers, keeps = read_head(data[:end])
        if 100 <= status < 200:
            return self._begin(data[end + 4 :]) if len(data) > end + 4 else b""
        self._reply = Incoming(status, headers, keeps, self._service.body_bytes_max)
        return data[end + 4 :]

    def _finish(self, reply: Incoming) -> None:
        received = reply.received()
        self.is_reusable = reply.keeps_connection and received.body is not None and not self._transport.is_closing()
        self._end()
        if self._future is not None and not self._future.done():
            self._future.set_result(received)
        self._future = None

    def _fail(self, error: OSError) -> None:
        self._end()
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
        self._future = None
        self._transport.abort()

    def _end(self) -> None:
        self._reply = None
        self._buffer = b""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_idle(self) -> None:
        left = self._heard_at + self._service.idle_timeout_s - self.loop.time()
        if left <= 0:
            self._timer = None
            self._fail(TimeoutError("the reply stopped half way"))
        else:
            self._timer = self.loop.call_later(left, self._check_idle)
