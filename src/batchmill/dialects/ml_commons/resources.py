"""Connectors, model groups, models and tasks, in the form of OpenSearch's documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from batchmill.dialects.ml_commons.predict import REMOTE_ERRORS
from batchmill.dialects.ml_commons.requests import (
    CONFLICT,
    MISSING,
    PREFIX,
    Common,
    Handler,
    Registering,
    body_of,
    is_set,
    operation,
    reply,
    search_operations,
    search_reply,
)
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.remote.groups import ModelGroup
from batchmill.services.remote.stored import ConnectorRecord, RemoteModel
from batchmill.services.remote.task_records import BATCH_PREDICTION, COMPLETED, DEPLOY_MODEL, REGISTER_MODEL, TaskRecord
from batchmill.services.services import Services
from batchmill.types import Action, Connector, Scope

CONNECTORS, MODELS = ".plugins-ml-connector", ".plugins-ml-model"
GROUPS, TASKS = ".plugins-ml-model-group", ".plugins-ml-task"
NODE_CHARS = 22


def node_id(data_dir: Path) -> str:
    """Return the id of this server, which is the only node. It never changes."""
    return hashlib.sha256(f"node {data_dir}".encode()).hexdigest()[:NODE_CHARS]


def connector_document(record: ConnectorRecord) -> dict[str, Any]:
    """Return a connector without its credentials."""
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
    """Return a model. A connector of its own is included without its credentials."""
    details = model.details
    own_connector = None
    if model.own is not None:
        config = model.own.client_config and msgspec.to_builtins(model.own.client_config)
        own_connector = _present(**_connector(model.own), client_config=config)
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
        connector=own_connector,
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
    """Return a task without its id, like a GET. `is_async` is always false, because the reply shows finished work."""
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


def change_document(index: str, name: str, revision: int, result: str) -> dict[str, Any]:
    """Return OpenSearch's reply to a changed or deleted document."""
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
                "Create a connector to a remote service",
                Scope.ADMIN,
                self.create,
                body="required",
                errors=(CONFLICT,),
            ),
            *search_operations("searchConnectors", f"{CONNECTORS_PATH}/_search", "Find connectors", self.search),
            operation(
                "getConnector",
                f"GET {CONNECTOR_PATH}",
                "Show a connector without its credentials",
                Scope.READ,
                self.get,
            ),
            operation(
                "updateConnector",
                f"PUT {CONNECTOR_PATH}",
                "Change a connector, or only its credentials",
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
                errors=(MISSING, CONFLICT),
            ),
        ]

    async def create(self, call: Call) -> Response:
        record = await self._connectors.create(call.caller, body_of(call, NO_CREATE))
        return reply(call, {"connector_id": record.id})

    async def get(self, call: Call) -> Response:
        return reply(call, connector_document(self._connectors.get(call.caller, call.path["connector_id"])))

    async def update(self, call: Call) -> Response:
        record = await self._connectors.update(call.caller, call.path["connector_id"], body_of(call, NO_UPDATE))
        return reply(call, change_document(CONNECTORS, record.id, record.revision, "updated"))

    async def delete(self, call: Call) -> Response:
        record = await self._connectors.delete(call.caller, call.path["connector_id"])
        return reply(call, change_document(CONNECTORS, record.id, record.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        records = self._connectors.all(call.caller)
        documents = (Document(each.id, connector_document(each), each.revision, each.revision - 1) for each in records)
        return await search_reply(call, documents, CONNECTORS)


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
                "Register a model group",
                Scope.ADMIN,
                self.register,
                body="required",
                errors=(),
            ),
            *search_operations("searchModelGroups", f"{GROUPS_PATH}/_search", "Find model groups", self.search),
            operation("getModelGroup", f"GET {GROUP_PATH}", "Show a model group", Scope.READ, self.get),
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
                errors=(MISSING, CONFLICT),
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
        return reply(call, change_document(GROUPS, group.id, group.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        documents = (
            Document(each.id, group_document(each), each.revision, each.revision - 1)
            for each in self._groups.all(call.caller)
        )
        return await search_reply(call, documents, GROUPS)


MODELS_PATH = f"{PREFIX}/models"
MODEL_PATH = f"{MODELS_PATH}/{{model_id}}"
IDS_MAX = 1000  # limit of models in one request


class MlCommonsModels:
    def __init__(self, services: Services) -> None:
        self._models, self._tasks = services.remote_models, services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        return [
            *_with_alias(
                "registerModel",
                f"{MODELS_PATH}/_register",
                "_upload",
                "Register a model with a connector",
                self.register,
                query=Registering,
                body="required",
                errors=(MISSING, CONFLICT),
            ),
            *_with_alias("deployModel", f"{MODEL_PATH}/_deploy", "_load", "Deploy a model", self.deploy),
            *_with_alias(
                "undeployModel",
                f"{MODEL_PATH}/_undeploy",
                "_unload",
                "Undeploy a model",
                self.undeploy,
                errors=(MISSING, CONFLICT),
            ),
            *_with_alias(
                "undeployModels",
                f"{MODELS_PATH}/_undeploy",
                "_unload",
                "Undeploy models",
                self.undeploy_many,
                errors=(MISSING, CONFLICT),
            ),
            *search_operations("searchModels", f"{MODELS_PATH}/_search", "Find models", self.search),
            operation("getModel", f"GET {MODEL_PATH}", "Show a model", Scope.READ, self.get),
            operation(
                "updateModel",
                f"PUT {MODEL_PATH}",
                "Change a model",
                Scope.ADMIN,
                self.update,
                body="required",
                errors=(MISSING, CONFLICT),
            ),
            operation(
                "deleteModel",
                f"DELETE {MODEL_PATH}",
                "Delete a model that is not deployed",
                Scope.ADMIN,
                self.delete,
                errors=(MISSING, CONFLICT),
            ),
        ]

    async def register(self, call: Call) -> Response:
        query: Registering = call.query
        model = await self._models.register(call.caller, body_of(call), deploy=is_set(query.deploy))
        task = await self._tasks.record(call.caller, model.id, REGISTER_MODEL, COMPLETED)
        return reply(call, {"task_id": task.id, "status": "CREATED", "model_id": model.id})

    async def deploy(self, call: Call) -> Response:
        self._check_nodes(_body_or_empty(call))
        model = await self._models.deploy(call.caller, call.path["model_id"])
        task = await self._tasks.record(call.caller, model.id, DEPLOY_MODEL, COMPLETED)
        return reply(call, {"task_id": task.id, "task_type": DEPLOY_MODEL, "status": COMPLETED})

    async def undeploy(self, call: Call) -> Response:
        self._check_nodes(_body_or_empty(call))
        return reply(call, await self._undeploy(call, [call.path["model_id"]]))

    async def undeploy_many(self, call: Call) -> Response:
        """Undeploy the named models; without names, all models of the caller."""
        fields = _body_or_empty(call)
        self._check_nodes(fields)
        ids = _id_list(fields, "model_ids")
        return reply(call, await self._undeploy(call, ids or [each.id for each in self._models.all(call.caller)]))

    async def _undeploy(self, call: Call, ids: Sequence[str]) -> dict[str, Any]:
        """Undeploy all models or none: a model with a running batch at a provider stays deployed."""
        models = [self._models.get(call.caller, each) for each in ids]
        await self._models.check_idle(ids)
        for model in models:
            await self._models.undeploy(call.caller, model.id)
        return {self._node: {"stats": {each.id: "undeployed" if each.is_deployed else "not_found" for each in models}}}

    @staticmethod
    def _check_nodes(fields: dict[str, Any]) -> None:
        """Check the fields. A client may name any nodes, because there is only one."""
        _id_list(fields, "node_ids")
        for name in fields:
            if name not in ("node_ids", "model_ids"):
                raise InvalidInput(f"the field {name[:80]!r} is unknown: use model_ids and node_ids")

    async def get(self, call: Call) -> Response:
        return reply(call, model_document(self._models.get(call.caller, call.path["model_id"])))

    async def update(self, call: Call) -> Response:
        fields = body_of(call, "Failed to update model: Request body is empty")
        model = await self._models.update(call.caller, call.path["model_id"], fields)
        return reply(call, change_document(MODELS, model.id, model.revision, "updated"))

    async def delete(self, call: Call) -> Response:
        model = await self._models.delete(call.caller, call.path["model_id"])
        return reply(call, change_document(MODELS, model.id, model.revision + 1, "deleted"))

    async def search(self, call: Call) -> Response:
        documents = (
            Document(each.id, model_document(each), each.revision, each.revision - 1)
            for each in self._models.all(call.caller)
        )
        return await search_reply(call, documents, MODELS)


def _with_alias(
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
    """Create an administrator's POST twice: at its current path, and at a path that ends with its old name."""
    old_path = f"{path.rpartition('/')[0]}/{old}"
    return [
        operation(name + suffix, f"POST {each}", summary, Scope.ADMIN, handler, query=query, body=body, errors=errors)
        for each, suffix in ((path, ""), (old_path, "ByItsOldName"))
    ]


def _body_or_empty(call: Call) -> dict[str, Any]:
    return parse_object(call.raw) if call.raw and not call.raw.isspace() else {}


def _id_list(fields: dict[str, Any], name: str) -> list[str]:
    """Return a field of the body that is a list of ids."""
    ids = fields.get(name) or []
    if not isinstance(ids, list) or len(ids) > IDS_MAX or not all(isinstance(each, str) for each in ids):
        raise InvalidInput(f"{name} must be a list of at most {IDS_MAX:,} ids", code="invalid_ids")
    return list(dict.fromkeys(ids))


TASKS_PATH = f"{PREFIX}/tasks"
TASK_PATH = f"{TASKS_PATH}/{{task_id}}"


class Tasks:
    def __init__(self, services: Services) -> None:
        self._tasks = services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        remote = (MISSING, CONFLICT, *REMOTE_ERRORS)
        return [
            operation(
                "getTask",
                f"GET {TASK_PATH}",
                "Show a task, with its state at the provider",
                Scope.READ,
                self.get,
                errors=remote,
            ),
            *search_operations(
                "searchTasks",
                f"{TASKS_PATH}/_search",
                "Find tasks, each with its last known state",
                self.search,
            ),
            operation("deleteTask", f"DELETE {TASK_PATH}", "Delete a task that has ended", Scope.SUBMIT, self.delete),
            *(
                operation(
                    name,
                    f"POST {TASK_PATH}/{verb}",
                    "Cancel a batch at the provider",
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
        return reply(call, change_document(TASKS, task_id, 2, "deleted"))

    async def search(self, call: Call) -> Response:
        tasks = await self._tasks.all(call.caller)
        documents = (Document(each.id, task_document(each, self._node) | {"task_id": each.id}) for each in tasks)
        return await search_reply(call, documents, TASKS)
