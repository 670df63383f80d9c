"""What providers' words make of a task."""

from __future__ import annotations

import pytest

from batchmill.config import MlCommonsEntry, StatusRegex
from batchmill.services.remote.job_tasks import StatusPatterns, state_of_job
from batchmill.states import JobState


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        ({"status": "validating"}, None),
        ({"status": "in_progress"}, None),
        ({"status": "finalizing"}, None),
        ({"status": "completed"}, "COMPLETED"),
        ({"status": "complete"}, "COMPLETED"),
        ({"TransformJobStatus": "complete"}, "COMPLETED"),
        ({"TransformJobStatus": "Completed"}, "COMPLETED"),
        ({"TransformJobStatus": "Stopping"}, "CANCELLING"),
        ({"TransformJobStatus": "Stopped"}, "CANCELLED"),
        ({"TransformJobStatus": "InProgress"}, None),
        ({"status": "PartiallyCompleted"}, "COMPLETED"),
        ({"status": "Submitted"}, None),
        ({"status": "cancelling"}, "CANCELLING"),
        ({"status": "cancelled"}, "CANCELLED"),
        ({"status": "canceled"}, "CANCELLED"),
        ({"Status": "EXPIRED"}, "EXPIRED"),
        ({"status": "timeout"}, "EXPIRED"),
        ({"status": "Failed"}, "FAILED"),
        ({"status": "incomplete"}, None),
        ({"status": "not_failed"}, None),
        ({"state": "completed"}, None),
        ({"status": 7}, None),
        ({"status": None}, None),
        ({"status": "completed" * 100}, None),
        ({}, None),
        ({"status": "completed", "TransformJobStatus": "Failed"}, "FAILED"),
        ({"status": "completed", "TransformJobStatus": "InProgress"}, "COMPLETED"),
    ],
    ids=str,
)
def test_words_of_providers(reply, state):
    """A provider's whole word means its state, in any case; one that is not known leaves the task as it is."""
    assert StatusPatterns(MlCommonsEntry()).state_of(reply) == state


def test_words_are_settings():
    """Fields and expressions are the configuration's: with `.*` around it, a part of a word is enough."""
    entry = MlCommonsEntry(status_field=("state",), status_regex=StatusRegex(completed=".*complete.*", failed="lost"))
    words = StatusPatterns(entry)
    assert words.state_of({"state": "incomplete"}) == "COMPLETED"
    assert words.state_of({"state": "LOST"}) == "FAILED"
    assert words.state_of({"status": "failed"}) is None


@pytest.mark.parametrize(
    ("state", "failed", "expected"),
    [
        (JobState.VALIDATING, 0, "RUNNING"),
        (JobState.PAUSED, 3, "RUNNING"),
        (JobState.FINALIZING, 0, "RUNNING"),
        (JobState.CANCELLING, 0, "CANCELLING"),
        (JobState.CANCELLED, 1, "CANCELLED"),
        (JobState.COMPLETED, 0, "COMPLETED"),
        (JobState.COMPLETED, 1, "COMPLETED_WITH_ERROR"),
        (JobState.EXPIRED, 0, "EXPIRED"),
        (JobState.FAILED, 0, "FAILED"),
    ],
)
def test_jobs_become_tasks(state, failed, expected):
    """A task whose rows run as a job says how the job stands, and whether some of its rows failed."""
    assert state_of_job(state, failed) == expected
