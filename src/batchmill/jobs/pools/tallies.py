"""Counters since this process started, and gauges of workers, for metrics only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

from msgspec import Struct
from msgspec.structs import replace

from batchmill.types import AdapterStats, CallStats, Commit, LiveHead

CODES_MAX = 100  # distinct error codes: user code may raise any number
ADAPTERS_MAX = 1000  # distinct adapters, of all models together
UNSUMMED_MAX = 256  # reports that wait to be summed up
OTHER = "other"  # the name for all further ones


class ModelGauge(Struct, frozen=True):
    """Gauges of the workers of one model."""

    name: str
    workers: int
    ready: int
    in_flight: int  # rows
    limit: int  # rows that may be in flight
    live: int  # live requests that are being answered
    live_waiting: int  # live requests that wait for a worker
    kv_usage: float  # 0..1, the mean of its workers
    cached_share: float | None  # 0..1, the mean of those that report it
    note: str  # why it waits, if it does
    failure: str  # why it has failed, if it has
    jobs: int  # that have rows left for it
    jobs_waiting: int  # of these, those of which no worker has a row
    rows_waiting: int  # rows of these jobs without an outcome
    replicas: int = 0  # that run or start
    wanted: int = 0
    waits: str = ""  # what a replica without resources waits for
    adapters_loaded: int = 0  # in all workers together


class AdapterSums:
    """Counters of the rows of each adapter, over all workers of a model. They only grow."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], AdapterStats] = {}

    @property
    def by_adapter(self) -> Mapping[tuple[str, str], AdapterStats]:
        """(model, own name) -> its sums."""
        return self._sums

    def add(self, model: str, before: Sequence[AdapterStats], now: Sequence[AdapterStats]) -> None:
        """Add one worker's counters, given its previous ones."""
        earlier = {each.name: each for each in before}
        for each in now:
            previous = earlier.get(each.name)
            if previous is None or each.rows < previous.rows or each.loads < previous.loads:  # its engine was restarted
                previous = AdapterStats(each.name)
            if each != previous:
                self._add(model, each, previous)

    def _add(self, model: str, now: AdapterStats, before: AdapterStats) -> None:
        key = model, now.name
        if key not in self._sums and len(self._sums) >= ADAPTERS_MAX:
            key = model, OTHER
        total = self._sums.get(key) or AdapterStats(key[1])
        self._sums[key] = replace(
            total,
            rows=total.rows + now.rows - before.rows,
            input_tokens=total.input_tokens + now.input_tokens - before.input_tokens,
            output_tokens=total.output_tokens + now.output_tokens - before.output_tokens,
            hits=total.hits + now.hits - before.hits,
            loads=total.loads + now.loads - before.loads,
            busy_s=total.busy_s + now.busy_s - before.busy_s,
        )


class CallSums:
    """Counters of a model's function calls, over all its workers, former ones included."""

    def __init__(self) -> None:
        self._total = CallStats()
        self._unsummed: list[CallStats] = []

    def add(self, stats: CallStats) -> None:
        """Add what was counted since the last report of the same worker."""
        self._unsummed.append(stats)
        if len(self._unsummed) >= UNSUMMED_MAX:
            self.total()

    def total(self) -> CallStats:
        """The total since this process started."""
        if self._unsummed:
            self._total = reduce(add, self._unsummed, self._total)
            self._unsummed.clear()
        return self._total


class Tallies:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, str, str]] = Counter()  # (project, model, "ok" or "failed")
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # (project, model, "input", "cached" or "output")
        self.errors: Counter[tuple[str, str, str]] = Counter()  # (project, model, code)
        self.warnings: Counter[tuple[str, str, str]] = Counter()  # (project, model, name in wire.replies.WARNINGS)
        self.reused: Counter[tuple[str, str]] = Counter()  # (project, model): rows with a result of an earlier job
        self.spending: dict[tuple[str, str], float] = defaultdict(float)  # USD by (project, model)
        self.live: Counter[tuple[str, int]] = Counter()  # (model, status of the reply; 0: no reply)
        self.adapters = AdapterSums()
        self._codes: set[str] = set()

    def count(self, project: str, model: str, commit: Commit, cost: float | None = None) -> None:
        """Count rows that the ledger counted. `cost`: theirs in USD; None: the model has no price."""
        if cost is not None:
            self.spending[project, model] += cost
        self.rows[project, model, "ok"] += commit.rows_ok
        self.rows[project, model, "failed"] += commit.rows_failed
        if commit.rows_reused:
            self.reused[project, model] += commit.rows_reused
        usage = commit.usage
        self.tokens[project, model, "input"] += usage.input_tokens
        self.tokens[project, model, "cached"] += usage.cached_tokens
        self.tokens[project, model, "output"] += usage.output_tokens
        for code, rows in commit.errors.items():
            self.errors[project, model, self._bounded(code)] += rows
        for name, replies in commit.warnings.items():
            self.warnings[project, model, name] += replies

    def _bounded(self, code: str) -> str:
        if code not in self._codes:
            if len(self._codes) >= CODES_MAX:
                return OTHER
            self._codes.add(code)
        return code

    def count_live(self, model: str, head: LiveHead | None) -> None:
        """Count a live request whose reply has begun, or that got none."""
        self.live[model, 0 if head is None else head.status] += 1
