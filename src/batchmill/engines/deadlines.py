"""One timer for all calls in flight: a timer for each would cost more than the rest of what is done for a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

TICKS = 8  # a call may overrun its time by this part of it, and no more than a second
TICK_MAX_S = 1.0


class Deadlines:
    """Ends what has run for `timeout_s` with TimeoutError.

    Concurrency: one call at a time in each task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tick_s = min(timeout_s / TICKS, TICK_MAX_S)
        # All have equally long, so the first in is the first to be late.
        self._due: dict[asyncio.Task[object], float] = {}
        self._late: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def limit(self, call: Callable[..., Awaitable[T]], *args: object) -> T:
        """What `call(*args)` returns. Raises: TimeoutError when it takes too long."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._due[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._sweep, loop)
        try:
            return await call(*args)
        except asyncio.CancelledError:
            # Cancelled by the sweep, and by nobody else besides?
            if task in self._late and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            self._due.pop(task, None)
            self._late.discard(task)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        while self._due:
            task, due = next(iter(self._due.items()))
            if due > now:
                break
            del self._due[task]
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(self._tick_s, self._sweep, loop) if self._due else None
