"""A piece of a job's work on the nodes of a cluster: one that is lost runs again, on any node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from batchmill.errors import BatchmillError
from batchmill.ports.executors import NodeTasks
from batchmill.types.cluster import TASK_LOST, NodeWork

TRIES_MAX = 3  # of a piece whose node or process is lost; then the owner's machine does it
FAILED_MAX = 3  # pieces that nodes could not do; then the owner's machine does all others

T = TypeVar("T")
Attempt = Callable[[], tuple[NodeWork, Callable[[bytes], T]]]


async def run_on_node(tasks: NodeTasks, attempt: Attempt[T], project: str) -> T:
    """What a node returns.

    Args: attempt: makes the work, and what reads its answer. Each try writes under other names: one that seemed lost
        may still write.
    Raises: BatchmillError: another try would not help.
    """
    tries = 1
    while True:
        work, read = attempt()
        try:
            return read(await tasks.run(work, project=project))
        except BatchmillError as error:
            if error.code != TASK_LOST or tries >= TRIES_MAX:
                raise
            tries += 1
