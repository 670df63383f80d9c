"""How a job ends before all of its rows have run: asked to, or because its deadline has passed."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec import Struct

from batchmill.states import EXPIRED, JobState
from batchmill.types import RowError


class EarlyEnd(Struct, frozen=True):
    """What becomes of the job, and what its error file says of the rows that never ran."""

    state: JobState
    reason: str | None  # while it is CANCELLING
    unrun: RowError


# Source: OpenAI's Batch API, "the request output object".
CANCELLED = EarlyEnd(
    JobState.CANCELLED,
    None,
    RowError("batch_cancelled", "This request was not executed because the batch was cancelled."),
)
PAST_DEADLINE = EarlyEnd(
    JobState.EXPIRED,
    EXPIRED,
    RowError("batch_expired", "This request could not be executed before the completion window expired."),
)


def early_end_of(record: sa.RowMapping) -> EarlyEnd:
    """How a job that was asked to end early ends: what was asked after the deadline is its expiry."""
    cancelling, deadline = record["cancelling"], record["deadline"]
    is_late = cancelling is not None and deadline is not None and cancelling >= deadline
    return PAST_DEADLINE if is_late else CANCELLED


def begins_at(early: EarlyEnd, deadline: float | None, now: float) -> float:
    """When a job begins to end: never before its deadline where that is the reason, whatever the clock says."""
    return max(now, deadline) if early is PAST_DEADLINE and deadline is not None else now
