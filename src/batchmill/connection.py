"""A command's way to the owner of its data directory: it is the owner itself, or it asks the process that is.

Owners come and go: when the one that was asked ends, another process takes over, perhaps this one, and is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from importlib import import_module
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchmill.client.messages import HttpReply, HttpRequest, OwnerGone
from batchmill.config import Config
from batchmill.control.app import OWNER_STOPPING, ControlApp, Pieces
from batchmill.errors import InvalidConfig, InvalidTransition, Unavailable
from batchmill.owner import open_owner, open_store
from batchmill.services.data_dirs import SOCKET, TAKEOVER_S, TAKEOVER_TRIES, prepare_data_dir, try_lock
from batchmill.wire.operations import EVENTS, SHOW_JOB, STEERING

if TYPE_CHECKING:
    from batchmill.control.guest import Guest

EVENT_END = b"\n\n"
GUEST = "batchmill.control.guest"  # it needs httpx2


def load_guest() -> type[Guest]:
    """What asks another process."""
    return import_module(GUEST).Guest


class OwnerConnection:
    """Carries requests to the owner, whoever that is by then. The data directory is opened with the first of them.

    Raises: what the owner's handlers raise; InvalidConfig when the data directory cannot be used; OwnerGone when the
    owner ended with a request that must not be done twice. No request is tried again for any other reason.
    """

    def __init__(self, config: Config, stack: contextlib.AsyncExitStack) -> None:
        """Args: stack: of whoever opens this; what this process comes to own is closed with it."""
        self._config, self._stack = config, stack
        self._own: ControlApp | None = None  # once this process is the owner
        self._guest: Guest | None = None  # once another process was asked
        self._opening = asyncio.Lock()

    async def _reached(self) -> ControlApp | Guest:
        """The application of this process, or a way to the owner's."""
        async with self._opening:
            if self._own is not None:
                return self._own
            if self._guest is None:
                prepare_data_dir(self._config.data_dir)
            for _ in range(TAKEOVER_TRIES):
                if (lock := try_lock(self._config.data_dir)) is not None:
                    self._own = await self._stack.enter_async_context(_own(self._config, lock))
                    return self._own
                if self._guest is None:
                    self._guest = load_guest()(self._config.data_dir / SOCKET)
                    self._stack.push_async_callback(self._guest.close)
                with contextlib.suppress(OwnerGone):
                    await self._guest.check()
                    return self._guest
                await asyncio.sleep(TAKEOVER_S)
        raise InvalidConfig(
            f"{self._config.data_dir} is locked by a process that does not answer on its control socket; end that "
            "process"
        )

    async def send(self, request: HttpRequest) -> HttpReply:
        """The reply, of the owner that is asked last."""
        was_asked = False
        while True:
            reached = await self._reached()
            try:
                return await reached.send(request)
            except OwnerGone as gone:
                if gone.was_sent and not (request.is_repeatable or _steers(request)):
                    raise
                was_asked |= gone.was_sent
            except Unavailable as error:
                await _wait_for_next_owner(error)
            except InvalidTransition:
                if not (was_asked and _steers(request)):
                    raise
                job, _, _ = request.path.rpartition("/")
                request = replace(request, method=SHOW_JOB.method, path=job)  # it was done: only the answer was lost

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[Pieces]:
        """A reply as it comes. Events go on with the next owner; of anything else OwnerGone says that it broke off."""
        async with contextlib.AsyncExitStack() as stack:
            reply = await self._entered(stack, request)
            if reply.media != EVENTS:
                yield reply
                return
            async with contextlib.aclosing(self._following(request, reply.pieces)) as pieces:
                yield Pieces(pieces, reply.media)

    async def _entered(self, stack: contextlib.AsyncExitStack, request: HttpRequest) -> Pieces:
        while True:
            try:
                return await stack.enter_async_context((await self._reached()).stream(request))
            except OwnerGone as gone:
                if gone.was_sent and not request.is_repeatable:
                    raise
            except Unavailable as error:
                await _wait_for_next_owner(error)

    async def _following(self, request: HttpRequest, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Whole events, so that none is half of one owner's and half of another's."""
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
                    pieces = (await self._entered(stack, request)).pieces


async def _wait_for_next_owner(error: Unavailable) -> None:
    """Wait before the next try if the owner refused because it is ending: it has done nothing. Raises: any other."""
    if error.code != OWNER_STOPPING:
        raise error
    await asyncio.sleep(TAKEOVER_S)


def _steers(request: HttpRequest) -> bool:
    """Asks for another state of a job. Its refusal by the next owner says that the last one did it."""
    return request.path.rpartition("/")[2] in STEERING


@contextlib.asynccontextmanager
async def _own(config: Config, lock: int) -> AsyncIterator[ControlApp]:
    async with open_store(config, lock) as store, open_owner(store) as owner:
        yield owner.control


@contextlib.asynccontextmanager
async def connect(config: Config) -> AsyncIterator[OwnerConnection]:
    """A connection for as long as a command takes. Leaving it pauses what this process runs; leaving it by
    cancellation, at once.
    """
    async with contextlib.AsyncExitStack() as stack:
        yield OwnerConnection(config, stack)
