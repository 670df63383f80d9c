"""The protocols between the parts of batchmill: engines, feeds, sinks, executors, jobs, live requests and clocks."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

from batchmill.errors import JobPaused
from batchmill.types import (
    AdapterSet,
    Amendment,
    CallStats,
    ColumnBlock,
    ColumnResultBlock,
    EngineStats,
    FunctionRequest,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    LiveHead,
    LiveRequest,
    MediaBounds,
    ModelSpec,
    Outcome,
    Provision,
    RemoteJob,
    ResultBlock,
    RetryChange,
    ReuseCount,
    Row,
    RowBlock,
    SegmentRef,
    Submitted,
    Usage,
    Wait,
)
from batchmill.types.cluster import ClusterView, NodeWork
from batchmill.types.models import Poison

if TYPE_CHECKING:
    from asyncio import Future

    from batchmill.wire.messages import FunctionReply, Start, ToOwner


class Columns(Struct, frozen=True):
    """The columns that an engine takes. Those that a dataset lacks are left out.

    Where it lacks one that is required, all are given: the rows cannot run, and their errors tell what there is.
    """

    names: tuple[str, ...] | None = None  # None: all
    required: frozenset[str] = frozenset()


class Feed(Protocol):
    """The rows for an engine: an endless stream without shards, leases or files."""

    async def take(self, n: int) -> list[Row]:
        """Wait for at least one row and return up to `n` rows; an empty list means that no more rows will come.

        Concurrency: any number of tasks may wait in `take` at once.
        """


@runtime_checkable
class BlockFeed(Feed, Protocol):
    """The feed of an engine that takes rows without an object for each."""

    async def take_block(self, n: int, columns: Columns | None = None) -> RowBlock | ColumnBlock | None:
        """As `take`, but all rows of one call have one lease; None means that no more rows will come.

        With `columns`, rows of a dataset that holds columns come as a ColumnBlock; all others are lines.
        """


@runtime_checkable
class LeaseFeed(Feed, Protocol):
    """The feed of an engine that takes whole leases, and sometimes has no room for another one."""

    async def take_noted(self, n: int) -> list[Row]:
        """As `take`, but only rows that an engine has begun already (they have notes) or that it must end."""


@runtime_checkable
class ProjectFeed(Feed, Protocol):
    """The feed of an engine that sometimes holds rows of some projects back for other projects."""

    def hold_back(self, projects: frozenset[str]) -> None:
        """Give no rows of these projects until the next call without them."""


@runtime_checkable
class JobFeed(Feed, Protocol):
    """The feed of an engine that sometimes holds rows of some jobs back for other jobs."""

    def hold_jobs(self, jobs: frozenset[str]) -> None:
        """Give no rows of these jobs until the next call without them."""


class LeaseHandle(Protocol):
    """The lease of a row's shard (`row.lease`), for an engine whose work outlives its process.

    All rows of one `Feed.take` have the same lease. Concurrency: on the event loop's thread only.
    """

    key: str  # identifies the job and generation; it is the same when a row is retried
    rows: int  # the number of rows granted under it: an engine that has taken this many has all of them
    notes: Mapping[str, bytes]  # the notes of this shard, also those of earlier workers
    adapters: AdapterSet  # the adapters that rows of its job may use
    media: MediaBounds  # of its rows
    project: str  # the job's project
    job_id: str
    takes_blocks: bool  # its outcomes may be put as a ResultBlock

    async def note(self, key: str, data: bytes) -> None:
        """Store a note; return once it is durable and all earlier outcomes are counted. Empty `data` deletes the note.

        Raises: JobPaused if another worker has the lease by now, or the note cannot be written: the caller must then
        not do what the note announces.
        """

    def count_misfits(self, tag: str, misfits: Mapping[int, Usage]) -> None:
        """Count what answers in the results of a remote job have cost that are no outcomes, and add their plan
        positions to `misfits` in its note: both, or neither if this worker is killed. Later notes are stored after it.

        Args: misfits: plan position -> what its answer has cost.

        Raises: JobPaused if another worker has the lease by now.
        """

    def spend(self, row: Row, usage: Usage) -> None:
        """Take the cost of an answer that is no outcome out of what is reserved for its row, and free the rest."""

    async def reserve(self, rows: Sequence[Row]) -> int:
        """Reserve what the requests of these rows may cost; return how many of them, in order, the budget can pay."""

    async def until_owned(self) -> None:
        """Wait until the owner surely owns the database. Call it before what must not be done for two owners."""

    @property
    def ending(self) -> str:
        """Empty: go on. "pause": the job pauses, and its rows may stay at the provider. "over": the job ends without
        its remaining rows.
        """

    @property
    def over(self) -> str:
        """Why its job is over for good, in words; empty: its rows may go on elsewhere, or `ending` is not "over"."""

    async def until_ending(self) -> str:
        """Wait until `ending` is not empty, and return it."""

    def leave(self) -> None:
        """Declare that no more outcomes of this lease will be put: its rows stay undone. Call it only when `ending`."""

    def fail(self, error: JobPaused) -> None:
        """Pause the job with this error, and `leave`; other jobs of the engine go on."""


class Sink(Protocol):
    """Takes an engine's finished rows, in any order, each exactly once."""

    def put(self, outcomes: Iterable[Outcome]) -> None:
        """Take outcomes. Returns at once; they are durable within a second.

        Concurrency: call it on the event loop's thread only.
        """


