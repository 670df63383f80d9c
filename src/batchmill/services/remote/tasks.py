"""Tasks: batches submitted to a provider unchanged and polled until they end, and other long operations on a model.

A batch is in the database before it is submitted, so that a repeated request or a crash never submits it twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from batchmill import faults
from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.config import MlCommonsEntry
from batchmill.errors import BatchmillError, Conflict, InvalidInput, InvalidTransition, RateLimited, UnknownName
from batchmill.models.connectors.urls import remote_parameters
from batchmill.ports.clock import Clock
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.remote import task_records as records
from batchmill.services.remote.calls import RemoteCalls, RemoteReply
from batchmill.services.remote.changes import new_id
from batchmill.services.remote.job_tasks import JobTasks, StatusPatterns
from batchmill.services.remote.models import RemoteModels
from batchmill.services.remote.task_records import (
    BATCH_PREDICTION,
    CANCELLING,
    CREATED,
    FAILED,
    RUNNING,
    UNREACHABLE,
    TaskRecord,
)
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import remote_tasks
from batchmill.types import Caller, Connector, JobOrder, Once, Scope
from batchmill.types.connectors import BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT
from batchmill.wire.json_bytes import encode
from batchmill.wire.rows.json_templates import is_json

log = logging.getLogger("batchmill.tasks")

FAILURES_MAX = 10  # after more failures in a row, only requests poll the task
POLLS_MAX = 64  # concurrent polls
MODEL_POLLS_MAX = 4  # concurrent polls through one model, so that a hanging provider delays no other
ROUND_TASKS_MAX = 100
ROUND_S = 5.0  # the longest wait between two rounds
BACK_OFF_MAX = 16  # times the usual wait, after failures
FAILED_STATUSES = (500, 501)
SUBMIT_DRAIN_S = 60.0  # how long a stopping server waits for submissions
DISABLED = (
    "Offline Batch Inference is currently disabled. To enable it, update the setting "
    '"plugins.ml_commons.offline_batch_inference_enabled" to true.'
)
STOPPED = (
    "the server stopped while the batch was being submitted: it is unknown whether the provider accepted it. Look "
    "there for a job of this time; then delete this task, and send the request again if there is none"
)
T = TypeVar("T")
REMOTE_JOB_BYTES_MAX = 64 * 1024  # of one as JSON, because a search reads all tasks of a project


class RemoteRefused(BatchmillError):
    """The service of a connector replied with an error. `status` is the service's."""

    def __init__(self, reply: RemoteReply) -> None:
        super().__init__(reply.error, code=reply.code)
        self.status = reply.status
        # A service that reports its own failure has not accepted the batch. A gateway may not know.
        has_failed = reply.code == "remote_error" and reply.status in FAILED_STATUSES
        self.may_have_acted = reply.may_have_acted and not has_failed


