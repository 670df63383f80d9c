"""Requests that engines died of: those of the caller's project, listed and let go."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.errors import UnknownName
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.services import Services
from batchmill.wire.native_llms import QuarantinedRequests
from batchmill.wire.operations import (
    CLEAR_QUARANTINE,
    CLEAR_QUARANTINED,
    LIST_QUARANTINE,
)

MISSING = 404
SHOWN_CHARS = 64


class QuarantinedRequestsOf:
    def __init__(self, services: Services) -> None:
        self._llms = services.llms

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(LIST_QUARANTINE, self.list),
            Operation.of(CLEAR_QUARANTINE, self.clear),
            Operation.of(CLEAR_QUARANTINED, self.clear_one, errors=(MISSING,)),
        )

    async def list(self, call: Call) -> Response:
        return json_reply(QuarantinedRequests.of(self._llms.quarantined(call.caller.project)))

    async def clear(self, call: Call) -> Response:
        return json_reply(QuarantinedRequests.of(self._llms.quarantined(call.caller.project, clear=True)))

    async def clear_one(self, call: Call) -> Response:
        digest = call.path["digest"]
        gone = self._llms.quarantined(call.caller.project, digest, clear=True)
        if not gone:
            raise UnknownName(f"no request {digest[:SHOWN_CHARS]!r} is known", code="unknown_request")
        return json_reply(QuarantinedRequests.of(gone))
