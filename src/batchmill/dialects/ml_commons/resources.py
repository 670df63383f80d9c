"""What administrators and clients keep: connectors, groups of models, models, and the tasks that tell how they fare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.ml_commons.documents import (
    CONNECTORS,
    GROUPS,
    MODELS,
    TASKS,
    connector_document,
    group_document,
    model_document,
    node_id,
    task_document,
    written,
)
from batchmill.dialects.ml_commons.predict import REMOTE_ERRORS
from batchmill.dialects.ml_commons.requests import (
    MISSING,
    PREFIX,
    TAKEN,
    Common,
    Handler,
    Registering,
    body_of,
    is_set,
    operation,
    reply,
    searched,
    searches,
)
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.remote.task_records import COMPLETED, DEPLOY_MODEL, REGISTER_MODEL
from batchmill.services.services import Services
from batchmill.types import Scope

CONNECTORS_PATH = f"{PREFIX}/connectors"
CONNECTOR_PATH = f"{CONNECTORS_PATH}/{{connector_id}}"
NO_CREATE, NO_UPDATE = "Create Connector request has empty body", "Failed to update connector: Request body is empty"


class Connectors:
    def __init__(self, services: Services) -> None:
        self._connectors = services.connectors

    def operations(self) -> Sequence[Operation]:
        return [
            operation(
                "createConnector",
                f"POST {CONNECTORS_PATH}/_create",
                "Describe a remote service",
                Scope.ADMIN,
                self.create,
                body="required",
                errors=(TAKEN,),
            ),
            *searches("searchConnectors", f"{CONNECTORS_PATH}/_search", "Find connectors", self.search),
            operation(
                "getConnector", f"GET {CONNECTOR_PATH}", "One connector, without its credentials", Scope.READ, self.get
            ),
            operation(
                "updateConnector",
                f"PUT {CONNECTOR_PATH}",
                "Change a connector, or its credentials alone",
                Scope.ADMIN,
                self.update,
                body="required",
            ),
            operation(
                "deleteConnector",
                f"DELETE {CONNECTOR_PATH}",
                "Delete a connector that no model uses",
                Scope.ADMIN,
                self.delete,
                errors=(MISSING, TAKEN),
            ),
        ]

    async def create(self, call: Call) -> Response:
        record = await self._connectors.create(call.caller, body_of(call, NO_CREATE))
        return reply(call, {"connector_id": record.id})

    async def get(self, call: Call) -> Response:
        return reply(call, connector_document(self._connectors.get(call.caller, call.path["connector_id"])))

    async def update(self, call: Call) -> Response:
        record = await self._connectors.update(call.caller, call.path["connector_id"], body_of(call, NO_UPDATE))
        return reply(call, written(CONNECTORS, record.id, record.revision, "updated"))

    async def delete(self, call: Call) -> Response:
        record = await self._connectors.delete(call.caller, call.path["connector_id"])
        return reply(call, written(CONNECTORS, record.id, record.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        records = self._connectors.all(call.caller)
        found = (Document(each.id, connector_document(each), each.revision, each.revision - 1) for each in records)
        return await searched(call, found, CONNECTORS)


GROUPS_PATH = f"{PREFIX}/model_groups"
GROUP_PATH = f"{GROUPS_PATH}/{{model_group_id}}"


class Groups:
    def __init__(self, services: Services) -> None:
        self._groups = services.groups

    def operations(self) -> Sequence[Operation]:
        return [
            operation(
                "registerModelGroup",
                f"POST {GROUPS_PATH}/_register",
                "Name what will have versions",
                Scope.ADMIN,
                self.register,
                body="required",
                errors=(),
            ),
            *searches("searchModelGroups", f"{GROUPS_PATH}/_search", "Find model groups", self.search),
            operation("getModelGroup", f"GET {GROUP_PATH}", "One model group", Scope.READ, self.get),
            operation(
                "updateModelGroup",
                f"PUT {GROUP_PATH}",
                "Change a model group",
                Scope.ADMIN,
                self.update,
                body="required",
            ),
            operation(
                "deleteModelGroup",
                f"DELETE {GROUP_PATH}",
                "Delete a model group without models",
                Scope.ADMIN,
                self.delete,
                errors=(MISSING, TAKEN),
            ),
        ]

    async def register(self, call: Call) -> Response:
        group = await self._groups.register(call.caller, body_of(call))
        return reply(call, {"model_group_id": group.id, "status": "CREATED"})

    async def get(self, call: Call) -> Response:
        return reply(call, group_document(self._groups.get(call.caller, call.path["model_group_id"])))

    async def update(self, call: Call) -> Response:
        await self._groups.update(call.caller, call.path["model_group_id"], body_of(call))
        return reply(call, {"status": "Updated"})

    async def delete(self, call: Call) -> Response:
        group = await self._groups.delete(call.caller, call.path["model_group_id"])
        return reply(call, written(GROUPS, group.id, group.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        found = (
            Document(each.id, group_document(each), each.revision, each.revision - 1)
            for each in self._groups.all(call.caller)
        )
        return await searched(call, found, GROUPS)


MODELS_PATH = f"{PREFIX}/models"
MODEL_PATH = f"{MODELS_PATH}/{{model_id}}"
IDS_MAX = 1000  # of models in one request


class Models:
    def __init__(self, services: Services) -> None:
        self._models, self._tasks = services.remote_models, services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        return [
            *_aliased(
                "registerModel",
                f"{MODELS_PATH}/_register",
                "_upload",
                "Make a model of a connector",
                self.register,
                query=Registering,
                body="required",
                errors=(MISSING, TAKEN),
            ),
            *_aliased("deployModel", f"{MODEL_PATH}/_deploy", "_load", "Let a model be called", self.deploy),
            *_aliased(
                "undeployModel",
                f"{MODEL_PATH}/_undeploy",
                "_unload",
                "Let a model be called no more",
                self.undeploy,
                errors=(MISSING, TAKEN),
            ),
            *_aliased(
                "undeployModels",
                f"{MODELS_PATH}/_undeploy",
                "_unload",
                "Let models be called no more",
                self.undeploy_many,
                errors=(MISSING, TAKEN),
            ),
            *searches("searchModels", f"{MODELS_PATH}/_search", "Find models", self.search),
            operation("getModel", f"GET {MODEL_PATH}", "One model", Scope.READ, self.get),
            operation(
                "updateModel",
                f"PUT {MODEL_PATH}",
                "Change a model",
                Scope.ADMIN,
                self.update,
                body="required",
                errors=(MISSING, TAKEN),
            ),
            operation(
                "deleteModel",
                f"DELETE {MODEL_PATH}",
                "Delete a model that is not deployed",
                Scope.ADMIN,
                self.delete,
                errors=(MISSING, TAKEN),
            ),
        ]

    async def register(self, call: Call) -> Response:
        query: Registering = call.query
        model = await self._models.register(call.caller, body_of(call), deploy=is_set(query.deploy))
        task = await self._tasks.record(call.caller, model.id, REGISTER_MODEL, COMPLETED)
        return reply(call, {"task_id": task.id, "status": "CREATED", "model_id": model.id})

    async def deploy(self, call: Call) -> Response:
        self._check_nodes(_said(call))
        model = await self._models.deploy(call.caller, call.path["model_id"])
        task = await self._tasks.record(call.caller, model.id, DEPLOY_MODEL, COMPLETED)
        return reply(call, {"task_id": task.id, "task_type": DEPLOY_MODEL, "status": COMPLETED})

    async def undeploy(self, call: Call) -> Response:
        self._check_nodes(_said(call))
        return reply(call, await self._undeployed(call, [call.path["model_id"]]))

    async def undeploy_many(self, call: Call) -> Response:
        """Those that are named; where none is, all of the caller's."""
        told = _said(call)
        self._check_nodes(told)
        named = _texts(told, "model_ids")
        return reply(call, await self._undeployed(call, named or [each.id for each in self._models.all(call.caller)]))

    async def _undeployed(self, call: Call, ids: Sequence[str]) -> dict[str, Any]:
        """All or none: a batch that runs at a provider keeps its model."""
        was = [self._models.get(call.caller, each) for each in ids]
        await self._models.check_idle(ids)
        for model in was:
            await self._models.undeploy(call.caller, model.id)
        return {self._node: {"stats": {each.id: "undeployed" if each.is_deployed else "not_found" for each in was}}}

    @staticmethod
    def _check_nodes(told: dict[str, Any]) -> None:
        """There is one node, which a client that has it from us may name; what it is called changes nothing."""
        _texts(told, "node_ids")
        for name in told:
            if name not in ("node_ids", "model_ids"):
                raise InvalidInput(f"there is nothing called {name[:80]!r} here: known are model_ids and node_ids")

    async def get(self, call: Call) -> Response:
        return reply(call, model_document(self._models.get(call.caller, call.path["model_id"])))

    async def update(self, call: Call) -> Response:
        told = body_of(call, "Failed to update model: Request body is empty")
        model = await self._models.update(call.caller, call.path["model_id"], told)
        return reply(call, written(MODELS, model.id, model.revision, "updated"))

    async def delete(self, call: Call) -> Response:
        model = await self._models.delete(call.caller, call.path["model_id"])
        return reply(call, written(MODELS, model.id, model.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        found = (
            Document(each.id, model_document(each), each.revision, each.revision - 1)
            for each in self._models.all(call.caller)
        )
        return await searched(call, found, MODELS)


def _aliased(
    name: str,
    path: str,
    old: str,
    summary: str,
    handler: Handler,
    *,
    query: type[Common] = Common,
    body: str = "optional",
    errors: tuple[int, ...] = (MISSING,),
) -> list[Operation]:
    """A POST of an administrator under its path of today, and under the last word that it had once."""
    before = f"{path.rpartition('/')[0]}/{old}"
    return [
        operation(name + suffix, f"POST {each}", summary, Scope.ADMIN, handler, query=query, body=body, errors=errors)
        for each, suffix in ((path, ""), (before, "ByItsOldName"))
    ]


def _said(call: Call) -> dict[str, Any]:
    return parse_object(call.raw) if call.raw and not call.raw.isspace() else {}


def _texts(told: dict[str, Any], name: str) -> list[str]:
    """The list of ids that a body holds under a name."""
    ids = told.get(name) or []
    if not isinstance(ids, list) or len(ids) > IDS_MAX or not all(isinstance(each, str) for each in ids):
        raise InvalidInput(f"{name} is a list of at most {IDS_MAX:,} ids", code="invalid_ids")
    return list(dict.fromkeys(ids))


TASKS_PATH = f"{PREFIX}/tasks"
TASK_PATH = f"{TASKS_PATH}/{{task_id}}"


class Tasks:
    def __init__(self, services: Services) -> None:
        self._tasks = services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        remote = (MISSING, TAKEN, *REMOTE_ERRORS)
        return [
            operation(
                "getTask",
                f"GET {TASK_PATH}",
                "One task; the provider is asked how it stands",
                Scope.READ,
                self.get,
                errors=remote,
            ),
            *searches(
                "searchTasks",
                f"{TASKS_PATH}/_search",
                "Find tasks, as they were when somebody last looked",
                self.search,
            ),
            operation("deleteTask", f"DELETE {TASK_PATH}", "Forget a task that has ended", Scope.SUBMIT, self.delete),
            *(
                operation(
                    name,
                    f"POST {TASK_PATH}/{verb}",
                    "Ask the provider to end a batch",
                    Scope.SUBMIT,
                    self.cancel,
                    body="optional",
                    errors=remote,
                )
                for name, verb in (("cancelTask", "_cancel"), ("cancelTaskBatch", "_cancel_batch"))
            ),
        ]

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
