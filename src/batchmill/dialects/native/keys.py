"""Keys of the caller's own project: made, listed and revoked by one that may. None reaches further than its maker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.keys import key_info
from batchmill.services.services import Services
from batchmill.services.usage import usage
from batchmill.wire.native import KeyList, MadeKey, NewKey, QuotaList, RevokeKey
from batchmill.wire.operations import (
    CREATE_KEY,
    LIST_KEYS,
    LIST_QUOTAS,
    REVOKE_KEY,
)

MISSING = 404


class Keys:
    def __init__(self, services: Services) -> None:
        self._keys, self._room, self._clock = services.keys, services.files.room, services.clock

    def operations(self) -> Sequence[Operation]:
        return (
            Operation.of(CREATE_KEY, self.create),
            Operation.of(LIST_KEYS, self.list),
            Operation.of(REVOKE_KEY, self.revoke, errors=(MISSING,)),
            Operation.of(LIST_QUOTAS, self.quotas),
        )

    async def create(self, call: Call) -> Response:
        asked: NewKey = call.body
        made = await self._keys.create(
            name=asked.name,
            project=asked.project or call.caller.project,
            scope=asked.scope,
            models=None if asked.models is None else frozenset(asked.models),
            requests_per_minute=asked.requests_per_minute,
            expires=asked.expires,
            by=call.caller,
        )
        return json_reply(MadeKey(made.key, key_info(made.record)), 201)

    async def quotas(self, call: Call) -> Response:
        return json_reply(QuotaList(await usage(self._room, call.caller.project, self._clock.now())))

    async def list(self, call: Call) -> Response:
        return json_reply(KeyList([key_info(record) for record in await self._keys.list(call.caller.project)]))

    async def revoke(self, call: Call) -> Response:
        asked: RevokeKey = call.query
        done = await self._keys.revoke(call.path["key_id"], call.caller.project, with_minted=asked.with_minted)
        told = msgspec.structs.replace(key_info(done.record), minted=done.minted)
        return json_reply(told)
