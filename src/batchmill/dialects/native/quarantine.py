"""Requests that engines died of: those of the caller's project, listed and let go."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from batchmill.errors import UnknownName
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.native import PREFIX
from batchmill.wire.native_llms import QuarantinedRequests

ALL = f"{PREFIX}/quarantine"
MISSING = 404
SHOWN_CHARS = 64


class QuarantinedRequestsOf:
    def __init__(self, services: Services) -> None:
        self._llms = services.llms

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                "quarantine", "GET", ALL, "Requests that engines died of", Scope.READ, self.list,
                reply=QuarantinedRequests,
            ),
            Operation(
                "clearQuarantine", "DELETE", ALL, "Let all of them go", Scope.ADMIN, self.clear,
                reply=QuarantinedRequests,
            ),
            Operation(
                "clearQuarantined", "DELETE", f"{ALL}/{{digest}}", "Let one of them go", Scope.ADMIN, self.clear_one,
                reply=QuarantinedRequests, errors=(MISSING,),
            ),
        )  # fmt: skip

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
