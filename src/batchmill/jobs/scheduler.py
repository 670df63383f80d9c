"""Which job goes first at a model's workers, what each has a claim to, and how large a shard is.

Pure: snapshot in, decision out. Priority comes first, strictly; then jobs that are about to miss their deadline; then
the project that is furthest behind its share; then the earlier deadline; then age.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from batchmill.models.providers import PROVIDERS
from batchmill.types import ModelSpec

# Rows of a shard, at least and at most: about two seconds of work at full speed for what each engine bears.
SHARD_ROWS = {
    "connector": (64, 1_024), "function": (1, 16_384), "function_process": (1, 16_384), "http": (64, 1_024),
    "llm": (16, 64), "routes": (64, 1_024),
}  # fmt: skip
SHARDS_PER_WORKER = 8  # at least, where the job has the rows for it: the last shards even the workers out
LATE_FACTOR = 1.5  # a deadline is in danger when the work left takes this much less than the time left
# Of a project's share its first job has so much to itself, the rest is for all of its jobs alike: many small jobs
# neither wait for a large one nor stop it.
FIRST_SHARE = 0.25


class Candidate(Struct, frozen=True):
    """A job that wants workers of the model in question."""

    job: str
    created: float
    project: str = "default"
    priority: int = 0
    deadline: float | None = None
    is_late: bool = False  # it is about to miss its deadline
    ahead: float = 0.0  # virtual time that its project has been served: see `jobs.fair_share`

    @property
    def rank(self) -> int:
        """Rows of a higher one always go first."""
        return 2 * self.priority + self.is_late


def order_of(candidate: Candidate) -> tuple:
    """Candidates sorted by this are in the order in which they are served."""
    deadline = math.inf if candidate.deadline is None else candidate.deadline
    urgency = deadline if candidate.is_late else 0.0
    return -candidate.rank, urgency, candidate.ahead, deadline, candidate.created, candidate.job


def ahead_of(job: str, is_waiting: bool, candidates: Sequence[Candidate]) -> int:
    """How many are served before this job; once it has rows at a worker only those of higher rank are."""
    mine = next((each for each in candidates if each.job == job), None)
    if mine is None:
        return 0
    before = [each for each in candidates if order_of(each) < order_of(mine)]
    return len(before if is_waiting else [each for each in before if each.rank > mine.rank])


def is_late(deadline: float | None, now: float, *, work: float, per_s: float | None) -> bool:
    """Whether a job with so much work left misses its deadline unless it has the workers to itself.

    `work` and `per_s`, what the workers get done a second, are in one unit; None: that is not known yet.
    """
    if deadline is None or not per_s:
        return False
    return deadline - now < LATE_FACTOR * work / per_s


def shares(candidates: Sequence[Candidate], weights: Mapping[str, float]) -> dict[str, float]:
    """Job -> its share of the workers beside others of its rank: its project's weight, divided among its jobs."""
    groups = Counter((each.rank, each.project) for each in candidates)
    seen: set[tuple[int, str]] = set()
    claims: dict[str, float] = {}
    for each in sorted(candidates, key=order_of):
        group = each.rank, each.project
        alike = (1.0 - FIRST_SHARE) / groups[group]
        claims[each.job] = weights.get(each.project, 1.0) * (alike if group in seen else FIRST_SHARE + alike)
        seen.add(group)
    return claims


def shard_rows(model: ModelSpec, rows: int) -> int:
    """Rows of a shard of this model in a job of `rows` rows; for a provider's batch API, those of one job there."""
    if model.is_handed_over:
        return handed_over_rows(model)
    least, most = SHARD_ROWS[model.engine]
    workers = max(1, model.workers if model.scaling is None else model.scaling.replicas_max)
    return max(least, min(most, rows // (workers * SHARDS_PER_WORKER)))


def handed_over_rows(model: ModelSpec) -> int:
    """The most rows of one job at a model's provider."""
    return int(argument(model, "rows_max", PROVIDERS[model.provider or "openai"].rows_max))


def argument(model: ModelSpec, name: str, default: float) -> float:
    """A number of at least 1 among the engine's arguments; the engine itself refuses what is none."""
    value = model.engine_args.get(name)
    try:
        number = default if value is None or isinstance(value, bool) else float(value)
    except ValueError:
        number = default
    return max(1.0, number) if math.isfinite(number) else default
