"""The states of a job and the one table of what may follow what. `jobs/runner.py` has the step of each state."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    VALIDATING = "validating"  # reading, checking and sealing the dataset
    PLANNING = "planning"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"  # resumable; the job says why
    FINALIZING = "finalizing"  # every row has its outcome; the result files are being written
    CANCELLING = "cancelling"  # no new rows; finished ones are kept, the rest go to the error file
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed: finished rows are kept, the rest are in the error file
    FAILED = "failed"  # no row ran: the dataset or the model was refused

    @property
    def is_at_rest(self) -> bool:
        """Nothing of it is left to do: it has ended, though a retry may open it again."""
        return self in ENDED


ENDED = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED})

_GONE = {JobState.CANCELLED, JobState.EXPIRED}  # no row was planned: there is nothing to write
NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.PLANNING, JobState.PAUSED, JobState.FAILED, *_GONE}),
    JobState.PLANNING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.FAILED, *_GONE}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLING}),
    # QUEUED again: a model's route failed, and the next one takes its rows. FAILED: the engine never started, and the
    # policy says so; else the job pauses.
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.FINALIZING, JobState.CANCELLING, JobState.FAILED}
    ),
    JobState.PAUSED: frozenset({JobState.VALIDATING, JobState.QUEUED, JobState.CANCELLING}),
    JobState.FINALIZING: frozenset({JobState.COMPLETED, JobState.PAUSED}),
    # A deadline that passes ends a job the same way; `reason` says which of the two it is.
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.EXPIRED, JobState.PAUSED}),
    # `retry` opens another generation over the rows that failed or were cancelled.
    JobState.COMPLETED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset(),
}

EXPIRED = "expired"  # the reason of a job that is CANCELLING because its deadline has passed


class PauseReason(StrEnum):
    """Why a job stopped and can go on."""

    ASKED = "asked"  # somebody paused it
    INTERRUPTED = "interrupted"  # Ctrl-C, or the process ended
    BUDGET = "budget"
    QUOTA = "quota"
    AUTH = "auth"
    STORAGE_FULL = "storage_full"
    STORAGE_FAILED = "storage_failed"  # the disk gives errors, or no further file may be opened
    DISK_QUOTA = "disk_quota"  # its project has as many bytes on the disk as it may
    INPUT_CHANGED = "input_changed"
    DATASET_DAMAGED = "dataset_damaged"  # what was kept of the input, not the input itself
    ENGINE_FAILED = "engine_failed"
    SUBMIT_UNKNOWN = "submit_unknown"  # nobody can say whether a provider took a batch of rows: somebody must look
    ROUTE_FAILED = "route_failed"  # the way to the model that was chosen does not go on, and there is no other
