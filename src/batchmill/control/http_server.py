"""HTTP over the control socket: uvicorn's protocol on the loop that is running already."""

from __future__ import annotations

import asyncio
import contextlib
from socket import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

KEEP_ALIVE_S = 3600
CANCELLED_S = 2.0  # for requests that were cancelled to say so


class HttpServer:
    """Serves an ASGI application on one socket."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket) -> None:
        """Take the connections that wait, and those that come."""
        config = uvicorn.Config(
            self._ended, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        protocol: Any = config.http_protocol_class
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: protocol(config=config, server_state=self._state, app_state={}), sock=sock
        )

    async def _ended(self, scope: Any, receive: Any, send: Any) -> None:
        """Requests are cancelled by `close` alone, which has broken their connections off: nobody is to be told."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._app(scope, receive, send)

    async def close(self) -> None:
        """Break every connection off at once; requests that are under way are cancelled."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the connections hear of it
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCELLED_S)
