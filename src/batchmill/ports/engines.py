"""What engines are, and what they are given: rows to run, places for outcomes and answers."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

from batchmill.errors import JobPaused
from batchmill.types import (
    AdapterSet,
    CallStats,
    ColumnBlock,
    ColumnResultBlock,
    EngineStats,
    FunctionRequest,
    LiveHead,
    LiveRequest,
    MediaBounds,
    Outcome,
    ResultBlock,
    Row,
    RowBlock,
    Usage,
)
from batchmill.types.models import Poison

if TYPE_CHECKING:
    from asyncio import Future

    from batchmill.wire.messages import FunctionReply


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
