"""HTTP over the control socket, with uvicorn's protocol on the running event loop.

Each connection carries one request. So a server that closes knows which requests still come: those of the connections
that it has accepted. Requests of later connections are not sent at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from batchmill.services.data_dirs.forks import leave_to_owner

CANCEL_S = 2.0  # how long `close` waits for cancelled requests
ACCEPT_RETRY_S = 1.0  # after no file descriptor was free


class HttpServer:
    """Serves an ASGI application on one socket."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        """Args: sock: listens and does not block. The caller closes it."""
        self._app, self._socket = app, sock
        self._state = ServerState()
        self._state.default_headers = [(b"connection", b"close")]
        self._connections: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._config = uvicorn.Config(
            self._call, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False,
        )  # fmt: skip
        self._config.load()
        self._protocol = _add_closed(self._config.http_protocol_class)

    def open(self) -> None:
        """Accept waiting and new connections."""
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is free
                loop.remove_reader(self._socket)
                self._retry = loop.call_later(ACCEPT_RETRY_S, self.open)
                return
            leave_to_owner(connection.fileno())
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it is closed."""
        closed = asyncio.Event()
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: self._protocol(closed, config=self._config, server_state=self._state, app_state={}), connection
        )
        await closed.wait()

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application. Only `close` cancels requests, and it has closed their connections before."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)

    async def close(self, drain_s: float) -> None:
        """Refuse new connections, and send the replies of the others.

        Args: drain_s: after this time, all connections are closed and the requests under way are cancelled.
        """
        self._socket.shutdown(socket.SHUT_RD)  # connections that wait to be accepted stay
        self._accept()
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while under_way := {*self._connections, *self._state.tasks}:
                    await asyncio.wait(under_way)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # let the connections notice it
        for request in list(self._state.tasks):
            request.cancel()
        if under_way := {*self._connections, *self._state.tasks}:
            await asyncio.wait(under_way, timeout=CANCEL_S)


def _add_closed(base: Any) -> Any:
    """Make a protocol that sets an event when its connection is closed."""

    class Protocol(base):
        def __init__(self, closed: asyncio.Event, **options: Any) -> None:
            super().__init__(**options)
            self._closed = closed

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._closed.set()

    return Protocol
