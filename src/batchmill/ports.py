"""Every seam on one page: what an engine, an executor, a segment sink and a clock promise."""

# pyright: reportReturnType=false
# A method of a protocol has its docstring for a body.

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from batchmill.errors import JobPaused
from batchmill.types import (
    AdapterSet,
    Amendment,
    CallStats,
    EngineStats,
    FunctionRequest,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    LiveHead,
    LiveRequest,
    ModelSpec,
    Outcome,
    Provision,
    RemoteJob,
    Row,
    SegmentRef,
    Submitted,
    Wait,
)
from batchmill.types.models import Poison

if TYPE_CHECKING:
    from batchmill.wire.messages import FunctionReply, Start, ToOwner


class Feed(Protocol):
    """Rows for an engine: one endless stream that knows nothing of shards, leases or files."""

    async def take(self, n: int) -> list[Row]:
        """Wait until at least one row is there and return up to `n`; an empty list means that no more will come.

        Concurrency: any number of tasks may wait in `take` at once.
        """


@runtime_checkable
class LeaseFeed(Feed, Protocol):
    """A feed of an engine that holds whole leases, and at times has room for no other."""

    async def take_noted(self, n: int) -> list[Row]:
        """As `take`, but only rows that an engine has begun already (something is noted of them) or is to end."""


@runtime_checkable
class ProjectFeed(Feed, Protocol):
    """A feed of an engine that at times has rows of some projects wait for those of others."""

    def hold_back(self, projects: frozenset[str]) -> None:
        """Give no rows of these projects until this is called again without them."""


class LeaseHandle(Protocol):
    """What rows carry as `row.lease`: the shard they belong to, for an engine whose work outlives its process.

    All rows of one `Feed.take` are of one lease. Concurrency: on the event loop's thread only.
    """

    key: str  # of the job and generation: the same whenever a row of it is tried again
    rows: int  # that were granted under it: an engine that has taken so many has all of them
    notes: Mapping[str, bytes]  # what was noted for this shard, by earlier workers too
    adapters: AdapterSet  # those that rows of its job may use
    project: str  # of its job
    job_id: str

    async def note(self, key: str, data: bytes) -> None:
        """Return once the note is durable, and what was put before counts; empty `data` takes it back.

        Raises: JobPaused when the lease is another's meanwhile, or it cannot be written: nothing may be done then that
        the note was to announce.
        """

    @property
    def ending(self) -> str:
        """Empty: go on. "pause": the job rests, its rows may stay where they are. "over": it ends without them."""

    async def until_ending(self) -> str:
        """Wait until `ending` says something, and return that."""

    def leave(self) -> None:
        """No more outcomes of this lease will be put: its rows stay undone. Only once it is `ending`."""

    def fail(self, error: JobPaused) -> None:
        """Pause the job for this reason, and `leave`; other jobs of the engine go on."""


class Sink(Protocol):
    """Where an engine leaves finished rows, in any order, each exactly once."""

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """Take outcomes over. Returns at once; they are durable within a second.

        Concurrency: call it on the event loop's thread only.
        """


class Engine(Protocol):
    """Runs rows for one model inside one worker. Constructed as `Engine(model: ModelSpec, home: EngineHome)`."""

    async def start(self) -> None:
        """Load whatever must be loaded. Raises ModelFailed, with what the user needs to mend it."""

    async def run(self, feed: Feed, sink: Sink) -> None:
        """Run every row of the feed and put exactly one outcome for each; return when the feed has ended.

        Transient faults are retried inside. Raises JobPaused (AuthRefused, QuotaExhausted) when going on would burn
        rows: rows taken and not yet put are then still undone, and finished ones have been put.
        Cancelling the task stops at once; rows in flight stay undone.
        """

    def predict(self, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]:
        """Answer a live request: one LiveHead, then the pieces of its body; with `stream`, as they come.

        Goes ahead of the rows of `run`, which may have begun or not. What a service answers is handed on, its errors
        included. Raises: BatchmillError where there is no answer (the call was refused, the model failed).
        Concurrency: any number at once, beside `run`; closing the iterator ends the call.
        """

    async def stop(self) -> None:
        """Release everything. Safe to call twice, and after a failed start."""

    def stats(self) -> EngineStats:
        """What the engine is doing now."""


@runtime_checkable
class MortalEngine(Engine, Protocol):
    """An engine whose server may die of a request."""

    def report_deaths(self, report: Callable[[Struct], None]) -> None:
        """Have `tell` hear of deaths and their causes: `EngineDied`, `Suspected`, `Charged` of `wire.messages`."""

    def learn(self, poison: Poison) -> None:
        """This is known of such requests now."""


class Answering(Protocol):
    """Where an engine leaves answers to Asks, in any order, each exactly once."""

    def put(self, answer: FunctionReply) -> None:
        """Take an answer over. Returns at once. Concurrency: on the event loop's thread only."""


class CallEngine(Engine, Protocol):
    """An engine of deployed functions: it takes Asks besides rows and live requests."""

    def ask(self, ask: FunctionRequest, answering: Answering) -> None:
        """Take a call over; returns at once. Its answer goes to `answering`, an error as `raised`."""

    def abandon(self, ask_id: int) -> None:
        """Nobody waits for this answer any more: none is put, and rows of it that have not begun never run."""

    def taken_stats(self) -> CallStats | None:
        """What has been counted since this was last called; None: nothing."""


class SegmentSink(Protocol):
    """Where a worker's outcomes become durable."""

    def append(self, blocks: bytes) -> SegmentRef:
        """Hand whole blocks to the kernel: they survive the death of this process, not yet of the machine."""

    def sync(self) -> None:
        """Return once everything appended before is on disk. An error is final for this sink."""

    def close(self) -> None: ...


