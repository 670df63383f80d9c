"""Tasks: batches that were handed to a provider as its users wrote them, looked at until they end, and what else of a
model takes its time. A batch stands in the database before its provider hears of it: no repeat and no kill makes two.
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
from batchmill.ports import Clock
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.remote import task_records as records
from batchmill.services.remote.calls import RemoteCalls, RemoteReply
from batchmill.services.remote.changes import new_id
from batchmill.services.remote.job_tasks import JobTasks, StatusWords
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
from batchmill.store.database import Database
from batchmill.store.tables import remote_tasks
from batchmill.types import Caller, Connector, JobOrder, Once, Scope
from batchmill.types.connectors import BATCH_PREDICT, BATCH_PREDICT_STATUS, CANCEL_BATCH_PREDICT
from batchmill.wire.json_bytes import encode
from batchmill.wire.json_templates import is_json

log = logging.getLogger("batchmill.tasks")

FAILURES_MAX = 10  # one more, and nobody looks any longer unless somebody asks
LOOKS_MAX = 64  # at providers at once
MODEL_LOOKS_MAX = 4  # of these, through one model: a provider that hangs holds up nobody else's
ROUND_TASKS_MAX = 100
ROUND_S = 5.0  # between two rounds at most
BACK_OFF_MAX = 16  # times the usual wait, after failures
FAILED_STATUSES = (500, 501)
HANDING_S = 60.0  # that the server's end waits for batches on their way to a provider
OFF = (
    "Offline Batch Inference is currently disabled. To enable it, update the setting "
    '"plugins.ml_commons.offline_batch_inference_enabled" to true.'
)
STOPPED = (
    "the server stopped while the batch was being submitted: it is unknown whether the provider accepted it. Look "
    "there for a job of this time; then delete this task, and send the request again if there is none"
)
T = TypeVar("T")
REMOTE_JOB_BYTES_MAX = 64 * 1024  # of one, as JSON: all tasks of a project are searched at once


class RemoteRefused(BatchmillError):
    """What the service of a connector answered instead of doing as it was asked. `status` is the service's."""

    def __init__(self, reply: RemoteReply) -> None:
        super().__init__(reply.error, code=reply.code)
        self.status = reply.status
        # A service that says itself that it failed has not taken a batch; a gateway may not know.
        has_failed = reply.code == "remote_error" and reply.status in FAILED_STATUSES
        self.may_have_acted = reply.may_have_acted and not has_failed


