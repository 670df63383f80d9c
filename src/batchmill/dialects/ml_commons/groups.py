"""Model groups: register, get, update, delete, search. Source: ML Commons, "Model group APIs"."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.dialects.ml_commons.documents import GROUPS, group_document, written
from batchmill.dialects.ml_commons.requests import PREFIX, body_of, reply, searched
from batchmill.dialects.ml_commons.routes import MISSING, TAKEN, operation, searches
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.services import Services
from batchmill.types import Scope

ALL = f"{PREFIX}/model_groups"
ONE = f"{ALL}/{{model_group_id}}"


class Groups:
    def __init__(self, services: Services) -> None:
        self._groups = services.groups

    def operations(self) -> Sequence[Operation]:
        return [
            operation(
                "registerModelGroup", f"POST {ALL}/_register", "Name what will have versions", Scope.ADMIN,
                self.register, body="required", errors=(),
            ),
            *searches("searchModelGroups", f"{ALL}/_search", "Find model groups", self.search),
            operation("getModelGroup", f"GET {ONE}", "One model group", Scope.READ, self.get),
            operation("updateModelGroup", f"PUT {ONE}", "Change a model group", Scope.ADMIN, self.update,
                      body="required"),
            operation("deleteModelGroup", f"DELETE {ONE}", "Delete a model group without models", Scope.ADMIN,
                      self.delete, errors=(MISSING, TAKEN)),
        ]  # fmt: skip

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
