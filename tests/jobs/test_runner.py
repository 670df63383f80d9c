"""The runner of a job: its table of steps, and the description that each step leaves."""

from __future__ import annotations

from batchmill.jobs.runner import STEPS
from batchmill.states import ENDED, NEXT, JobState


def test_every_state_has_a_step_or_rests():
    """A job can leave each state: by the state's step, or, where it rests, by a request."""
    assert set(STEPS) == set(JobState) - ENDED - {JobState.PAUSED, JobState.PLANNING}
    assert all(JobState.PAUSED in NEXT[state] for state in STEPS)
