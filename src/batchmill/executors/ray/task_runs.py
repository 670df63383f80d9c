"""TaskRuns: the driver's side of pieces of work. It chooses the node of each: Ray would put none beside workers that
hold all CPUs, and would put some on a head that has none.

A node runs one for every two of its CPUs, at a lower priority than its workers. Each is an actor: while it runs, it is
told again and again how long it may change objects, which is until the term of the owner is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from msgspec import Struct
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchmill.errors import DatabaseUnavailable, StorageFailed, Unavailable
from batchmill.executors.ray.bytes_only import ActorFailed, limit
from batchmill.executors.ray.frames import RunTask, TaskEnded
from batchmill.executors.ray.node_tasks import HostedTask
from batchmill.owner_term import term_at

CPUS_EACH = 2  # of a node, for one task
LOOK_S = 2.0  # between two looks at the nodes, and at the owner's term
RENEWALS, RENEWAL_S_MIN = 4, 0.1  # of a task, while its term lasts; between two of them, LOOK_S at most
NODES_S = 60.0  # without any node that may run tasks: then the owner does the work
TASK_S = 3600.0  # until a node has room for a task, and for the task: a process that hangs is ended
REPLY_BYTES_MAX = 8 * 1024 * 1024
TIME_BYTES_MAX = 64
NEVER_LOST = ("NOT_BYTES", "TOO_LONG")  # kinds of `ActorFailed` that another try would meet again
WHY_CHARS = 2000
TERM_OVER = (DatabaseUnavailable, StorageFailed, Unavailable)  # what a term raises


class TaskRuns:
    """
    Args:
        send: sends a frame to the owner.

    Concurrency: the driver's loop.
    """

    def __init__(self, send: Callable[[Struct], None]) -> None:
        self._send, self._task_class = send, ray.remote(HostedTask)
        self._runs: dict[int, asyncio.Task[None]] = {}  # bounded by the owner
        self._on_node: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._look: asyncio.Task[dict[str, int]] | None = None  # the last one, or the one under way
        self._looked = 0.0  # when it began

    def begin(self, order: RunTask) -> None:
        task = self._runs[order.id] = asyncio.create_task(self._serve(order))
        task.add_done_callback(lambda _: self._runs.pop(order.id, None))

    def end(self, number: int) -> None:
        if (task := self._runs.get(number)) is not None:
            task.cancel()

    async def _serve(self, order: RunTask) -> None:
        try:
            node = await self._find_node(order.term)
            self._on_node[node] += 1
            try:
                reply = await self._run_on(node, order)
            finally:
                self._on_node -= Counter([node])
                self._freed.set()
            ended = TaskEnded(order.id, reply)
        except ActorFailed as error:
            is_lost = error.kind not in NEVER_LOST and not error.is_of_setup
            ended = TaskEnded(order.id, why=str(error)[:WHY_CHARS], is_lost=is_lost)
        except (TimeoutError, *TERM_OVER) as error:
            ended = TaskEnded(order.id, why=str(error)[:WHY_CHARS])
        except Exception as error:  # whatever Ray raises for a node that it lost
            ended = TaskEnded(order.id, why=f"{type(error).__name__}: {error}"[:WHY_CHARS], is_lost=True)
        self._send(ended)

    async def _run_on(self, node: str, order: RunTask) -> bytes:
        """Raises: TimeoutError, TERM_OVER once the owner's term is over, whatever Ray raises."""
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        task = self._task_class.options(scheduling_strategy=strategy, **options).remote()
        result = asyncio.create_task(_result(task.run.remote(order.order), REPLY_BYTES_MAX))
        renewing = asyncio.create_task(_renew(task, order.term))
        try:
            await asyncio.wait({result, renewing}, timeout=TASK_S, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                if renewing.done():
                    await renewing  # it raises
                raise TimeoutError(f"it took more than {TASK_S:g} s")
            return await result
        finally:
            for each in (result, renewing):
                each.cancel()
            await asyncio.gather(result, renewing, return_exceptions=True)
            ray.kill(task)

    async def _find_node(self, term: str) -> str:
        """The node with the most room, once one has some.

        Raises: TimeoutError, TERM_OVER, whatever Ray raises.
        """
        began = seen = time.monotonic()
        while True:
            nodes, now = await self._nodes(), time.monotonic()
            term_at(term).check()
            room = {node: most - self._on_node[node] for node, most in nodes.items()}
            best = max(room, key=room.__getitem__, default="")
            if best and room[best] > 0:
                return best
            seen = now if nodes else seen
            if now - seen > NODES_S:
                raise TimeoutError(f"the cluster has had no node with a CPU for tasks for {NODES_S:g} s")
            if now - began > TASK_S:
                raise TimeoutError(f"no node of the cluster had room for it within {TASK_S:g} s")
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()

    async def _nodes(self) -> dict[str, int]:
        """The nodes that may run tasks, and how many each: tasks that wait share a look. Raises: whatever Ray does."""
        look = self._look
        is_old = look is not None and look.done() and time.monotonic() - self._looked >= LOOK_S
        if look is None or is_old or (look.done() and look.exception() is not None):
            self._look, self._looked = asyncio.create_task(asyncio.to_thread(_look)), time.monotonic()
        return await asyncio.shield(self._look)


async def _result(ref: Any, size_max: int) -> bytes:
    with limit(ref, size_max):
        return await ref


async def _renew(task: Any, path: str) -> None:
    """Tell a task, again and again, until when by the clock of its node it may change objects.

    A term ends so long after it was read as `left_s` says, and so much later than the time that the node said before.
    Raises: TERM_OVER, whatever Ray raises.
    """
    term, at_s = term_at(path), -math.inf
    while True:
        term.check()
        left_s, was_asked = term.left_s(), at_s > -math.inf
        until_s = at_s + left_s if left_s < math.inf else left_s
        call = asyncio.create_task(_result(task.renew.remote(repr(until_s).encode()), TIME_BYTES_MAX))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=LOOK_S)
                term.check()
            at_s = float(await call)
        finally:
            call.cancel()
        if was_asked:
            await asyncio.sleep(max(RENEWAL_S_MIN, min(left_s / RENEWALS, LOOK_S)))


def _look() -> dict[str, int]:
    """The nodes that may run tasks, and how many each."""
    leaving = set(ray._private.state.state.get_draining_nodes())
    return {
        node["NodeID"]: max(1, int(node["Resources"]["CPU"]) // CPUS_EACH)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving and node["Resources"].get("CPU", 0) >= 1
    }


__all__ = ["TaskRuns"]
