"""The Ray actor that hosts one worker: the same `Worker` as in a child process, behind another channel.

Its methods take and return bytes alone, so that its driver never unpickles anything that an actor has made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import ray
from msgspec import Struct

from batchmill import __version__
from batchmill.errors import ModelFailed
from batchmill.executors.channel import joined
from batchmill.executors.ray.frames import EXITED, ITEM_BYTES, LOST, WorkerOrder, join, orders, split
from batchmill.executors.ray.node_process import lead_session, on_first_sigterm
from batchmill.executors.worker import Worker, failed_start, lower_priority, prepare_process
from batchmill.models import devices
from batchmill.wire import messages
from batchmill.wire.messages import Start

OUTBOX_BYTES = 4 * 1024 * 1024  # of unsent messages; beyond it `drain` waits
IDLE_HEARTBEAT_S = 5.0
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # Ray has read them; user code does not get them


class ActorChannel:
    """The worker's end of its actor: `executors.channel.Channel` without a socket and shared memory."""

    idle_heartbeat_s = IDLE_HEARTBEAT_S

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
        """What the worker sends; what gathers in a turn of the loop travels together. Ends once it is closed."""
        while self._outbox or not self._is_closed:
            if not self._outbox:
                self._filled.clear()
                await self._filled.wait()
                await asyncio.sleep(0)
                continue
            batch, size = [], 0
            while self._outbox and (not batch or size + len(self._outbox[0]) <= ITEM_BYTES):
                data = self._outbox.popleft()
                batch.append(data)
                size += len(data)
            self._outbox_bytes -= size
            if self._outbox_bytes <= OUTBOX_BYTES:
                self._can_write.set()
            yield join(batch)


class HostedWorker:
    """One worker in one actor process."""

    def __init__(self) -> None:
        self._channel: ActorChannel | None = None
        self._worker: Worker | None = None
        self._is_evicted = False
        self._early: list[bytes] = []

    async def run(self, order_data: bytes) -> AsyncIterator[bytes]:
        """Host the worker of a packed `WorkerOrder`. Yields items: first its node, last its exit code."""
        loop = asyncio.get_running_loop()
        on_first_sigterm(lambda: loop.call_soon_threadsafe(self._evict))
        yield ray.get_runtime_context().get_node_id().encode()
        channel = self._channel = ActorChannel()
        for item in self._early:
            channel.receive(item)
        hosting = asyncio.create_task(self._host(orders.decode(order_data), channel))
        async for item in channel.items():
            yield item
        code = await hosting
        yield EXITED + str(LOST if self._is_evicted else code).encode()

    async def deliver(self, item: bytes) -> bytes:
        """Take messages of the owner. The driver sends the next ones after this has returned."""
        if self._channel is None:
            self._early.append(item)
        else:
            self._channel.receive(item)
        return b""

    async def leave(self) -> bytes:
        """The owner has ended: write what is finished, and end."""
        if self._channel is not None:
            self._channel.end()
        return b""

    async def evict(self) -> bytes:
        """Its node is going away, as at a SIGTERM: commit what is finished, and end."""
        self._evict()
        return b""

    def _evict(self) -> None:
        self._is_evicted = True
        if self._worker is not None:
            self._worker.evict()

    async def _host(self, order: WorkerOrder, channel: ActorChannel) -> int:
        """Run the worker to its exit code."""
        try:
            worker = self._worker = _make_worker(order, channel)
        except Exception as error:  # the engine cannot be created: the owner must get the reason
            channel.send(failed_start(error, f"the {order.engine} engine"))
            channel.close()
            return 1
        if self._is_evicted:
            worker.evict()
        try:
            return await worker.run()
        finally:
            channel.close()


def _make_worker(order: WorkerOrder, channel: ActorChannel) -> Worker:
    """Raises: whatever its engine raises."""
    start = messages.to_worker.decode(order.start)
    assert isinstance(start, Start)
    _enter_node(order)
    prepare_process(start)
    model = start.model
    if not model.traits.starts_process:
        lower_priority()  # of this thread: those of Ray stay as they are
    if model.limits.memory_bytes is not None and not model.traits.limits_memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + model.limits.memory_bytes,) * 2)  # Ray has mapped its own
    return Worker(start, channel)


def _enter_node(order: WorkerOrder) -> None:
    """Take what the actor needs of its node. Raises: ModelFailed if the node lacks it."""
    node = ray.util.get_node_ip_address()
    if order.version != __version__:
        raise ModelFailed(
            f"the node {node} has batchmill {__version__} and the owner {order.version}: install the same version on "
            "every node",
            code="version_differs",
        )
    if not sees(order.probe, order.probe_text):
        raise ModelFailed(
            f"the node {node} does not see the data directory {Path(order.probe).parent}: give every node the same "
            "folder at the same path (NFS, or the cluster's shared volume)",
            code="data_dir_not_shared",
        )
    lead_session()
    Path(order.log).parent.mkdir(parents=True, exist_ok=True)
    with open(order.log, "ab", buffering=0) as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    for name in TOKENS:
        os.environ.pop(name, None)
    os.environ.update(order.environment)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    os.environ[devices.ASSIGNED] = os.environ[devices.VISIBLE] = ",".join(gpus)


def sees(path: str, text: str) -> bool:
    """Whether this machine has the owner's file with its content."""
    with contextlib.suppress(OSError):
        return Path(path).read_text() == text
    return False


__all__ = ["HostedWorker", "sees"]