@runtime_checkable
class CheckingSink(Sink, Protocol):
    """A sink that knows which answers may be asked for again, for an engine that takes whole leases."""

    async def put_or_return(
        self, outcomes: Iterable[Outcome], stopping: Future[None]
    ) -> tuple[list[Outcome], list[Outcome]]:
        """As `put`, but return answers that do not fit the schema of their job and may be asked for again; and answers
        that the class of the schema has not validated when `stopping` is done.

        Each of the first has the error that it is if its row is not, and its answer in `row.earlier`. Raises: JobPaused
        if the class cannot validate; nothing was put then.
        """

    async def as_returned(self, outcome: Outcome) -> Outcome:
        """An answer that `put_or_return` has returned before, as it returned it."""


@runtime_checkable
class BlockSink(Sink, Protocol):
    """Takes finished rows also as lines of the output file, without an object for each."""

    def put_block(self, block: ResultBlock | ColumnResultBlock) -> None:
        """As `put`, for rows that have a result."""


class SegmentSink(Protocol):
    """Takes a worker's finished blocks of one job. An OSError is final: nothing more can be appended.

    Concurrency: `sync` may run in a thread while another thread appends.
    """

    roll: int  # the number of the last segment; a later sink of the same job and worker goes on behind it

    @property
    def commit_delay_s(self) -> float:
        """How long appended blocks may wait for `sync` and their commit."""

    def append(self, blocks: bytes) -> SegmentRef:
        """Take whole blocks of one lease, and say where they will be. From now on they outlive this process, unless
        their commit has to carry them: then it follows within `commit_delay_s`. Raises: OSError.
        """

    def sync(self) -> None:
        """Return once earlier appends are durable, but for those that a commit carries. Raises: OSError."""

    def carried(self, ref: SegmentRef) -> bytes:
        """The blocks of a range that its commit must carry; empty if they are durable where `ref` says."""

    def acknowledge(self, ref: SegmentRef) -> None:
        """The owner has decided on the commit of this range: it is stored, or will never count."""

    def close(self) -> None:
        """Sync, and release what is open. Carried blocks stay known until they are acknowledged. Raises: OSError."""


class SegmentSource(Protocol):
    """Reads the segments of one job. All methods raise FileNotFoundError for a segment that is not there, and OSError.

    Concurrency: one thread at a time.
    """

    def names(self, worker: str = "") -> list[str]:
        """The segments that may hold blocks which no commit names, of one worker or of all; in order."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a segment; fewer only at its end."""

    def sync(self, name: str) -> None:
        """Make durable what a worker that has died wrote."""

    def where(self, name: str) -> str:
        """The place of a segment, for people. It need not exist."""

    def close(self) -> None:
        """Release what is open. Safe to call twice."""