class RemoteTasks:
    """All methods raise UnknownName (`unknown_task`) for a task that is unknown or of another project."""

    def __init__(
        self, database: Database, models: RemoteModels, calls: RemoteCalls, jobs: JobTasks, *, clock: Clock,
        entry: MlCommonsEntry,
    ) -> None:  # fmt: skip
        self._database, self._models, self._calls, self._jobs = database, models, calls, jobs
        self._clock, self._entry, self._status_patterns = clock, entry, StatusPatterns(entry)
        self._clock_steps = ClockSteps(database, clock, remote_tasks)
        self._submitting: dict[str, asyncio.Task[TaskRecord]] = {}  # by task id
        self._polls: dict[str, asyncio.Task[TaskRecord]] = {}
        self._background_polls: dict[str, asyncio.Task[None]] = {}  # by task id: running and waiting
        self._poll_slots = FairSemaphore(POLLS_MAX)
        self._model_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by model
        self._poll_loop: asyncio.Task[None] | None = None

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Recover tasks of an earlier server, and start polling."""
        await self.recover()
        self._poll_loop = asyncio.create_task(self._poll_forever())

    async def recover(self) -> None:
        """Find or fail the batches that an earlier server was submitting when it stopped."""
        for task in await self._database.read(records.unsubmitted):
            if task.has_dataset:
                await self._jobs.find_again(task)
            else:
                await self._save(replace(task, state=FAILED, error=STOPPED, is_unknown=True, due=None))

    async def close(self) -> None:
        """Wait for submissions, for `SUBMIT_DRAIN_S` at most. Cancel polls."""
        polls = [
            task
            for task in (self._poll_loop, *self._background_polls.values(), *self._polls.values())
            if task is not None
        ]
        if self._submitting:
            await asyncio.wait(self._submitting.values(), timeout=SUBMIT_DRAIN_S)
        for task in (*polls, *self._submitting.values()):
            task.cancel()
        await asyncio.gather(*polls, *self._submitting.values(), return_exceptions=True)

    # -- batches ------------------------------------------------------------------------------------------------------

    async def predict(self, caller: Caller, model_id: str, parameters: Mapping[str, Any], once: Once) -> TaskRecord:
        """Submit a batch to its provider. Returns once the provider has accepted it.

        A repeated order returns the first batch. Raises: RateLimited if the project has too many batches; Conflict for
        a repeated order whose first result is unknown; what `RemoteCalls.act` raises.
        """
        self.check_enabled()
        connector = self._models.connector(await self._models.ready(caller, model_id))
        now = self._clock.now()
        task = TaskRecord(
            new_id(), caller.project, model_id, BATCH_PREDICTION, CREATED, now, now,
            once=once.key, fingerprint=once.fingerprint,
        )  # fmt: skip
        tasks_max = self._entry.max_batch_inference_tasks
        existing = await self._database.write(records.insert_batch, task, tasks_max, self._quota(caller.project))
        if existing is not None:
            return await self._find_repeated(existing, once)
        faults.point("after_task")
        return await _share(self._submitting, task.id, self._submit(task, connector, parameters))

    async def _find_repeated(self, task: TaskRecord, once: Once) -> TaskRecord:
        """The task of a repeated order, once it is submitted. Raises: Conflict."""
        if task.fingerprint != once.fingerprint:
            raise Conflict(
                "another request has used the Idempotency-Key of this request", code="idempotency_key_reused"
            )
        submission = self._submitting.get(task.id)
        if submission is not None:
            return await asyncio.shield(submission)
        if task.is_unknown:
            raise Conflict(
                f"the same request was sent before as task {task.id}: {task.error}. Once you know, delete that task "
                "and send the request again",
                code="submit_unknown",
            )
        return task

    async def _submit(self, task: TaskRecord, connector: Connector, parameters: Mapping[str, Any]) -> TaskRecord:
        try:
            reply = await self._act(task, connector, BATCH_PREDICT, parameters)
        except BatchmillError as error:
            if isinstance(error, RemoteRefused) and error.may_have_acted:
                message = f"it is unknown whether the provider accepted it: {error.message}. Look there for such a job"
                await self._save(replace(task, state=FAILED, error=message, is_unknown=True))
            else:
                await self._database.write(records.delete, task.id)
            raise
        faults.point("after_hand_over")
        if reply is None:
            message = "Unable to create batch transform job"
            error = (
                f"{message}: it is unknown whether the provider accepted it, because its reply has no job. Look there"
            )
            await self._save(replace(task, state=FAILED, error=error, is_unknown=True))
            raise UnknownName(message, code="no_remote_job")
        due = self._clock.now() + self._entry.poll_s
        return await self._save(
            replace(task, state=RUNNING, remote_job=bounded_remote_job(reply | {"dlq": None}), due=due)
        )

    async def find_existing_job(self, caller: Caller, once: Once) -> TaskRecord | None:
        """The task of the same order with a dataset if it was submitted before; None otherwise."""
        return await self._jobs.find_existing(caller, once)

    async def run(self, caller: Caller, model_id: str, order: JobOrder) -> TaskRecord:
        """Run the rows of a dataset as a job. A repeated order returns the first task."""
        self.check_enabled()
        now = self._clock.now()
        task = TaskRecord(
            new_id(), caller.project, model_id, BATCH_PREDICTION, CREATED, now, now, has_dataset=True
        )  # fmt: skip
        return await self._jobs.submit(caller, task, order, self._entry.max_batch_inference_tasks)

    async def record(self, caller: Caller, model_id: str, kind: str, state: str) -> TaskRecord:
        """Store the task of an operation on a model that has ended."""
        now = self._clock.now()
        task = TaskRecord(new_id(), caller.project, model_id, kind, state, now, now)
        await self._database.write(records.insert, task, self._quota(caller.project))
        return task

    def _quota(self, project: str) -> int:
        return self._jobs.quotas.of(project).remote_tasks

    def check_enabled(self) -> None:
        """Raises: InvalidInput if the configuration disables batches."""
        if not self._entry.offline_batch_inference_enabled:
            raise InvalidInput(DISABLED, code="feature_disabled")

    # -- polling on request -------------------------------------------------------------------------------------------

    async def get(self, caller: Caller, task_id: str) -> TaskRecord:
        """The current task: polls its provider unless it has ended."""
        task = await self._database.read(records.find, caller.project, task_id)
        if task.type != BATCH_PREDICTION or task.state == CREATED or task.is_unknown:
            return task
        if task.job is None:
            self.check_enabled()
            if (task.has_ended and not self._entry.strict_polling) or task.remote_job is None:
                return task
        return await self._poll(task)

    async def stored(self, caller: Caller, task_id: str) -> TaskRecord:
        """A task as of its last poll."""
        return await self._database.read(records.find, caller.project, task_id)

    async def all(self, caller: Caller) -> Sequence[TaskRecord]:
        """The caller's tasks as of their last polls, the newest first."""
        return await self._database.read(records.all_of, caller.project)

    async def _poll(self, task: TaskRecord) -> TaskRecord:
        """Poll a task. Concurrent polls of it share one request."""
        return await _share(self._polls, task.id, self._refresh(task))

    async def _refresh(self, task: TaskRecord) -> TaskRecord:
        now = self._clock.now()
        if task.job is not None:
            updated = await self._jobs.refresh(task)
            return await self._save(replace(updated, due=None if updated.has_ended else now + self._entry.poll_s))
        connector = self._connector_of(task)
        remote_job = task.remote_job or {}
        reply = await self._act(task, connector, BATCH_PREDICT_STATUS, remote_parameters(remote_job))
        if reply is None:
            raise UnknownName("Couldn't fetch status of the transform job", code="no_remote_job")
        state = self._status_patterns.state_of(reply) or (RUNNING if task.state == UNREACHABLE else task.state)
        merged = {name: each for name, each in remote_job.items() if name != "num_of_retries"} | reply
        updated = replace(task, state=state, remote_job=bounded_remote_job(merged), failures=0)
        return await self._save(replace(updated, due=None if updated.has_ended else now + self._entry.poll_s))

    async def _act(
        self, task: TaskRecord, connector: Connector, kind: str, parameters: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Call the service and return the job in its reply; None if the reply has none. Raises: RemoteRefused."""
        reply = await self._calls.act(connector, kind, parameters, project=task.project)
        if not reply.is_ok:
            raise RemoteRefused(reply)
        return read_remote_job(reply)

    def _connector_of(self, task: TaskRecord) -> Connector:
        try:
            return self._models.connector(self._models.get(Caller(task.project, Scope.READ), task.model))
        except UnknownName:
            raise UnknownName("Failed to retrieve the ML model for the given task ID", code="model_gone") from None

    async def _save(self, task: TaskRecord) -> TaskRecord:
        task = replace(task, changed=self._clock.now())
        await self._database.write(records.update, task)
        return task

    # -- cancelling and deleting --------------------------------------------------------------------------------------

    async def cancel(self, caller: Caller, task_id: str) -> None:
        """Ask the provider to cancel a batch, and poll it soon. The task's state follows the provider's."""
        try:
            task = await self._database.read(records.find, caller.project, task_id)
        except UnknownName:
            raise UnknownName("Fail to find task", code="unknown_task") from None
        if task.type != BATCH_PREDICTION:
            raise InvalidInput(
                "The task ID you provided does not have any associated batch job", code="no_batch_of_task"
            )
        if task.job is not None:
            await self._jobs.cancel(caller, task.job)
            return
        self.check_enabled()
        if task.remote_job is None:
            message = task.error or "the batch is being submitted: try again"
            raise InvalidTransition(f"the task has no job at the provider to cancel: {message}", code="submit_unknown")
        await self._act(task, self._connector_of(task), CANCEL_BATCH_PREDICT, remote_parameters(task.remote_job))
        if not task.has_ended:
            await self._database.write(records.set_due, task.id, self._clock.now())

    async def delete(self, caller: Caller, task_id: str) -> None:
        """Delete an ended task. The provider keeps its batch. Raises: InvalidTransition."""
        task = await self._database.read(records.find, caller.project, task_id)
        if task.state in (CREATED, RUNNING, CANCELLING):
            raise InvalidTransition(
                "Task cannot be deleted in running state. Try after some time.", code="task_under_way"
            )
        await self._database.write(records.delete, task.id)

    # -- polling in the background ------------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        """Poll running tasks in an endless loop."""
        while True:
            try:
                await self._start_due_polls()
            except BatchmillError as error:  # the next round may succeed
                log.warning("tasks could not be polled: %s", error)
            await self._clock.sleep(min(ROUND_S, self._entry.poll_s))

    async def poll_due(self) -> None:
        """Poll every task that is due, and wait for all of these polls."""
        await self._start_due_polls()
        await asyncio.gather(*self._background_polls.values())

    async def _start_due_polls(self) -> None:
        """Start a poll for every task that is due. A provider that hangs delays only its own models."""
        await self._clock_steps.check()
        due = await self._database.read(records.due, self._clock.now(), ROUND_TASKS_MAX, self._background_polls.keys())
        for project, task_id, model in due:
            poll = asyncio.create_task(self._poll_in_turn(project, task_id, model))
            self._background_polls[task_id] = poll
            poll.add_done_callback(lambda done, task_id=task_id: _discard(self._background_polls, task_id, done))

    async def _poll_in_turn(self, project: str, task_id: str, model: str) -> None:
        slots = self._model_slots.setdefault(model, asyncio.Semaphore(MODEL_POLLS_MAX))
        async with slots, self._poll_slots.slot(project):
            try:
                task = await self._database.read(records.find, project, task_id)
            except UnknownName:  # deleted meanwhile
                return
            if task.due is not None and task.due <= self._clock.now():
                await self._poll_in_background(task)

    async def _poll_in_background(self, task: TaskRecord) -> None:
        """Poll a task and count failures. After too many failures the task is UNREACHABLE and no longer polled."""
        try:
            await self._poll(task)
        except RateLimited:  # our own limit: the provider was not called
            await self._database.write(records.set_due, task.id, self._clock.now() + self._entry.poll_s)
        except BatchmillError as error:
            await self._note_failure(task, error)
        except Exception as error:  # unexpected data of a provider must not end polling: try again later
            log.exception("task %s could not be polled", task.id)
            await self._note_failure(task, BatchmillError(f"{type(error).__name__}, see the server's log"))

    async def _note_failure(self, task: TaskRecord, error: BatchmillError) -> None:
        failures, now = task.failures + 1, self._clock.now()
        wait_s = self._entry.poll_s * min(2**failures, BACK_OFF_MAX)
        remote = (task.remote_job or {}) | {"num_of_retries": failures}
        updated = replace(task, failures=failures, remote_job=remote, due=now + wait_s, changed=now)
        if failures > FAILURES_MAX:
            message = f"the provider could not be polled {failures} times in a row: {error.message}"
            updated = replace(updated, state=UNREACHABLE, error=message, due=None)
        log.info("task %s: poll %d failed: %s", task.id, failures, error.code)
        await self._database.write(records.update_unchanged, updated, task.changed)


async def _share(tasks: dict[str, asyncio.Task[T]], key: str, work: Coroutine[Any, Any, T]) -> T:
    """Run work that continues when its caller is cancelled. If work for the key is running, wait for that instead."""
    task = tasks.get(key)
    if task is not None:
        work.close()
    else:
        task = tasks[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: _discard(tasks, key, done))
    waiting: Awaitable[T] = asyncio.shield(task)
    return await waiting


def _discard(tasks: dict[str, asyncio.Task[T]], key: str, done: asyncio.Task[T]) -> None:
    tasks.pop(key, None)
    if not done.cancelled():
        done.exception()  # retrieved: its callers may have been cancelled


def read_remote_job(reply: RemoteReply) -> dict[str, Any] | None:
    """The job in a reply; None for a list, a text or anything else that is not an object."""
    if reply.data is None or not reply.body.lstrip().startswith(b"{") or not is_json(reply.body):
        return None  # post-processing makes an object of any text
    return reply.data


def bounded_remote_job(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Limit the size of a job by dropping its longest members first. Ids and states are short."""
    sizes = {name: len(encode(name)) + len(encode(value)) + 2 for name, value in fields.items()}
    total, dropped = sum(sizes.values()), set()
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= REMOTE_JOB_BYTES_MAX:
            break
        total -= sizes[name]
        dropped.add(name)
    return {name: value for name, value in fields.items() if name not in dropped}
