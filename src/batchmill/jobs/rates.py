"""How fast a job runs: rows and tokens of the last seconds, and what that means for the time left."""

from __future__ import annotations

from collections import deque

from batchmill.ports import Clock
from batchmill.types import Usage

WINDOW_S = 15.0
MEMORY_ROWS = 4096.0  # what rows cost is told from about so many of the last ones


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


def cost_of(rows: int, usage: Usage) -> float:
    """What rows count as between projects: their tokens, or as many as there are rows where there are none."""
    return float(usage.input_tokens + usage.output_tokens or rows)


class RowCost:
    """What a row costs, told from the last ones."""

    def __init__(self) -> None:
        self._rows = self._cost = 0.0

    def add(self, rows: int, usage: Usage) -> None:
        if self._rows > MEMORY_ROWS:
            self._rows, self._cost = self._rows / 2, self._cost / 2
        self._rows += rows
        self._cost += cost_of(rows, usage)

    def now(self) -> float | None:
        """None before the first row."""
        return self._cost / self._rows if self._rows else None


class Throughput:
    """What workers get done a second while they have work: idle time does not count."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque()  # (when, cost)
        self._cost = 0.0
        self._since: float | None = None  # work began here; None: there is none
        self._last: float | None = None  # as it was when work last ended

    def work(self, *, is_there: bool) -> None:
        """Whether there is work now."""
        if is_there and self._since is None:
            self._since = self._clock.monotonic()
        elif not is_there and self._since is not None:
            self._last = self.now()
            self._since, self._cost = None, 0.0
            self._seen.clear()

    def add(self, cost: float) -> None:
        now = self._clock.monotonic()
        self._forget(now)
        self._seen.append((now, cost))
        self._cost += cost

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] < now - WINDOW_S:
            self._cost -= self._seen.popleft()[1]

    def now(self) -> float | None:
        """Cost per second; None as long as nothing is known."""
        now = self._clock.monotonic()
        self._forget(now)
        if self._since is None or not self._seen or now <= self._since:
            return self._last
        return self._cost / min(WINDOW_S, now - self._since)
