"""How long the answers of a model were in its newest jobs: what an estimate of another job learns from."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from batchmill.states import JobState
from batchmill.types import JobView

JOBS_MAX = 5  # the newest of a model
JOBS_SURE = 3  # with fewer, the range is wider than what they show
WIDER = 2.0  # so many times
FAILED_SHARE_MAX = 0.1  # of the rows that ran: the answers of failed rows are not known


class AnswerLengths(Struct, frozen=True):
    """Output tokens of a row of one model: the mean of each job, the lowest and highest of them, and of all rows."""

    model: str
    jobs: list[str]  # the newest first
    rows: int
    low: float
    mid: float
    high: float

    @property
    def is_sure(self) -> bool:
        return len(self.jobs) >= JOBS_SURE


def learn(views: Iterable[JobView], models: Iterable[str]) -> list[AnswerLengths]:
    """The lengths for each model with completed jobs of its own. Args: views: jobs, the newest first."""
    found: dict[str, list[tuple[str, int, int]]] = {name: [] for name in models}
    for view in views:
        jobs = found.get(view.model)
        rows = _rows_answered(view)
        if jobs is not None and rows and len(jobs) < JOBS_MAX:
            jobs.append((view.id, rows, view.usage.output_tokens))
    return [_lengths(name, jobs) for name, jobs in found.items() if jobs]


def _rows_answered(view: JobView) -> int:
    """Rows that have an answer of their own; 0 for a job that cannot be learned from, such as one that was retried."""
    if view.state != JobState.COMPLETED or view.generation or not view.usage.output_tokens:
        return 0
    ran = view.rows - view.rows_rejected - view.rows_folded
    failed = view.rows_failed - view.rows_rejected
    return ran - failed if failed <= ran * FAILED_SHARE_MAX else 0


def _lengths(model: str, jobs: list[tuple[str, int, int]]) -> AnswerLengths:
    means = [tokens / rows for _, rows, tokens in jobs]
    rows, tokens = sum(rows for _, rows, _ in jobs), sum(tokens for _, _, tokens in jobs)
    wider = 1.0 if len(jobs) >= JOBS_SURE else WIDER
    return AnswerLengths(
        model, [job for job, _, _ in jobs], rows, min(means) / wider, tokens / rows, max(means) * wider
    )
