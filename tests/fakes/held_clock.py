"""A clock that stands still until somebody sleeps on it."""

from __future__ import annotations

import asyncio


class HeldClock:
    """Time passes only in `sleep`, and at once. `slept` lists what was asked for."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.at

    def now(self) -> float:
        return 1_700_000_000.0 + self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        until = self.at + seconds
        await asyncio.sleep(0)
        self.at = max(self.at, until)
