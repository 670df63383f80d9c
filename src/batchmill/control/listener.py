"""The control socket of an owner, which only its user may open. The HTTP server is imported for the first client."""

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
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import POLL_S
from batchmill.services.data_dirs.forks import leave_to_owner

HTTP = "batchmill.control.http_server"  # it needs uvicorn
BACKLOG = 128
MODE = 0o600
DRAIN_S = 10.0  # how long requests under way may take when the owner ends


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a short name of a socket, because the kernel accepts at most 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def load_server() -> Any:
    """Import the class that serves HTTP."""
    return import_module(HTTP).HttpServer


class ControlListener:
    """Answers requests on the socket at `path`, from `open` to `close`."""

    def __init__(self, app: ControlApp, path: Path, owned: OwnedFiles = OwnedFiles()) -> None:
        self._app, self._path, self._owned = app, path, owned
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None

    async def open(self) -> None:
        """Start to listen. Replaces a socket that a killed owner left behind."""
        while self._owned.term.is_over():  # it may be that of a successor, which ends this process
            await asyncio.sleep(POLL_S)
        self._owned.remove(self._path)
        sock = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        leave_to_owner(sock.fileno())
        sock.setblocking(False)
        with short_name(self._path) as name:
            sock.bind(name)
        os.chmod(self._path, MODE)
        sock.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(sock, self._begin)

    def _begin(self) -> None:
        """Import the HTTP server while the first client waits in the backlog."""
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._serving = asyncio.create_task(self._serve(self._socket))

    async def _serve(self, sock: socket.socket) -> None:
        self._server = (await asyncio.to_thread(load_server))(self._app, sock)
        self._server.open()

    async def close(self, *, at_once: bool = False) -> None:
        """Close every connection: the commands at the other ends notice, and one of them becomes the owner.

        Requests under way get their replies first, unless `at_once`; later changes are refused.
        """
        if self._socket is None:
            return
        self._app.stop()
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._socket)
        else:
            if at_once:
                self._serving.cancel()
            await asyncio.wait({self._serving})
        if self._server is not None:
            await self._server.close(0.0 if at_once else DRAIN_S)
        self._socket.close()
        self._socket = None
