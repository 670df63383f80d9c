"""The clock of the machine: what every Clock is outside of tests."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """A ports.Clock that tells the machine's time."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