class Engine(Protocol):
    """Runs rows for one model inside one worker. Constructed as `Engine(model: ModelSpec, home: EngineHome)`."""

    async def start(self) -> None:
        """Load the model. Raises ModelFailed, with a message that tells the user how to fix it."""

    async def run(self, feed: Feed, sink: Sink) -> None:
        """Run every row of the feed and put exactly one outcome for each; return when the feed has ended.

        Transient errors are retried inside. Raises JobPaused (AuthRefused, QuotaExhausted) if all further rows would
        fail: finished rows have been put then, and the other rows stay undone.
        Cancelling the task stops at once; rows in flight stay undone.
        """

    def predict(self, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]:
        """Answer a live request: one LiveHead, then the pieces of its body; with `stream`, as they arrive.

        It goes ahead of the rows of `run`, which may or may not have begun. The answer of a service is passed on, also
        an error. Raises: BatchmillError if there is no answer (the call was refused, the model failed).
        Concurrency: any number at once, beside `run`; closing the iterator ends the call.
        """

    async def stop(self) -> None:
        """Release everything. Safe to call twice, and after a failed start."""

    def stats(self) -> EngineStats:
        """The current statistics of the engine."""


@runtime_checkable
class CrashReportingEngine(Engine, Protocol):
    """An engine whose server a request may kill."""

    def report_deaths(self, report: Callable[[Struct], None]) -> None:
        """Set the callback for deaths and their causes: `EngineDied`, `Suspected`, `Charged` of `wire.messages`."""

    def learn(self, poison: Poison) -> None:
        """Update what is known of such requests."""


class Prepared(Protocol):
    """What an engine has started before its model is known."""

    async def close(self) -> None:
        """End what nobody uses. Returns when it has ended."""


@runtime_checkable
class PreparingEngine(Protocol):
    """An engine that can begin its start before its model is known."""

    @staticmethod
    async def prepare() -> Prepared:
        """Start what does not depend on the model. No user code runs. Raises: OSError."""
        ...

    def adopt(self, prepared: Any) -> None:
        """Use what `prepare` of this class returned, and close it. Called before `start`, at most once."""


class AnswerSink(Protocol):
    """Takes an engine's replies to function requests, in any order, each exactly once."""

    def put(self, answer: FunctionReply) -> None:
        """Take a reply. Returns at once. Concurrency: on the event loop's thread only."""


class CallEngine(Engine, Protocol):
    """An engine of deployed functions: it takes function requests besides rows and live requests."""

    def call(self, request: FunctionRequest, answering: AnswerSink) -> None:
        """Take a call; returns at once. Its reply goes to `answering`, an error as `raised`."""

    def abandon(self, request_id: int) -> None:
        """Cancel a call: no reply is put, and its rows that have not begun never run."""

    def take_stats(self) -> CallStats | None:
        """Return the statistics since the last call; None: there are none."""


