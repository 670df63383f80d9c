"""What was counted since this process began, and what its workers do now: for those who look, and for nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from batchmill.jobs.adapter_sums import AdapterSums
from batchmill.jobs.pool import Pool
from batchmill.types import Commit, EngineStats, LiveHead

CODES_MAX = 100  # distinct error codes; user code may raise without end
OTHER = "other"  # what all further ones are counted under


class ModelGauge(Struct, frozen=True):
    """The workers of one model at this moment."""

    name: str
    workers: int
    ready: int
    in_flight: int  # rows
    limit: int  # rows that may be in flight
    live: int  # live requests that are being answered
    live_waiting: int  # live requests that wait for a worker
    kv_usage: float  # 0..1, the mean of its workers
    cached_share: float | None  # 0..1, the mean of those that know
    note: str  # why it waits, if it does
    failure: str  # why it has failed, if it has
    jobs: int  # that have rows left for it
    jobs_waiting: int  # of these, those of which no worker has a row
    rows_waiting: int  # rows of these jobs without an outcome
    replicas: int = 0  # that run or start
    wanted: int = 0
    waits: str = ""  # for what a replica waits that the machine has no room for
    adapters_loaded: int = 0  # in all workers together


class Tallies:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, str, str]] = Counter()  # (project, model, "ok" or "failed")
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # (project, model, "input", "cached" or "output")
        self.errors: Counter[tuple[str, str, str]] = Counter()  # (project, model, code)
        self.live: Counter[tuple[str, int]] = Counter()  # (model, status of the answer; 0 where there was none)
        self.adapters = AdapterSums()
        self._codes: set[str] = set()

    def count(self, project: str, model: str, commit: Commit) -> None:
        """Rows that the ledger counted."""
        self.rows[project, model, "ok"] += commit.rows_ok
        self.rows[project, model, "failed"] += commit.rows_failed
        usage = commit.usage
        self.tokens[project, model, "input"] += usage.input_tokens
        self.tokens[project, model, "cached"] += usage.cached_tokens
        self.tokens[project, model, "output"] += usage.output_tokens
        for code, rows in commit.errors.items():
            self.errors[project, model, self._bounded(code)] += rows

    def _bounded(self, code: str) -> str:
        if code not in self._codes:
            if len(self._codes) >= CODES_MAX:
                return OTHER
            self._codes.add(code)
        return code

    def count_live(self, model: str, head: LiveHead | None) -> None:
        """A live request whose answer has begun, or that got none."""
        self.live[model, 0 if head is None else head.status] += 1


def gauge(pool: Pool, *, rows_left: Sequence[int], waiting: int) -> ModelGauge:
    """What a pool does now; `rows_left` has the rows of each of its jobs, of which `waiting` hold no worker."""
    workers = list(pool.workers.values())
    stats: list[EngineStats] = [worker.stats for worker in workers]
    known = [each.cached_share for each in stats if each.cached_share is not None]
    return ModelGauge(
        name=pool.model.name,
        workers=len(workers),
        ready=sum(worker.is_ready for worker in workers),
        in_flight=sum(each.in_flight for each in stats),
        limit=sum(each.in_flight_limit for each in stats),
        live=sum(len(worker.calls) for worker in workers),
        live_waiting=pool.waiting,
        kv_usage=sum(each.kv_usage for each in stats) / len(stats) if stats else 0.0,
        cached_share=sum(known) / len(known) if known else None,
        note="; ".join(dict.fromkeys(each.note for each in stats if each.note)),
        failure="" if pool.failure is None else pool.failure.message,
        jobs=len(rows_left),
        jobs_waiting=waiting,
        rows_waiting=sum(rows_left),
        replicas=pool.replicas,
        wanted=pool.standing.wanted,
        waits=pool.waits,
        adapters_loaded=sum(each.adapters_loaded for each in stats),
    )
