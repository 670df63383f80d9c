"""Deployments of language models, and adapters: create, list, show, change and remove."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.native.orders import Redactor
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

MISSING, CONFLICT = 404, 409


class Adapters:
    def __init__(self, services: Services, redactor: Redactor) -> None:
        self._adapters, self._redactor = services.adapters, redactor

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(REGISTER_ADAPTER, self.register, errors=(MISSING, CONFLICT)),
            Operation.of(UPLOAD_ADAPTER, self.upload, body_bytes_max=BUNDLE_BYTES_MAX, errors=(MISSING, CONFLICT)),
            Operation.of(LIST_ADAPTERS, self.list),
            Operation.of(SHOW_ADAPTER, self.show, errors=(MISSING,)),
            Operation.of(REMOVE_ADAPTER, self.remove, errors=(MISSING,)),
        )

    async def register(self, call: Call) -> Response:
        body: NewAdapter = call.body
        _check(call.caller, body.name)
        record = await self._adapters.register(call.caller, body.base, body.name, body.source, token=body.token)
        return json_reply(self._info(record), 202)

    async def upload(self, call: Call) -> Response:
        query: UploadQuery = call.query
        name = call.path["name"]
        _check(call.caller, name)
        bundle = await asyncio.to_thread(self._adapters.incoming)
        try:
            await self._adapters.receive(call.caller.project, bundle, call.request.stream())
            record = await self._adapters.upload(call.caller, query.base, name, bundle)
        finally:
            await asyncio.to_thread(bundle.unlink)
        return json_reply(self._info(record), 201)

    async def list(self, call: Call) -> Response:
        query: AdapterQuery = call.query
        records = self._adapters.list(call.caller.project, query.base)
        return json_reply(AdapterList([self._info(each) for each in records if _can_see(call.caller, each)]))

    async def show(self, call: Call) -> Response:
        query: AdapterVersion = call.query
        record = self._adapters.get(call.caller.project, call.path["name"], query.version)
        if not _can_see(call.caller, record):
            raise unknown_adapter(record.name, query.version)
        return json_reply(self._info(record))

    async def remove(self, call: Call) -> Response:
        query: AdapterVersion = call.query
        name = call.path["name"]
        if not _can_use(call.caller, name):
            raise unknown_adapter(name, query.version)
        removed = await self._adapters.remove(call.caller.project, name, query.version)
        return json_reply(AdapterList([self._info(each) for each in removed]))

    def _info(self, record: AdapterRecord) -> AdapterInfo:
        info = shown_info(record)
        return replace(info, message=self._redactor.text(info.message))


def _can_use(caller: Caller, name: str) -> bool:
    return caller.models is None or name in caller.models


def _can_see(caller: Caller, record: AdapterRecord) -> bool:
    return _can_use(caller, record.name) or _can_use(caller, record.own_name)


def _check(caller: Caller, name: str) -> None:
    """Raises: Forbidden for a name that the key may not use."""
    if not _can_use(caller, name):
        raise Forbidden(f"this key may not use the adapter {name!r}, so it may not register it")


class Llms:
    def __init__(self, services: Services, redactor: Redactor) -> None:
        self._llms, self._redactor = services.llms, redactor

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(DEPLOY_LLM, self.create, errors=(MISSING, CONFLICT)),
            Operation.of(LIST_LLMS, self.list),
            Operation.of(SHOW_LLM, self.show, errors=(MISSING,)),
            Operation.of(CHANGE_LLM, self.change, errors=(MISSING, CONFLICT)),
            Operation.of(REMOVE_LLM, self.remove, errors=(MISSING, CONFLICT)),
            Operation.of(LLM_EVENTS, self.events, errors=(MISSING,)),
            Operation.of(START_LLM, self.start, errors=(MISSING,)),
            Operation.of(STOP_LLM, self.stop, errors=(MISSING, CONFLICT)),
        )

    async def create(self, call: Call) -> Response:
        body: NewLlm = call.body
        settings = views.settings_of(body)
        deployment = await self._llms.create(call.caller, body.name, settings, description=body.description)
        return self._reply(call.caller, deployment, 201)

    async def list(self, call: Call) -> Response:
        deployments = [self._info(call.caller, each) for each in self._llms.list(call.caller)]
        return json_reply(LlmList(deployments, self._llms.bases(call.caller)))

    async def show(self, call: Call) -> Response:
        return self._reply(call.caller, self._llms.get(call.caller, call.path["name"]))

    async def change(self, call: Call) -> Response:
        return self._reply(call.caller, await views.change(self._llms, call.caller, call.path["name"], call.body))

    async def remove(self, call: Call) -> Response:
        deleted = await self._llms.delete(call.caller, call.path["name"])
        return json_reply(views.info(deleted, EngineView()))

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
        info = views.info(deployment, self._llms.shown(caller, deployment))
        return replace(info, message=self._redactor.text(info.message))

    def _event(self, event: EngineEvent) -> EngineEvent:
        return replace(event, message=self._redactor.text(event.message))
