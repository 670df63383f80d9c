"""A cluster whose only node is this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from batchmill.executors.ray.frames import RunTask, TaskEnded
from batchmill.executors.ray.node_tasks import run_task
from batchmill.executors.ray.tasks import RayTasks


class OneNode:
    """`tasks.Cluster`, whose only node is this process."""

    may_send_secrets = True

    def __init__(self, hidden: Path) -> None:
        """Args: hidden: a folder that it does not see."""
        self._hidden = hidden
        self.tasks: RayTasks
        self.served: list[RunTask] = []
        self.change: Callable[[bytes], bytes] = lambda reply: reply
        self.lost = 0  # how many of the next tasks

    async def reach(self) -> None:
        return

    def send(self, frame: msgspec.Struct) -> None:
        assert isinstance(frame, RunTask)
        self.served.append(frame)
        away = self._hidden.rename(self._hidden.with_name("away"))
        try:
            reply = run_task(frame.order, frame.term)  # one that is lost may have written, too
        finally:
            away.rename(self._hidden)
        if self.lost:
            self.lost -= 1
            self.tasks.receive(TaskEnded(frame.id, why="its node went away", is_lost=True))
        else:
            self.tasks.receive(TaskEnded(frame.id, self.change(reply)))
