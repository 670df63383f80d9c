"""The control socket of an owner, which only its user may open. What speaks HTTP is loaded for the first guest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from batchmill.control.app import ControlApp

HTTP = "batchmill.control.http_server"  # has `serve`; it needs uvicorn
BACKLOG = 128
MODE = 0o600
DRAIN_S = 10.0  # for changes under way when the owner ends


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name for a socket in a folder of any depth: the kernel takes at most 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def load_server() -> Any:
    """The class that serves HTTP."""
    return import_module(HTTP).HttpServer


class ControlListener:
    """Answers on the socket at `path`, from `open` to `close`."""

    def __init__(self, app: ControlApp, path: Path) -> None:
        self._app, self._path = app, path
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None

    async def open(self) -> None:
        """Take the place of a socket that a killed owner left behind."""
        self._path.unlink(missing_ok=True)
        sock = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        with short_name(self._path) as name:
            sock.bind(name)
        os.chmod(self._path, MODE)
        sock.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(sock, self._begin)

    def _begin(self) -> None:
        """The first guest waits in the backlog while what serves it is loaded."""
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._serving = asyncio.create_task(self._serve(self._socket))

    async def _serve(self, sock: socket.socket) -> None:
        self._server = (await asyncio.to_thread(load_server))(self._app)
        await self._server.open(sock)

    async def close(self, *, at_once: bool = False) -> None:
        """Close every connection: the commands at the other ends notice, and one of them becomes the owner.

        Changes under way get their replies first, unless `at_once`; later ones are refused.
        """
        if self._socket is None:
            return
        self._app.stop()
        if not at_once:
            await self._app.drain(DRAIN_S)
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._socket)
        else:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self._server is not None:
            await self._server.close()
        self._socket.close()
