"""How slowly a body may come: a least rate over a window of waiting, and a total time where it is no upload."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct

WINDOW_S = 30.0  # of waiting for the client, over which the rate is measured
SPREAD = 1 / 3  # a window is longer by up to so much of it, so that bodies that began at once are not refused at once
NO_BODY_S = 5.0  # for the few bytes that may come where a request has no body


class Pace(Struct, frozen=True):
    """`total_s` of a body that is read whole; `rate_min` bytes a second of every body."""

    total_s: float = 300.0
    rate_min: int = 1024
    window_s: float = WINDOW_S


class Pacer:
    """Measures one body: it is told how long a wait was, and how much came of it. `jitter`: from 0 to 1."""

    def __init__(self, pace: Pace, total_s: float | None, jitter: Callable[[], float] = random.random) -> None:
        self._pace, self._left_s = pace, total_s
        self._window_s = pace.window_s * (1 + SPREAD * jitter())
        self._waited_s, self._bytes = 0.0, 0

    @property
    def patience_s(self) -> float:
        """How long to wait for the next piece before `late` is asked."""
        window_s = self._window_s - self._waited_s
        return window_s if self._left_s is None else min(window_s, self._left_s)

    def waited(self, seconds: float, size: int) -> None:
        self._waited_s += seconds
        self._bytes += size
        if self._left_s is not None:
            self._left_s -= seconds

    def late(self) -> str:
        """Why the client is left now; empty: it goes on, and a new window begins once this one is over."""
        if self._left_s is not None and self._left_s <= 0:
            return "the body did not end in time: server.body_timeout_s says how long it may take"
        if self._waited_s < self._window_s:
            return ""
        if self._bytes < self._pace.rate_min * self._waited_s:
            return (
                f"less than {self._pace.rate_min:,} bytes a second of the body came for {self._waited_s:.0f} s: "
                "server.body_rate_min is the least"
            )
        self._waited_s, self._bytes = 0.0, 0
        return ""
