"""A job as OpenAI's batch object."""

import msgspec
import pytest
from openai.types import Batch as OpenAIBatch

from batchmill.dialects.openai.batches import batch_id, batch_of, job_id
from batchmill.services.project_jobs import ResultIds
from batchmill.states import EXPIRED, JobState
from batchmill.types import JobView, Price, Problem, Usage

ID = "job_0123456789abcdef0123"
ORIGIN = {"frontend": "openai", "endpoint": "/v1/embeddings", "input_file_id": "file-1", "completion_window": "24h"}
EARLY = JobView(ID, JobState.VALIDATING, origin=ORIGIN, created=100.9, deadline=86500.0)


def shown(view: JobView, results: ResultIds | None = None) -> OpenAIBatch:
    """As the openai package reads it, strictly."""
    batch = batch_of(view) if results is None else batch_of(view, results)
    return OpenAIBatch.model_validate_json(msgspec.json.encode(batch), strict=True)


def changed(**changes) -> JobView:
    return msgspec.structs.replace(EARLY, **changes)


STATUS = {
    JobState.VALIDATING: "validating",
    JobState.PLANNING: "validating",
    JobState.QUEUED: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
    JobState.FINALIZING: "finalizing",
    JobState.CANCELLING: "cancelling",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
    JobState.FAILED: "failed",
}


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_a_status(state):
    """Each state of a job is one of OpenAI's statuses, and the whole object is one their package takes."""
    assert shown(changed(state=state)).status == STATUS[state]


def test_ids_go_both_ways():
    """A batch and its job have the same digits; what is not a batch's id is not a job's."""
    assert batch_id(ID) == "batch_0123456789abcdef0123"
    assert job_id(batch_id(ID)) == ID
    assert job_id(ID) == job_id("file-1") == job_id("") == ""


def test_a_running_batch():
    """Counts are live, times are whole seconds, and what has not happened has no time."""
    view = changed(state=JobState.RUNNING, started=101.2, rows=10, rows_ok=4, rows_failed=1, usage=Usage(50, 20, 7))
    batch = shown(view)
    assert (batch.created_at, batch.in_progress_at, batch.expires_at) == (100, 101, 86500)
    assert batch.request_counts and batch.request_counts.model_dump() == {"total": 10, "completed": 4, "failed": 1}
    assert batch.usage and (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (
        50,
        7,
        57,
    )
    assert batch.usage.input_tokens_details.cached_tokens == 20
    assert batch.usage.output_tokens_details.reasoning_tokens == 0
    later = (batch.finalizing_at, batch.completed_at, batch.failed_at, batch.cancelled_at, batch.expired_at)
    assert later == (None,) * 5
    assert (batch.output_file_id, batch.error_file_id, batch.errors, batch.metadata) == (None,) * 4


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "expired"])
def test_only_its_own_end_has_a_time(state):
    """A batch ended in one way, and says when."""
    batch = shown(changed(state=state, finished=200.5))
    ends = {name: getattr(batch, f"{name}_at") for name in ("completed", "failed", "cancelled", "expired")}
    assert ends == {name: 200 if name == state else None for name in ends}


def test_results_are_named():
    """The files of an ended batch stand where OpenAI has them."""
    batch = shown(changed(state=JobState.COMPLETED, finished=1.0), ResultIds("file-o", "file-e"))
    assert (batch.output_file_id, batch.error_file_id) == ("file-o", "file-e")


def test_a_batch_that_runs_out_of_time_is_finalizing():
    """Its results are being written: nobody cancelled it."""
    batch = shown(changed(state=JobState.CANCELLING, reason=EXPIRED, cancelling=300.0))
    assert (batch.status, batch.finalizing_at, batch.cancelling_at) == ("finalizing", 300, None)


def test_a_cancelled_batch_says_since_when():
    """`cancelling_at` is when it was asked, `cancelled_at` when it was done; a provider may have to be asked."""
    held_up = changed(state=JobState.PAUSED, reason="route_failed", cancelling=300.0)
    assert shown(held_up).status == "cancelling"
    assert shown(msgspec.structs.replace(held_up, deadline=300.0)).status == "finalizing"
    batch = shown(changed(state=JobState.CANCELLED, cancelling=300.0, finished=302.0))
    assert (batch.cancelling_at, batch.cancelled_at) == (300, 302)


def test_problems_have_lines():
    """What validation refused is listed with line numbers; what is not listed is counted."""
    problems = [Problem("duplicate_custom_id", "twice", 7), Problem("empty_file", "nothing", 0)]
    batch = shown(changed(state=JobState.FAILED, problems=problems, problems_total=5))
    assert batch.errors and batch.errors.object == "list" and batch.errors.data
    result = [(each.code, each.line) for each in batch.errors.data]
    assert result == [("duplicate_custom_id", 7), ("empty_file", None), ("more_errors", None)]
    assert "3 more" in (batch.errors.data[-1].message or "")


def test_an_engine_that_did_not_start_is_an_error():
    """A batch that failed without a wrong line tells what its engine said."""
    batch = shown(changed(state=JobState.FAILED, reason="engine_failed", message="ValueError: no such model"))
    assert batch.errors and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].message) == ("engine_failed", "ValueError: no such model")


def test_a_paused_batch_says_why():
    """OpenAI has no word for it: the batch is in progress, and `batchmill` tells the rest."""
    fields = {"reason": "budget", "message": "the budget is spent", "cost": 1.5, "prices": {"m": Price.of(0.5)}}
    batch = shown(changed(state=JobState.PAUSED, **fields))
    fields = batch.model_extra["batchmill"]
    assert batch.status == "in_progress"
    assert fields == {
        "job": ID, "state": "paused", "reason": "budget", "message": "the budget is spent",
        "notes": [], "remaining_s": None, "rows_per_s": None, "cost": 1.5,
        "prices": {"m": {"input": 0.5, "cached": None, "output": 0.5}},
    }  # fmt: skip


def test_the_model_is_named_when_there_is_one():
    """Rows of several models make a batch of none in particular."""
    assert shown(changed(model="tiny")).model == "tiny"
    assert shown(changed(model="tiny, upper")).model is None


def test_what_an_engine_is_doing_is_told():
    """A batch whose model is still being loaded says so instead of looking stuck."""
    view = JobView(id="job_a", state=JobState.RUNNING, notes=["starting vLLM: 20 s"])
    assert batch_of(view).batchmill.notes == ["starting vLLM: 20 s"]
