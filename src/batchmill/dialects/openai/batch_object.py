"""A job as this API shows it: the batch object, made from committed records only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from batchmill.services.job_desk import NO_RESULTS, ResultIds
from batchmill.states import EXPIRED, JobState
from batchmill.types import JobView, Price

JOB, BATCH = "job_", "batch_"

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_STATUS: dict[JobState, Status] = {
    JobState.VALIDATING: "validating",
    JobState.PLANNING: "validating",
    JobState.QUEUED: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
    JobState.FINALIZING: "finalizing",
    JobState.CANCELLING: "cancelling",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
    JobState.FAILED: "failed",
}


class BatchError(Struct, frozen=True):
    code: str | None
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, frozen=True):
    cached_tokens: int


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0  # engines do not tell them apart


class BatchUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Progress(Struct, frozen=True):
    """What OpenAI's object has no words for; the openai package keeps it in `model_extra`."""

    job: str
    state: str
    reason: str | None
    message: str
    notes: list[str]  # what its engines say: "starting vLLM: 20 s"
    remaining_s: float | None
    rows_per_s: float | None
    cost: float | None  # USD
    prices: dict[str, Price]  # USD per million tokens, of the models that rows go to


class Batch(Struct, frozen=True, kw_only=True):
    """Source: OpenAI's API reference, "the batch object"."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    batchmill: Progress


def batch_id(job_id: str) -> str:
    return BATCH + job_id.removeprefix(JOB)


def job_id(batch_id: str) -> str:
    """The job behind a batch; an id that is none of ours stays one that nobody knows."""
    return JOB + batch_id.removeprefix(BATCH) if batch_id.startswith(BATCH) else ""


def batch_of(view: JobView, results: ResultIds = NO_RESULTS, *, hide: Callable[[str], str] = str) -> Batch:
    """`hide` takes out of a sentence what only the server's operator may read."""
    state, origin = _state(view), view.origin or {}
    has_expired = state is JobState.EXPIRED or view.reason == EXPIRED or _is_late(view)
    return Batch(
        id=batch_id(view.id),
        endpoint=origin.get("endpoint", ""),
        model=view.model if view.model and "," not in view.model else None,
        errors=_errors(view, hide) if state is JobState.FAILED else None,
        input_file_id=origin.get("input_file_id", ""),
        completion_window=origin.get("completion_window", ""),
        status=_status(state, has_expired),
        output_file_id=results.output,
        error_file_id=results.errors,
        created_at=int(view.created),
        in_progress_at=_seconds(view.started),
        expires_at=_seconds(view.deadline),
        finalizing_at=_seconds(view.finalizing or (view.cancelling if has_expired else None)),
        completed_at=_ended(view, JobState.COMPLETED),
        failed_at=_ended(view, JobState.FAILED),
        expired_at=_ended(view, JobState.EXPIRED),
        cancelling_at=None if has_expired else _seconds(view.cancelling),
        cancelled_at=_ended(view, JobState.CANCELLED),
        request_counts=RequestCounts(view.rows, view.rows_ok, view.rows_failed),
        usage=_usage(view),
        metadata=view.labels or None,
        batchmill=Progress(
            view.id,
            view.state,
            view.reason,
            hide(view.message),
            [hide(note) for note in view.notes],
            view.remaining_s,
            view.rows_per_s,
            view.cost,
            view.prices,
        ),  # fmt: skip
    )


def _state(view: JobView) -> JobState:
    """One that is to end is no longer in progress, though a provider of its rows may have to be asked again."""
    is_stopped = view.state == JobState.PAUSED and view.cancelling is not None
    return JobState.CANCELLING if is_stopped else JobState(view.state)


def _is_late(view: JobView) -> bool:
    return view.cancelling is not None and view.deadline is not None and view.cancelling >= view.deadline


def _status(state: JobState, has_expired: bool) -> Status:
    """A batch that ran out of time is not being cancelled: its results are being written."""
    return "finalizing" if state is JobState.CANCELLING and has_expired else _STATUS[state]


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)


def _ended(view: JobView, state: JobState) -> int | None:
    return _seconds(view.finished) if view.state == state else None


def _errors(view: JobView, hide: Callable[[str], str]) -> BatchErrors:
    """Why no row ran: what validation found, or what the engine said."""
    if not view.problems:
        return BatchErrors([BatchError(view.reason or "failed", hide(view.message))])
    found = [BatchError(each.code, hide(each.message), each.line or None) for each in view.problems]
    more = view.problems_total - len(found)
    if more > 0:
        found.append(BatchError("more_errors", f"{more:,} more errors are not listed"))
    return BatchErrors(found)


def _usage(view: JobView) -> BatchUsage:
    usage = view.usage
    return BatchUsage(
        usage.input_tokens,
        InputDetails(usage.cached_tokens),
        usage.output_tokens,
        OutputDetails(),
        usage.input_tokens + usage.output_tokens,
    )
