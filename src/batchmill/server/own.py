"""The operations that belong to no dialect: is the server well, what does it offer, how much has it done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from batchmill.server.auth import Gate
from batchmill.server.health import Health, Report
from batchmill.server.metrics import CONTENT_TYPE
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.types import Caller, Scope

DOCUMENT = Content("application/json", {"type": "object", "required": ["openapi", "paths"]})
METRICS = "text/plain"


class Own:
    def __init__(
        self,
        health: Health,
        gate: Gate,
        render: Callable[[str | None], Awaitable[bytes]],
        sees: Callable[[Caller, str], bool],
        document: Callable[[], dict[str, object]],
    ) -> None:
        """Args:
        render: makes the text of /metrics.
        sees: a caller may know that there is a model of a name.
        document: makes the OpenAPI document, once every operation is known.
        """
        self._health, self._gate, self._render, self._sees = health, gate, render, sees
        self._document = document
        self._encoded = b""

    def operations(self) -> Sequence[Operation]:
        text = Content(METRICS, {"type": "string"})
        return [
            Operation(
                "getHealth", "GET", "/health", "Say whether the server can take work", None, self.health,
                reply=Report, also={503: Report}, is_vital=True,
            ),
            Operation(
                "getOpenApi", "GET", "/openapi.json", "Describe every operation", None, self.openapi, reply=DOCUMENT
            ),
            Operation(
                "getMetrics", "GET", "/metrics", "Count and measure, for Prometheus", Scope.READ, self.metrics,
                reply=text,
            ),
        ]  # fmt: skip

    async def health(self, call: Call) -> Response:
        report = await self._health.report()
        scope = call.request.scope
        caller = await self._gate.asker(scope["headers"], (scope.get("client") or ("",))[0])
        if caller is None:  # a stranger is told whether it takes work, and nothing of what it stands on
            return json_reply(Report(report.status), 200 if report.status == "ok" else 503)
        report = replace(report, models=[each for each in report.models or () if self._shows(caller, each.name)])
        return json_reply(report, 200 if report.status == "ok" else 503)

    def _shows(self, caller: Caller, name: str) -> bool:
        """As with /metrics: whoever looks after projects sees what all of them use."""
        return caller.may(Scope.ADMIN) or self._sees(caller, name)

    async def openapi(self, call: Call) -> Response:
        if not self._encoded:
            self._encoded = msgspec.json.encode(self._document())
        return Response(self._encoded, media_type="application/json")

    async def metrics(self, call: Call) -> Response:
        """Of what projects did, a key that looks after none sees its own project's share."""
        caller = call.caller
        page = await self._render(None if caller.may(Scope.ADMIN) else caller.project)
        return Response(page, headers={"content-type": CONTENT_TYPE})