class Clock(Protocol):
    """The time, which a test can control."""

    def monotonic(self) -> float:
        """Monotonic seconds."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""

    async def sleep(self, seconds: float) -> None: ...


@runtime_checkable
class RetryingEngine(Protocol):
    """An engine whose rows may wait for a retry while their service is down."""

    def fail_rows(self, job_id: str) -> None:
        """Stop retrying failed rows of this job, until one of its rows is answered."""

    def give_back(self, job_id: str) -> list[Row]:
        """Return the rows of this job that wait, and of which no call is in flight. They get no outcome."""
        ...

    def forget(self, job_id: str) -> None:
        """Drop the state of this job: no more rows of it come, unless it is started again."""


class Jobs(Protocol):
    """The only interface to jobs, in the process that owns them. `JobService` implements it.

    All methods raise UnknownName for an unknown id (a unique prefix of an id is enough), and InvalidTransition for a
    request that does not fit the job's state.
    """

    async def submit(self, order: JobOrder) -> Submitted:
        """Start, resume or join a job. Raises InvalidInput if the order cannot run.

        With `order.once` a repeated order returns its first job: `how` is "repeated".
        Raises: Conflict for a key that another order has used.
        """

    async def count_reused(self, spec: Any, dataset: str, plan: str) -> ReuseCount:
        """How many rows of a sealed and planned dataset would take over results of earlier jobs.

        Args: spec: a wire.job_spec.JobSpec. dataset, plan: their folders.
        """

    async def list(self, query: JobQuery = JobQuery()) -> list[JobView]:
        """Jobs, the newest first; without their `problems`. Raises UnknownName for an `after` that is not a job."""

    async def show(self, job_id: str) -> JobView: ...

    def show_recent(self, job_id: str) -> JobView | None:
        """As `show`, without waiting, by the whole id; None: call `show`."""

    def watch(self, job_id: str, interval_s: float = 0.5) -> AsyncIterator[JobView]:
        """Yield views of a job: one at once, then one in each interval; the last when it is paused or has ended."""

    async def pause(self, job_id: str) -> JobView: ...

    async def resume(self, job_id: str) -> JobView: ...

    async def cancel(self, job_id: str) -> JobView:
        """End a job without its remaining rows; finished ones are kept.

        A job from a server's frontend may still be CANCELLING when this returns; it will certainly end. The results of
        any other job are complete.
        """

    async def retry(
        self, job_id: str, change: RetryChange = RetryChange(), model: ModelSpec | None = None
    ) -> JobView:  # fmt: skip
        """Open another generation over the failed rows that may be retried.

        Args: model: what `change.model` names. Raises: InvalidInput for a change that cannot be made.
        """

    async def fail_rows(self, job_id: str) -> JobView:
        """Turn the job's failed rows that wait for a retry into errors now; a paused job is resumed.

        Further failed rows are not retried until a row is answered again. Raises: InvalidTransition.
        """

    async def amend(self, job_id: str, change: Amendment) -> JobView:
        """Change the priority, deadline or budget of an unfinished job."""

    async def explain(self, job_id: str) -> Wait:
        """Explain why a job waits, or is not faster, and which routes it uses or used."""

    async def partial(self, job_id: str, *, is_numbered: bool = False, sampled: bool = False) -> str:
        """Write the rows with an outcome so far, in row order, to a file. Return its path; the caller removes it.

        Args:
            is_numbered: each line begins with the number of its row and a tab.
            sampled: only the rows of the job's sample. Raises: InvalidInput if it has none.
        """

    async def remote(self, job_id: str) -> list[RemoteJob]:
        """List the provider jobs with rows of this job, also of retries, in the order in which they were created."""

    async def settle_remote(self, job_id: str, tag: str, remote_id: str | None) -> RemoteJob:
        """Settle a submission whose result is `unknown`: the provider's id, or None if it was never created.

        Raises: InvalidTransition for another state, or while the job runs; UnknownName for an unknown tag.
        """

    async def remove(self, job_id: str, by: str = "a command on this machine") -> JobView:
        """Remove an ended job with its files, and return its last view. Results outside of the data directory stay.

        Args: by: who removes it, in words, for later requests for the job.

        Raises: InvalidTransition for a job that has not ended.
        """

    async def verify(self, job_id: str) -> LedgerReport:
        """Audit the ledger against the segments; changes nothing."""

    async def rebuild(self, job_id: str) -> LedgerReport:
        """Rebuild the ledger from the job's description and its segments."""


class Live(Protocol):
    """Live requests to models: a client waits for the answer."""

    def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]:
        """As `Engine.predict`, on a worker of the model. A worker is started if there is none.

        Raises: ModelFailed, with the engine's message, if it cannot be started; Unavailable if too many requests wait.
        """

    async def call(
        self, model: ModelSpec, form: str, body: bytes, *, head: bytes = b"", timeout_s: float | None = None
    ) -> FunctionReply:
        """Call a deployed function: see `FunctionRequest`. Raises as `predict`, and what the function raises."""


