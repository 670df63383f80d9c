"""What the jobs at one pool have a claim to, told from what its workers get done. Memory only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from batchmill.jobs import scheduler
from batchmill.jobs.job_run import JobRun
from batchmill.jobs.rates import RowCost, Throughput, cost_of
from batchmill.jobs.scheduler import FairShare
from batchmill.ports import Clock
from batchmill.types import Commit

FRESH_S = 0.5  # claims are reckoned anew after this, or when a job comes or goes
NEWS = 0.1  # a weight that changed by less is not worth telling


class Weight(Struct, frozen=True):
    """How a job's rows count at a worker, as in `messages.Grant`."""

    priority: int = 0
    share: float = 1.0
    row_cost: float = 1.0

    def is_like(self, other: Weight | None) -> bool:
        """There is too little between them to tell anybody."""
        if other is None or self.priority != other.priority:
            return False
        pairs = ((self.share, other.share), (self.row_cost, other.row_cost))
        return all(abs(one - two) <= NEWS * max(one, two) for one, two in pairs)


class Claim(Struct, frozen=True, eq=False):
    """A job with rows left for the pool's model, and how they count."""

    run: JobRun
    model: int
    candidate: scheduler.Candidate
    weight: Weight


class Claims:
    def __init__(self, weights: Mapping[str, float], clock: Clock) -> None:
        self._weights, self._clock = weights, clock
        self._share = FairShare(weights)
        self._row_cost = RowCost()
        self._throughput = Throughput(clock)
        self._reckoned: list[Claim] | None = None
        self._at = 0.0

    def charge(self, project: str, commit: Commit) -> None:
        """The ledger has counted these rows."""
        rows = commit.rows_ok + commit.rows_failed
        cost = cost_of(rows, commit.usage)
        self._share.charge(project, cost)
        self._throughput.add(cost)
        self._row_cost.add(rows, commit.usage)

    def forget(self) -> None:
        """A job has come, changed or gone."""
        self._reckoned = None

    @property
    def is_fresh(self) -> bool:
        return self._reckoned is not None and self._clock.monotonic() - self._at < FRESH_S

    def reckon(self, runs: Sequence[tuple[JobRun, int]]) -> list[Claim]:
        """The claims of these (job, number of its model), in the order in which they are served."""
        costs = [self._cost(run, model) for run, model in runs]
        held: Counter[str] = Counter()
        for (run, model), cost in zip(runs, costs, strict=True):
            held[run.spec.project] += run.rows_held(model) * cost
        self._share.set_active(held)
        self._throughput.work(is_there=bool(runs))
        candidates = [self._candidate(*each, cost, held) for each, cost in zip(runs, costs, strict=True)]
        shares = scheduler.shares(candidates, self._weights)
        claims = [
            Claim(run, model, candidate, Weight(candidate.rank, shares[candidate.job], cost))
            for (run, model), candidate, cost in zip(runs, candidates, costs, strict=True)
        ]
        self._reckoned = sorted(claims, key=lambda claim: scheduler.order_of(claim.candidate))
        self._at = self._clock.monotonic()
        return self._reckoned

    @property
    def last(self) -> list[Claim]:
        """As they were reckoned last."""
        return self._reckoned or []

    def _cost(self, run: JobRun, model: int) -> float:
        """What a row of this job is reckoned at: as its last ones, or as those of others."""
        return run.row_cost(model) or self._row_cost.now() or 1.0

    def _candidate(self, run: JobRun, model: int, cost: float, held: Mapping[str, float]) -> scheduler.Candidate:
        spec, policy = run.spec, run.spec.policy
        work = run.rows_left_of(model) * cost
        return scheduler.Candidate(
            job=spec.id,
            created=spec.created,
            project=spec.project,
            priority=policy.priority,
            deadline=policy.deadline,
            is_late=scheduler.is_late(policy.deadline, self._clock.now(), work=work, per_s=self._throughput.now()),
            ahead=self._share.ahead(spec.project, held[spec.project]),
        )
