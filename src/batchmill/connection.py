"""The connection of a command to the owner of its data directory: this process itself, or another one over its socket.

If the owner ends during a request, another process takes over, perhaps this one, and the request is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchmill import faults
from batchmill.client.messages import HttpReply, HttpRequest, OwnerGone
from batchmill.config import Config
from batchmill.control.app import OWNER_STOPPING, ControlApp, Pieces
from batchmill.errors import InvalidTransition, Unavailable
from batchmill.imports import import_large
from batchmill.prepared import prepare
from batchmill.services.data_dirs.data_dirs import SOCKET, TAKEOVER_S, owner_pid, prepare_data_dir, try_lock
from batchmill.types import ModelSpec
from batchmill.wire.operations import EVENTS

if TYPE_CHECKING:
    from batchmill.control.client import ControlClient

log = logging.getLogger("batchmill.connection")

NOTICE_ATTEMPTS = 20  # after so many to take the lock, a command says that it waits
EVENT_END = b"\n\n"
CONTROL_CLIENT = "batchmill.control.client"  # it needs httpx2
OWNER = "batchmill.owner"  # it needs SQLAlchemy


def load_owner() -> ModuleType:
    """Import what opens a data directory as its owner."""
    return import_large(OWNER)


def load_control_client() -> type[ControlClient]:
    """Import the client of another process's control socket."""
    return import_module(CONTROL_CLIENT).ControlClient


class OwnerConnection:
    """Sends requests to the current owner. The first request opens the data directory.

    Raises: what the owner's handlers raise; InvalidConfig if the data directory cannot be used; OwnerGone if the owner
    ended during a request that must not be repeated. Requests are repeated for no other reason.
    """

    def __init__(self, config: Config, stack: contextlib.AsyncExitStack) -> None:
        """Args: stack: closes what this process opens as the owner."""
        self._expected: Sequence[ModelSpec] = ()
        self._config, self._stack = config, stack
        self._own: ControlApp | None = None  # set if this process is the owner
        self._client: ControlClient | None = None  # set if another process was contacted
        self._opening = asyncio.Lock()

    def expect(self, models: Sequence[ModelSpec]) -> None:
        """Announce a job with these models: if this process becomes the owner, their processes start at once."""
        self._expected = models

    async def _owner_connection(self) -> ControlApp | ControlClient:
        """Return the application of this process if it is the owner, otherwise a client of the owner's."""
        async with self._opening:
            if self._own is not None:
                return self._own
            if self._client is None:
                prepare_data_dir(self._config.data_dir)
            attempts = 0
            while True:
                if (lock := try_lock(self._config.data_dir)) is not None:
                    self._own = await self._stack.enter_async_context(_own(self._config, lock, self._expected))
                    return self._own
                if self._client is None:
                    self._client = load_control_client()(self._config.data_dir / SOCKET)
                    self._stack.push_async_callback(self._client.close)
                with contextlib.suppress(OwnerGone):
                    await self._client.check()
                    return self._client
                attempts += 1
                if attempts == NOTICE_ATTEMPTS:
                    _say_waiting(self._config.data_dir)
                await asyncio.sleep(TAKEOVER_S)

    async def send(self, request: HttpRequest) -> HttpReply:
        """Send a request, and repeat it with the next owner where that is safe."""
        was_sent = False
        while True:
            owner = await self._owner_connection()
            try:
                return await owner.send(request)
            except OwnerGone as error:
                if error.was_sent and not request.is_repeatable and request.result_path is None:
                    raise
                was_sent |= error.was_sent
            except Unavailable as error:
                await _wait_for_next_owner(error)
            except InvalidTransition:
                if not was_sent or request.result_path is None:
                    raise
                request = replace(request, method="GET", path=request.result_path)  # only the reply was lost

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[Pieces]:
        """Stream a reply. Events continue with the next owner; any other reply that breaks off raises OwnerGone."""
        async with contextlib.AsyncExitStack() as stack:
            reply = await self._open_stream(stack, request)
            if reply.media != EVENTS:
                yield reply
                return
            async with contextlib.aclosing(self._follow_events(request, reply.pieces)) as pieces:
                yield Pieces(pieces, reply.media)

    async def _open_stream(self, stack: contextlib.AsyncExitStack, request: HttpRequest) -> Pieces:
        while True:
            try:
                return await stack.enter_async_context((await self._owner_connection()).stream(request))
            except OwnerGone as error:
                if error.was_sent and not request.is_repeatable:
                    raise
            except Unavailable as error:
                await _wait_for_next_owner(error)

    async def _follow_events(self, request: HttpRequest, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Yield whole events, so that no event is joined from two owners."""
        async with contextlib.AsyncExitStack() as stack:
            while True:
                rest = b""
                try:
                    async for piece in pieces:
                        whole, mark, rest = (rest + piece).rpartition(EVENT_END)
                        yield whole + mark
                    return
                except OwnerGone:
                    await stack.aclose()
                    pieces = (await self._open_stream(stack, request)).pieces


def _say_waiting(data_dir: Path) -> None:
    pid = owner_pid(data_dir)
    log.warning(
        "waiting for process %s, which owns the data directory %s and is starting or ending (its rows in flight finish "
        "first). If it hangs, `kill -9 %s` ends it; finished rows are kept",
        pid, data_dir, pid,
    )  # fmt: skip


async def _wait_for_next_owner(error: Unavailable) -> None:
    """Wait before the next try if the owner refused because it is stopping. Raises: `error`, if it is another error."""
    if error.code != OWNER_STOPPING:
        raise error
    await asyncio.sleep(TAKEOVER_S)


@contextlib.asynccontextmanager
async def _own(config: Config, lock: int, expected: Sequence[ModelSpec]) -> AsyncIterator[ControlApp]:
    async with contextlib.AsyncExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        held.callback(os.close, lock)
        prepared = await stack.enter_async_context(prepare(config.data_dir / "workers", expected))
        faults.point("after_prepared")
        owner = load_owner()
        held.pop_all()  # the store closes it
        store = await stack.enter_async_context(owner.open_store(config, lock))
        yield (await stack.enter_async_context(owner.open_owner(store, prepared=prepared))).control


@contextlib.asynccontextmanager
async def connect(config: Config) -> AsyncIterator[OwnerConnection]:
    """Open a connection for a command. Leaving it pauses the jobs of this process; a cancellation does so at once."""
    async with contextlib.AsyncExitStack() as stack:
        yield OwnerConnection(config, stack)
