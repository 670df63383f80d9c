"""The time."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """The time, which a test can control."""

    def monotonic(self) -> float:
        """Monotonic seconds."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""

    async def sleep(self, seconds: float) -> None: ...
