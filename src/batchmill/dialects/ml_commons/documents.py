"""What is told of connectors, models, groups and tasks: documents as OpenSearch has them in its indexes. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from batchmill.services.remote.connectors import ConnectorRecord
from batchmill.services.remote.groups import ModelGroup
from batchmill.services.remote.models import RemoteModel
from batchmill.services.remote.task_records import BATCH_PREDICTION, TaskRecord
from batchmill.types import Action, Connector

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
