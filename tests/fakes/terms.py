"""Terms of an owner that end, and go on, when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from batchmill.owner_term import Term


class SetTerm(Term):
    """A term that is over once `left` says so. It is asked at each check."""

    def __init__(self, left: Callable[[], float]) -> None:
        self._left = left

    def left_s(self) -> float:
        return self._left()
