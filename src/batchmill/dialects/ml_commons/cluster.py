"""What clients ask of a cluster: that it is there, what it calls itself, and what its one node is doing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

import batchmill
from batchmill.dialects.ml_commons.documents import node_id, task_document
from batchmill.dialects.ml_commons.requests import PREFIX, Search, reply, search_of
from batchmill.dialects.ml_commons.routes import MISSING, operation
from batchmill.errors import InvalidInput
from batchmill.server.operations import Call, Operation
from batchmill.services.services import Services
from batchmill.types import Scope

NUMBER = "3.5.0"  # of OpenSearch, whose ML Commons this API is
TAGLINE = "The OpenSearch Project: https://opensearch.org/"
PROFILE = f"{PREFIX}/profile"
FLAGS = ("return_all_tasks", "return_all_models")
LISTS = ("model_ids", "task_ids", "node_ids")
IDS_MAX = 1000


class Cluster:
    def __init__(self, services: Services) -> None:
        self._models, self._tasks = services.remote_models, services.remote_tasks
        self._node = node_id(services.config.data_dir)
        self._uuid = hashlib.sha256(f"cluster {services.config.data_dir}".encode()).hexdigest()[:22]

    def operations(self) -> Sequence[Operation]:
        return [
            operation("getClusterInfo", "GET /", "What answers here", Scope.READ, self.info, errors=()),
            *(
                operation(name, f"GET {path}", "Models that are deployed and tasks that run", Scope.READ, handler,
                          query=Search, body="optional", errors=(MISSING,))
                for name, path, handler in (
                    ("getProfile", PROFILE, self.everything),
                    ("getModelsProfile", f"{PROFILE}/models", self.models),
                    ("getModelProfile", f"{PROFILE}/models/{{model_ids}}", self.models),
                    ("getTasksProfile", f"{PROFILE}/tasks", self.tasks),
                    ("getTaskProfile", f"{PROFILE}/tasks/{{task_ids}}", self.tasks),
                )
            ),
        ]  # fmt: skip

    async def info(self, call: Call) -> Response:
        told = {
            "name": "batchmill",
            "cluster_name": "batchmill",
            "cluster_uuid": self._uuid,
            "version": {
                "distribution": "opensearch",
                "number": NUMBER,
                "build_type": "batchmill",
                "build_hash": batchmill.__version__,
                "minimum_wire_compatibility_version": "2.19.0",
                "minimum_index_compatibility_version": "2.0.0",
            },
            "tagline": TAGLINE,
        }
        return reply(call, told)

    async def everything(self, call: Call) -> Response:
        return self._reply(call, {**self._of_models(call, []), **await self._of_tasks(call, [])})

    async def models(self, call: Call) -> Response:
        return self._reply(call, self._of_models(call, _named(call, "model_ids")))

    async def tasks(self, call: Call) -> Response:
        return self._reply(call, await self._of_tasks(call, _named(call, "task_ids")))

    def _reply(self, call: Call, node: dict[str, Any]) -> Response:
        told = {name: each for name, each in node.items() if each}
        return reply(call, {"nodes": {self._node: told}} if told else {})

    def _of_models(self, call: Call, ids: list[str]) -> dict[str, Any]:
        chosen = _asked(call, "model_ids") or ids
        found = [each for each in self._models.all(call.caller) if each.is_deployed or each.id in chosen]
        return {
            "models": {
                each.id: {"model_state": each.state, "worker_nodes": [self._node] if each.is_deployed else []}
                for each in found
                if not chosen or each.id in chosen
            }
        }

    async def _of_tasks(self, call: Call, ids: list[str]) -> dict[str, Any]:
        chosen = _asked(call, "task_ids") or ids
        found = [each for each in await self._tasks.all(call.caller) if not each.has_ended or each.id in chosen]
        return {
            "tasks": {each.id: task_document(each, self._node) for each in found if not chosen or each.id in chosen}
        }


def _named(call: Call, name: str) -> list[str]:
    """The ids of the path, with commas between them."""
    return [each for each in call.path.get(name, "").split(",") if each][:IDS_MAX]


def _asked(call: Call, name: str) -> list[str]:
    """The ids of the body. Raises: InvalidInput for what nobody knows."""
    told = search_of(call)
    for key, value in told.items():
        if key in FLAGS and isinstance(value, bool):
            continue
        if key in LISTS and isinstance(value, list) and len(value) <= IDS_MAX:
            continue
        raise InvalidInput(
            f"a profile takes {', '.join(FLAGS)} (true or false) and {', '.join(LISTS)} (lists), not {key[:80]!r}: "
            f"{str(value)[:80]}"
        )
    return [str(each) for each in told.get(name, [])]
