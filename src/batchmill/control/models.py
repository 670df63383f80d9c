"""Handlers for functions, language models and adapters, for the machine's user, whose local code is trusted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchmill.control import operations as own
from batchmill.control.admin import PROJECT, user_of
from batchmill.control.app import Handler, OwnerCall
from batchmill.control.operations import LocalFile, ResolvedModel, ResolvedSchema
from batchmill.errors import ModelFailed, UnknownName
from batchmill.services.adapters.records import FAILED, READY, adapter_info
from batchmill.services.adapters.service import AdapterService
from batchmill.services.functions import records as functions
from batchmill.services.functions.names import LATEST
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.llms import views as llms
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.llms.service import LlmService
from batchmill.services.remote.models import RemoteModels
from batchmill.types import Caller, EngineView
from batchmill.types.engine_traits import CONNECTOR, FUNCTION_PROCESS, LLM
from batchmill.wire import operations as table
from batchmill.wire.native import (
    AliasInfo,
    DeployReply,
    FunctionDetail,
    Merge,
    ModelInfo,
    ModelList,
    NewAlias,
    Restart,
    Rollback,
    VersionInfo,
    VersionList,
    VersionQuery,
)
from batchmill.wire.native_models import (
    AdapterInfo,
    AdapterList,
    AdapterQuery,
    AdapterVersion,
    LlmEvents,
    LlmEventsQuery,
    LlmInfo,
    LlmList,
    LogPage,
    NewAdapter,
    NewLlm,
    QuarantinedRequests,
)
from batchmill.wire.operations import Endpoint

SHOWN_CHARS = 64


class FunctionHandlers:
    def __init__(self, versions: ModelVersions, url: str) -> None:
        """Args: url: the address of the server in examples."""
        self._versions, self._url = versions, url

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.DEPLOY_ARCHIVE, self.deploy),
            (table.SHOW_MODEL, self.show),
            (table.MODEL_LOG, self.log),
            (table.MODEL_CALLS, self.calls),
            (table.ROLLBACK_MODEL, self.rollback),
            (table.MERGE_MODEL, self.merge),
            (table.RESTART_MODEL, self.restart),
            (table.SET_ALIAS, self.set_alias),
            (table.REMOVE_ALIAS, self.remove_alias),
            (table.REMOVE_MODEL, self.remove),
        )

    async def deploy(self, call: OwnerCall) -> DeployReply:
        archive: LocalFile = call.body
        return functions.deploy_reply(await self._versions.deploy(Path(archive.path)))

    async def show(self, call: OwnerCall) -> FunctionDetail:
        versions, routes = self._versions.show(call.name)
        return functions.detail(call.name, versions, routes, self._url)

    async def log(self, call: OwnerCall) -> bytes:
        query: VersionQuery = call.query
        return (await self._versions.log(call.name, query.branch, query.version or LATEST)).encode()

    async def calls(self, call: OwnerCall) -> LogPage:
        return await self._versions.calls(call.name, call.query)

    async def rollback(self, call: OwnerCall) -> VersionInfo:
        body: Rollback = call.body
        return functions.version_info(await self._versions.rollback(call.name, body.branch, body.number))

    async def merge(self, call: OwnerCall) -> VersionInfo:
        body: Merge = call.body
        return functions.version_info(await self._versions.merge(call.name, body.source, body.into))

    async def restart(self, call: OwnerCall) -> VersionInfo:
        body: Restart = call.body
        return functions.version_info(await self._versions.restart(call.name, body.branch))

    async def set_alias(self, call: OwnerCall) -> AliasInfo:
        body: NewAlias = call.body
        backends, mirrors = functions.backends_of(body.backends), functions.backends_of(body.mirrors)
        route = await self._versions.set_alias(call.names["name"], call.names["alias"], backends, mirrors)
        return functions.alias_info(route)

    async def remove_alias(self, call: OwnerCall) -> VersionList:
        await self._versions.remove_alias(call.names["name"], call.names["alias"])
        return VersionList([])

    async def remove(self, call: OwnerCall) -> VersionList:
        query: VersionQuery = call.query
        removed = await self._versions.remove(call.name, query.branch, query.version)
        return VersionList([functions.version_info(each) for each in removed])


class LlmHandlers:
    def __init__(self, service: LlmService) -> None:
        self._llms = service

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (table.DEPLOY_LLM, self.create),
            (table.LIST_LLMS, self.list),
            (table.SHOW_LLM, self.show),
            (table.CHANGE_LLM, self.change),
            (table.REMOVE_LLM, self.remove),
            (table.LLM_EVENTS, self.events),
            (table.START_LLM, self._changing(self._llms.start)),
            (table.STOP_LLM, self._changing(self._llms.stop)),
            (table.LIST_QUARANTINE, self.quarantine),
            (table.CLEAR_QUARANTINE, self.clear),
            (table.CLEAR_QUARANTINED, self.clear_one),
        )

    async def create(self, call: OwnerCall) -> LlmInfo:
        body: NewLlm = call.body
        deployment = await self._llms.create(
            user_of(call.project), body.name, llms.settings_of(body), description=body.description, is_trusted=True
        )
        return self._info(deployment)

    async def list(self, call: OwnerCall) -> LlmList:
        caller = user_of(call.project)
        return LlmList([self._info(each) for each in self._llms.list(caller)], self._llms.bases(caller))

    async def show(self, call: OwnerCall) -> LlmInfo:
        return self._info(self._llms.get(user_of(call.project), call.name))

    async def change(self, call: OwnerCall) -> LlmInfo:
        changed = await llms.change(self._llms, user_of(call.project), call.name, call.body, is_trusted=True)
        return self._info(changed)

    async def remove(self, call: OwnerCall) -> LlmInfo:
        return llms.info(await self._llms.delete(user_of(call.project), call.name), EngineView())

    async def events(self, call: OwnerCall) -> LlmEvents:
        query: LlmEventsQuery = call.query
        view = self._llms.view(self._llms.get(user_of(call.project), call.name))
        return LlmEvents([each for each in view.events if query.after is None or each.at > query.after])

    def _changing(self, change: Callable[[Caller, str], Awaitable[LlmDeployment]]) -> Handler:
        async def handle(call: OwnerCall) -> LlmInfo:
            return self._info(await change(user_of(call.project), call.name))

        return handle

    async def quarantine(self, call: OwnerCall) -> QuarantinedRequests:
        """List the quarantined requests of all projects, or of the named one."""
        return QuarantinedRequests.of(self._llms.quarantined(call.project))

    async def clear(self, call: OwnerCall) -> QuarantinedRequests:
        return QuarantinedRequests.of(self._llms.quarantined(call.project, clear=True))

    async def clear_one(self, call: OwnerCall) -> QuarantinedRequests:
        cleared = self._llms.quarantined(call.project, call.name, clear=True)
        if not cleared:
            raise UnknownName(f"there is no quarantined request {call.name[:SHOWN_CHARS]!r}", code="unknown_request")
        return QuarantinedRequests.of(cleared)

    def _info(self, deployment: LlmDeployment) -> LlmInfo:
        return llms.info(deployment, self._llms.view(deployment))


class AdapterHandlers:
    def __init__(self, adapters: AdapterService) -> None:
        self._adapters = adapters

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.ADD_ADAPTER, self.add),
            (table.LIST_ADAPTERS, self.list),
            (table.SHOW_ADAPTER, self.show),
            (table.REMOVE_ADAPTER, self.remove),
        )

    async def add(self, call: OwnerCall) -> AdapterInfo:
        body: NewAdapter = call.body
        record = await self._adapters.register(
            user_of(call.project), body.base, body.name, body.source, token=body.token, is_trusted=True
        )
        record = await self._adapters.wait(record)
        if record.state == FAILED:
            raise ModelFailed(f"the adapter {record.own_name} cannot be used: {record.message}", code="adapter_failed")
        return adapter_info(record)

    async def list(self, call: OwnerCall) -> AdapterList:
        """List the adapters of all projects, or of the named one."""
        query: AdapterQuery = call.query
        adapters = self._adapters.list_all() if call.project is None else self._adapters.list(call.project)
        return AdapterList([adapter_info(each) for each in adapters if query.base in (None, each.base)])

    async def show(self, call: OwnerCall) -> AdapterInfo:
        query: AdapterVersion = call.query
        return adapter_info(self._adapters.get(call.project or PROJECT, call.name, query.version))

    async def remove(self, call: OwnerCall) -> AdapterList:
        query: AdapterVersion = call.query
        removed = await self._adapters.remove(call.project or PROJECT, call.name, query.version)
        return AdapterList([adapter_info(each) for each in removed])


class ModelHandlers:
    """Resolves names of models for a command, which has its own configuration."""

    def __init__(
        self, versions: ModelVersions, llms: LlmService, adapters: AdapterService, remote: RemoteModels
    ) -> None:
        self._versions, self._llms, self._adapters, self._remote = versions, llms, adapters, remote

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.LIST_ALL_MODELS, self.list),
            (own.ADAPT_MODEL, self.adapt),
            (own.FIND_MODEL, self.find),
            (own.FIND_SCHEMA, self.find_schema),
        )

    async def find(self, call: OwnerCall) -> ResolvedModel:
        """Find the deployed function, language model or model of a connector with this name."""
        if (function := self._versions.for_job(call.name)) is not None:
            return ResolvedModel(function)
        if (deployment := self._llms.find(user_of(None), call.name)) is not None:
            return ResolvedModel(deployment.model)
        remote = self._remote.find(call.name)
        return ResolvedModel(None if remote is None else self._remote.for_job(remote))

    async def find_schema(self, call: OwnerCall) -> ResolvedSchema:
        return ResolvedSchema(self._versions.schema_class(user_of(call.project), call.name))

    async def adapt(self, call: OwnerCall) -> ResolvedModel:
        """Add the adapters of the project default to a model, and raise its rank limit for all projects' adapters."""
        body: ResolvedModel = call.body
        assert body.model is not None, "the request contains the model"
        return ResolvedModel(self._adapters.adapted(PROJECT, body.model))

    async def list(self, call: OwnerCall) -> ModelList:
        configured: ModelList = call.body
        models = [*configured.models, *(ModelInfo(name, FUNCTION_PROCESS, []) for name in self._versions.names())]
        adapters: dict[str, dict[str, None]] = {}  # base -> names, in the order of names and versions
        for each in self._adapters.list(PROJECT):
            if each.state == READY:
                adapters.setdefault(each.base, {}).update({each.name: None, each.own_name: None})
        models = [replace(each, adapters=[*each.adapters, *adapters.get(each.name, ())]) for each in models]
        deployments = [each for each in self._llms.list(user_of(None)) if not each.is_configured]
        infos = [llms.info(each, self._llms.view(each)) for each in deployments]
        models += [ModelInfo(each.name, LLM, each.adapters, each.price) for each in infos]
        for each in self._remote.list_all():
            by_name = self._remote.find(each.name)  # None if the name occurs in several groups
            has_name = by_name is not None and by_name.id == each.id
            models += [ModelInfo(name, CONNECTOR, []) for name in ([each.id, each.name] if has_name else [each.id])]
        return ModelList(models)
