"""The states of a job, and the table of allowed transitions. `jobs/runner.py` has the step of each state."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    VALIDATING = "validating"  # reading, checking and sealing the dataset
    PLANNING = "planning"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"  # resumable; the job's reason says why
    FINALIZING = "finalizing"  # every row has its outcome; the result files are being written
    CANCELLING = "cancelling"  # no new rows; finished ones are kept, the others go to the error file
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed: finished rows are kept, the others are in the error file
    FAILED = "failed"  # no row ran: the dataset or the model was refused

    @property
    def is_at_rest(self) -> bool:
        """Whether the job has ended. A retry may open it again."""
        return self in ENDED


ENDED = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED})

_ENDED_EARLY = {JobState.CANCELLED, JobState.EXPIRED}  # before any row is planned, there are no results to write
NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.PLANNING, JobState.PAUSED, JobState.FAILED, *_ENDED_EARLY}),
    JobState.PLANNING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.FAILED, *_ENDED_EARLY}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLING}),
    # QUEUED again: a model's route failed, and its rows go to the next route. FAILED: the engine never started, and the
    # policy is to fail; otherwise the job pauses.
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.FINALIZING, JobState.CANCELLING, JobState.FAILED}
    ),
    JobState.PAUSED: frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.CANCELLING}),
    JobState.FINALIZING: frozenset({JobState.COMPLETED, JobState.PAUSED}),
    # A job whose deadline passes ends the same way; `reason` tells the two apart.
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.EXPIRED, JobState.PAUSED}),
    # `retry` opens another generation over the rows that failed or were cancelled.
    JobState.COMPLETED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset(),
}

EXPIRED = "expired"  # the reason of a job that is CANCELLING because its deadline has passed


class PauseReason(StrEnum):
    """Why a job is paused."""

    REQUESTED = "asked"  # a user paused it
    INTERRUPTED = "interrupted"  # Ctrl-C, or the process ended
    INTERNAL_ERROR = "internal_error"  # a bug ended what gives out rows, or what counts them
    BUDGET = "budget"
    SAMPLED = "sampled"  # the rows of its sample have run; `resume` runs the others
    QUOTA = "quota"
    AUTH = "auth"
    STORAGE_FULL = "storage_full"
    STORAGE_FAILED = "storage_failed"  # the disk or the object store failed, or the limit of open files was reached
    DATABASE_UNAVAILABLE = "database_unavailable"  # it goes on by itself when the database is back
    DISK_QUOTA = "disk_quota"  # its project has reached its disk quota
    INPUT_CHANGED = "input_changed"
    DATASET_DAMAGED = "dataset_damaged"  # the sealed copy of the input, not the input itself
    ENGINE_FAILED = "engine_failed"
    SUBMIT_UNKNOWN = "submit_unknown"  # it is unknown whether a provider accepted a batch: a user must check
    ROUTE_FAILED = "route_failed"  # the model's chosen route failed, and there is no other
