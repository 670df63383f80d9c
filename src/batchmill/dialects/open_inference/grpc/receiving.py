"""Messages as they are taken from gRPC: not before somebody may send them, and never more of them than memory holds.

gRPC tells the length of a message only once it has all of it. So one call of a project reads at a time, which takes no
time for a message that has come; one that takes longer either gets room for the largest message there may be, and lets
the others read beside it, or keeps its turn until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from weakref import WeakValueDictionary

from grpc.aio import EOF

from batchmill.errors import InvalidInput, Unavailable
from batchmill.server.admission.admission import Admission
from batchmill.server.admission.memory import Hold

QUICK_S = 0.05  # a message that has come by then was small, or was there
ROOM_S, LOOK_S = 30.0, 0.02  # how long a stream waits for memory, and how often it looks

Context = Any  # a grpc.aio.ServicerContext


class Receiver:
    def __init__(self, admission: Admission, bytes_max: int) -> None:
        """Args: bytes_max: of one message."""
        self._memory, self._total_s, self._bytes_max = admission.memory, admission.pace.total_s, bytes_max
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def one(self, context: Context, project: str, hold: Hold) -> bytes:
        """The message of a call, counted in `hold`. Raises: Unavailable; InvalidInput where none comes in time."""
        turn = self._turns.get(project) or asyncio.Lock()
        self._turns[project] = turn
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(turn)
            reading = asyncio.ensure_future(context.read())
            try:
                done, _ = await asyncio.wait({reading}, timeout=QUICK_S)
                if not done:
                    with contextlib.suppress(Unavailable):
                        hold.grow_to(self._bytes_max)
                        await stack.aclose()
                    done, _ = await asyncio.wait({reading}, timeout=self._total_s)
                if not done:
                    raise InvalidInput(
                        f"the message did not come within {self._total_s:.0f} s: see server.body_timeout_s",
                        code="request_timeout",
                    )
            finally:
                reading.cancel()
        data = reading.result()
        if data is EOF:
            raise InvalidInput("the call ended without a message", code="missing_body")
        hold.shrink_to(len(data))
        hold.grow_to(len(data))
        return data

    async def of_stream(self, context: Context, project: str, size: int, hold: Hold) -> bytes | None:
        """The next message of a stream that holds `size` bytes of others; None: there are no more.

        Raises: Unavailable, where there is no room for it, nor comes any.
        """
        data = await context.read()
        if data is EOF:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                while not self._memory.has_room(project, len(data)):
                    await asyncio.sleep(LOOK_S)
        hold.grow_to(size + len(data))
        return data
