"""Tasks whose rows are a dataset: batchmill runs them as a job, and the task shows the job's state.

The job's `origin` has the task's id, so that a task can find its job after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from batchmill import faults
from batchmill.config import MlCommonsEntry, StatusRegex
from batchmill.errors import BatchmillError, UnknownName
from batchmill.services.project_jobs import ProjectJobs, ResultIds
from batchmill.services.remote import task_records as records
from batchmill.services.remote.task_records import (
    BATCH_PREDICTION,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    COMPLETED_WITH_ERROR,
    EXPIRED,
    FAILED,
    RUNNING,
    TaskRecord,
)
from batchmill.services.repeats import RepeatedOrders
from batchmill.states import JobState
from batchmill.store.sql.database import Database
from batchmill.types import Caller, JobOrder, JobQuery, JobView, Once, ProjectQuotas, RemoteJob, Scope

# State -> the setting with its regular expression, in the order of matching.
STATE_SETTINGS = {
    CANCELLING: "cancelling",
    CANCELLED: "cancelled",
    COMPLETED: "completed",
    EXPIRED: "expired",
    FAILED: "failed",
}
STATUS_CHARS_MAX = 256  # of a provider's status; a longer text is not a status
TASK_STATES = {
    JobState.CANCELLING: CANCELLING,
    JobState.COMPLETED: COMPLETED,
    JobState.CANCELLED: CANCELLED,
    JobState.EXPIRED: EXPIRED,
    JobState.FAILED: FAILED,
}


class StatusPatterns:
    """The compiled settings `status_field` and `status_regex`."""

    def __init__(self, entry: MlCommonsEntry) -> None:
        self._fields = entry.status_field
        patterns: StatusRegex = entry.status_regex
        self._patterns = [
            (state, re.compile(getattr(patterns, setting), re.IGNORECASE)) for state, setting in STATE_SETTINGS.items()
        ]

    def state_of(self, reply: Mapping[str, Any]) -> str | None:
        """The task state for a provider's reply, from the last field with a known status; None if there is none."""
        result = None
        for name in self._fields:
            status = reply.get(name)
            if isinstance(status, str) and len(status) <= STATUS_CHARS_MAX:
                result = next((state for state, pattern in self._patterns if pattern.fullmatch(status)), result)
        return result


def state_of_job(state: JobState, rows_failed: int) -> str:
    """The state of a task for the state of its job. A job with failed rows completes with errors."""
    if state is JobState.COMPLETED and rows_failed:
        return COMPLETED_WITH_ERROR
    return TASK_STATES.get(state, RUNNING)


FRONTEND = "ml_commons"
REMOTE_JOBS_MAX = 100  # of one job, in its task's document
JOB_STATUSES = {
    JobState.VALIDATING: "validating",
    JobState.PLANNING: "validating",
    JobState.QUEUED: "in_progress",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "paused",
    JobState.FINALIZING: "finalizing",
    JobState.CANCELLING: "cancelling",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
    JobState.FAILED: "failed",
}


