"""Keys and quotas of the caller's project, and its quarantined requests, which crashed engines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from batchmill.errors import UnknownName
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.keys import key_info
from batchmill.services.services import Services
from batchmill.services.usage import usage
from batchmill.wire.native import KeyList, MadeKey, NewKey, QuotaList, RevokeKey
from batchmill.wire.native_models import QuarantinedRequests
from batchmill.wire.operations import (
    CLEAR_QUARANTINE,
    CLEAR_QUARANTINED,
    CREATE_KEY,
    LIST_KEYS,
    LIST_QUARANTINE,
    LIST_QUOTAS,
    REVOKE_KEY,
)

MISSING = 404


class NativeKeys:
    def __init__(self, services: Services) -> None:
        self._keys, self._disk_quota, self._clock = services.keys, services.files.disk_quota, services.clock

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(CREATE_KEY, self.create),
            Operation.of(LIST_KEYS, self.list),
            Operation.of(REVOKE_KEY, self.revoke, errors=(MISSING,)),
            Operation.of(LIST_QUOTAS, self.quotas),
        )

    async def create(self, call: Call) -> Response:
        body: NewKey = call.body
        key = await self._keys.create(
            name=body.name,
            project=body.project or call.caller.project,
            scope=body.scope,
            models=None if body.models is None else frozenset(body.models),
            requests_per_minute=body.requests_per_minute,
            expires=body.expires,
            by=call.caller,
        )
        return json_reply(MadeKey(key.key, key_info(key.record)), 201)

    async def quotas(self, call: Call) -> Response:
        return json_reply(QuotaList(await usage(self._disk_quota, call.caller.project, self._clock.now())))

    async def list(self, call: Call) -> Response:
        return json_reply(KeyList([key_info(record) for record in await self._keys.list(call.caller.project)]))

    async def revoke(self, call: Call) -> Response:
        query: RevokeKey = call.query
        revoked = await self._keys.revoke(call.path["key_id"], call.caller.project, with_minted=query.with_minted)
        info = msgspec.structs.replace(key_info(revoked.record), minted=revoked.minted)
        return json_reply(info)


SHOWN_CHARS = 64


class NativeQuarantine:
    def __init__(self, services: Services) -> None:
        self._llms = services.llms

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(LIST_QUARANTINE, self.list),
            Operation.of(CLEAR_QUARANTINE, self.clear),
            Operation.of(CLEAR_QUARANTINED, self.clear_one, errors=(MISSING,)),
        )

    async def list(self, call: Call) -> Response:
        return json_reply(QuarantinedRequests.of(self._llms.quarantined(call.caller.project)))

    async def clear(self, call: Call) -> Response:
        return json_reply(QuarantinedRequests.of(self._llms.quarantined(call.caller.project, clear=True)))

    async def clear_one(self, call: Call) -> Response:
        digest = call.path["digest"]
        cleared = self._llms.quarantined(call.caller.project, digest, clear=True)
        if not cleared:
            raise UnknownName(f"there is no quarantined request {digest[:SHOWN_CHARS]!r}", code="unknown_request")
        return json_reply(QuarantinedRequests.of(cleared))
