"""Places of rows whose media are being loaded: so many at once. A row that waits for something else has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Places:
    """
    Args:
        count: rows that may have a place at once.
        first: the row that must go on whatever others do, by its number: it gets a place beyond them. None: there is
            none.

    Concurrency: on the event loop's thread only.
    """

    def __init__(self, count: int, first: Callable[[], int | None]) -> None:
        self._count, self._first = count, first
        self._taken: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}  # number of a row -> its turn, the longest waiting first

    async def take(self, number: int) -> None:
        """Wait for a place."""
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.check()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            self.leave(number)
            raise

    def leave(self, number: int) -> None:
        """Give the place back, if the row has one."""
        self._taken.discard(number)
        self.check()

    def check(self) -> None:
        """Give places to rows that wait. Call it when another row is the first."""
        while self._waiting and len(self._taken) < self._count:
            self._give(next(iter(self._waiting)))
        if self._waiting and (first := self._first()) in self._waiting:
            self._give(first)

    def _give(self, number: int) -> None:
        turn = self._waiting.pop(number)
        if not turn.cancelled():
            self._taken.add(number)
            turn.set_result(None)
