"""The system clock: `ports.clock.Clock`. On a node of a cluster it gives the time of the owner's machine.

A node's own clock may be wrong, and what workers say of times is compared with those of the owner and of other nodes.
"""

from __future__ import annotations

import asyncio
import time

_offset_s: float | None = None  # the owner's time minus our monotonic time; None: this is the owner's machine


def now() -> float:
    """Seconds since the epoch."""
    return time.time() if _offset_s is None else time.monotonic() + _offset_s


def follow(owner_now: float) -> None:
    """Take the time of the owner's machine, which is that now, for this process's own from now on."""
    global _offset_s
    _offset_s = owner_now - time.monotonic()


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    now = staticmethod(now)
    sleep = staticmethod(asyncio.sleep)
