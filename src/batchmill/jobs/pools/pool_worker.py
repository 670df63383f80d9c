"""PoolWorker: a worker as its pool sees it: the shards and calls that it holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.jobs.pools import scheduler
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.pools.scheduler import FairShare, RowCost, Throughput, cost_of
from batchmill.ports import Clock, WorkerHandle
from batchmill.types import Commit, EngineStats, FunctionRequest, LiveHead, Provision
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import (
    LIVE_REQUESTS_BYTES,
    Abandon,
    Answered,
    Drain,
    FunctionReply,
    FunctionRequests,
    Head,
    Provide,
    ReplyChunk,
)

FRESH_S = 0.5  # claims are reckoned anew after this, or when a job comes or goes
NEWS = 0.1  # a weight that changed by less is not worth telling


class Weight(Struct, frozen=True):
    """How a job's rows count at a worker, as in `messages.Grant`."""

    priority: int = 0
    share: float = 1.0
    row_cost: float = 1.0

    def is_like(self, other: Weight | None) -> bool:
        """Whether the difference is too small to send."""
        if other is None or self.priority != other.priority:
            return False
        pairs = ((self.share, other.share), (self.row_cost, other.row_cost))
        return all(abs(one - two) <= NEWS * max(one, two) for one, two in pairs)


class Claim(Struct, frozen=True, eq=False):
    """A job with open rows for the pool's model, and the weight of its rows."""

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
        """Record rows that the ledger counted."""
        rows = commit.rows_ok + commit.rows_failed
        cost = cost_of(rows, commit.usage)
        self._share.charge(project, cost)
        self._throughput.add(cost)
        self._row_cost.add(rows, commit.usage)

    def forget(self) -> None:
        """Drop cached shares: a job was added, changed or removed."""
        self._reckoned = None

    @property
    def is_fresh(self) -> bool:
        return self._reckoned is not None and self._clock.monotonic() - self._at < FRESH_S

    def reckon(self, runs: Sequence[tuple[JobRun, int]]) -> list[Claim]:
        """The claims of these (job, number of its model), in serving order."""
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
        """The claims as last computed."""
        return self._reckoned or []

    def _cost(self, run: JobRun, model: int) -> float:
        """The cost of a row of this job: of its recent rows, or else of other jobs."""
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


JOBS_OPEN_MAX = 64  # at one worker: each has a file open there, and a place among those whose turn it may be
JOBS_OPEN_PROJECT_MAX = 48  # of one project: a worker has room for the jobs of others

# None: the answer is complete. An Ask has one Answer, or an error.
LiveCallback = Callable[[FunctionReply | LiveHead | bytes | Exception | None], None]


class PoolWorker:
    """A worker and what it holds."""

    def __init__(
        self, name: str, home: Path, handle: WorkerHandle, provision: Provision = Provision(), replica: int = 0
    ) -> None:
        self.name, self.home, self.handle, self.provision, self.replica = name, home, handle, provision, replica
        self.is_leaving = False  # it finishes what it has, and ends
        self.is_ready = False
        self.is_ended = False  # we killed it: its end is no evidence against a row
        self.storage_error = ""  # why it cannot write outcomes: its end is no evidence against a row
        self.wants: set[str] = set()  # jobs of which it has room for one more grant
        self.weights: dict[str, Weight] = {}  # job -> the weight that was sent
        self.calls: dict[int, LiveCallback] = {}  # live request -> who hears its answer
        self.opened: dict[str, str] = {}  # jobs that it has open and may get grants of, and their projects
        self.revoked: set[str] = set()  # jobs of which it may still run what it had begun
        self.stats = EngineStats()
        self.heard_at = 0.0
        self._asks: list[FunctionRequest] = []  # of this turn of the loop: they go in one message

    def drain(self) -> None:
        """Let the worker finish its rows and live requests, and end. It gets nothing more."""
        self.is_leaving, self.is_ready = True, False
        self._send_asks()
        self.handle.send(Drain())

    def end(self) -> None:
        """Kill the worker on purpose."""
        self.is_ended = True
        self.handle.kill()

    def provide(self, provision: Provision) -> None:
        """Send the current secrets, if the worker has others."""
        if provision != self.provision:
            self.provision = provision
            self.handle.send(Provide(provision))

    def has_room(self, job: JobSpec) -> bool:
        """Whether the worker wants more of this job, or has none of it and not too many other shards."""
        if job.id in self.wants:
            return True
        if job.id in self.opened or len(self.opened) >= JOBS_OPEN_MAX:
            return False
        is_crowded = len(self.opened) >= JOBS_OPEN_PROJECT_MAX
        return not is_crowded or list(self.opened.values()).count(job.project) < JOBS_OPEN_PROJECT_MAX

    def close(self, job_id: str) -> None:
        """Give the worker no more of this job."""
        self.opened.pop(job_id, None)
        self.wants.discard(job_id)
        self.weights.pop(job_id, None)

    def deliver(self, message: Head | ReplyChunk | Answered) -> None:
        """Pass on a piece of a reply; pieces of an abandoned call are dropped."""
        match message:
            case Head(id_, piece) | ReplyChunk(id_, piece):
                on_reply = self.calls.get(id_)
            case Answered(id_, raised):
                on_reply, piece = self.calls.pop(id_, None), None if raised is None else raised.error()
        if on_reply is not None:
            on_reply(piece)

    def ask(self, ask: FunctionRequest, on_reply: LiveCallback) -> None:
        """Send a call, together with all others of this turn of the event loop."""
        self.calls[ask.id] = on_reply
        if not self._asks:
            asyncio.get_running_loop().call_soon(self._send_asks)
        self._asks.append(ask)

    def _send_asks(self) -> None:
        asks, self._asks = self._asks, []
        begin = size = 0
        for at, ask in enumerate(asks):
            size += len(ask.body) + len(ask.head)
            if size > LIVE_REQUESTS_BYTES and at > begin:
                self.handle.send(FunctionRequests(asks[begin:at]))
                begin, size = at, len(ask.body) + len(ask.head)
        if asks:
            self.handle.send(FunctionRequests(asks[begin:]))

    def abandon(self, ask_id: int) -> None:
        """Abandon a call: its caller no longer waits."""
        if self.calls.pop(ask_id, None) is not None:
            self._send_asks()
            self.handle.send(Abandon(ask_id))

    def answer(self, answers: Sequence[FunctionReply]) -> None:
        for answer in answers:
            on_reply = self.calls.pop(answer.id, None)
            if on_reply is not None:
                on_reply(answer)

    def end_calls(self, error: BatchmillError) -> None:
        """Fail all calls: the worker replies no more."""
        calls, self.calls = self.calls, {}
        for on_reply in calls.values():
            on_reply(error)
