"""uvicorn on the loop that is running already: bound early, drained within a bound, no signals of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.responses import Response

from batchmill.errors import BatchmillError, InvalidConfig
from batchmill.server.admission.connections import ConnectionPool
from batchmill.server.connection import Connection
from batchmill.server.fast_path import FastPath
from batchmill.server.http import HttpRoot

KEEP_ALIVE_S = 75
BACKLOG = 2048
ACCEPTED_MAX = 16
CANCELLED_S = 2.0  # for requests that were cancelled to say so


class _Config(uvicorn.Config):
    """What uvicorn hands to each connection."""

    fast_path: FastPath | None
    pool: ConnectionPool
    unreadable: Callable[[BatchmillError], Response]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # of which the loop takes no more than ACCEPTED_MAX in one turn
        self.listens.set()


class Listener:
    """Serves an ASGI application on a socket that `bind` made."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        *,
        root: HttpRoot,
        drain_s: int,
        connection: type[Connection] = Connection,
        fast_path: FastPath | None = None,
    ) -> None:
        """Args: app: `root`, or what is around it; fast_path: of requests that need not go through `app`."""
        config = _Config(
            app, http=connection, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=drain_s,
            backlog=ACCEPTED_MAX,
        )  # fmt: skip
        config.fast_path, config.pool, config.unreadable = fast_path, root.admission.pool, root.unreadable
        self._sock, self._server = sock, _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns once requests are answered."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        await self._server.listens.wait()

    async def close(self, *, at_once: bool = False) -> None:
        """Take no further connection and let requests under way end, within the bound."""
        if self._serving is None:
            self._sock.close()
            return
        self._server.should_exit = True
        self._server.force_exit = at_once
        state = self._server.server_state
        if at_once:
            for connection in list(state.connections):
                connection.transport.abort()
            for task in state.tasks:
                task.cancel()
        await asyncio.wait({self._serving})
        for connection in list(state.connections):
            connection.end_fast_reply()
        if state.tasks:  # they were cancelled, by us or at the end of the time that they had
            await asyncio.wait(state.tasks, timeout=CANCELLED_S)


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet. Raises: InvalidConfig."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfig(f"the address {host!r} is not known: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address[0] == "::" else 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        way_out = (
            "end what listens there, or choose another --port" if error.errno == errno.EADDRINUSE else "see --host"
        )
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}; {way_out}") from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