class JobTasks:
    def __init__(
        self,
        database: Database,
        project_jobs: ProjectJobs,
        repeats: RepeatedOrders,
        quotas: ProjectQuotas = ProjectQuotas(),
    ) -> None:
        self._database, self._project_jobs, self._repeats, self.quotas = database, project_jobs, repeats, quotas

    async def find_existing(self, caller: Caller, once: Once) -> TaskRecord | None:
        """The task of the same order if it was submitted before; None otherwise."""
        job = await self._repeats.find(once)
        return None if job is None else await self._find_by_job(caller, job)

    async def submit(self, caller: Caller, task: TaskRecord, order: JobOrder, tasks_max: int) -> TaskRecord:
        """Start the job of a task, or return the existing task if the same order was submitted before.

        Raises: RateLimited if the project has too many tasks, and what `ProjectJobs.submit` raises.
        """
        await self._database.write(records.insert_batch, task, tasks_max, self.quotas.of(task.project).remote_tasks)
        try:
            labelled = replace(order, origin={**(order.origin or {}), "frontend": FRONTEND, "task": task.id})
            submitted = await self._project_jobs.submit(caller, labelled)
        except BatchmillError:
            await self._database.write(records.delete, task.id)
            raise
        faults.point("after_task_job")
        if submitted.how == "repeated":  # the same order arrived twice at the same time
            await self._database.write(records.delete, task.id)
            return await self._find_by_job(caller, submitted.id)
        return await self._start(task, submitted.id)

    async def _start(self, task: TaskRecord, job: str) -> TaskRecord:
        started = await self.refresh(replace(task, job=job, state=RUNNING, due=task.created))
        await self._database.write(records.update, started)
        return started

    async def _find_by_job(self, caller: Caller, job: str) -> TaskRecord:
        """The task of an existing job. It is stored again if it is missing."""
        task = await self._database.read(records.by_job, job)
        if task is not None:
            return task
        view = await self._project_jobs.show(caller, job)  # the task is not complete yet, or was deleted
        origin = view.origin or {}
        task = TaskRecord(
            origin["task"], caller.project, origin["model"], BATCH_PREDICTION, RUNNING, view.created, view.created,
            has_dataset=True,
        )  # fmt: skip
        await self._database.write(records.ensure, task, self.quotas.of(task.project).remote_tasks)
        return await self._start(task, job)

    async def find_again(self, task: TaskRecord) -> None:
        """Find the job of a task after a crash between the two; without a job, delete the task."""
        caller, after = _reader(task.project), None
        while views := await self._project_jobs.list(caller, JobQuery(origin=FRONTEND, after=after, limit=100)):
            for view in views:
                if (view.origin or {}).get("task") == task.id:
                    await self._start(task, view.id)
                    return
            after = views[-1].id
        await self._database.write(records.delete, task.id)

    async def refresh(self, task: TaskRecord) -> TaskRecord:
        """The task with the current state of its job."""
        assert task.job is not None, "its rows run as a job"
        try:
            caller = _reader(task.project)
            view, results = await self._project_jobs.show_with_results(caller, task.job)
            remote = await self._project_jobs.remote(caller, task.job)
        except UnknownName:
            return replace(task, state=FAILED, error=f"its job {task.job} was deleted")
        state = JobState(view.state)
        error = f"{view.reason or 'failed'}: {view.message}" if state in (JobState.FAILED, JobState.PAUSED) else ""
        job_document = document(view, results, remote)
        return replace(task, state=state_of_job(state, view.rows_failed), remote_job=job_document, error=error)

    async def cancel(self, caller: Caller, job: str) -> None:
        """Cancel the job; finished rows stay. Raises: InvalidTransition if it has ended."""
        await self._project_jobs.cancel(caller, job)


def document(view: JobView, results: ResultIds, remote_jobs: list[RemoteJob]) -> dict[str, Any]:
    """A job as the `remote_job` of its task, with the field names of OpenAI's batch object where they exist."""
    origin = view.origin or {}
    return {
        "id": view.id,
        "object": "batchmill.job",
        "status": JOB_STATUSES[JobState(view.state)],
        "route": origin.get("route"),
        "input_file_id": origin.get("input_file_id"),
        "output_file_id": results.output,
        "error_file_id": results.errors,
        "request_counts": {"total": view.rows, "completed": view.rows_ok, "failed": view.rows_failed},
        "created_at": int(view.created),
        "in_progress_at": _seconds(view.started),
        "finalizing_at": _seconds(view.finalizing),
        "cancelling_at": _seconds(view.cancelling),
        "ended_at": _seconds(view.finished),
        "expires_at": _seconds(view.deadline),
        "reason": view.reason,
        "message": view.message or None,
        "notes": view.notes,
        "cost": view.cost,
        "prices": msgspec.to_builtins(view.prices),
        "errors": view.errors,
        "jobs": [_remote_job_view(each) for each in remote_jobs[:REMOTE_JOBS_MAX]],
        "jobs_total": len(remote_jobs),
    }


def _remote_job_view(remote: RemoteJob) -> dict[str, Any]:
    """The view of one job at a provider."""
    return {
        "id": remote.id or None,
        "provider": remote.provider,
        "tag": remote.tag,
        "state": remote.state,
        "status": remote.remote_state or None,
        "input": remote.input or None,
        "request_counts": {"total": remote.rows, "completed": remote.completed, "failed": remote.failed},
        "message": remote.message or None,
    }


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)


def _reader(project: str) -> Caller:
    """The caller for reading jobs on behalf of a task's project."""
    return Caller(project, Scope.READ)
