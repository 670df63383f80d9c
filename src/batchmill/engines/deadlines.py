"""One timer for all calls in flight: a timer for each would cost more than the rest of what is done for a call."""

from __future__ import annotations

import asyncio
from typing import Any

TICKS = 8  # a call may overrun its time by this part of it, and no more than a second
TICK_MAX_S = 1.0


class Deadlines:
    """Cancels tasks whose call has run for `timeout_s`.

    Around a call: `begin`, and in any case `end`; when it is cancelled, `is_late` says whether that was done here.
    Concurrency: one call at a time in each task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tick_s = min(timeout_s / TICKS, TICK_MAX_S)
        # All have equally long, so the first in is the first to be late.
        self._due: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any]) -> None:
        loop = task.get_loop()
        self._due[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._sweep, loop)

    def end(self, task: asyncio.Task[Any]) -> None:
        self._due.pop(task, None)
        if self._late:
            self._late.discard(task)

    def is_late(self, task: asyncio.Task[Any]) -> bool:
        """Whether the cancellation that has just arrived was for the time alone: then it is over and done with."""
        return task in self._late and task.uncancel() == 0

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
