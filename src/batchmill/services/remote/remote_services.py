"""Opens the services for connectors, remote models, model groups and their calls."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.programs import Programs
from batchmill.config import Config
from batchmill.errors import BatchmillError, Conflict
from batchmill.models.addresses import read_private
from batchmill.models.connectors.urls import remote_parameters
from batchmill.ports.clock import Clock
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.remote import task_records as records
from batchmill.services.remote.calls import RemoteCalls
from batchmill.services.remote.connectors import ConnectorService, Endpoints
from batchmill.services.remote.groups import ModelGroups
from batchmill.services.remote.models import RemoteModels
from batchmill.services.remote.stored import RemoteModel
from batchmill.services.remote.task_records import CANCELLED, UNREACHABLE, TaskRecord
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types.connectors import CANCEL_BATCH_PREDICT

FORCED = "the model was deleted by force; the provider accepted the request to cancel the batch"
LOST = "the model was deleted by force, and the provider could not be reached: look for the batch there"


class ForcedCancellation:
    def __init__(self, database: Database, models: RemoteModels, calls: RemoteCalls, clock: Clock) -> None:
        self._database, self._models, self._calls, self._clock = database, models, calls, clock

    async def cancel_all(self, model: RemoteModel) -> None:
        """Ask the provider to cancel all batches of a model, and record that in the tasks.

        Raises: Conflict, with the id of the task, if the provider refuses and the task is not UNREACHABLE.
        """
        for task in await self._database.read(records.running_of, [model.id]):
            error = FORCED
            try:
                await self._cancel(model, task)
            except BatchmillError as refusal:
                if task.state != UNREACHABLE:
                    raise Conflict(
                        f"the task {task.id} of the model {model.id} could not be cancelled, and nothing is deleted: "
                        f"{refusal.message}",
                        code="task_running",
                    ) from None
                error = LOST
            now = self._clock.now()
            cancelled = replace(task, state=CANCELLED, error=error, due=None, changed=now)
            await self._database.write(records.update, cancelled)

    async def _cancel(self, model: RemoteModel, task: TaskRecord) -> None:
        if task.remote_job is None:
            raise Conflict("it is being submitted: try again", code="task_running")
        parameters = remote_parameters(task.remote_job)
        connector = self._models.connector(model)
        reply = await self._calls.act(connector, CANCEL_BATCH_PREDICT, parameters, project=task.project)
        if not reply.is_ok:
            raise Conflict(reply.error, code="task_running")


class RemoteServices(Struct, frozen=True):
    connectors: ConnectorService
    groups: ModelGroups
    models: RemoteModels
    calls: RemoteCalls
    forced: ForcedCancellation
    programs: Programs  # child processes that run callers' templates

    async def load(self) -> None:
        """Read all connectors, groups and models."""
        await self.connectors.load()
        await self.groups.load()
        await self.models.load()

    async def close(self) -> None:
        await self.calls.close()
        await self.programs.close()


def make_remote(
    config: Config, database: Database, vault: Vault, clock: Clock, directory: ModelDirectory
) -> RemoteServices:
    """The services for a data directory that this process owns. Call `load` next. Raises: InvalidConfig."""
    entry, programs = config.ml_commons, Programs(clock)
    private = read_private(config.server.private_hosts)
    endpoints = Endpoints(private, entry.trusted_connector_endpoints)
    connectors = ConnectorService(database, vault, endpoints, clock, programs)
    groups = ModelGroups(database, clock, connectors.changes, config.project_quotas)
    models = RemoteModels(database, connectors, groups, clock, directory, auto_deploy=entry.model_auto_deploy)
    calls = RemoteCalls(vault, clock, private=private, endpoints=endpoints, programs=programs)
    forced = ForcedCancellation(database, models, calls, clock)
    return RemoteServices(connectors, groups, models, calls, forced, programs)
