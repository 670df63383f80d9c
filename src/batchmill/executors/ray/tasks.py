"""RayTasks: pieces of a job's work as tasks of a Ray cluster, as the owner sees them: see `task_runs`."""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

import msgspec
from msgspec import Struct

from batchmill import __version__
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.errors import BatchmillError, Unavailable
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import EndTask, RunTask, TaskEnded, TaskOrder
from batchmill.executors.ray.shared_store import SharedStore
from batchmill.types.cluster import TASK_FAILED, TASK_LOST, NodeWork

TASKS_MAX = 64  # that the driver has, half of them for one project: it starts as many as the nodes have room for
FLAW_CHARS = 1000  # of what a node says


class Cluster(Protocol):
    """`RayExecutor`."""

    @property
    def may_send_secrets(self) -> bool: ...

    async def reach(self) -> None: ...

    def send(self, frame: Struct) -> None: ...


class RayTasks:
    """`ports.executors.NodeTasks`."""

    at_once = TASKS_MAX // 2

    def __init__(self, cluster: Cluster, store: SharedStore) -> None:
        self._cluster, self._store = cluster, store
        self.store = store.url
        self._slots = FairSemaphore(TASKS_MAX)
        self._numbers = itertools.count(1)
        self._running: dict[int, asyncio.Future[TaskEnded]] = {}

    async def run(self, work: NodeWork, *, project: str = "") -> bytes:
        async with self._slots.slot(project):
            try:
                await self._cluster.reach()
            except TimeoutError:
                raise Unavailable("the Ray cluster does not reply", code="cluster_unavailable") from None
            ended = await self._run(self._order(work), work.term)
        if ended.why:
            code = TASK_LOST if ended.is_lost else TASK_FAILED
            raise Unavailable(f"a task on a node ended: {ended.why!r}", code=code)
        try:
            reply = frames.task_replies.decode(ended.reply)
        except msgspec.MsgspecError as error:
            raise BatchmillError(f"a node sent what is no reply of a task: {error}", code=TASK_FAILED) from None
        if reply.flaw:
            raise BatchmillError(f"a node says: {reply.flaw[:FLAW_CHARS]!r}", code=TASK_FAILED)  # it may hold anything
        return reply.answer

    async def _run(self, order: TaskOrder, term: str) -> TaskEnded:
        number = next(self._numbers)
        self._running[number] = asyncio.get_running_loop().create_future()
        self._cluster.send(RunTask(number, frames.encode(order), term))
        try:
            return await self._running[number]
        except asyncio.CancelledError:
            self._cluster.send(EndTask(number))
            raise
        finally:
            del self._running[number]

    def _order(self, work: NodeWork) -> TaskOrder:
        """Raises: StorageFailed."""
        node = self._store.on_nodes(with_credentials=self._cluster.may_send_secrets)
        return TaskOrder(work.target, work.order, self._store.files_of_work(work.paths), node, __version__)

    def receive(self, ended: TaskEnded) -> None:
        future = self._running.get(ended.id)
        if future is not None and not future.done():
            future.set_result(ended)

    def lose(self, why: str) -> None:
        """The cluster has gone, and its tasks with it."""
        for number in self._running:
            self.receive(TaskEnded(number, why=why, is_lost=True))


__all__ = ["RayTasks"]