class RemoteTasks:
    """Raises, everywhere: UnknownName (`unknown_task`) for a task of another project, or of none."""

    def __init__(
        self, database: Database, models: RemoteModels, calls: RemoteCalls, jobs: JobTasks, *, clock: Clock,
        entry: MlCommonsEntry,
    ) -> None:  # fmt: skip
        self._database, self._models, self._calls, self._jobs = database, models, calls, jobs
        self._clock, self._entry, self._words = clock, entry, StatusWords(entry)
        self._steps = ClockSteps(database, clock, remote_tasks)
        self._handing: dict[str, asyncio.Task[TaskRecord]] = {}  # by task: batches on their way to a provider
        self._looking: dict[str, asyncio.Task[TaskRecord]] = {}
        self._rounds: dict[str, asyncio.Task[None]] = {}  # by task: looks that nobody waits for, and those to come
        self._turns = FairSemaphore(LOOKS_MAX)
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by model
        self._following: asyncio.Task[None] | None = None

    # -- the server's own life ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take up what a server before left, and look at all that runs from now on."""
        await self.recover()
        self._following = asyncio.create_task(self._follow())

    async def recover(self) -> None:
        """Say what became of batches that a server before had begun to hand over."""
        for task in await self._database.read(records.unsaid):
            if task.has_dataset:
                await self._jobs.find_again(task)
            else:
                await self._save(replace(task, state=FAILED, error=STOPPED, is_unknown=True, due=None))

    async def close(self) -> None:
        """Batches on their way to a provider arrive, within a bound; looks are broken off."""
        looks = [
            each for each in (self._following, *self._rounds.values(), *self._looking.values()) if each is not None
        ]
        if self._handing:
            await asyncio.wait(self._handing.values(), timeout=HANDING_S)
        for each in (*looks, *self._handing.values()):
            each.cancel()
        await asyncio.gather(*looks, *self._handing.values(), return_exceptions=True)

    # -- batches ------------------------------------------------------------------------------------------------------

    async def predict(self, caller: Caller, model_id: str, parameters: Mapping[str, Any], once: Once) -> TaskRecord:
        """Hand a batch to its provider; return once the provider has said that it took it.

        The same order again is that batch. Raises: RateLimited for too many of a project, Conflict for an order of
        which nobody knows what became, and what `Calls.act` raises.
        """
        self.check_enabled()
        connector = self._models.connector(await self._models.ready(caller, model_id))
        now = self._clock.now()
        task = TaskRecord(
            new_id(), caller.project, model_id, BATCH_PREDICTION, CREATED, now, now,
            once=once.key, fingerprint=once.fingerprint,
        )  # fmt: skip
        most = self._entry.max_batch_inference_tasks
        known = await self._database.write(records.insert_batch, task, most, self._quota(caller.project))
        if known is not None:
            return await self._repeated(known, once)
        faults.point("after_task")
        return await _joined(self._handing, task.id, self._hand_over(task, connector, parameters))

    async def _repeated(self, known: TaskRecord, once: Once) -> TaskRecord:
        """What an order is that was taken before."""
        if known.fingerprint != once.fingerprint:
            raise Conflict(
                "the Idempotency-Key of this request came with another request before", code="idempotency_key_reused"
            )
        on_its_way = self._handing.get(known.id)
        if on_its_way is not None:
            return await asyncio.shield(on_its_way)
        if known.is_unknown:
            raise Conflict(
                f"the same request came before as task {known.id}: {known.error}. Once you know, delete that task to "
                "send the request again",
                code="submit_unknown",
            )
        return known

    async def _hand_over(self, task: TaskRecord, connector: Connector, parameters: Mapping[str, Any]) -> TaskRecord:
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
            error = f"{message}: it is unknown whether the provider accepted it, for its reply names no job. Look there"
            await self._save(replace(task, state=FAILED, error=error, is_unknown=True))
            raise UnknownName(message, code="no_remote_job")
        due = self._clock.now() + self._entry.poll_s
        return await self._save(
            replace(task, state=RUNNING, remote_job=bounded_remote_job(reply | {"dlq": None}), due=due)
        )

    async def known_job(self, caller: Caller, once: Once) -> TaskRecord | None:
        """The task that an order with a dataset is already."""
        return await self._jobs.known(caller, once)

    async def run(self, caller: Caller, model_id: str, order: JobOrder) -> TaskRecord:
        """Run the rows of a dataset as a job. The same order again is that job's task."""
        self.check_enabled()
        now = self._clock.now()
        task = TaskRecord(
            new_id(), caller.project, model_id, BATCH_PREDICTION, CREATED, now, now, has_dataset=True
        )  # fmt: skip
        return await self._jobs.submit(caller, task, order, self._entry.max_batch_inference_tasks)

    async def record(self, caller: Caller, model_id: str, kind: str, state: str) -> TaskRecord:
        """Something else that was done with a model, and is over."""
        now = self._clock.now()
        task = TaskRecord(new_id(), caller.project, model_id, kind, state, now, now)
        await self._database.write(records.insert, task, self._quota(caller.project))
        return task

    def _quota(self, project: str) -> int:
        return self._jobs.quotas.of(project).remote_tasks

    def check_enabled(self) -> None:
        """Raises: InvalidInput where the configuration says that no batches are taken."""
        if not self._entry.offline_batch_inference_enabled:
            raise InvalidInput(OFF, code="feature_disabled")

    # -- looking ------------------------------------------------------------------------------------------------------

    async def get(self, caller: Caller, task_id: str) -> TaskRecord:
        """A task as it is: its provider is asked, unless it has ended."""
        task = await self._database.read(records.find, caller.project, task_id)
        if task.type != BATCH_PREDICTION or task.state == CREATED or task.is_unknown:
            return task
        if task.job is None:
            self.check_enabled()
            if (task.has_ended and not self._entry.strict_polling) or task.remote_job is None:
                return task
        return await self._look(task)

    async def stored(self, caller: Caller, task_id: str) -> TaskRecord:
        """A task as it was when somebody last looked."""
        return await self._database.read(records.find, caller.project, task_id)

    async def all(self, caller: Caller) -> Sequence[TaskRecord]:
        """The caller's tasks, the newest first, as they were when somebody last looked."""
        return await self._database.read(records.all_of, caller.project)

    async def _look(self, task: TaskRecord) -> TaskRecord:
        """Who looks at the same time sees the same."""
        return await _joined(self._looking, task.id, self._ask(task))

    async def _ask(self, task: TaskRecord) -> TaskRecord:
        now = self._clock.now()
        if task.job is not None:
            seen = await self._jobs.look(task)
            return await self._save(replace(seen, due=None if seen.has_ended else now + self._entry.poll_s))
        connector = self._connector_of(task)
        remote_job = task.remote_job or {}
        reply = await self._act(task, connector, BATCH_PREDICT_STATUS, remote_parameters(remote_job))
        if reply is None:
            raise UnknownName("Couldn't fetch status of the transform job", code="no_remote_job")
        state = self._words.state_of(reply) or (RUNNING if task.state == UNREACHABLE else task.state)
        merged = {name: each for name, each in remote_job.items() if name != "num_of_retries"} | reply
        seen = replace(task, state=state, remote_job=bounded_remote_job(merged), failures=0)
        return await self._save(replace(seen, due=None if seen.has_ended else now + self._entry.poll_s))

    async def _act(
        self, task: TaskRecord, connector: Connector, kind: str, parameters: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """What a service says to a call; None: nothing that could be read. Raises: RemoteRefused."""
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

    # -- ending -------------------------------------------------------------------------------------------------------

    async def cancel(self, caller: Caller, task_id: str) -> None:
        """Ask the provider to end a batch. The task says so once the provider does; the next look is soon."""
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
            message = task.error or "the batch is being handed over: try again"
            raise InvalidTransition(f"the task has no job at the provider to cancel: {message}", code="submit_unknown")
        await self._act(task, self._connector_of(task), CANCEL_BATCH_PREDICT, remote_parameters(task.remote_job))
        if not task.has_ended:
            await self._database.write(records.hasten, task.id, self._clock.now())

    async def delete(self, caller: Caller, task_id: str) -> None:
        """Forget a task that has ended; what the provider has stays there. Raises: InvalidTransition."""
        task = await self._database.read(records.find, caller.project, task_id)
        if task.state in (CREATED, RUNNING, CANCELLING):
            raise InvalidTransition(
                "Task cannot be deleted in running state. Try after some time.", code="task_under_way"
            )
        await self._database.write(records.delete, task.id)

    # -- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Look at what runs, for ever."""
        while True:
            try:
                await self._begin_looks()
            except BatchmillError as error:  # the next round may do better
                log.warning("tasks could not be looked at: %s", error)
            await self._clock.sleep(min(ROUND_S, self._entry.poll_s))

    async def look_round(self) -> None:
        """Look at every task whose time has come; return when all have been looked at."""
        await self._begin_looks()
        await asyncio.gather(*self._rounds.values())

    async def _begin_looks(self) -> None:
        """Have every task looked at whose time has come. A provider that hangs keeps only its own models waiting."""
        await self._steps.look()
        due = await self._database.read(records.due, self._clock.now(), ROUND_TASKS_MAX, self._rounds.keys())
        for project, name, model in due:
            look = asyncio.create_task(self._look_in_turn(project, name, model))
            self._rounds[name] = look
            look.add_done_callback(lambda done, name=name: _over(self._rounds, name, done))

    async def _look_in_turn(self, project: str, name: str, model: str) -> None:
        lane = self._lanes.setdefault(model, asyncio.Semaphore(MODEL_LOOKS_MAX))
        async with lane, self._turns.place(project):
            try:
                task = await self._database.read(records.find, project, name)
            except UnknownName:  # deleted while it waited
                return
            if task.due is not None and task.due <= self._clock.now():
                await self._look_quietly(task)

    async def _look_quietly(self, task: TaskRecord) -> None:
        """A look that nobody waits for: failures are counted, and after too many of them nobody looks any more."""
        try:
            await self._look(task)
        except RateLimited:  # of our own making: the provider was not asked
            await self._database.write(records.hasten, task.id, self._clock.now() + self._entry.poll_s)
        except BatchmillError as error:
            await self._note_failure(task, error)
        except Exception as error:  # whatever a provider brought about, the task is looked at again, and later
            log.exception("task %s could not be looked at", task.id)
            await self._note_failure(task, BatchmillError(f"{type(error).__name__}, see the server's log"))

    async def _note_failure(self, task: TaskRecord, error: BatchmillError) -> None:
        failures, now = task.failures + 1, self._clock.now()
        wait_s = self._entry.poll_s * min(2**failures, BACK_OFF_MAX)
        remote = (task.remote_job or {}) | {"num_of_retries": failures}
        seen = replace(task, failures=failures, remote_job=remote, due=now + wait_s, changed=now)
        if failures > FAILURES_MAX:
            message = f"the provider could not be asked {failures} times in a row: {error.message}"
            seen = replace(seen, state=UNREACHABLE, error=message, due=None)
        log.info("task %s: look %d failed: %s", task.id, failures, error.code)
        await self._database.write(records.update_unchanged, seen, task.changed)


async def _joined(under_way: dict[str, asyncio.Task[T]], name: str, work: Coroutine[Any, Any, T]) -> T:
    """The result of work that goes on when who waits for it leaves; of what is under way already, that one's."""
    doing = under_way.get(name)
    if doing is not None:
        work.close()
    else:
        doing = under_way[name] = asyncio.ensure_future(work)
        doing.add_done_callback(lambda done: _over(under_way, name, done))
    waiting: Awaitable[T] = asyncio.shield(doing)
    return await waiting


def _over(under_way: dict[str, asyncio.Task[T]], name: str, done: asyncio.Task[T]) -> None:
    under_way.pop(name, None)
    if not done.cancelled():
        done.exception()  # who asked for it may have left: it is not lost, but nobody's


def read_remote_job(reply: RemoteReply) -> dict[str, Any] | None:
    """The job that a reply tells of; None for a list, a text and anything else that is no object."""
    if reply.data is None or not reply.body.lstrip().startswith(b"{") or not is_json(reply.body):
        return None  # post-processing makes an object of whatever comes
    return reply.data


def bounded_remote_job(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As much as may be kept: the longest members go first. Ids and states are short."""
    sizes = {name: len(encode(name)) + len(encode(value)) + 2 for name, value in fields.items()}
    total, gone = sum(sizes.values()), set()
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= REMOTE_JOB_BYTES_MAX:
            break
        total -= sizes[name]
        gone.add(name)
    return {name: value for name, value in fields.items() if name not in gone}
