"""The Ray actor that hosts one worker: the same `Worker` as in a child process, behind another channel.

Its methods take and return bytes alone, so that its driver never unpickles anything that an actor has made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import ray

from batchmill import __version__
from batchmill.engines import clock
from batchmill.errors import ModelFailed
from batchmill.executors.ray.channel import ActorChannel
from batchmill.executors.ray.frames import EXITED, LOST, WorkerOrder, join, orders
from batchmill.executors.ray.node_channel import NodeChannel
from batchmill.executors.ray.node_files import NodeFiles
from batchmill.executors.ray.node_process import (
    end_with_this_thread,
    forget_threads,
    lead_session,
    on_first_sigterm,
)
from batchmill.executors.worker import Worker
from batchmill.executors.worker_process import failed_start, lower_priority, set_up_memory, take_start
from batchmill.models import devices
from batchmill.types import ModelSpec
from batchmill.wire import messages
from batchmill.wire.messages import Start

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # Ray has read them; user code does not get them


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
        end_with_this_thread()
        yield ray.get_runtime_context().get_node_id().encode()
        order = orders.decode(order_data)
        try:
            _check_node(order)
            files = await asyncio.to_thread(_node_files, order)
        except Exception as error:  # the owner must get the reason
            yield join([messages.encode(failed_start(error, "the node"))])
            yield EXITED + b"1"
            return
        channel = self._channel = ActorChannel() if files is None else NodeChannel(files)
        for item in self._early:
            channel.receive(item)
        hosting = asyncio.create_task(self._host(order, channel, files))
        async for item in channel.items():
            yield item
        code = await hosting
        if files is not None and code == 0 and not self._is_evicted:
            files.leave()
        yield EXITED + str(LOST if self._is_evicted else code).encode()

    async def deliver(self, item: bytes) -> bytes:
        """Take messages of the owner. The driver sends the next ones after this has returned."""
        if self._channel is None:
            self._early.append(item)
        else:
            self._channel.receive(item)
        return b""

    async def set_time(self, now: bytes) -> bytes:
        """Take the time of the owner's machine, in seconds since the epoch, for that of this process."""
        clock.follow(float(now))
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

    async def _host(self, order: WorkerOrder, channel: ActorChannel, files: NodeFiles | None) -> int:
        """Run the worker to its exit code."""
        try:
            worker = self._worker = await _make_worker(order, channel, files)
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


async def _make_worker(order: WorkerOrder, channel: ActorChannel, files: NodeFiles | None) -> Worker:
    """Raises: whatever its engine raises."""
    start = messages.to_worker.decode(order.start)
    assert isinstance(start, Start)
    _enter_node(order, start.model, Path(order.log) if files is None else files.home / f"{start.worker}.log")
    set_up_memory()
    take_start(start)
    if files is not None:
        assert order.node is not None
        start = await files.start(start, order.node.files)
    model = start.model
    if not model.traits.starts_process:
        lower_priority()  # of this thread: those of Ray stay as they are
    if model.limits.memory_bytes is not None and not model.traits.limits_memory:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + model.limits.memory_bytes,) * 2)  # Ray has mapped its own
    return Worker(start, channel)


def _node_files(order: WorkerOrder) -> NodeFiles | None:
    """What it has of a data directory that it does not see; None: it sees it. Raises: ModelFailed, InvalidConfig."""
    if order.node is None:
        return None
    start = messages.to_worker.decode(order.start)
    assert isinstance(start, Start)
    return NodeFiles(order.node, start.worker)


def _check_node(order: WorkerOrder) -> None:
    """Raises: ModelFailed if the node lacks what a worker needs."""
    node = ray.util.get_node_ip_address()
    if order.version != __version__:
        raise ModelFailed(
            f"the node {node} has batchmill {__version__} and the owner {order.version}: install the same version on "
            "every node",
            code="version_differs",
        )
    if order.node is None and not sees(order.probe, order.probe_text):
        raise ModelFailed(
            f"the node {node} does not see the data directory {Path(order.probe).parent}: give every node the same "
            "folder at the same path (NFS, or the cluster's shared volume), or set storage.objects",
            code="data_dir_not_shared",
        )


def _enter_node(order: WorkerOrder, model: ModelSpec, log_path: Path) -> None:
    """Make this process the worker's own on its node."""
    lead_session()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab", buffering=0) as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    for name in TOKENS:
        os.environ.pop(name, None)
    if not model.traits.runs_user_code:
        forget_threads()
    if model.needs.cpus:
        os.environ[devices.CORES] = str(max(1, int(model.needs.cpus)))
    os.environ.update(order.environment)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    os.environ[devices.ASSIGNED] = os.environ[devices.VISIBLE] = ",".join(gpus)


def sees(path: str, text: str) -> bool:
    """Whether this machine has the owner's file with its content."""
    with contextlib.suppress(OSError):
        return Path(path).read_text() == text
    return False


__all__ = ["HostedWorker", "sees"]
