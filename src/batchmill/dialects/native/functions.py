"""Deployed functions: deploy from an archive of code, show, change versions, remove.

Operations that bring code or decide which code runs need the scope deploy, because code runs as the server's user. The
archive has its own media type, so that no web page can send one to a server without keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace
from starlette.responses import PlainTextResponse, Response

from batchmill.dialects.native.orders import Redactor
from batchmill.errors import Forbidden
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.functions import records
from batchmill.services.functions.examples import openapi
from batchmill.services.functions.names import LATEST, MAIN
from batchmill.services.services import Services
from batchmill.wire.bundles import BYTES_MAX, READY, ModelVersion
from batchmill.wire.native import (
    DeployReply,
    Merge,
    NewAlias,
    Restart,
    Rollback,
    VersionList,
    VersionQuery,
)
from batchmill.wire.operations import (
    DEPLOY,
    MERGE_MODEL,
    MODEL_CALLS,
    MODEL_DOCUMENT,
    MODEL_LOG,
    MODEL_VERSIONS,
    REMOVE_ALIAS,
    REMOVE_MODEL,
    RESTART_MODEL,
    ROLLBACK_MODEL,
    SET_ALIAS,
    SHOW_MODEL,
)

MISSING, IN_USE, REFUSED = 404, 409, 422


class Functions:
    def __init__(self, services: Services, redactor: Redactor) -> None:
        self._services, self._redactor = services, redactor
        self._versions, self._directory = services.versions, services.directory

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(
                DEPLOY, self.deploy, also={200: DeployReply}, body_bytes_max=BYTES_MAX, errors=(IN_USE, REFUSED)
            ),
            Operation.of(SHOW_MODEL, self.show, errors=(MISSING,)),
            Operation.of(MODEL_VERSIONS, self.versions, errors=(MISSING,)),
            Operation.of(MODEL_DOCUMENT, self.document, errors=(MISSING,)),
            Operation.of(MODEL_LOG, self.log, errors=(MISSING,)),
            Operation.of(MODEL_CALLS, self.calls, errors=(MISSING,)),
            Operation.of(ROLLBACK_MODEL, self.rollback, errors=(MISSING,)),
            Operation.of(MERGE_MODEL, self.merge, errors=(MISSING,)),
            Operation.of(RESTART_MODEL, self.restart, errors=(MISSING,)),
            Operation.of(SET_ALIAS, self.alias, errors=(MISSING,)),
            Operation.of(REMOVE_ALIAS, self.remove_alias, errors=(MISSING, IN_USE)),
            Operation.of(REMOVE_MODEL, self.remove, errors=(MISSING, IN_USE)),
        )

    async def deploy(self, call: Call) -> Response:
        bundle = await asyncio.to_thread(self._versions.incoming)
        try:
            with bundle.open("wb") as file:
                async for piece in call.request.stream():
                    await asyncio.to_thread(file.write, piece)
            version = await self._versions.deploy(bundle, check=lambda name: self._check(call, name), by=call.caller)
        finally:
            await asyncio.to_thread(bundle.unlink)
        return json_reply(records.deploy_reply(version), 201 if version.is_new else 200)

    def _check(self, call: Call, name: str) -> None:
        """Raises: Forbidden for a name that this key may not use.

        The names of other projects' hidden functions are refused elsewhere.
        """
        if not self._directory.may_call(call.caller, name) and not self._versions.is_hidden(name, call.caller.project):
            raise Forbidden(f"this key may not use the model {name!r}, so it may not deploy it")

    async def show(self, call: Call) -> Response:
        name, (_, routes) = self._name(call), self._versions.show(self._name(call))
        url = str(call.request.base_url).rstrip("/")
        return json_reply(records.detail(name, self._visible_versions(call, name), routes, url))

    async def versions(self, call: Call) -> Response:
        name = self._name(call)
        return json_reply(VersionList([records.version_info(each) for each in self._visible_versions(call, name)]))

    def _visible_versions(self, call: Call, name: str) -> list[ModelVersion]:
        """Return versions as the caller may see them. Another project only sees what a call needs."""
        try:
            return [self._redactor.version(each) for each in self._versions.own(name, call.caller)]
        except Forbidden:
            ready = [each for each in self._versions.get(name) if each.state == READY]
            return [replace(each, source="", error=None, project="", key=None) for each in ready]

    async def document(self, call: Call) -> Response:
        target = self._services.functions.find(call.caller, call.path["name"])
        return json_reply(openapi(target.name, MAIN, target.interface))

    async def log(self, call: Call) -> Response:
        query: VersionQuery = call.query
        text = await self._versions.log(self._name(call), query.branch, query.version or LATEST, by=call.caller)
        return PlainTextResponse(self._redactor.text(text))

    async def calls(self, call: Call) -> Response:
        page = await self._versions.calls(self._name(call), call.query, by=call.caller)
        return json_reply(
            replace(page, entries=[replace(each, text=self._redactor.text(each.text)) for each in page.entries])
        )

    async def rollback(self, call: Call) -> Response:
        body: Rollback = call.body
        version = await self._versions.rollback(self._name(call), body.branch, body.number, by=call.caller)
        return json_reply(records.version_info(version))

    async def merge(self, call: Call) -> Response:
        body: Merge = call.body
        version = await self._versions.merge(self._name(call), body.source, body.into, by=call.caller)
        return json_reply(records.version_info(version))

    async def restart(self, call: Call) -> Response:
        body: Restart = call.body
        version = await self._versions.restart(self._name(call), body.branch, by=call.caller)
        return json_reply(records.version_info(version))

    async def alias(self, call: Call) -> Response:
        body: NewAlias = call.body
        backends, mirrors = records.backends_of(body.backends), records.backends_of(body.mirrors)
        name, alias = self._name(call), call.path["alias"]
        route = await self._versions.set_alias(name, alias, backends, mirrors, by=call.caller)
        return json_reply(records.alias_info(route))

    async def remove_alias(self, call: Call) -> Response:
        await self._versions.remove_alias(self._name(call), call.path["alias"], by=call.caller)
        return json_reply(VersionList([]))

    async def remove(self, call: Call) -> Response:
        query: VersionQuery = call.query
        removed = await self._versions.remove(self._name(call), query.branch, query.version, by=call.caller)
        return json_reply(VersionList([records.version_info(self._redactor.version(each)) for each in removed]))

    def _name(self, call: Call) -> str:
        """Return the function's name. Raises: UnknownName, the same for an unknown and a hidden function."""
        name = call.path["name"]
        is_hidden = self._versions.is_hidden(name, call.caller.project)
        if is_hidden or not self._directory.may_call(call.caller, name) or not self._versions.get(name):
            self._directory.find(call.caller, name)  # raises, except for a configured model
            self._versions.show(name)
        return name
