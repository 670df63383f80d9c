"""ActorChannel: the worker's end of its actor."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from msgspec import Struct

from batchmill.executors.channel import joined
from batchmill.executors.ray.frames import LENGTH_BYTES, PIECE_BYTES, cut, join, split
from batchmill.wire import messages

OUTBOX_BYTES = 4 * 1024 * 1024  # of unsent messages; beyond it `drain` waits
# A message costs worker and driver some milliseconds of processor time together.
HEARTBEAT_S, IDLE_HEARTBEAT_S = 2.0, 5.0
COMMIT_PACE_S = 0.5  # leases of slow rows that end at about the same time are committed together
FAST_COMMIT_PACE_S = 0.2  # the same of rows that end by thousands
AHEAD_S = 0.2  # grants for so long are requested together: a grant of fast rows may last less than its way here


class ActorChannel:
    """`executors.channel.Channel` without a socket and shared memory."""

    is_on_node = False
    heartbeat_s, idle_heartbeat_s = HEARTBEAT_S, IDLE_HEARTBEAT_S
    commit_pace_s, fast_commit_pace_s = COMMIT_PACE_S, FAST_COMMIT_PACE_S
    grants_max, ahead_s = messages.GRANTS_REQUESTED_MAX, AHEAD_S

    def __init__(self) -> None:
        self._inbox: deque[memoryview] = deque()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._is_over = self._is_closed = False
        self._changed = asyncio.Event()  # for the reader
        self._filled = asyncio.Event()  # for the stream
        self._can_write = asyncio.Event()
        self._can_write.set()

    def send(self, message: Struct) -> None:
        if self._is_closed:
            return
        data = messages.encode(message)
        self._outbox.append(data)
        self._outbox_bytes += len(data)
        if self._outbox_bytes > OUTBOX_BYTES:
            self._can_write.clear()
        self._filled.set()

    def complete(self, message: Struct) -> Struct:
        return joined(message)

    async def read(self) -> list[memoryview]:
        while not self._inbox:
            if self._is_over:
                return []
            self._changed.clear()
            await self._changed.wait()
        received = list(self._inbox)
        self._inbox.clear()
        return received

    async def drain(self) -> None:
        await self._can_write.wait()
        if self._is_over:
            raise ConnectionResetError("the owner has ended")

    def close(self) -> None:
        self._is_closed = True
        self._filled.set()

    def receive(self, item: bytes) -> None:
        self._inbox.extend(split(item))
        self._changed.set()

    def end(self) -> None:
        """The owner has ended: `read` returns nothing more."""
        self._is_over = True
        self._changed.set()
        self._can_write.set()

    async def items(self) -> AsyncIterator[bytes]:
        """What the worker sends; what gathers in a turn of the loop travels together, and a longer message in
        pieces. Ends once it is closed.
        """
        while self._outbox or not self._is_closed:
            if not self._outbox:
                self._filled.clear()
                await self._filled.wait()
                await asyncio.sleep(0)
                continue
            batch, size = [], 0
            while self._outbox and (not batch or size + len(self._outbox[0]) + LENGTH_BYTES <= PIECE_BYTES):
                data = self._outbox.popleft()
                batch.append(data)
                size += len(data) + LENGTH_BYTES
            self._outbox_bytes -= size - LENGTH_BYTES * len(batch)
            if self._outbox_bytes <= OUTBOX_BYTES:
                self._can_write.set()
            for piece in cut(join(batch)):
                yield piece


__all__ = ["ActorChannel"]
