"""RayWorker: a worker's actor, as its pool sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from batchmill.executors.channel import joined
from batchmill.executors.ray import frames
from batchmill.executors.ray.checks import OPEN_CLUSTER
from batchmill.executors.ray.frames import KILLED, LOST, Deliver, Item, Kill, Placement
from batchmill.states import PauseReason
from batchmill.wire import messages
from batchmill.wire.messages import Drain, Failed, Open, Provide, Ready, Released, Start, ToOwner

RECEIVED_BYTES = 128 * 1024 * 1024  # of a worker, that its pool has not read; then it is killed
WAITING_BYTES = 64 * 1024 * 1024  # of a worker that waits for its cluster; then it is ended


class Cluster(Protocol):
    """`RayExecutor`."""

    @property
    def may_send_secrets(self) -> bool: ...

    def prepared(self, message: Struct) -> Struct: ...

    def send(self, frame: Struct) -> None: ...

    def forget(self, worker: RayWorker) -> None: ...

    def note(self, worker: RayWorker, why: str) -> None: ...


class RayWorker:
    """A worker's actor. It may wait for the cluster or a place there, which `waits` says."""

    def __init__(self, number: int, start: Start, placement: Placement, executor: Cluster) -> None:
        self.number, self.start, self.placement = number, start, placement
        self._executor = executor
        self.pid = 0  # on its node; 0 until it is ready
        self.waits = ""
        self.was_launched = self.is_placed = False
        self.is_lost = False
        self.ending = ""
        self._is_overrun = False  # this process was too slow for its messages: no fault of its own
        self.opened: dict[str, Path] = {}  # jobs that it has -> the folder of their segments
        self._code: int | None = None
        self._ended = asyncio.Event()
        self._received: asyncio.Queue[Item | Failed | None] = asyncio.Queue()  # bounded by `receive`
        self._received_bytes = 0
        self._decoded: deque[ToOwner] = deque()  # of one item, not yielded yet
        self._count = self._count_seen = 0  # of items, and when `is_frozen` looked last
        self._unsent: list[bytes] = []  # until it is launched
        self._unsent_bytes = 0

    def send(self, message: Struct) -> None:
        if self._code is not None:
            return
        if isinstance(message, Drain) and not self.is_placed:
            if self.was_launched:
                self._executor.send(Kill(self.number))
            self.end(0)
            return
        message = self._executor.prepared(message)
        if isinstance(message, Provide) and message.provision.has_secrets and not self._executor.may_send_secrets:
            self.fail(Failed("cluster_not_trusted", OPEN_CLUSTER, PauseReason.ENGINE_FAILED))
            return
        if isinstance(message, Open):
            self.opened[message.job] = Path(message.segments.folder)
        data = messages.encode(message)
        if self.was_launched:
            self._executor.send(Deliver(self.number, data))
        else:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            if self._unsent_bytes > WAITING_BYTES:
                self.end(LOST, is_lost=True)

    def take_unsent(self) -> list[bytes]:
        unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
        return unsent

    def receive(self, item: Item) -> None:
        self._count += 1
        if self._is_overrun:
            return  # it is being killed: after a gap nothing of it counts
        if self._received_bytes + len(item.data) > RECEIVED_BYTES:
            self._is_overrun = True
            self._executor.note(self, f"its messages were not read: more than {RECEIVED_BYTES} bytes waited")
            self.kill()
        else:
            self._received_bytes += len(item.data)
            self._received.put_nowait(item)

    def fail(self, failure: Failed) -> None:
        """End it with a failure of its model."""
        self._received.put_nowait(failure)
        if self.was_launched:
            self._executor.send(Kill(self.number))
        self.end(1)

    def end(self, code: int, *, is_lost: bool = False, ending: str = "") -> None:
        if self._code is None:
            self.ending = ending
            self._code, self.is_lost = (LOST, True) if self._is_overrun else (code, is_lost)
            self._executor.forget(self)
            self._received.put_nowait(None)
            self._ended.set()

    async def messages(self) -> AsyncIterator[ToOwner]:
        while self._decoded or await self._decode_next():
            message = self._decoded.popleft()
            if isinstance(message, Ready):
                self.pid = message.pid
            elif isinstance(message, Released):
                self.opened.pop(message.job, None)
            yield message

    async def _decode_next(self) -> bool:
        """Decode the next items; False: none will come."""
        while not self._decoded:
            item = await self._received.get()
            if item is None:
                self._received.put_nowait(None)
                return False
            if isinstance(item, Failed):
                self._decoded.append(item)
                continue
            self._received_bytes -= len(item.data)
            try:
                self._decoded.extend([joined(messages.to_owner.decode(each)) for each in frames.split(item.data)])
            except (msgspec.MsgspecError, ConnectionError) as error:  # nothing on the node is trusted
                text = f"a worker sent what is no message of batchmill: {error}"
                self.fail(Failed("worker_failed", text, PauseReason.ENGINE_FAILED))
        return True

    def is_frozen(self) -> bool:
        """Whether it has said nothing since the last call. Its pool calls this once it has been silent for long."""
        is_silent = self.was_launched and self._count > 0 and self._count == self._count_seen
        self._count_seen = self._count
        return is_silent

    def kill(self) -> None:
        if self.was_launched:
            self._executor.send(Kill(self.number))
        else:
            self.end(KILLED)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._code is not None
        return self._code


__all__ = ["RayWorker"]
