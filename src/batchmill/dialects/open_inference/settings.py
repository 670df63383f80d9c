"""Settings that Triton's clients look at: what there is, is told; what cannot be changed here, is refused by name.

Source: Triton's logging, trace and shared memory extensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from batchmill.errors import InvalidInput
from batchmill.server.bodies import Refusal
from batchmill.server.function_replies import body_of, json_of
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.functions.paths import locate
from batchmill.services.services import Services
from batchmill.types import Scope
from batchmill.wire.json_bytes import decode

BYTES_MAX = 1024 * 1024
LOGGING: dict[str, Any] = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip
TRACE: dict[str, Any] = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip
_SETTINGS = Content("application/json", {"type": "object", "additionalProperties": True})
_KINDS = {"system": "System", "cuda": "Cuda"}
_NO_MEMORY = (
    "shared memory is not supported: send tensors as binary data behind the request's JSON, which copies them once"
)


class Region(Struct, frozen=True):
    """Of memory that a client shares with a server; here there are none."""

    name: str


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """A body that says nothing."""


class Settings:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions

    def operations(self) -> Sequence[Operation]:
        found = [
            *self._pair("InferenceLogging", "/v2/logging", "What is logged", self.logging, self.change_logging),
            *self._pair("InferenceTrace", "/v2/trace/setting", "What is traced", self.trace, self.change_trace),
            *self._pair(
                "InferenceModelTrace", "/v2/models/{model}/trace/setting", "What is traced of a function", self.trace,
                self.change_trace,
            ),
        ]  # fmt: skip
        for kind in _KINDS:
            found += self._memory(kind)
        return found

    @staticmethod
    def _pair(name: str, path: str, summary: str, look: Any, change: Any) -> list[Operation]:
        errors = (404,) if "{" in path else ()
        return [
            Operation(f"get{name}", "GET", path, summary, Scope.READ, look, reply=_SETTINGS, errors=errors),
            Operation(
                f"update{name}", "POST", path, f"{summary}: nothing of it can be changed", Scope.ADMIN, change,
                body=_SETTINGS, reply=_SETTINGS, errors=errors, body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    def _memory(self, kind: str) -> list[Operation]:
        path, name = f"/v2/{kind}sharedmemory", f"{_KINDS[kind]}SharedMemory"
        told = Content("application/json", {"type": "object"})
        return [
            Operation(
                f"get{name}", "GET", f"{path}/status", "Regions that are shared: none", Scope.READ, self.regions,
                reply=list[Region],
            ),
            Operation(
                f"get{name}Region", "GET", f"{path}/region/{{region}}/status", "A region: there is none", Scope.READ,
                self.no_region,
            ),
            Operation(
                f"register{name}", "POST", f"{path}/region/{{region}}/register", "Always refused", Scope.SUBMIT,
                self.no_region, body=told, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}Region", "POST", f"{path}/region/{{region}}/unregister", "There is none",
                Scope.SUBMIT, self.nothing, body=Nothing, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}", "POST", f"{path}/unregister", "There are none", Scope.SUBMIT, self.nothing,
                body=Nothing, body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    async def logging(self, call: Call) -> Response:
        return json_reply(LOGGING)

    async def change_logging(self, call: Call) -> Response:
        return json_reply(await _unchanged(call, LOGGING, "log"))

    async def trace(self, call: Call) -> Response:
        self._find(call)
        return json_reply(TRACE)

    async def change_trace(self, call: Call) -> Response:
        self._find(call)
        return json_reply(await _unchanged(call, TRACE, "trace"))

    def _find(self, call: Call) -> None:
        if "model" in call.path:
            locate(self._functions, call.caller, call.path["model"])

    async def regions(self, call: Call) -> Response:
        return json_reply([])

    async def nothing(self, call: Call) -> Response:
        """To let go of what there is none of is done at once: clients do it before they begin."""
        await json_of(call, Nothing)
        return Response(status_code=200)

    async def no_region(self, call: Call) -> Response:
        raise InvalidInput(f"{_NO_MEMORY} ({call.path['region'][:80]!r})", code="parameter_not_allowed")


async def _unchanged(call: Call, settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """The settings, if the body asks for nothing else: None means what a setting is without being set.

    Raises: InvalidInput, naming the one that would change or that there is not.
    """
    raw = await body_of(call, BYTES_MAX)
    try:
        asked = decode(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise Refusal("the body must be a JSON object of settings", code="invalid_value")
    for name, value in asked.items():
        if name not in settings:
            known = ", ".join(settings)
            raise Refusal(f"unknown {kind} setting {name[:80]!r}; known are {known}", code="unknown_parameter")
        if value is not None and value != settings[name]:
            raise InvalidInput(
                f"the {kind} setting {name!r} cannot be changed here; `batchmill serve` is told when it starts",
                code="parameter_not_allowed",
            )
    return settings
