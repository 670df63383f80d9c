"""What became of the replicas of every model lately; it outlives their pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from batchmill.ports import Clock
from batchmill.types.engines import EngineEvent

EVENTS_MAX = 200  # of one model
ENGINES_MAX = 1000  # models whose events are kept; those that nothing became of for longest are forgotten
TAIL_LINES, TAIL_BYTES = 20, 4096  # of a log


class EngineLog:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: dict[str, deque[EngineEvent]] = {}
        self._failures: dict[str, str] = {}  # pool key -> why it failed and has not been started since

    def add(
        self,
        key: str,
        kind: str,
        message: str = "",
        replica: int | None = None,
        in_flight: Mapping[str, int] | None = None,
    ) -> None:
        """Of the pool as a whole where there is no `replica`. `in_flight`: of each project, when a server died."""
        events = self._events.pop(key, None) or deque(maxlen=EVENTS_MAX)
        events.append(EngineEvent(self._clock.now(), kind, message, replica, by_project=dict(in_flight or {})))
        self._events[key] = events  # the one of which most was heard lately stands last
        if kind == "starting":
            self._failures.pop(key, None)
        elif kind == "failed" and replica is None:
            self._failures[key] = message
        if len(self._events) > ENGINES_MAX:
            oldest = next(iter(self._events))
            del self._events[oldest]
            self._failures.pop(oldest, None)

    def of(self, key: str) -> list[EngineEvent]:
        """The oldest first."""
        return list(self._events.get(key, ()))

    def failure(self, key: str) -> str:
        """Why it failed, where it has not been started since; empty: it has not."""
        return self._failures.get(key, "")


def last_lines(path: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])
