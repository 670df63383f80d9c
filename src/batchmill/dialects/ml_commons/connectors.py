"""Connectors: create, get, update, delete, search. Source: ML Commons, "Connector APIs"."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.dialects.ml_commons.documents import CONNECTORS, connector_document, written
from batchmill.dialects.ml_commons.requests import PREFIX, body_of, reply, searched
from batchmill.dialects.ml_commons.routes import MISSING, TAKEN, operation, searches
from batchmill.server.operations import Call, Operation
from batchmill.services.documents.search import Document
from batchmill.services.services import Services
from batchmill.types import Scope

ALL = f"{PREFIX}/connectors"
ONE = f"{ALL}/{{connector_id}}"
NO_CREATE, NO_UPDATE = "Create Connector request has empty body", "Failed to update connector: Request body is empty"


class Connectors:
    def __init__(self, services: Services) -> None:
        self._connectors = services.connectors

    def operations(self) -> Sequence[Operation]:
        return [
            operation(
                "createConnector", f"POST {ALL}/_create", "Describe a remote service", Scope.ADMIN, self.create,
                body="required", errors=(TAKEN,),
            ),
            *searches("searchConnectors", f"{ALL}/_search", "Find connectors", self.search),
            operation("getConnector", f"GET {ONE}", "One connector, without its credentials", Scope.READ, self.get),
            operation(
                "updateConnector", f"PUT {ONE}", "Change a connector, or its credentials alone", Scope.ADMIN,
                self.update, body="required",
            ),
            operation(
                "deleteConnector", f"DELETE {ONE}", "Delete a connector that no model uses", Scope.ADMIN, self.delete,
                errors=(MISSING, TAKEN),
            ),
        ]  # fmt: skip

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
