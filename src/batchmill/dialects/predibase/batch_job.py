"""A job as this API shows it, made from committed records only. Its published client reads the first five fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchmill.dialects.predibase.datasets import told
from batchmill.services.job_desk import ResultIds
from batchmill.states import JobState
from batchmill.types import JobView, Price

DOOR = "predibase"

Status = Literal["queued", "running", "completed", "failed", "cancelled"]
_STATUS: dict[JobState, Status] = {
    JobState.VALIDATING: "queued",
    JobState.PLANNING: "queued",
    JobState.QUEUED: "queued",
    JobState.RUNNING: "running",
    JobState.PAUSED: "running",
    JobState.FINALIZING: "running",
    JobState.CANCELLING: "running",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "failed",
    JobState.FAILED: "failed",
}


class Rows(Struct, frozen=True):
    total: int  # 0: not counted yet
    succeeded: int
    failed: int


class Tokens(Struct, frozen=True):
    input: int
    cached: int  # of the input
    output: int


class PerMillion(Struct, frozen=True):
    """USD per million tokens."""

    input: float
    cached: float
    output: float


class Job(Struct, frozen=True, kw_only=True, rename="camel"):
    uuid: str
    original_request: dict[str, Any]
    status: Status
    error: str | None
    result_path: str | None  # None: there is nothing to download
    state: str  # as batchmill has it
    message: str  # what it waits for, or what its engine says
    dataset_id: str | None
    model: str
    rows: Rows
    errors: dict[str, int]  # code -> rows
    tokens: Tokens
    cost: float | None  # USD; None: no price is known
    price_per_million: PerMillion | None
    progress: float  # 0 to 1
    rows_per_second: float | None
    remaining_seconds: float | None
    created_at: float  # seconds since the epoch, as the following
    started_at: float | None
    finished_at: float | None


def job_of(view: JobView, results: ResultIds, hide: Callable[[str], str], *, reasons: Sequence[str] = ()) -> Job:
    """`hide` takes the server's folders out of a sentence; `reasons` say why it is not going faster."""
    origin = view.origin or {}
    state = JobState(view.state)
    usage = view.usage
    return Job(
        uuid=view.id,
        original_request=origin.get("request", {}),
        status=_status(view, state),
        error=_error(view, state, hide),
        result_path=None if results.output is None else f"/v2/batch-inference/{view.id}/results",
        state=view.state,
        message=hide("; ".join([*reasons]) or view.message or "; ".join(view.notes)),
        dataset_id=origin.get("dataset_id"),
        model=view.model,
        rows=Rows(view.rows, view.rows_ok, view.rows_failed),
        errors=view.errors,
        tokens=Tokens(usage.input_tokens, usage.cached_tokens, usage.output_tokens),
        cost=view.cost,
        price_per_million=_price(view.prices),
        progress=_progress(view, state),
        rows_per_second=view.rows_per_s,
        remaining_seconds=view.remaining_s,
        created_at=view.created,
        started_at=view.started,
        finished_at=view.finished,
    )


def _status(view: JobView, state: JobState) -> Status:
    """A job that paused before a row of it ran waits still."""
    return "queued" if state is JobState.PAUSED and view.started is None else _STATUS[state]


def _error(view: JobView, state: JobState, hide: Callable[[str], str]) -> str | None:
    """Why it failed: the first lines that are wrong, or what the engine said."""
    if state is JobState.EXPIRED:
        return hide(view.message) or "its deadline passed before all rows had run: the results hold those that did"
    if state is not JobState.FAILED:
        return None
    return hide(told(view.problems, view.problems_total) or view.message or view.reason or "failed")


def _price(prices: dict[str, Price]) -> PerMillion | None:
    """Of the base model: its adapters cost what it costs."""
    for price in prices.values():
        return PerMillion(price.input, price.input if price.cached is None else price.cached, price.output)
    return None


def _progress(view: JobView, state: JobState) -> float:
    if state is JobState.COMPLETED:
        return 1.0
    return (view.rows_ok + view.rows_failed) / view.rows if view.rows else 0.0
