"""Connectors, groups of models, models, and the tasks that show their progress, as OpenSearch's documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

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
from batchmill.services.remote.connectors import ConnectorRecord
from batchmill.services.remote.groups import ModelGroup
from batchmill.services.remote.models import RemoteModel
from batchmill.services.remote.task_records import BATCH_PREDICTION, COMPLETED, DEPLOY_MODEL, REGISTER_MODEL, TaskRecord
from batchmill.services.services import Services
from batchmill.types import Action, Connector, Scope

CONNECTORS, MODELS = ".plugins-ml-connector", ".plugins-ml-model"
GROUPS, TASKS = ".plugins-ml-model-group", ".plugins-ml-task"
NODE_CHARS = 22


def node_id(data_dir: Path) -> str:
    """The one node that this server is, always the same."""
    return hashlib.sha256(f"node {data_dir}".encode()).hexdigest()[:NODE_CHARS]


def connector_document(record: ConnectorRecord) -> dict[str, Any]:
    """A connector without its credentials."""
    return _present(
        **_connector(record.connector),
        created_time=_millis(record.created),
        last_updated_time=_millis(record.changed),
        client_config=record.connector.client_config and msgspec.to_builtins(record.connector.client_config),
        **record.access,
    )


def _connector(connector: Connector) -> dict[str, Any]:
    return {
        "name": connector.name,
        "version": connector.version,
        "description": connector.description or None,
        "protocol": connector.protocol,
        "parameters": connector.parameters or None,
        "actions": [_action(each) for each in connector.actions],
    }


def _action(action: Action) -> dict[str, Any]:
    return _present(
        action_type=action.action_type,
        method=action.method,
        url=action.url,
        headers=action.headers or None,
        request_body=action.request_body,
        pre_process_function=action.pre_process_function,
        post_process_function=action.post_process_function,
        name=action.name,
    )


def model_document(model: RemoteModel) -> dict[str, Any]:
    """A model; of one with a connector of its own, that without its credentials."""
    details = model.details
    own = None
    if model.own is not None:
        config = model.own.client_config and msgspec.to_builtins(model.own.client_config)
        own = _present(**_connector(model.own), client_config=config)
    return _present(
        name=model.name,
        model_group_id=model.group,
        algorithm="REMOTE",
        function_name="REMOTE",
        model_version=str(model.version),
        description=details.description,
        is_enabled=details.is_enabled,
        rate_limiter=details.rate_limiter and msgspec.to_builtins(details.rate_limiter),
        interface=details.interface,
        deploy_setting=_present(is_auto_deploy_enabled=details.is_auto_deploy) or None,
        model_state=model.state,
        created_time=_millis(model.created),
        last_updated_time=_millis(model.changed),
        last_deployed_time=_millis(details.deployed),
        last_undeployed_time=_millis(details.undeployed),
        planning_worker_node_count=1,
        current_worker_node_count=1 if model.is_deployed else 0,
        deploy_to_all_nodes=True,
        connector_id=model.connector,
        connector=own,
    )


def group_document(group: ModelGroup) -> dict[str, Any]:
    return _present(
        name=group.name,
        latest_version=group.latest,
        **group.details,
        created_time=_millis(group.created),
        last_updated_time=_millis(group.changed),
    )


def task_document(task: TaskRecord, node: str) -> dict[str, Any]:
    """A task without its id, as a GET has it. `is_async` is always there, and false: what is told has happened."""
    return _present(
        model_id=task.model,
        task_type=task.type,
        function_name="REMOTE",
        state=task.state,
        input_type="REMOTE" if task.type == BATCH_PREDICTION else None,
        worker_node=[node],
        create_time=_millis(task.created),
        last_update_time=_millis(max(task.changed, task.created)),
        error=task.error or None,
        is_async=False,
        remote_job=task.remote_job,
    )


def written(index: str, name: str, revision: int, result: str) -> dict[str, Any]:
    """How OpenSearch tells that a document was changed or deleted."""
    return {
        "_index": index,
        "_id": name,
        "_version": revision,
        "result": result,
        "_shards": {"total": 1, "successful": 1, "failed": 0},
        "_seq_no": revision - 1,
        "_primary_term": 1,
    }


def _present(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def _millis(time: float | None) -> int | None:
    return None if time is None else int(time * 1000)


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


class MlCommonsModels:
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
        fields = _said(call)
        self._check_nodes(fields)
        named = _texts(fields, "model_ids")
        return reply(call, await self._undeployed(call, named or [each.id for each in self._models.all(call.caller)]))

    async def _undeployed(self, call: Call, ids: Sequence[str]) -> dict[str, Any]:
        """All or none: a batch that runs at a provider keeps its model."""
        was = [self._models.get(call.caller, each) for each in ids]
        await self._models.check_idle(ids)
        for model in was:
            await self._models.undeploy(call.caller, model.id)
        return {self._node: {"stats": {each.id: "undeployed" if each.is_deployed else "not_found" for each in was}}}

    @staticmethod
    def _check_nodes(fields: dict[str, Any]) -> None:
        """There is one node, which a client that has it from us may name; what it is called changes nothing."""
        _texts(fields, "node_ids")
        for name in fields:
            if name not in ("node_ids", "model_ids"):
                raise InvalidInput(f"there is nothing called {name[:80]!r} here: known are model_ids and node_ids")

    async def get(self, call: Call) -> Response:
        return reply(call, model_document(self._models.get(call.caller, call.path["model_id"])))

    async def update(self, call: Call) -> Response:
        fields = body_of(call, "Failed to update model: Request body is empty")
        model = await self._models.update(call.caller, call.path["model_id"], fields)
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


def _texts(fields: dict[str, Any], name: str) -> list[str]:
    """The list of ids that a body holds under a name."""
    ids = fields.get(name) or []
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
