"""Language models and their adapters: deployed, registered, looked at, changed, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.native.orders import Shown
from batchmill.errors import Forbidden
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.adapters.records import shown_info
from batchmill.services.adapters.service import AdapterRecord, unknown_adapter
from batchmill.services.llms import views
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.services import Services
from batchmill.types import Caller, EngineEvent, EngineView
from batchmill.wire.adapter_bundles import BUNDLE_BYTES_MAX
from batchmill.wire.native_models import (
    AdapterInfo,
    AdapterList,
    AdapterQuery,
    AdapterVersion,
    LlmEvents,
    LlmEventsQuery,
    LlmInfo,
    LlmList,
    NewAdapter,
    NewLlm,
    UploadQuery,
)
from batchmill.wire.operations import (
    CHANGE_LLM,
    DEPLOY_LLM,
    LIST_ADAPTERS,
    LIST_LLMS,
    LLM_EVENTS,
    REGISTER_ADAPTER,
    REMOVE_ADAPTER,
    REMOVE_LLM,
    SHOW_ADAPTER,
    SHOW_LLM,
    START_LLM,
    STOP_LLM,
    UPLOAD_ADAPTER,
)

NO_ADAPTER, ADAPTER_TAKEN = 404, 409


class Adapters:
    def __init__(self, services: Services, shown: Shown) -> None:
        self._adapters, self._shown = services.adapters, shown

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(REGISTER_ADAPTER, self.register, errors=(NO_ADAPTER, ADAPTER_TAKEN)),
            Operation.of(
                UPLOAD_ADAPTER, self.upload, body_bytes_max=BUNDLE_BYTES_MAX, errors=(NO_ADAPTER, ADAPTER_TAKEN)
            ),
            Operation.of(LIST_ADAPTERS, self.list),
            Operation.of(SHOW_ADAPTER, self.show, errors=(NO_ADAPTER,)),
            Operation.of(REMOVE_ADAPTER, self.remove, errors=(NO_ADAPTER,)),
        )

    async def register(self, call: Call) -> Response:
        asked: NewAdapter = call.body
        _check(call.caller, asked.name)
        record = await self._adapters.register(call.caller, asked.base, asked.name, asked.source, token=asked.token)
        return json_reply(self._info(record), 202)

    async def upload(self, call: Call) -> Response:
        query: UploadQuery = call.query
        name = call.path["name"]
        _check(call.caller, name)
        bundle = await asyncio.to_thread(self._adapters.incoming)
        try:
            await self._adapters.receive(call.caller.project, bundle, call.request.stream())
            record = await self._adapters.take(call.caller, query.base, name, bundle)
        finally:
            await asyncio.to_thread(bundle.unlink)
        return json_reply(self._info(record), 201)

    async def list(self, call: Call) -> Response:
        query: AdapterQuery = call.query
        found = self._adapters.list(call.caller.project, query.base)
        return json_reply(AdapterList([self._info(each) for each in found if _may_see(call.caller, each)]))

    async def show(self, call: Call) -> Response:
        query: AdapterVersion = call.query
        record = self._adapters.get(call.caller.project, call.path["name"], query.version)
        if not _may_see(call.caller, record):
            raise unknown_adapter(record.name, query.version)
        return json_reply(self._info(record))

    async def remove(self, call: Call) -> Response:
        query: AdapterVersion = call.query
        name = call.path["name"]
        if not _may(call.caller, name):
            raise unknown_adapter(name, query.version)
        gone = await self._adapters.remove(call.caller.project, name, query.version)
        return json_reply(AdapterList([self._info(each) for each in gone]))

    def _info(self, record: AdapterRecord) -> AdapterInfo:
        info = shown_info(record)
        return replace(info, message=self._shown.text(info.message))


def _may(caller: Caller, name: str) -> bool:
    return caller.models is None or name in caller.models


def _may_see(caller: Caller, record: AdapterRecord) -> bool:
    return _may(caller, record.name) or _may(caller, record.own_name)


def _check(caller: Caller, name: str) -> None:
    """Raises: Forbidden for a name that the key may not use."""
    if not _may(caller, name):
        raise Forbidden(f"this key may not use the adapter {name!r}, and so not register it")


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
