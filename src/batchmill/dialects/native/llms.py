"""Language models that batchmill serves itself: deployed, looked at, changed, started and stopped."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.native.views import Shown
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.llms import views
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.services import Services
from batchmill.types import Caller, EngineEvent, EngineView
from batchmill.wire.native_llms import LlmEvents, LlmEventsQuery, LlmInfo, LlmList, NewLlm
from batchmill.wire.operations import (
    CHANGE_LLM,
    DEPLOY_LLM,
    LIST_LLMS,
    LLM_EVENTS,
    REMOVE_LLM,
    SHOW_LLM,
    START_LLM,
    STOP_LLM,
)

MISSING, TAKEN = 404, 409


class Llms:
    def __init__(self, services: Services, shown: Shown) -> None:
        self._llms, self._shown = services.llms, shown

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(DEPLOY_LLM, self.create, errors=(MISSING, TAKEN)),
            Operation.of(LIST_LLMS, self.list),
            Operation.of(SHOW_LLM, self.show, errors=(MISSING,)),
            Operation.of(CHANGE_LLM, self.change, errors=(MISSING, TAKEN)),
            Operation.of(REMOVE_LLM, self.remove, errors=(MISSING, TAKEN)),
            Operation.of(LLM_EVENTS, self.events, errors=(MISSING,)),
            Operation.of(START_LLM, self.start, errors=(MISSING,)),
            Operation.of(STOP_LLM, self.stop, errors=(MISSING, TAKEN)),
        )

    async def create(self, call: Call) -> Response:
        asked: NewLlm = call.body
        settings = views.settings_of(asked)
        made = await self._llms.create(call.caller, asked.name, settings, description=asked.description)
        return self._reply(call.caller, made, 201)

    async def list(self, call: Call) -> Response:
        found = [self._info(call.caller, each) for each in self._llms.list(call.caller)]
        return json_reply(LlmList(found, self._llms.bases(call.caller)))

    async def show(self, call: Call) -> Response:
        return self._reply(call.caller, self._llms.get(call.caller, call.path["name"]))

    async def change(self, call: Call) -> Response:
        return self._reply(call.caller, await views.change(self._llms, call.caller, call.path["name"], call.body))

    async def remove(self, call: Call) -> Response:
        gone = await self._llms.delete(call.caller, call.path["name"])
        return json_reply(views.info(gone, EngineView()))

    async def events(self, call: Call) -> Response:
        query: LlmEventsQuery = call.query
        view = self._llms.shown(call.caller, self._llms.get(call.caller, call.path["name"]))
        after = 0.0 if query.after is None else query.after
        return json_reply(LlmEvents([self._event(each) for each in view.events if each.at > after]))

    async def start(self, call: Call) -> Response:
        return self._reply(call.caller, await self._llms.start(call.caller, call.path["name"]))

    async def stop(self, call: Call) -> Response:
        return self._reply(call.caller, await self._llms.stop(call.caller, call.path["name"]))

    def _reply(self, caller: Caller, deployment: LlmDeployment, status: int = 200) -> Response:
        return json_reply(self._info(caller, deployment), status)

    def _info(self, caller: Caller, deployment: LlmDeployment) -> LlmInfo:
        found = views.info(deployment, self._llms.shown(caller, deployment))
        return replace(found, message=self._shown.text(found.message))

    def _event(self, event: EngineEvent) -> EngineEvent:
        return replace(event, message=self._shown.text(event.message))
