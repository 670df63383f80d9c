"""The system clock: `ports.Clock`."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    now = staticmethod(time.time)
    sleep = staticmethod(asyncio.sleep)
