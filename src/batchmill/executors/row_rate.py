"""RowRate: how fast an engine takes the rows of a job."""

from __future__ import annotations

MEASURE_S = 0.1


class RowRate:
    """Rows a second, measured anew every `MEASURE_S`: an engine takes its first rows at once, however slow they are."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._rows = 0
        self._per_s = 0.0

    def count(self, rows: int, now_s: float) -> None:
        """These were taken. Args: now_s: of a monotonic clock."""
        if self._since_s is None:
            self._since_s = now_s
        self._rows += rows
        took_s = now_s - self._since_s
        if took_s >= MEASURE_S:
            self._per_s = self._rows / took_s
            self._since_s, self._rows = now_s, 0

    def rows_in(self, seconds: float) -> int:
        """How many are taken in this time; 0 as long as that is unknown."""
        return int(self._per_s * seconds)


__all__ = ["RowRate"]
