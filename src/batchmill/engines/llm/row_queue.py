"""The queue of rows for an engine server: their order, and how many may be in flight."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from itertools import count

from msgspec import Struct

from batchmill.engines.llm.adapters import Adapter
from batchmill.engines.llm.calls import LlmRow

LIMIT_START = 256
LIMIT_MIN = 8
LIMIT_MAX = 1024
SPARE_ROWS = 16  # rows that wait inside the engine, at least
SPARE_SHARE = 0.25  # of the rows that run
BACKLOG_ROWS = 128  # rows in flight beyond twice the recent peak of running rows
PEAK_SAMPLES = 20  # the samples of the recent peak
SHRINK = 0.85
CALM_SAMPLES = 20  # samples without preemption before the limit doubles again

_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
}
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^\n]*\})? ([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)


class Gauges(Struct, frozen=True):
    """One sample of a server's metrics, summed over its engines. Counters start at 0 with the server."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1, of the fullest engine
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache_queries: int = 0  # prompt tokens that were looked up in the cache
    cache_hits: int = 0  # prompt tokens that were in the cache

    @property
    def cached_share(self) -> float | None:
        """0..1; None before the first prompt."""
        return self.cache_hits / self.cache_queries if self.cache_queries else None

    @property
    def tokens(self) -> int:
        """Total tokens, which grow while the engine makes progress."""
        return self.prompt_tokens + self.output_tokens


def read_gauges(text: str) -> Gauges:
    """Read vLLM's /metrics. Source: Prometheus' text format, vllm/v1/metrics/loggers.py."""
    sums = dict.fromkeys(_SUMMED.values(), 0.0)
    kv_usage = 0.0
    for name, value in _SAMPLE.findall(text):
        if name in _SUMMED:
            sums[_SUMMED[name]] += float(value)
        elif name == _KV_USAGE:
            kv_usage = max(kv_usage, float(value))
    return Gauges(kv_usage=kv_usage, **{name: int(value) for name, value in sums.items()})


