"""Answers that are sent to a webhook: what is promised, and how it is written once it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchmill.dialects.modelbit.errors import envelope
from batchmill.dialects.modelbit.links import Links
from batchmill.dialects.modelbit.requests import Wanted
from batchmill.errors import BatchmillError
from batchmill.services.functions.late_replies import LateCall, Order
from batchmill.services.places import Places
from batchmill.services.services import Services
from batchmill.types import Caller
from batchmill.wire.call_forms import ROWS
from batchmill.wire.json_bytes import encode
from batchmill.wire.messages import Answer

if TYPE_CHECKING:
    from batchmill.services.functions.calls import Target

DOOR = "modelbit"
HEADER = "x-mb-batch-id"


class Later:
    """Concurrency: one for each server; it writes the answers of calls that an earlier one took, too."""

    def __init__(self, services: Services) -> None:
        self._late, self._links = services.late, Links(services)
        self._hide = Places(services.config.data_dir).hide
        self._late.speak(DOOR, self.write)

    async def promise(self, caller: Caller, target: Target, wanted: Wanted, links: str | None) -> str:
        """The id of an answer that will be sent to the webhook. Raises: InvalidInput for one that leads nowhere."""
        assert wanted.webhook is not None
        order = Order(DOOR, ROWS, wanted.webhook, HEADER, ignores_timeout=wanted.ignores_timeout, told=links or "")
        return await self._late.promise(caller, target, wanted.body, order)

    async def write(self, call: LateCall, answered: Answer | BatchmillError) -> bytes:
        """The body that the webhook gets: as the reply's would have been."""
        if isinstance(answered, BatchmillError):
            return encode(envelope(answered, self._hide(answered.message)))
        if call.order.told:
            return (await self._links.save(call.project, call.order.told, answered.body)).body
        return answered.body
