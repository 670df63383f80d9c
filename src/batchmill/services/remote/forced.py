"""Batches of models that are to be deleted all the same: cancelled at their provider while somebody still can."""

from __future__ import annotations

from msgspec.structs import replace

from batchmill.errors import BatchmillError, Conflict
from batchmill.models.connectors.derived import remote_parameters
from batchmill.ports import Clock
from batchmill.services.remote import task_records as records
from batchmill.services.remote.calls import RemoteCalls
from batchmill.services.remote.models import RemoteModel, RemoteModels
from batchmill.services.remote.task_records import CANCELLED, UNREACHABLE, TaskRecord
from batchmill.store.database import Database
from batchmill.types.connectors import CANCEL_BATCH_PREDICT

TOLD = "the model was deleted by force; the provider was asked to cancel the batch, and took that"
LOST = "the model was deleted by force, and the provider could not be asked: look there for the batch"


class ForcedEndings:
    def __init__(self, database: Database, models: RemoteModels, calls: RemoteCalls, clock: Clock) -> None:
        self._database, self._models, self._calls, self._clock = database, models, calls, clock

    async def cancel_all(self, model: RemoteModel) -> None:
        """Have a provider cancel what it has of a model; its tasks say so.

        Raises: Conflict, naming the task, where the provider does not: unless nobody has reached it for long.
        """
        for task in await self._database.read(records.running_of, [model.id]):
            error = TOLD
            try:
                await self._cancel(model, task)
            except BatchmillError as refused:
                if task.state != UNREACHABLE:
                    raise Conflict(
                        f"the task {task.id} of the model {model.id} could not be cancelled, and nothing is deleted: "
                        f"{refused.message}",
                        code="task_running",
                    ) from None
                error = LOST
            now = self._clock.now()
            seen = replace(task, state=CANCELLED, error=error, due=None, changed=now)
            await self._database.write(records.update, seen)

    async def _cancel(self, model: RemoteModel, task: TaskRecord) -> None:
        if task.remote_job is None:
            raise Conflict("it is being handed over: try again", code="task_running")
        parameters = remote_parameters(task.remote_job)
        connector = self._models.connector(model)
        reply = await self._calls.act(connector, CANCEL_BATCH_PREDICT, parameters, project=task.project)
        if not reply.is_ok:
            raise Conflict(reply.error, code="task_running")
