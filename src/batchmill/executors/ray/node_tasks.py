"""A piece of work on a node that sees nothing of the data directory: its files are brought, and its folder removed."""

from __future__ import annotations

import os
import shutil

from batchmill import __version__
from batchmill.errors import BatchmillError
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import TaskOrder, TaskReply
from batchmill.executors.ray.node_cache import NodeCache, cache_folder
from batchmill.models import redaction
from batchmill.object_store.credentials import environment_with, joined
from batchmill.optional import require
from batchmill.store.objects import StoreObjects
from batchmill.types.cluster import NodePlace

FLAW_CHARS = 1000


def run_task(data: bytes) -> bytes:
    """Run a packed `TaskOrder`. Returns: a packed `TaskReply`. Concurrency: one at a time in a process."""
    try:
        reply = TaskReply(_run(frames.task_orders.decode(data)))
    except BatchmillError as error:
        reply = TaskReply(flaw=redaction.mask(error.message)[:FLAW_CHARS])
    except Exception as error:  # the owner must get the reason, and does the work itself
        reply = TaskReply(flaw=redaction.mask(f"{type(error).__name__}: {error}")[:FLAW_CHARS])
    return frames.encode(reply)


def _run(order: TaskOrder) -> bytes:
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
                order.order, NodePlace(moved, str(scratch), storage.url)
            )
        finally:
            shutil.rmtree(home, ignore_errors=True)
            for fd in held:
                os.close(fd)


__all__ = ["run_task"]
