"""A piece of work on a node that sees nothing of the data directory: its files are brought, and its folder removed."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading

from batchmill import __version__
from batchmill.errors import BatchmillError
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import TaskOrder, TaskReply
from batchmill.executors.ray.node_cache import NodeCache, cache_folder
from batchmill.models import redaction
from batchmill.object_store.credentials import environment_with, joined
from batchmill.optional import require
from batchmill.owner_term import TaskTerm, TermFile, now_s
from batchmill.store.objects import StoreObjects
from batchmill.types.cluster import NodePlace

FLAW_CHARS = 1000
NICENESS = 10


class HostedTask:
    """One piece of work in an actor process of its own, whose methods take and return bytes alone."""

    def __init__(self) -> None:
        self._term = TermFile()

    async def run(self, order: bytes) -> bytes:
        """As `run_task`, at a lower priority than workers."""
        return await asyncio.to_thread(self._run, order)

    def _run(self, order: bytes) -> bytes:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread, not those of Ray
        return run_task(order, TaskTerm(self._term.path).path)

    async def renew(self, until_s: bytes) -> bytes:
        """Let the work change objects until then, by the clock of this node. Returns: its time. Both are as `now_s`."""
        self._term.write(float(until_s))
        return repr(now_s()).encode()


def run_task(data: bytes, term: str) -> bytes:
    """Run a packed `TaskOrder`. Returns: a packed `TaskReply`. Concurrency: one at a time in a process.

    Args: term: see `NodePlace.term`.
    """
    try:
        reply = TaskReply(_run(frames.task_orders.decode(data), term))
    except BatchmillError as error:
        reply = TaskReply(flaw=redaction.mask(error.message)[:FLAW_CHARS])
    except Exception as error:  # the owner must get the reason, and does the work itself
        reply = TaskReply(flaw=redaction.mask(f"{type(error).__name__}: {error}")[:FLAW_CHARS])
    return frames.encode(reply)


def _run(order: TaskOrder, term: str) -> bytes:
    if order.version != __version__:
        raise BatchmillError(
            f"a node has batchmill {__version__} and the owner {order.version}: install the same version on every node",
            code="version_differs",
        )
    storage = order.node.storage
    with environment_with(joined({**storage.environ, **storage.credentials}, os.environ)):  # of callers' stores, too
        cache = NodeCache(
            cache_folder(order.node.cache, storage.url), StoreObjects(storage.url), order.node.cache_bytes
        )  # fmt: skip
        home, fd = cache.enter_task()
        held = [fd]
        try:
            moved = {}
            for file in order.files:
                place, fd = cache.hold(file)
                held.append(fd)
                moved[file.path] = str(place)
            scratch = home / "scratch"
            scratch.mkdir()
            return require(order.target, "a task", BatchmillError)(
                order.order, NodePlace(moved, str(scratch), storage.url, term)
            )
        finally:
            shutil.rmtree(home, ignore_errors=True)
            for fd in held:
                os.close(fd)


__all__ = ["HostedTask", "run_task"]
