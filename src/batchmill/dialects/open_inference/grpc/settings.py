"""Settings and shared memory over gRPC: told and refused as over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from batchmill.dialects.open_inference.grpc.calls import call_of
from batchmill.dialects.open_inference.grpc.door import Action
from batchmill.dialects.open_inference.grpc.messages import METHODS, Message
from batchmill.dialects.open_inference.settings import Settings
from batchmill.services.services import Services
from batchmill.types import Caller, Scope

LISTS = frozenset({"trace_level"})  # the settings whose values are many


class SettingCalls:
    def __init__(self, services: Services) -> None:
        self._settings = Settings(services)

    def actions(self) -> dict[str, tuple[Scope, Action]]:
        """Every method, with what it needs where nothing is to be changed."""
        found: dict[str, tuple[Scope, Action]] = {
            "LogSettings": (Scope.READ, self.log),
            "TraceSetting": (Scope.READ, self.trace),
        }
        for kind in ("System", "Cuda"):
            found |= {
                f"{kind}SharedMemoryStatus": (Scope.READ, self._no_regions(kind)),
                f"{kind}SharedMemoryRegister": (Scope.SUBMIT, self.register),
                f"{kind}SharedMemoryUnregister": (Scope.SUBMIT, self._let_go(kind)),
            }
        return found

    async def log(self, caller: Caller, request: Any) -> Message:
        asked = {name: _single(value) for name, value in request.settings.items()}
        reply = await self._settings.change_logging(call_of(caller, sent=asked))
        response = METHODS["LogSettings"].response()
        for name, value in msgspec.json.decode(reply.body).items():
            match value:
                case bool():
                    response.settings[name].bool_param = value
                case int():
                    response.settings[name].uint32_param = value
                case _:
                    response.settings[name].string_param = value
        return response

    async def trace(self, caller: Caller, request: Any) -> Message:
        asked = {name: _values(name, value.value) for name, value in request.settings.items()}
        path = {"model": request.model_name} if request.model_name else {}
        reply = await self._settings.change_trace(call_of(caller, sent=asked, **path))
        response = METHODS["TraceSetting"].response()
        told: Mapping[str, Any] = msgspec.json.decode(reply.body)
        for name, value in told.items():
            response.settings[name].value.extend(value if isinstance(value, list) else [value])
        return response

    def _no_regions(self, kind: str) -> Action:
        async def status(caller: Caller, request: Any) -> Message:
            if request.name:
                await self._settings.no_region(call_of(caller, region=request.name))
            return METHODS[f"{kind}SharedMemoryStatus"].response()

        return status

    async def register(self, caller: Caller, request: Any) -> bytes:
        """Always refused."""
        reply = await self._settings.no_region(call_of(caller, region=request.name))
        return bytes(reply.body)

    def _let_go(self, kind: str) -> Action:
        async def unregister(caller: Caller, request: Any) -> Message:
            await self._settings.nothing(call_of(caller))
            return METHODS[f"{kind}SharedMemoryUnregister"].response()

        return unregister


def _single(value: Any) -> Any:
    """None: what the setting is without being set."""
    choice = value.WhichOneof("parameter_choice")
    return None if choice is None else getattr(value, choice)


def _values(name: str, values: Any) -> Any:
    if not values:
        return None
    return list(values) if name in LISTS or len(values) > 1 else values[0]
