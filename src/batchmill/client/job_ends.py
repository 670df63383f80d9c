"""Whether a job has ended with results, for programs that wait for it."""

from __future__ import annotations

from batchmill.errors import InvalidDataset, JobPaused
from batchmill.states import JobState, PauseReason
from batchmill.types import JobView

PROBLEMS_SHOWN = 5


def is_sampled(view: JobView) -> bool:
    """Whether a job has paused after its sample."""
    return view.state == JobState.PAUSED and view.reason == PauseReason.SAMPLED


def check_ended(view: JobView, way_on: str) -> None:
    """Raises: InvalidDataset for refused rows; JobPaused, which ends with `way_on`, but for a sample that has run."""
    if view.state == JobState.FAILED:
        places = [f"row {each.line}: {each.code}: {each.message}" for each in view.problems[:PROBLEMS_SHOWN]]
        raise InvalidDataset("\n".join([view.message or "the dataset was refused", *places]))
    if view.state == JobState.PAUSED and not is_sampled(view):
        reason = PauseReason(view.reason) if view.reason in list(PauseReason) else None
        raise JobPaused(f"the job {view.id} is paused ({view.reason}): {view.message}; {way_on}", reason=reason)
