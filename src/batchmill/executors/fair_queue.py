"""Whose rows a worker begins next: jobs by priority, those of one priority by their shares."""

from __future__ import annotations

from msgspec import Struct

SHARE_MIN = 1e-9  # a share of nothing would never come to its turn


class JobQueue(Struct, eq=False):
    """The queue of one job at this worker."""

    job: str
    priority: int = 0
    share: float = 1.0  # of the worker, beside other lanes of its priority
    row_cost: float = 1.0
    due: float = 0.0  # virtual time of its next row
    is_reading: bool = False  # its next rows are on their way from a store: others go first


class FairQueue:
    """The job queues that have waiting rows."""

    def __init__(self) -> None:
        self._waiting: dict[str, JobQueue] = {}
        self._now: dict[int, float] = {}  # priority -> the virtual time that its lanes have reached

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, lane: JobQueue) -> None:
        """Add a queue that has rows."""
        if lane.job not in self._waiting:
            lane.due = max(lane.due, self._now.get(lane.priority, 0.0))
            self._waiting[lane.job] = lane

    def leave(self, lane: JobQueue) -> None:
        """Remove a queue that has no rows for now."""
        self._waiting.pop(lane.job, None)

    def next(self) -> JobQueue | None:
        """The next queue to serve; of several due at once, the one that has waited longest.

        None: there is none, or the rows of all are on their way.
        """
        if len(self._waiting) == 1:
            lane = next(iter(self._waiting.values()))
            return None if lane.is_reading else lane
        there = (lane for lane in self._waiting.values() if not lane.is_reading)
        return min(there, key=lambda lane: (-lane.priority, lane.due), default=None)

    def charge(self, lane: JobQueue, rows: int) -> None:
        """Charge the served queue for the rows that were taken."""
        self._now[lane.priority] = max(lane.due, self._now.get(lane.priority, 0.0))
        lane.due += rows * lane.row_cost / lane.share

    def weigh(self, lane: JobQueue, *, priority: int, share: float, row_cost: float) -> None:
        """Change the weight of a queue. What it owes moves with it to another priority."""
        if priority != lane.priority:
            owed = max(0.0, lane.due - self._now.get(lane.priority, 0.0))
            lane.due = self._now.get(priority, 0.0) + owed
        lane.priority, lane.share, lane.row_cost = priority, max(share, SHARE_MIN), max(row_cost, 0.0)
