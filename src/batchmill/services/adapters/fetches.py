"""Adapters on their way here: a few at a time, each in a child process, with its token, and again where that helps."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.offload import Children
from batchmill.errors import Unavailable
from batchmill.models import secrets
from batchmill.models.adapters.fetching import FetchOrder, FetchReport
from batchmill.models.worker_environment import FETCHERS
from batchmill.ports import Clock
from batchmill.services.secrets.vault import Vault

WORK = "batchmill.models.adapters.fetching:run"
FETCHES_MAX = 4  # at once
ATTEMPTS_MAX = 3
WAIT_S = 2.0  # before the second attempt; twice as long before the third
FETCH_S_MAX = 6 * 3600.0
SECRET = "secret:"


class Fetches:
    def __init__(self, clock: Clock, vault: Vault) -> None:
        self._clock, self._vault = clock, vault
        self._children = Children(more=FETCHERS)
        self._places = FairSemaphore(FETCHES_MAX)

    async def fetch(self, project: str, order: FetchOrder, token: str | None) -> FetchReport:
        """What became of an order of a project. Cancelling it ends the child that works on it.

        Args: token: where the token for a model hub lies.

        Raises: BatchmillError, with what is wrong.
        """
        async with self._places.place(project):
            order = replace(order, token=await self._reveal(token))
            for attempt in range(ATTEMPTS_MAX):
                try:
                    return await self._once(order)
                except Unavailable:
                    if attempt + 1 == ATTEMPTS_MAX:
                        raise
                await self._clock.sleep(WAIT_S * 2**attempt)
            raise AssertionError("the last attempt returns or raises")

    async def _once(self, order: FetchOrder) -> FetchReport:
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                answer = await self._children.offload(WORK, msgspec.json.encode(order), lambda _: None)
        except TimeoutError:
            raise Unavailable(f"{order.source} did not arrive within {FETCH_S_MAX / 3600:g} h") from None
        return msgspec.json.decode(answer, type=FetchReport)

    async def _reveal(self, token: str | None) -> str | None:
        if token is None:
            return None
        if token.startswith(SECRET):
            return await self._vault.reveal(token.removeprefix(SECRET))
        return (await asyncio.to_thread(secrets.resolve, token)).reveal()

    async def close(self) -> None:
        await self._children.close()