class WorkerHandle(Protocol):
    """A worker process, for its owner. The messages are those of `wire.messages`."""

    @property
    def pid(self) -> int: ...

    def send(self, message: Struct) -> None:
        """Queue a message; never waits, and does nothing if the worker has exited."""

    def messages(self) -> AsyncIterator[ToOwner]:
        """Yield the worker's messages until it exits."""

    def is_frozen(self) -> bool:
        """Whether a signal has stopped it; it sends nothing until it is continued."""

    def kill(self) -> None:
        """Kill it at once."""

    async def wait(self) -> int:
        """Wait for its exit code, or minus the signal that ended it."""


@runtime_checkable
class PlacedHandle(Protocol):
    """A worker that a cluster places on one of its nodes."""

    waits: str  # why it has not started: the cluster is away, or has no room; empty: it has
    is_lost: bool  # it ended because its node or the cluster went away
    ending: str  # how it ended, if it has no exit code


class Provisions(Protocol):
    """Makes the provisions of workers: all that they get besides their model."""

    async def of(self, model: ModelSpec) -> Provision:
        """Make the provision of a worker of this model. Raises: ModelFailed, naming a missing secret."""


class FetchedAdapter(Protocol):
    """An adapter that was fetched because rows name it."""

    @property
    def own_name(self) -> str:
        """ "NAME/VERSION"."""

    @property
    def state(self) -> str:
        """ "ready", or another state."""

    @property
    def message(self) -> str:
        """Why fetching it failed."""

    @property
    def folder(self) -> str:
        """Its folder."""

    @property
    def rank(self) -> int: ...


class Adapters(Protocol):
    """Registers and fetches adapters."""

    async def ensure(
        self, project: str, base: str, hub_ids: Sequence[str], *, token: str | None = None
    ) -> Mapping[str, FetchedAdapter]:
        """Register these ids of a model hub for the model `base`, and fetch them: each is ready or failed afterwards.

        Args: token: a reference to the token for the hub; None: the base model's token.
        Cancelling it does not stop fetches that have begun.
        """


class Objects(Protocol):
    """The objects below one address of an object store, by names in it. Concurrency: any thread.

    Raises, everywhere: StorageFailed if the store cannot be reached, refuses the credentials, or misses an object.
    """

    def put(self, name: str, data: bytes) -> None:
        """Create an object. Raises: StorageFailed if one of this name exists with other bytes."""

    def get(self, name: str) -> bytes: ...

    def list(self, prefix: str) -> Iterable[tuple[str, int]]:
        """The names that begin with `prefix`, with the size of each."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are no error."""


class Executor(Protocol):
    """Starts workers."""

    async def start(self, start: Start) -> WorkerHandle:
        """Start a worker and send it `start`."""

    def sweep(self) -> None:
        """Kill the workers that a dead owner left behind."""


class NodeTasks(Protocol):
    """Runs pieces of a job's work on the nodes of a cluster, beside its workers."""

    at_once: int  # pieces; more wait
    store: str  # URL of the object store that nodes read and write

    async def run(self, work: NodeWork, *, project: str = "") -> bytes:
        """What the work returns: whatever runs on the node may have made it. Cancelling ends the work.

        Raises: Unavailable (`node_task_lost`) if its process or its node went away, another try may help; Unavailable
        (`cluster_unavailable`); BatchmillError (`node_task_failed`).
        """


@runtime_checkable
class ClusterExecutor(Protocol):
    """An executor whose workers run on a cluster."""

    tasks: NodeTasks | None  # None: nodes read and write no object store

    @property
    def is_local(self) -> bool:
        """Whether its nodes are this machine. False until that is known."""

    async def view(self, *, brief: bool = False) -> ClusterView:
        """The cluster, what runs there and what waits. `brief`: without asking it."""
