"""Models: register, deploy, undeploy, get, update, delete, search. Source: ML Commons, "Model APIs".

A model here is always remote: it stands in memory of every server that has it, and to deploy it takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from batchmill.dialects.ml_commons.documents import MODELS, model_document, node_id, written
from batchmill.dialects.ml_commons.requests import PREFIX, Common, Registering, body_of, is_set, reply, searched
from batchmill.dialects.ml_commons.routes import MISSING, TAKEN, Handler, operation, searches
from batchmill.errors import InvalidInput
from batchmill.server.bodies import parse_object
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.remote.task_records import COMPLETED, DEPLOY_MODEL, REGISTER_MODEL
from batchmill.services.services import Services
from batchmill.types import Scope

ALL = f"{PREFIX}/models"
ONE = f"{ALL}/{{model_id}}"
IDS_MAX = 1000  # of models in one request


class Models:
    def __init__(self, services: Services) -> None:
        self._models, self._tasks = services.remote_models, services.remote_tasks
        self._node = node_id(services.config.data_dir)

    def operations(self) -> Sequence[Operation]:
        return [
            *_aliased(
                "registerModel", f"{ALL}/_register", "_upload", "Make a model of a connector", self.register,
                query=Registering, body="required", errors=(MISSING, TAKEN),
            ),
            *_aliased("deployModel", f"{ONE}/_deploy", "_load", "Let a model be called", self.deploy),
            *_aliased("undeployModel", f"{ONE}/_undeploy", "_unload", "Let a model be called no more", self.undeploy,
                      errors=(MISSING, TAKEN)),
            *_aliased(
                "undeployModels", f"{ALL}/_undeploy", "_unload", "Let models be called no more", self.undeploy_many,
                errors=(MISSING, TAKEN),
            ),
            *searches("searchModels", f"{ALL}/_search", "Find models", self.search),
            operation("getModel", f"GET {ONE}", "One model", Scope.READ, self.get),
            operation("updateModel", f"PUT {ONE}", "Change a model", Scope.ADMIN, self.update, body="required",
                      errors=(MISSING, TAKEN)),
            operation(
                "deleteModel", f"DELETE {ONE}", "Delete a model that is not deployed", Scope.ADMIN, self.delete,
                errors=(MISSING, TAKEN),
            ),
        ]  # fmt: skip

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
    name: str, path: str, old: str, summary: str, handler: Handler, *,
    query: type[Common] = Common, body: str = "optional", errors: tuple[int, ...] = (MISSING,),
) -> list[Operation]:  # fmt: skip
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
