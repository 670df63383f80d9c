"""Adapters: registered from where the server may fetch them, or uploaded; looked at, removed. Making is an admin's.

The archive has a media type of its own, so that no web page can send one to a server that asks for no key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace
from starlette.responses import Response

from batchmill.dialects.native.views import Shown
from batchmill.errors import Forbidden
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.adapters.service import AdapterRecord, unknown_adapter
from batchmill.services.adapters.views import shown_info
from batchmill.services.services import Services
from batchmill.types import Caller
from batchmill.wire.adapter_bundles import BUNDLE_BYTES_MAX
from batchmill.wire.native_adapters import (
    AdapterInfo,
    AdapterList,
    AdapterQuery,
    AdapterVersion,
    NewAdapter,
    UploadQuery,
)
from batchmill.wire.operations import (
    LIST_ADAPTERS,
    REGISTER_ADAPTER,
    REMOVE_ADAPTER,
    SHOW_ADAPTER,
    UPLOAD_ADAPTER,
)

MISSING, TAKEN = 404, 409


class Adapters:
    def __init__(self, services: Services, shown: Shown) -> None:
        self._adapters, self._shown = services.adapters, shown

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(REGISTER_ADAPTER, self.register, errors=(MISSING, TAKEN)),
            Operation.of(UPLOAD_ADAPTER, self.upload, body_bytes_max=BUNDLE_BYTES_MAX, errors=(MISSING, TAKEN)),
            Operation.of(LIST_ADAPTERS, self.list),
            Operation.of(SHOW_ADAPTER, self.show, errors=(MISSING,)),
            Operation.of(REMOVE_ADAPTER, self.remove, errors=(MISSING,)),
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
