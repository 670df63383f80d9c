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
from batchmill.ports.clock import Clock
from batchmill.ports.executors import PlacedHandle, WorkerHandle
from batchmill.types import Commit, EngineStats, FunctionRequest, LiveHead, Provision
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.messages import (
    GRANTS_REQUESTED_MAX,
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

FRESH_S = 0.5  # claims are recomputed after this, or when a job is added or removed
WEIGHT_CHANGE_MIN = 0.1  # a smaller relative change of a weight is not sent


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
        return all(abs(new - old) <= WEIGHT_CHANGE_MIN * max(new, old) for new, old in pairs)


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
        self._computed: list[Claim] | None = None
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
        self._computed = None

    @property
    def is_fresh(self) -> bool:
        return self._computed is not None and self._clock.monotonic() - self._at < FRESH_S

    def compute(self, runs: Sequence[tuple[JobRun, int]]) -> list[Claim]:
        """Compute the claims of these (job, number of its model), in serving order."""
        costs = [self._cost(run, model) for run, model in runs]
        held: Counter[str] = Counter()
        for (run, model), cost in zip(runs, costs, strict=True):
            held[run.spec.project] += run.rows_held(model) * cost
        self._share.set_active(held)
        self._throughput.work(has_work=bool(runs))
        candidates = [self._candidate(*each, cost, held) for each, cost in zip(runs, costs, strict=True)]
        shares = scheduler.shares(candidates, self._weights)
        claims = [
            Claim(run, model, candidate, Weight(candidate.rank, shares[candidate.job], cost))
            for (run, model), candidate, cost in zip(runs, candidates, costs, strict=True)
        ]
        self._computed = sorted(claims, key=lambda claim: scheduler.order_of(claim.candidate))
        self._at = self._clock.monotonic()
        return self._computed

    @property
    def last(self) -> list[Claim]:
        """The claims as last computed."""
        return self._computed or []

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


JOBS_OPEN_MAX = 64  # at one worker, where each has an open file
JOBS_OPEN_PROJECT_MAX = 48  # of one project: the rest is for other projects

# None: the reply is complete. A function call gets one reply or an error.
LiveCallback = Callable[[FunctionReply | LiveHead | bytes | Exception | None], None]


class PoolWorker:
    """A worker and what it holds."""

    def __init__(
        self, name: str, home: Path, handle: WorkerHandle, provision: Provision = Provision(), replica: int = 0
    ) -> None:
        self.name, self.home, self.handle, self.provision, self.replica = name, home, handle, provision, replica
        self.is_leaving = False  # it finishes its work and ends
        self.is_ready = self.was_ready = False
        self.is_ended = False  # its owner killed it, so its end is not the fault of a row
        self.storage_error = ""  # why it cannot write outcomes, in which case its end is not the fault of a row
        self.requested: Counter[str] = Counter()  # job -> further grants that it requests
        self.weights: dict[str, Weight] = {}  # job -> the weight that was sent
        self.calls: dict[int, LiveCallback] = {}  # id of a live request -> the callback for its reply
        self.opened: dict[str, str] = {}  # open jobs, which may get grants -> their projects
        self.revoked: set[str] = set()  # removed jobs of which rows may still be running
        self.stats = EngineStats()
        self.last_message_at = 0.0
        self.placed: PlacedHandle | None = handle if isinstance(handle, PlacedHandle) else None
        self._requests: list[FunctionRequest] = []  # of this turn of the event loop: sent in one message

    def drain(self) -> None:
        """Let the worker finish its rows and live requests, and end. It gets nothing more."""
        self.is_leaving, self.is_ready = True, False
        self._send_requests()
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
        """Whether the worker requests more of this job, or can open it beside its other jobs."""
        if self.requested[job.id] > 0:
            return True
        if job.id in self.opened or len(self.opened) >= JOBS_OPEN_MAX:
            return False
        is_crowded = len(self.opened) >= JOBS_OPEN_PROJECT_MAX
        return not is_crowded or list(self.opened.values()).count(job.project) < JOBS_OPEN_PROJECT_MAX

    def request(self, job_id: str, grants: int) -> None:
        """It has room for so many more grants of a job, by its own account."""
        self.requested[job_id] = min(self.requested[job_id] + max(0, grants), GRANTS_REQUESTED_MAX)

    def close(self, job_id: str) -> None:
        """Give the worker no more of this job."""
        self.opened.pop(job_id, None)
        self.requested.pop(job_id, None)
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

    def send_request(self, request: FunctionRequest, on_reply: LiveCallback) -> None:
        """Send a call, together with all others of this turn of the event loop."""
        self.calls[request.id] = on_reply
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._send_requests)
        self._requests.append(request)

    def _send_requests(self) -> None:
        requests, self._requests = self._requests, []
        begin = size = 0
        for at, request in enumerate(requests):
            size += len(request.body) + len(request.head)
            if size > LIVE_REQUESTS_BYTES and at > begin:
                self.handle.send(FunctionRequests(requests[begin:at]))
                begin, size = at, len(request.body) + len(request.head)
        if requests:
            self.handle.send(FunctionRequests(requests[begin:]))

    def abandon(self, request_id: int) -> None:
        """Abandon a call: its caller no longer waits."""
        if self.calls.pop(request_id, None) is not None:
            self._send_requests()
            self.handle.send(Abandon(request_id))

    def deliver_replies(self, replies: Sequence[FunctionReply]) -> None:
        for reply in replies:
            on_reply = self.calls.pop(reply.id, None)
            if on_reply is not None:
                on_reply(reply)

    def end_calls(self, error: BatchmillError) -> None:
        """Fail all calls: the worker sends no more replies."""
        calls, self.calls = self.calls, {}
        for on_reply in calls.values():
            on_reply(error)
