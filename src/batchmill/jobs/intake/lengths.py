"""How long the answers of a model were in its newest jobs and samples: what an estimate of a job learns from.

Of jobs that made the same requests, it learns how long the requests were, too: as the service counted them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from batchmill.states import JobState, PauseReason
from batchmill.types import JobView
from batchmill.wire.native import EstimateRange
from batchmill.wire.replies import ASKED_AGAIN, MISMATCH
from batchmill.wire.sampling import SURE

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
    asked_again: float | None = None  # share of the rows whose first answer did not fit their schema; None: not known
    input: EstimateRange | None = None  # input tokens of a row, in jobs that made the same requests; None: not known
    is_same: bool = False  # the jobs made the same requests as the one that is estimated, or were samples of it

    @property
    def is_sure(self) -> bool:
        return len(self.jobs) >= JOBS_SURE


class _Answered(Struct, frozen=True):
    """A job that tells how long answers are."""

    job: str
    rows: int  # with an answer of their own
    input_tokens: int
    tokens: int
    work: str
    asked_again: int  # rows; 0: none, or the job has no schema
    mismatched: int  # rows whose last answer did not fit either


def learn(views: Iterable[JobView], models: Iterable[str], work: str = "") -> list[AnswerLengths]:
    """The lengths for each model with jobs of its own that completed, or have run their sample.

    Args:
        views: jobs, the newest first.
        work: jobs that compute the same, such as a sample of this one, know more than all others.
    """
    found: dict[str, list[_Answered]] = {name: [] for name in models}
    for view in views:
        if view.model in found and (rows := _rows_answered(view)):
            failed = view.errors.get(MISMATCH, 0)
            asked = view.warnings.get(ASKED_AGAIN, 0) + failed
            found[view.model].append(
                _Answered(view.id, rows, view.usage.input_tokens, view.usage.output_tokens, view.work, asked, failed)
            )
    return [_lengths(name, jobs, work) for name, jobs in found.items() if jobs]


def _rows_answered(view: JobView) -> int:
    """Rows that have an answer of their own; 0 for a job that cannot be learned from, such as one that was retried."""
    is_sample = view.state == JobState.PAUSED and view.reason == PauseReason.SAMPLED
    if not (is_sample or view.state == JobState.COMPLETED) or view.generation or not view.usage.output_tokens:
        return 0
    failed = view.rows_failed - view.rows_rejected
    if is_sample:  # those that share an outcome are counted at the end
        ran = view.rows_ok + failed - view.rows_reused
    else:
        ran = view.rows - view.rows_rejected - view.rows_folded - view.rows_reused
    return ran - failed if failed <= ran * FAILED_SHARE_MAX else 0


def _lengths(model: str, jobs: list[_Answered], work: str) -> AnswerLengths:
    same = [job for job in jobs if work and job.work == work]
    chosen = (same or jobs)[:JOBS_MAX]
    rows = sum(job.rows for job in chosen)
    if same:  # other rows are the only difference
        wider = 1 + SURE / math.sqrt(rows)
    else:
        wider = 1.0 if len(chosen) >= JOBS_SURE else WIDER
    output = _spread([(job.tokens, job.rows) for job in chosen], wider)
    given = _spread([(job.input_tokens, job.rows) for job in chosen], wider) if same else None
    return AnswerLengths(
        model, [job.job for job in chosen], rows, output.low, output.mid, output.high,
        _asked_again(same or chosen, bool(same)), given if given and given.mid else None, bool(same),
    )  # fmt: skip


def _spread(counted: Sequence[tuple[int, int]], wider: float) -> EstimateRange:
    """Tokens of a row. Args: counted: tokens and rows of each job."""
    means = [tokens / rows for tokens, rows in counted]
    mid = sum(tokens for tokens, _ in counted) / sum(rows for _, rows in counted)
    return EstimateRange(min(means) / wider, mid, max(means) * wider)


def _asked_again(jobs: list[_Answered], is_same: bool) -> float | None:
    """Of jobs that may have no schema, those tell in which a row was asked for again."""
    known = jobs if is_same else [job for job in jobs if job.asked_again]
    rows = sum(job.rows + job.mismatched for job in known)
    return min(1.0, sum(job.asked_again for job in known) / rows) if known else None
