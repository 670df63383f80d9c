"""How many replicas a model gets, and its recent events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from batchmill.ports.clock import Clock
from batchmill.types import Scaling
from batchmill.types.models import EngineEvent

REQUESTS_DEFAULT = 128  # as types.Scaling says
COOLDOWN_DEFAULT_S = 600.0


class Load(Struct, frozen=True):
    """The current load of a model."""

    requests: int = 0  # live requests that are being answered or wait
    rows: int = 0  # of jobs, without an outcome
    shards: int = 0  # that these rows are in: a shard is at one worker at a time


class ReplicaTarget(Struct, frozen=True):
    """The target number of replicas, and since when fewer would do."""

    wanted: int
    spare_since: float | None = None
    peak: int = 0  # the most replicas that were needed since then


def needed(scaling: Scaling, load: Load) -> int:
    """The number of replicas for a load: each at its number of requests and rows, and none without work."""
    each = scaling.scale_up_requests or REQUESTS_DEFAULT
    by_load = -(-(load.requests + load.rows) // each)
    least = max(1, scaling.replicas_min)
    return max(least, min(by_load, load.requests + load.shards, scaling.replicas_max))


def follow(target: ReplicaTarget, need: int, *, now: float, cooldown_s: float) -> ReplicaTarget:
    """Scale up at once; scale down after `cooldown_s`, to the most that were needed meanwhile."""
    if need >= target.wanted:
        return ReplicaTarget(need)
    since = now if target.spare_since is None else target.spare_since
    peak = need if target.spare_since is None else max(target.peak, need)
    if now - since < cooldown_s:
        return ReplicaTarget(target.wanted, since, peak)
    return ReplicaTarget(peak) if peak == need else ReplicaTarget(peak, now, need)


EVENTS_MAX = 200  # of one model
ENGINES_MAX = 1000  # models with events; those without a new event for longest are dropped
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
        """Add an event, of the pool if `replica` is missing. `in_flight`: requests by project when a server died."""
        events = self._events.pop(key, None) or deque(maxlen=EVENTS_MAX)
        events.append(EngineEvent(self._clock.now(), kind, message, replica, by_project=dict(in_flight or {})))
        self._events[key] = events  # the model with the newest event is last
        if kind == "starting":
            self._failures.pop(key, None)
        elif kind == "failed" and replica is None:
            self._failures[key] = message
        if len(self._events) > ENGINES_MAX:
            oldest = next(iter(self._events))
            del self._events[oldest]
            self._failures.pop(oldest, None)

    def of(self, key: str) -> list[EngineEvent]:
        """The events of a model, the oldest first."""
        return list(self._events.get(key, ()))

    def failure(self, key: str) -> str:
        """Why the model failed, if it has not started since; otherwise empty."""
        return self._failures.get(key, "")


def last_lines(path: Path) -> str:
    """The last lines of a log; empty if there are none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])
