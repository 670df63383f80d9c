"""Sets of plan positions as runs: (first, count), ascending."""

from __future__ import annotations

from collections.abc import Iterable

Runs = list[tuple[int, int]]


def numbers_of(runs: Iterable[tuple[int, int]]) -> set[int]:
    """The positions of some runs, in any order."""
    return {number for first, count in runs for number in range(first, first + count)}


def runs_of(numbers: Iterable[int]) -> Runs:
    """Positions as runs."""
    runs: Runs = []
    for number in sorted(numbers):
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
