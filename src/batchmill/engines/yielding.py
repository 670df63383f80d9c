"""How many rows may be in flight while somebody waits for an answer. Pure: told what happens and when, it decides."""

from __future__ import annotations


class Yielding:
    """The limit on rows that live requests set."""

    def __init__(self) -> None:
        self.live = 0
        self.samples: list[float] = []

    def began(self, now: float) -> None:
        self.live += 1

    def ended(self, now: float) -> None:
        self.live -= 1

    def waited(self, seconds: float) -> None:
        self.samples.append(seconds)

    def limit(self, limit: int, now: float) -> int:
        """`limit`, or fewer."""
        return limit