class Flight:
    """Controls the limit of rows in flight.

    The limit grows while the engine runs all rows that it gets. It falls below the running rows when vLLM preempts
    rows, because their work is lost. Rows that wait in the engine are harmless up to a bound: rows end in waves, and
    each wave empties the engine's queue.
    """

    def __init__(self, *, limit_max: int | None = None, start: int = LIMIT_START) -> None:
        self.limit_max = LIMIT_MAX if limit_max is None else max(1, limit_max)
        self.limit_min = min(LIMIT_MIN, self.limit_max)
        self.limit = min(start, self.limit_max)
        self.gauges = Gauges()  # the last sample
        self._preemptions = 0
        self._calm = CALM_SAMPLES  # samples since the last preemption
        self._running: deque[int] = deque(maxlen=PEAK_SAMPLES)

    def restarted(self) -> None:
        """Reset: the server is a new one, and its counters begin at 0."""
        self._preemptions = 0

    def observe(self, gauges: Gauges, in_flight: int) -> None:
        """Add a sample, with the rows in flight at that moment."""
        self.gauges = gauges
        preempted = gauges.preemptions - self._preemptions
        self._preemptions = gauges.preemptions
        self._running.append(gauges.running)
        if preempted > 0:
            self._calm = 0
            self._set(int(SHRINK * min(self.limit, max(gauges.running, LIMIT_MIN))))
            return
        self._calm += 1
        spare = max(SPARE_ROWS, int(SPARE_SHARE * gauges.running))
        bound = 2 * max(self._running) + BACKLOG_ROWS
        if in_flight + spare >= self.limit and gauges.waiting < spare:
            # The limit grows slowly after a preemption; otherwise it doubles.
            step = self.limit if self._calm > CALM_SAMPLES else max(1, self.limit // 32)
            self._set(min(self.limit + step, max(self.limit, bound)))
        elif self.limit > bound and len(self._running) == PEAK_SAMPLES:
            self._set(bound)

    def _set(self, limit: int) -> None:
        self.limit = max(self.limit_min, min(self.limit_max, limit))


ALERT_S = 5.0  # after the last live request rows go at full speed again
SLOWER, FASTER = 1.5, 1.25  # times the recent best: above SLOWER allow fewer rows, below FASTER more
YIELD_SHRINK, GROWTH = 0.8, 1.1
FIRST_SHARE = 0.75  # of the running rows, when the first live request arrives
ROWS_MIN = 4
RATE_MIN_SHARE = 0.55  # of the rows' rate without live requests; below it rows are not slowed further
BEST_GROWTH = 1.005  # with each answer, so that one old best is not the target forever
CREDIT_MAX_S = 4.0  # how long no row is sent while live requests run; regained while none run
LEARN = 0.2  # weight of the newest sample


class Yielding:
    """Holds rows back while live requests are slower than their recent best.

    While a live request runs, no new row is sent, for at most half of the time. While live requests arrive now and
    then, fewer rows are in flight: as many as do not slow the answers.
    """

    def __init__(self) -> None:
        self.live = 0
        self._live_at = -math.inf  # when a live request last ran
        self._allowed = math.inf
        self._best_s = math.inf  # for one piece of an answer
        self._running = 0
        self._rows_at: tuple[float, int] | None = None
        self._rate = 0.0  # recent rows per second
        self._full_rate = 0.0  # without live requests
        self._credit_s = CREDIT_MAX_S
        self._credit_at: float | None = None

    def record_start(self, now: float) -> None:
        """Note the start of a live request."""
        self._spend(now)
        if not self._is_alert(now):
            self._allowed = max(ROWS_MIN, FIRST_SHARE * self._running) if self._running else math.inf
        self.live += 1
        self._live_at = now

    def record_end(self, now: float) -> None:
        """Note the end of a live request."""
        self._spend(now)
        self.live -= 1
        self._live_at = now

    def record_reply(self, piece_s: float, in_flight: int) -> None:
        """Note a complete reply: the seconds for each piece, with `in_flight` rows beside it."""
        self._best_s = min(self._best_s * BEST_GROWTH, piece_s)
        if in_flight == 0:
            return
        is_slow_enough = self._rate < RATE_MIN_SHARE * self._full_rate
        if is_slow_enough or piece_s < FASTER * self._best_s:
            self._allowed = self._allowed * GROWTH + 1
        elif piece_s > SLOWER * self._best_s:
            self._allowed = max(ROWS_MIN, YIELD_SHRINK * min(self._allowed, in_flight))

    def observe(self, running: int, rows_done: int, now: float) -> None:
        """Record a sample: the rows that run in the engine, and the number of rows finished so far."""
        self._running = running
        if self._rows_at is not None and now > self._rows_at[0] and rows_done >= self._rows_at[1]:
            rate = (rows_done - self._rows_at[1]) / (now - self._rows_at[0])
            self._rate += LEARN * (rate - self._rate)
            if not self._is_alert(now):
                self._full_rate += LEARN * (rate - self._full_rate)
        self._rows_at = now, rows_done

    def limit(self, limit: int, in_flight: int, now: float) -> int:
        """The rows that may be in flight: `limit`, or fewer."""
        if not self._is_alert(now):
            return limit
        self._spend(now)
        allowed = int(min(limit, self._allowed))
        return min(allowed, in_flight) if self.live and self._credit_s > 0 else allowed

    def _is_alert(self, now: float) -> bool:
        return self.live > 0 or now - self._live_at < ALERT_S

    def _spend(self, now: float) -> None:
        """Account for the time in which rows were held back."""
        elapsed_s = 0.0 if self._credit_at is None else now - self._credit_at
        self._credit_at = now
        self._credit_s = max(0.0, min(CREDIT_MAX_S, self._credit_s + (-elapsed_s if self.live else elapsed_s)))


class _Group(Struct, eq=False):
    """The rows of one adapter, in order."""

    calls: list[tuple[int, LlmRow]] = []  # a heap
    late_until: int = -1  # rows up to this turn could have been sent if their adapter had been loaded


class AdapterQueue:
    """Calls in order of arrival; those whose adapter is not loaded are skipped."""

    def __init__(self) -> None:
        self._groups: dict[Adapter | None, _Group] = {}
        self._numbers = count()
        self._size = 0
        self._projects: Counter[str] = Counter()  # the waiting calls of each project

    def __len__(self) -> int:
        return self._size

    def calls(self) -> list[LlmRow]:
        return [call for group in self._groups.values() for _, call in group.calls]

    def assign_turn(self, call: LlmRow) -> None:
        """Give a new call its turn, also if it waits in the quarantine queue."""
        if call.turn < 0:
            call.turn = next(self._numbers)

    def push(self, call: LlmRow) -> None:
        """Add a new call, or put a call back at its turn."""
        self.assign_turn(call)
        self._projects[call.project] += 1
        group = self._groups.setdefault(call.adapter, _Group())
        heapq.heappush(group.calls, (call.turn, call))
        self._size += 1

    def pop(self, can_send: Callable[[Adapter], bool]) -> LlmRow | None:
        """Take the first call without an adapter or with a loaded adapter."""
        ready = [group for adapter, group in self._groups.items() if adapter is None or can_send(adapter)]
        if not ready:
            return None
        group = min(ready, key=lambda group: group.calls[0][0])
        turn, call = heapq.heappop(group.calls)
        call.adapter_was_loaded = turn > group.late_until
        self._drop_empty(call.adapter)
        self._uncount([call])
        return call

    def mark_late(self, adapters: Iterable[Adapter], room: int) -> int:
        """Mark up to `room` rows that could be sent if their adapters were loaded. Returns their number."""
        left = room
        for adapter in adapters:
            if not left:
                break
            group = self._groups[adapter]
            late = heapq.nsmallest(left, (turn for turn, _ in group.calls))
            group.late_until = max(group.late_until, late[-1])
            left -= len(late)
        return room - left

    def take_adapter(self, adapter: Adapter) -> list[LlmRow]:
        """Take every call of an adapter, in order."""
        group = self._groups.pop(adapter, _Group())
        calls = [call for _, call in sorted(group.calls, key=lambda entry: entry[0])]
        self._uncount(calls)
        return calls

    def take_projects(self, projects: Set[str]) -> list[LlmRow]:
        """Take every call of some projects, in order."""
        entries = []
        for adapter, group in list(self._groups.items()):
            matching = [entry for entry in group.calls if entry[1].project in projects]
            if matching:
                group.calls = [entry for entry in group.calls if entry[1].project not in projects]
                heapq.heapify(group.calls)
                self._drop_empty(adapter)
                entries += matching
        calls = [call for _, call in sorted(entries, key=lambda entry: entry[0])]
        self._uncount(calls)
        return calls

    def projects(self) -> set[str]:
        """The projects of waiting calls."""
        return set(self._projects)

    def _uncount(self, calls: Iterable[LlmRow]) -> None:
        for call in calls:
            self._size -= 1
            self._projects[call.project] -= 1
            if not self._projects[call.project]:
                del self._projects[call.project]

    def adapters(self) -> list[Adapter]:
        """The adapters of waiting rows, in the order of their first rows."""
        waiting = [(group.calls[0][0], adapter) for adapter, group in self._groups.items() if adapter is not None]
        return [adapter for _, adapter in sorted(waiting, key=lambda entry: entry[0])]

    def first_turn(self, adapter: Adapter) -> int:
        return self._groups[adapter].calls[0][0]

    def waiting(self, adapter: Adapter) -> int:
        """The number of waiting rows of an adapter."""
        return len(self._groups[adapter].calls) if adapter in self._groups else 0

    def _drop_empty(self, adapter: Adapter | None) -> None:
        if not self._groups[adapter].calls:
            del self._groups[adapter]


ROUNDS_MAX = 16  # groups of one project's suspects; the rows of a group that kills the server run one by one
LAST_GROUP_MAX = 8  # rows of a project beyond its budget that run together


class QuarantineQueue:
    """The suspect rows that wait to run in isolation."""

    def __init__(self) -> None:
        self.calls: list[LlmRow] = []

    def __len__(self) -> int:
        return len(self.calls)

    def add(self, call: LlmRow) -> None:
        self.calls.append(call)

    def take(self, adapter: Adapter) -> list[LlmRow]:
        """Take the rows of an adapter."""
        calls = [call for call in self.calls if call.adapter == adapter]
        self.calls = [call for call in self.calls if call.adapter != adapter]
        return calls

    def projects(self) -> set[str]:
        return {call.project for call in self.calls}

    def adapters(self) -> list[Adapter]:
        return [call.adapter for call in self.calls if call.adapter is not None]

    def next_group(self, *, is_last: Callable[[str], bool], can_send: Callable[[LlmRow], bool]) -> list[LlmRow]:
        """The rows to run now; they stay queued until `start`. `is_last`: whether a project runs after all others."""
        waiting = sorted(self.calls, key=lambda call: (is_last(call.project), not call.must_run_alone, call.turn))
        first = next((call for call in waiting if can_send(call)), None)
        if first is None or first.must_run_alone:
            return [] if first is None else [first]
        alike = [call for call in waiting if call.project == first.project and not call.must_run_alone]
        size = math.ceil(len(alike) / ROUNDS_MAX)
        if is_last(first.project):
            size = LAST_GROUP_MAX if not first.tracked.deaths else size
        return [call for call in alike if call.adapter == first.adapter][: max(1, size)]

    def start(self, group: list[LlmRow]) -> None:
        """Remove rows that are now in flight."""
        for call in group:
            self.calls.remove(call)
