"""Rows whose answers do not fit their job's schema wait here until the engine takes them once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from batchmill.executors.leases import Held
from batchmill.types import Row


class RowsAskedAgain:
    """It knows which rows may still come, so that the feed does not end before them."""

    def __init__(self) -> None:
        self._waiting: deque[Row] = deque()
        self._leases: dict[int, tuple[Held, set[int]]] = {}  # with the positions of rows that the engine has

    def __bool__(self) -> bool:
        """Whether a row waits."""
        return bool(self._waiting)

    @property
    def may_come(self) -> bool:
        """Whether a row waits, or the engine has rows that may be asked for again."""
        return bool(self._leases)

    def taken(self, rows: list[Row]) -> None:
        """The engine has taken these rows of one lease."""
        held: Held = rows[0].lease
        self._leases.setdefault(id(held), (held, set()))[1].update(row.position for row in rows)

    def has_any(self, is_held: Callable[[Held], bool]) -> bool:
        """Whether a row waits whose lease is not held back."""
        return any(not is_held(row.lease) for row in self._waiting)

    def take(self, n: int, is_held: Callable[[Held], bool]) -> list[Row]:
        """Up to `n` rows of one lease that is not held back."""
        first = next((row for row in self._waiting if not is_held(row.lease)), None)
        if first is None:
            return []
        rows = [row for row in self._waiting if row.lease is first.lease][:n]
        for row in rows:
            self._waiting.remove(row)
        return rows

    def add(self, row: Row) -> bool:
        """Let a row wait. False: its lease has ended, and the row stays undone."""
        held: Held = row.lease
        if held.stale or held.is_left or held.ending or held.job.revoked:
            _leave_undone(row)
            self.settle(row)
            return False
        self._waiting.append(row)
        return True

    def settle(self, row: Row) -> bool:
        """The engine is done with a row. Returns whether no other may come."""
        held: Held = row.lease
        _, positions = self._leases.get(id(held), (held, set()))
        positions.discard(row.position)
        if not positions:
            self._leases.pop(id(held), None)
        return not self._leases

    def forget(self, held: Held) -> list[Row]:
        """Rows of a lease that wait stay undone, and no other of it comes. Returns: those rows."""
        forgotten = [row for row in self._waiting if row.lease is held]
        for row in forgotten:
            self._waiting.remove(row)
            _leave_undone(row)
        self._leases.pop(id(held), None)
        return forgotten

    def forget_job(self, job_id: str) -> list[Row]:
        """`forget` for all leases of a job."""
        leases = [held for held, _ in self._leases.values() if held.job.id == job_id]
        return [row for held in leases for row in self.forget(held)]


def _leave_undone(row: Row) -> None:
    """The row has no outcome here. What its answers have cost is spent all the same."""
    held: Held = row.lease
    held.undone -= 1
    if held.job.allowance is not None:
        held.job.allowance.release(row)
