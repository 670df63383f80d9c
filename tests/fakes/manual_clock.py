"""A clock that goes on when a test says so, and wakes those whose time has come."""

from __future__ import annotations

import asyncio


class ManualClock:
    def __init__(self) -> None:
        self.at = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.at

    def now(self) -> float:
        return 1_700_000_000.0 + self.at

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.at + seconds, woken))
        await woken

    async def go_on(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass in steps, and those that wake do what they do."""
        until = self.at + seconds
        await settled()
        while self.at < until:
            self.at = min(until, self.at + step)
            due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.at]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self.at]
            for _, woken in due:
                if not woken.done():
                    woken.set_result(None)
            await settled()


async def settled() -> None:
    """Whatever can go on without time passing has done so."""
    for _ in range(30):
        await asyncio.sleep(0)
