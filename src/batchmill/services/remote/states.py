"""How a provider's words for a batch become the state of a task. Pure; the expressions are settings.

Source: ML Commons' `remote_job.status_field` and `remote_job.status_regex`. Unlike there an expression must
fit the whole word: `incomplete` is not complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchmill.config import MlCommonsEntry, StatusRegex
from batchmill.services.remote.task_records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    COMPLETED_WITH_ERROR,
    EXPIRED,
    FAILED,
    RUNNING,
)
from batchmill.states import JobState

# A state -> the setting of its expression, in the order in which they are tried.
STATES = {
    CANCELLING: "cancelling",
    CANCELLED: "cancelled",
    COMPLETED: "completed",
    EXPIRED: "expired",
    FAILED: "failed",
}
WORD_CHARS_MAX = 256  # of what a provider says; a longer text is no word for a state
OF_JOB = {
    JobState.CANCELLING: CANCELLING,
    JobState.COMPLETED: COMPLETED,
    JobState.CANCELLED: CANCELLED,
    JobState.EXPIRED: EXPIRED,
    JobState.FAILED: FAILED,
}


class StatusWords:
    """The settings, compiled."""

    def __init__(self, entry: MlCommonsEntry) -> None:
        self._fields = entry.status_field
        told: StatusRegex = entry.status_regex
        self._states = [(state, re.compile(getattr(told, setting), re.IGNORECASE)) for state, setting in STATES.items()]

    def state_of(self, reply: Mapping[str, Any]) -> str | None:
        """The state that a provider's reply means: the last of the fields that says one; None: none says any."""
        found = None
        for name in self._fields:
            word = reply.get(name)
            if isinstance(word, str) and len(word) <= WORD_CHARS_MAX:
                found = next((state for state, words in self._states if words.fullmatch(word)), found)
        return found


def state_of_job(state: JobState, rows_failed: int) -> str:
    """The state of a task whose rows run as a job: with errors where some of its rows have one."""
    if state is JobState.COMPLETED and rows_failed:
        return COMPLETED_WITH_ERROR
    return OF_JOB.get(state, RUNNING)
