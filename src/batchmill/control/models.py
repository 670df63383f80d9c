"""Deployed functions, language models and adapters, looked after by the machine's user: code and folders of this
machine are taken as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchmill.control import operations as own
from batchmill.control.admin import PROJECT, user_of
from batchmill.control.app import Handler, OwnerCall
from batchmill.control.operations import FoundModel, LocalFile
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
        """Args: url: the address of the server that examples are to go to."""
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
        asked: Rollback = call.body
        return functions.version_info(await self._versions.rollback(call.name, asked.branch, asked.number))

    async def merge(self, call: OwnerCall) -> VersionInfo:
        asked: Merge = call.body
        return functions.version_info(await self._versions.merge(call.name, asked.source, asked.into))

    async def restart(self, call: OwnerCall) -> VersionInfo:
        asked: Restart = call.body
        return functions.version_info(await self._versions.restart(call.name, asked.branch))

    async def set_alias(self, call: OwnerCall) -> AliasInfo:
        asked: NewAlias = call.body
        backends, mirrors = functions.backends_of(asked.backends), functions.backends_of(asked.mirrors)
        route = await self._versions.set_alias(call.names["name"], call.names["alias"], backends, mirrors)
        return functions.alias_info(route)

    async def remove_alias(self, call: OwnerCall) -> VersionList:
        await self._versions.remove_alias(call.names["name"], call.names["alias"])
        return VersionList([])

    async def remove(self, call: OwnerCall) -> VersionList:
        query: VersionQuery = call.query
        gone = await self._versions.remove(call.name, query.branch, query.version)
        return VersionList([functions.version_info(each) for each in gone])


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
            (table.START_LLM, self._doing(self._llms.start)),
            (table.STOP_LLM, self._doing(self._llms.stop)),
            (table.LIST_QUARANTINE, self.quarantine),
            (table.CLEAR_QUARANTINE, self.clear),
            (table.CLEAR_QUARANTINED, self.clear_one),
        )

    async def create(self, call: OwnerCall) -> LlmInfo:
        asked: NewLlm = call.body
        made = await self._llms.create(
            user_of(call.project), asked.name, llms.settings_of(asked), description=asked.description, is_trusted=True
        )
        return self._info(made)

    async def list(self, call: OwnerCall) -> LlmList:
        who = user_of(call.project)
        return LlmList([self._info(each) for each in self._llms.list(who)], self._llms.bases(who))

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

    def _doing(self, do: Callable[[Caller, str], Awaitable[LlmDeployment]]) -> Handler:
        async def done(call: OwnerCall) -> LlmInfo:
            return self._info(await do(user_of(call.project), call.name))

        return done

    async def quarantine(self, call: OwnerCall) -> QuarantinedRequests:
        """Of all projects, unless one is named."""
        return QuarantinedRequests.of(self._llms.quarantined(call.project))

    async def clear(self, call: OwnerCall) -> QuarantinedRequests:
        return QuarantinedRequests.of(self._llms.quarantined(call.project, clear=True))

    async def clear_one(self, call: OwnerCall) -> QuarantinedRequests:
        gone = self._llms.quarantined(call.project, call.name, clear=True)
        if not gone:
            raise UnknownName(f"no request {call.name[:SHOWN_CHARS]!r} is known", code="unknown_request")
        return QuarantinedRequests.of(gone)

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
        asked: NewAdapter = call.body
        record = await self._adapters.register(
            user_of(call.project), asked.base, asked.name, asked.source, token=asked.token, is_trusted=True
        )
        record = await self._adapters.wait(record)
        if record.state == FAILED:
            raise ModelFailed(f"the adapter {record.own_name} cannot be used: {record.message}", code="adapter_failed")
        return adapter_info(record)

    async def list(self, call: OwnerCall) -> AdapterList:
        """Of all projects, unless one is named."""
        query: AdapterQuery = call.query
        found = self._adapters.every() if call.project is None else self._adapters.list(call.project)
        return AdapterList([adapter_info(each) for each in found if query.base in (None, each.base)])

    async def show(self, call: OwnerCall) -> AdapterInfo:
        query: AdapterVersion = call.query
        return adapter_info(self._adapters.get(call.project or PROJECT, call.name, query.version))

    async def remove(self, call: OwnerCall) -> AdapterList:
        query: AdapterVersion = call.query
        gone = await self._adapters.remove(call.project or PROJECT, call.name, query.version)
        return AdapterList([adapter_info(each) for each in gone])


class ModelHandlers:
    """What names mean to a command, which has a configuration of its own."""

    def __init__(
        self, versions: ModelVersions, llms: LlmService, adapters: AdapterService, remote: RemoteModels
    ) -> None:
        self._versions, self._llms, self._adapters, self._remote = versions, llms, adapters, remote

    def handlers(self) -> Sequence[tuple[Endpoint[Any], Handler]]:
        return (
            (own.LIST_ALL_MODELS, self.list),
            (own.ADAPT_MODEL, self.adapted),
            (own.FIND_MODEL, self.find),
        )

    async def find(self, call: OwnerCall) -> FoundModel:
        """The deployed function, or language model, or the model of a connector, that a name means now."""
        if (found := self._versions.for_job(call.name)) is not None:
            return FoundModel(found)
        if (deployed := self._llms.find(user_of(None), call.name)) is not None:
            return FoundModel(deployed.model)
        remote = self._remote.find(call.name)
        return FoundModel(None if remote is None else self._remote.for_job(remote))

    async def adapted(self, call: OwnerCall) -> FoundModel:
        """With the adapters of the project default, and room for the ranks of everybody's."""
        asked: FoundModel = call.body
        assert asked.model is not None, "it is what is asked about"
        return FoundModel(self._adapters.adapted(PROJECT, asked.model))

    async def list(self, call: OwnerCall) -> ModelList:
        configured: ModelList = call.body
        found = [*configured.models, *(ModelInfo(name, FUNCTION_PROCESS, []) for name in self._versions.names())]
        named: dict[str, dict[str, None]] = {}  # in the order of names and versions
        for each in self._adapters.list(PROJECT):
            if each.state == READY:
                named.setdefault(each.base, {}).update({each.name: None, each.own_name: None})
        found = [replace(each, adapters=[*each.adapters, *named.get(each.name, ())]) for each in found]
        own_llms = [each for each in self._llms.list(user_of(None)) if not each.is_configured]
        infos = [llms.info(each, self._llms.view(each)) for each in own_llms]
        found += [ModelInfo(each.name, LLM, each.adapters, each.price) for each in infos]
        for each in self._remote.every():
            meant = self._remote.find(each.name)  # a name of several groups means none of them
            is_named = meant is not None and meant.id == each.id
            found += [ModelInfo(name, CONNECTOR, []) for name in ([each.id, each.name] if is_named else [each.id])]
        return ModelList(found)
