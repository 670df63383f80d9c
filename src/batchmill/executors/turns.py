"""Whose rows a worker begins next: strictly by priority, then each job by its share. Knows no clock and no loop.

Start-time fair queueing: every lane has the virtual time at which its next row is due. A lane that comes back after
it had nothing to do begins where the others are: it has saved up nothing, and owes what it took too much.
"""

from __future__ import annotations

from msgspec import Struct

SHARE_MIN = 1e-9  # a share of nothing would never come to its turn


class Lane(Struct, eq=False):
    """One job's place at this worker."""

    job: str
    priority: int = 0
    share: float = 1.0  # of the worker, beside other lanes of its priority
    row_cost: float = 1.0
    due: float = 0.0  # virtual time of its next row


class Turns:
    """The lanes that have rows waiting."""

    def __init__(self) -> None:
        self._waiting: dict[str, Lane] = {}
        self._now: dict[int, float] = {}  # priority -> the virtual time that its lanes have reached

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, lane: Lane) -> None:
        """The lane has rows."""
        if lane.job not in self._waiting:
            lane.due = max(lane.due, self._now.get(lane.priority, 0.0))
            self._waiting[lane.job] = lane

    def leave(self, lane: Lane) -> None:
        """The lane has no rows for now."""
        self._waiting.pop(lane.job, None)

    def next(self) -> Lane | None:
        """The lane whose turn it is; of those due at once the one that waits longest."""
        if len(self._waiting) == 1:
            return next(iter(self._waiting.values()))
        return min(self._waiting.values(), key=lambda lane: (-lane.priority, lane.due), default=None)

    def charge(self, lane: Lane, rows: int) -> None:
        """The lane whose turn it was has had so many rows begun."""
        self._now[lane.priority] = max(lane.due, self._now.get(lane.priority, 0.0))
        lane.due += rows * lane.row_cost / lane.share

    def weigh(self, lane: Lane, *, priority: int, share: float, row_cost: float) -> None:
        """Rows of this lane count so from now on. What it owes goes with it to another priority."""
        if priority != lane.priority:
            owed = max(0.0, lane.due - self._now.get(lane.priority, 0.0))
            lane.due = self._now.get(priority, 0.0) + owed
        lane.priority, lane.share, lane.row_cost = priority, max(share, SHARE_MIN), max(row_cost, 0.0)
