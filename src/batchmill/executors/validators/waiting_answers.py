"""How many answers of each job wait for the classes that validate them, and which jobs begin no row meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

WAITING_MAX, WAITING_BYTES = 4096, 64 * 1024 * 1024  # answers that wait in all; then each job with one is held
JOB_MAX, JOB_BYTES = 1024, 16 * 1024 * 1024  # of one job; then it is held
LOW = 2  # a job goes on once only 1/LOW of what held it waits: rows are not held and let go one by one


class _Answers(Struct):
    """Of one job."""

    count: int = 0
    size_bytes: int = 0

    def exceeds(self, count: int, size_bytes: int) -> bool:
        return self.count >= count or self.size_bytes >= size_bytes


class WaitingAnswers:
    """Holds the jobs of slow classes, so that others go on.

    Answers of rows that the engine has already come in any case: beyond the bounds wait at most those.

    Args: hold: called with all jobs that begin no row, whenever they change.
    """

    def __init__(self, hold: Callable[[frozenset[str]], None]) -> None:
        self._hold = hold
        self._all, self._jobs = _Answers(), dict[str, _Answers]()
        self._is_full = False
        self._held: frozenset[str] = frozenset()

    def move(self, job: str, count: int, size_bytes: int) -> None:
        """So many answers more of a job wait; fewer, if negative."""
        mine = self._jobs.setdefault(job, _Answers())
        for each in (self._all, mine):
            each.count += count
            each.size_bytes += size_bytes
        if not mine.count:
            del self._jobs[job]
        was_full, low = self._is_full, LOW if self._is_full else 1
        self._is_full = self._all.exceeds(WAITING_MAX // low, WAITING_BYTES // low)
        if self._is_full != was_full:
            held = frozenset(each for each, answers in self._jobs.items() if self._is_held(each, answers))
        else:
            held = self._held | {job} if self._is_held(job, mine) else self._held - {job}
        if held != self._held:
            self._held = held
            self._hold(held)

    def _is_held(self, job: str, answers: _Answers) -> bool:
        if not answers.count:
            return False
        low = LOW if job in self._held else 1
        return self._is_full or answers.exceeds(JOB_MAX // low, JOB_BYTES // low)
