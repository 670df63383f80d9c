"""Tasks whose rows are a dataset: batchmill runs them as a job, and the task tells how that job stands.

The task's id lies in the job's `origin`: a task of which a kill left no more than a beginning finds its job again.
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
from batchmill.store.database import Database
from batchmill.types import Caller, JobOrder, JobQuery, JobView, Once, ProjectQuotas, RemoteJob, Scope

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
        patterns: StatusRegex = entry.status_regex
        self._states = [
            (state, re.compile(getattr(patterns, setting), re.IGNORECASE)) for state, setting in STATES.items()
        ]

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


FRONTEND = "ml_commons"
REMOTE_JOBS_MAX = 100  # of a job, in the document of its task
WORDS = {
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

    async def known(self, caller: Caller, once: Once) -> TaskRecord | None:
        """The task that an order is already."""
        job = await self._repeats.find(once)
        return None if job is None else await self._of_job(caller, job)

    async def submit(self, caller: Caller, task: TaskRecord, order: JobOrder, tasks_max: int) -> TaskRecord:
        """Start the job of a task; the task that the same order is already, if there is one.

        Raises: RateLimited for too many of a project, and what `ProjectJobs.submit` raises.
        """
        await self._database.write(records.insert_batch, task, tasks_max, self.quotas.of(task.project).remote_tasks)
        try:
            labelled = replace(order, origin={**(order.origin or {}), "frontend": FRONTEND, "task": task.id})
            submitted = await self._project_jobs.submit(caller, labelled)
        except BatchmillError:
            await self._database.write(records.delete, task.id)
            raise
        faults.point("after_task_job")
        if submitted.how == "repeated":  # two came at once
            await self._database.write(records.delete, task.id)
            return await self._of_job(caller, submitted.id)
        return await self._begun(task, submitted.id)

    async def _begun(self, task: TaskRecord, job: str) -> TaskRecord:
        begun = await self.look(replace(task, job=job, state=RUNNING, due=task.created))
        await self._database.write(records.update, begun)
        return begun

    async def _of_job(self, caller: Caller, job: str) -> TaskRecord:
        """The task of a job that an order is already."""
        task = await self._database.read(records.by_job, job)
        if task is not None:
            return task
        view = await self._project_jobs.show(caller, job)  # its task has not been written whole yet, or was deleted
        origin = view.origin or {}
        task = TaskRecord(
            origin["task"], caller.project, origin["model"], BATCH_PREDICTION, RUNNING, view.created, view.created,
            has_dataset=True,
        )  # fmt: skip
        await self._database.write(records.ensure, task, self.quotas.of(task.project).remote_tasks)
        return await self._begun(task, job)

    async def find_again(self, task: TaskRecord) -> None:
        """A kill came between the task and its job: the job is there, or nothing was begun."""
        caller, after = _reader(task.project), None
        while found := await self._project_jobs.list(caller, JobQuery(origin=FRONTEND, after=after, limit=100)):
            for view in found:
                if (view.origin or {}).get("task") == task.id:
                    await self._begun(task, view.id)
                    return
            after = found[-1].id
        await self._database.write(records.delete, task.id)

    async def look(self, task: TaskRecord) -> TaskRecord:
        """The task as its job stands now."""
        assert task.job is not None, "its rows run as a job"
        try:
            caller = _reader(task.project)
            view, results = await self._project_jobs.show_with_results(caller, task.job)
            remote = await self._project_jobs.remote(caller, task.job)
        except UnknownName:
            return replace(task, state=FAILED, error=f"its job {task.job} is not there any more")
        state = JobState(view.state)
        error = f"{view.reason or 'failed'}: {view.message}" if state in (JobState.FAILED, JobState.PAUSED) else ""
        said = document(view, results, remote)
        return replace(task, state=state_of_job(state, view.rows_failed), remote_job=said, error=error)

    async def cancel(self, caller: Caller, job: str) -> None:
        """End the job early; finished rows are kept. Raises: InvalidTransition for one that has ended."""
        await self._project_jobs.cancel(caller, job)


def document(view: JobView, results: ResultIds, remote: list[RemoteJob]) -> dict[str, Any]:
    """A job as the `remote_job` of its task, in the words of OpenAI's batch object where it has them."""
    origin = view.origin or {}
    return {
        "id": view.id,
        "object": "batchmill.job",
        "status": WORDS[JobState(view.state)],
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
        "jobs": [_shown(each) for each in remote[:REMOTE_JOBS_MAX]],
        "jobs_total": len(remote),
    }


def _shown(remote: RemoteJob) -> dict[str, Any]:
    """A job at a provider."""
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
    """Who looks after tasks, in the name of whoever asked for them."""
    return Caller(project, Scope.READ)
