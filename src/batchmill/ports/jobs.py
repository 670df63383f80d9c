"""Jobs and live requests, as the APIs use them, and the adapters that jobs name."""

# pyright: reportReturnType=false
# The body of a protocol's method is its docstring.

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from batchmill.types import (
    Amendment,
    JobOrder,
    JobQuery,
    JobView,
    LedgerReport,
    LiveHead,
    LiveRequest,
    ModelSpec,
    Once,
    RemoteJob,
    RetryChange,
    ReuseCount,
    Submitted,
    Wait,
)

if TYPE_CHECKING:
    from batchmill.wire.messages import FunctionReply


class Jobs(Protocol):
    """The only interface to jobs, in the process that owns them. `JobService` implements it.

    All methods raise UnknownName for an unknown id (a unique prefix of an id is enough), and InvalidTransition for a
    request that does not fit the job's state.
    """

    async def submit(self, order: JobOrder) -> Submitted:
        """Start, resume or join a job. Raises InvalidInput if the order cannot run.

        With `order.once` a repeated order returns its first job: `how` is "repeated". That of a command has it go on.
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

    async def pause(self, job_id: str) -> JobView:
        """Pause a running job. One that the end of its owner interrupted stays paused: who follows it leaves it so."""

    async def resume(self, job_id: str) -> JobView: ...

    async def resume_interrupted(self, job_id: str) -> None:
        """Resume a job that the end of its owner interrupted; any other stays as it is."""

    async def cancel(self, job_id: str) -> JobView:
        """End a job without its remaining rows; finished ones are kept.

        A job from a server's frontend may still be CANCELLING when this returns; it will certainly end. The results of
        any other job are complete.
        """

    async def retry(
        self, job_id: str, change: RetryChange = RetryChange(), model: ModelSpec | None = None,
        once: Once | None = None,
    ) -> JobView:  # fmt: skip
        """Open another generation over the failed rows that may be retried.

        Args:
            model: what `change.model` names.
            once: by it, a repeated request does nothing.

        Raises: InvalidInput for a change that cannot be made.
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
