"""Tasks: get, search, delete, cancel. Source: ML Commons, "Tasks APIs"; its documentation says `_cancel_batch`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.dialects.ml_commons.documents import TASKS, node_id, task_document, written
from batchmill.dialects.ml_commons.predict import REMOTE_ERRORS
from batchmill.dialects.ml_commons.requests import PREFIX, reply, searched
from batchmill.dialects.ml_commons.routes import MISSING, TAKEN, operation, searches
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.services import Services
from batchmill.types import Scope

ALL = f"{PREFIX}/tasks"
ONE = f"{ALL}/{{task_id}}"


class Tasks:
    def __init__(self, services: Services) -> None:
        self._tasks = services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        remote = (MISSING, TAKEN, *REMOTE_ERRORS)
        return [
            operation(
                "getTask", f"GET {ONE}", "One task; the provider is asked how it stands", Scope.READ, self.get,
                errors=remote,
            ),
            *searches("searchTasks", f"{ALL}/_search", "Find tasks, as they were when somebody last looked",
                      self.search),
            operation("deleteTask", f"DELETE {ONE}", "Forget a task that has ended", Scope.SUBMIT, self.delete),
            *(
                operation(name, f"POST {ONE}/{verb}", "Ask the provider to end a batch", Scope.SUBMIT, self.cancel,
                          body="optional", errors=remote)
                for name, verb in (("cancelTask", "_cancel"), ("cancelTaskBatch", "_cancel_batch"))
            ),
        ]  # fmt: skip

    async def get(self, call: Call) -> Response:
        return reply(call, task_document(await self._tasks.get(call.caller, call.path["task_id"]), self._node))

    async def cancel(self, call: Call) -> Response:
        await self._tasks.cancel(call.caller, call.path["task_id"])
        return reply(call, {"status": "OK"})

    async def delete(self, call: Call) -> Response:
        task_id = call.path["task_id"]
        await self._tasks.delete(call.caller, task_id)
        return reply(call, written(TASKS, task_id, 2, "deleted"))

    async def search(self, call: Call) -> Response:
        tasks = await self._tasks.all(call.caller)
        found = (Document(each.id, task_document(each, self._node) | {"task_id": each.id}) for each in tasks)
        return await searched(call, found, TASKS)
