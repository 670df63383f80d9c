"""What became of the calls of a model's functions, summed over all its workers, those that have ended too."""

from __future__ import annotations

from functools import reduce
from operator import add

from batchmill.types import CallStats

UNSUMMED_MAX = 256  # reports that are kept as they came until somebody looks


class CallSums:
    def __init__(self) -> None:
        self._total = CallStats()
        self._unsummed: list[CallStats] = []

    def add(self, stats: CallStats) -> None:
        """What was counted since the last report of the same worker."""
        self._unsummed.append(stats)
        if len(self._unsummed) >= UNSUMMED_MAX:
            self.total()

    def total(self) -> CallStats:
        """Since this process began."""
        if self._unsummed:
            self._total = reduce(add, self._unsummed, self._total)
            self._unsummed.clear()
        return self._total