class Clock(Protocol):
    """Time that a test can hold still."""

    def monotonic(self) -> float:
        """Seconds, never going back."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""

    async def sleep(self, seconds: float) -> None: ...


@runtime_checkable
class PatientEngine(Protocol):
    """An engine whose rows may wait for their service."""

    def fail_rows(self, job_id: str) -> None:
        """Give up the rows of this job that have failed, and those that fail until one of them is answered."""

    def forget(self, job_id: str) -> None:
        """No row of this job comes any more, unless it begins anew."""


class Jobs(Protocol):
    """The one entrance to jobs, in the process that owns them: `JobService` is one.

    Raises, everywhere: UnknownName for an id nobody knows (a unique prefix of an id will do), InvalidTransition for
    what does not fit the job's state.
    """

    async def submit(self, order: JobOrder) -> Submitted:
        """Start, resume or join a job. Raises InvalidInput when the order cannot be run as it is.

        With `order.once` an order that was taken already is that job again: `how` is "repeated".
        Raises: Conflict for a key that stands for another order.
        """

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        """Jobs, the newest first; without their `problems`. Raises UnknownName for an `after` that is none of them."""

    async def show(self, job_id: str) -> JobView: ...

    def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        """Views of a job, one at once and then one an interval; the last when it is paused or has ended."""

    async def pause(self, job_id: str) -> JobView: ...

    async def resume(self, job_id: str) -> JobView: ...

    async def cancel(self, job_id: str) -> JobView:
        """End a job without the rows that have not run; finished ones are kept.

        A job that a server's frontend took may still be CANCELLING when this returns, but ends whatever happens; of any
        other the results are there.
        """

    async def retry(self, job_id: str) -> JobView:
        """Open another generation over the rows that failed and may be run again."""

    async def fail_rows(self, job_id: str) -> JobView:
        """The rows of a job that failed and wait become errors now; a paused job goes on so.

        Until a row is answered again, rows of it that fail are not tried again. Raises: InvalidTransition.
        """

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        """Change the priority, deadline or budget of an unfinished job."""

    async def explain(self, job_id: str) -> Wait:
        """Why a job waits, or goes no faster, and by which ways it goes or went."""

    async def partial(self, job_id: str) -> str:
        """Write the rows that have an outcome so far, in row order, to a new file; its path. The caller removes it."""

    async def remote(self, job_id: str) -> list[RemoteJob]:
        """The jobs at providers that hold or held rows of this one, retries included, in the order of their making."""

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        """Say what became of a submission that is `unknown`: the provider's id, or None where it never came to be.

        Raises: InvalidTransition for one that is not unknown, or while the job runs; UnknownName for a tag nobody has.
        """

    async def remove(self, job_id: str, by: str = "a command on this machine") -> JobView:
        """Remove an ended job and all that is kept of it; how it was. Results that lie elsewhere stay.

        Args: by: who does it, in words, for those who ask for it later.

        Raises: InvalidTransition for one that has not ended.
        """

    async def verify(self, job_id: str) -> LedgerReport:
        """Audit the ledger against the segments; changes nothing."""

    async def rebuild(self, job_id: str) -> LedgerReport:
        """Make the ledger anew from the job's description and its segments."""


class Live(Protocol):
    """The short way to a model: a request that somebody waits for."""

    def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]:
        """As `Engine.predict`, on a worker of the model that is started if there is none.

        Raises: ModelFailed, with the engine's own words, when it cannot be started; Unavailable when too many wait.
        """

    async def ask(
        self, model: ModelSpec, form: str, body: bytes, *, head: bytes = b"", timeout_s: float | None = None
    ) -> FunctionReply:
        """Call a deployed function: see `FunctionRequest`. Raises as `predict`, and what the function raises."""


class WorkerHandle(Protocol):
    """A worker as its owner sees it. The messages are those of `wire.messages`."""

    @property
    def pid(self) -> int: ...

    def send(self, message: Struct) -> None:
        """Queue a message; never waits, and is quiet when the worker has gone."""

    def messages(self) -> AsyncIterator[ToOwner]:
        """What the worker says; ends when it has gone."""

    def is_frozen(self) -> bool:
        """It is stopped by a signal and will say nothing until somebody continues it."""

    def kill(self) -> None:
        """End it at once."""

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""


class Provisions(Protocol):
    """What workers are given beside their model."""

    async def of(self, model: ModelSpec) -> Provision:
        """For a worker of this model. Raises: ModelFailed, naming the secret that is missing."""


class FetchedAdapter(Protocol):
    """An adapter that was registered because rows name it."""

    @property
    def own_name(self) -> str:
        """ "NAME/VERSION"."""

    @property
    def state(self) -> str:
        """ "ready", or what else has become of it."""

    @property
    def message(self) -> str:
        """Why it could not be had."""

    @property
    def folder(self) -> str:
        """Where it lies."""

    @property
    def rank(self) -> int: ...


class Adapters(Protocol):
    """Who registers and fetches adapters."""

    async def ensure(
        self, project: str, base: str, hub_ids: Sequence[str], *, token: str | None = None
    ) -> Mapping[str, FetchedAdapter]:
        """Have these ids of a model hub registered for the model `base`, and fetched: each is ready or failed.

        Args: token: where the token lies that the hub is shown; None: that of the base.

        Cancelling it leaves what was begun to itself.
        """


class Executor(Protocol):
    """Where workers live."""

    async def start(self, start: Start) -> WorkerHandle:
        """A new worker that has been sent `start`."""

    def sweep(self) -> None:
        """End the workers that a dead owner left behind."""
