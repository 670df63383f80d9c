"""How fast a job runs: rows and tokens of the last seconds, and what that means for the time left."""

from __future__ import annotations

from collections import deque

from batchmill.ports import Clock
from batchmill.types import Usage

WINDOW_S = 15.0


class Rates:
    """Fed with every commit; answers for the last `WINDOW_S` seconds, or since `start` while that is less."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int, Usage]] = deque()
        self._rows, self._usage = 0, Usage()
        self._since = clock.monotonic()

    def start(self) -> None:
        """Work begins now: what lies before does not count."""
        self._seen.clear()
        self._rows, self._usage = 0, Usage()
        self._since = self._clock.monotonic()

    def add(self, rows: int, usage: Usage) -> None:
        now = self._clock.monotonic()
        self._forget(now)
        self._seen.append((now, rows, usage))
        self._rows += rows
        self._usage = self._usage + usage

    def _forget(self, now: float) -> None:
        """Drop what is older than the window, whether or not anybody looks."""
        while self._seen and self._seen[0][0] < now - WINDOW_S:
            _, rows, usage = self._seen.popleft()
            self._rows -= rows
            self._usage = self._usage + Usage(-usage.input_tokens, -usage.cached_tokens, -usage.output_tokens)

    def now(self) -> tuple[float, float, float] | None:
        """(rows, input tokens, output tokens) per second; None before the first commit."""
        now = self._clock.monotonic()
        self._forget(now)
        span = min(WINDOW_S, now - self._since)
        if not self._seen or span <= 0:
            return None
        return self._rows / span, self._usage.input_tokens / span, self._usage.output_tokens / span
