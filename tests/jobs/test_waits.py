"""Why a job waits, in sentences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchmill.jobs.views import ModelAtWork, Silent, Standstill, reasons, view_at_work, wait_without_runner
from batchmill.states import JobState, PauseReason
from batchmill.types import EngineStats, JobView

STARTING = ModelAtWork("tiny", False, [EngineStats(note="loading weights")])
RESTING = ModelAtWork("mini", True, [EngineStats(note="the service requests a wait of 12 s", live=2)])
WHY = "'big' needs 12 GiB and 4 of 24 GiB are free"
ROOMLESS = ModelAtWork("big", False, [], WHY)
CRAMPED = ModelAtWork("big", True, [EngineStats(note="busy")], WHY)
BUSY = ModelAtWork("f", True, [EngineStats(in_flight=5)])


def view(state: JobState, **more) -> JobView:
    return JobView(id="job_1", state=state, **more)


@pytest.mark.parametrize(
    ("seen", "models", "ahead", "words"),
    [
        (view(JobState.RUNNING), [BUSY], 0, []),
        (view(JobState.COMPLETED), [], 0, []),
        (view(JobState.VALIDATING, progress=0.42), [], 0, ["42%"]),
        (view(JobState.QUEUED), [STARTING], 3, ["'tiny' is still starting: loading weights", "3 other jobs"]),
        (view(JobState.QUEUED), [ROOMLESS], 0, [f"the model 'big' waits for room: {WHY}"]),
        (view(JobState.RUNNING), [CRAMPED], 0, [f"another copy of the model 'big' waits for room: {WHY}", "busy"]),
        (view(JobState.RUNNING), [RESTING, BUSY], 1, ["a wait of 12 s", "1 other job gets", "2 live requests"]),
        (view(JobState.FINALIZING, progress=0.5), [], 0, ["results are being written (50% done)"]),
        (view(JobState.CANCELLING), [], 0, ["being ended"]),
        (view(JobState.PAUSED, reason=PauseReason.BUDGET, message="the budget is spent"), [], 0, ["budget is spent"]),
        (view(JobState.PAUSED, reason=PauseReason.AUTH, message="401"), [], 0, ["401; mend the credentials"]),
        (view(JobState.PAUSED, reason=PauseReason.REQUESTED), [], 0, ["(asked); resume it"]),
    ],
)
def test_what_a_job_waits_for(seen, models, ahead, words):
    """Each thing that holds a job up is one sentence; a job that has what it can use waits for nothing."""
    found = reasons(seen, models, ahead)
    assert len(found) == len(words)
    assert all(part in sentence for part, sentence in zip(words, found, strict=True))


SILENT = ModelAtWork("f", True, [], silent=[Silent(31, 42.0, True), Silent(32, 7.0, False)])


@pytest.mark.parametrize(
    ("models", "standstill", "words"),
    [
        ([BUSY], Standstill(75.0, 3), ["no row of it has ended for 75 s; 3 rows are with its workers"]),
        ([BUSY], Standstill(75.0, 0), ["for 75 s; its rows wait until a worker has room"]),
        ([BUSY], Standstill(0.0, 0), ["its rows wait until a worker has room"]),
        ([], Standstill(0.0, 0, is_between=True), ["what its workers had finished is being counted"]),
        ([STARTING], Standstill(0.0, 0), ["still starting"]),
        ([SILENT], Standstill(42.0, 1), ["nothing for 42 s: a signal has stopped it", "`kill 32`", "1 row is with"]),
    ],
)
def test_a_job_that_stands_still_says_so(models, standstill, words):
    """A job of which no row ends has always a reason, and workers that say nothing are named."""
    found = reasons(view(JobState.RUNNING), models, 0, standstill)
    assert len(found) == len(words)
    assert all(part in sentence for part, sentence in zip(words, found, strict=True))


def test_a_job_that_nothing_works_on_says_so():
    """A job that looks as if it ran while nothing works on it has a reason; one that is over has none."""
    assert "disk has no room" in wait_without_runner(view(JobState.RUNNING), is_stranded=True).reasons[0]
    assert "nothing works on it" in wait_without_runner(view(JobState.QUEUED), is_stranded=False).reasons[0]
    paused = view(JobState.PAUSED, reason=PauseReason.REQUESTED)
    assert "(asked)" in wait_without_runner(paused, is_stranded=False).reasons[0]
    assert wait_without_runner(view(JobState.COMPLETED), is_stranded=False).reasons == []


@pytest.mark.parametrize(("state", "notes"), [(JobState.QUEUED, ["setting up f"]), (JobState.FINALIZING, [])])
def test_workers_say_nothing_of_a_job_whose_rows_have_run(state, notes):
    """While results are written, the view shows how far, and no note of a worker that was starting."""
    runner = SimpleNamespace(models=[], spec=SimpleNamespace(code=None), rows_run=None, waits_for="", progress=0.5)
    worker = SimpleNamespace(stats=EngineStats(note="setting up f"), is_ready=True)
    found = view_at_work(view(str(state)), runner, SimpleNamespace(workers_of=lambda models, code: [worker]))
    assert (found.progress, found.notes) == (0.5, notes)
