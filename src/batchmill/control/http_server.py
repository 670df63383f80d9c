"""HTTP over the control socket, with uvicorn's protocol on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
from socket import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

KEEP_ALIVE_S = 3600
CANCEL_S = 2.0  # how long `close` waits for cancelled requests


class HttpServer:
    """Serves an ASGI application on one socket."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket) -> None:
        """Accept waiting and new connections."""
        config = uvicorn.Config(
            self._call, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        protocol: Any = config.http_protocol_class
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: protocol(config=config, server_state=self._state, app_state={}), sock=sock
        )

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application. Only `close` cancels requests, and it has closed their connections before."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)

    async def close(self) -> None:
        """Close all connections at once and cancel the requests under way."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # let the connections notice it
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
