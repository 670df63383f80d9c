"""Where adapters may come from, and how they are fetched: a few at a time, each in a child process, with its token, and
again where that helps. Whoever runs the machine may name any place."""

from __future__ import annotations

import asyncio
import os
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill.children.fair_semaphore import FairSemaphore
from batchmill.children.offload import Children
from batchmill.config import DeploymentsEntry
from batchmill.errors import Forbidden, InvalidInput, Unavailable
from batchmill.models import secrets
from batchmill.models.adapters.fetching import FetchOrder, FetchReport, kind_of
from batchmill.models.secrets import KINDS, NAME
from batchmill.models.worker_environment import FETCHERS
from batchmill.ports import Clock
from batchmill.services.secrets.vault import Vault

WORK = "batchmill.models.adapters.fetching:run"
FETCHES_MAX = 4  # at once
ATTEMPTS_MAX = 3
WAIT_S = 2.0  # before the second attempt; twice as long before the third
FETCH_S_MAX = 6 * 3600.0
SECRET = "secret:"
SHOWN_CHARS = 200
SOURCE_CHARS_MAX = 1000


def check_source(source: str, entry: DeploymentsEntry, *, is_trusted: bool) -> str:
    """The source, a folder by its real path. Raises: InvalidInput for a text that is none; Forbidden."""
    if len(source) > SOURCE_CHARS_MAX or not source.isprintable():
        raise InvalidInput(f"a source is {SOURCE_CHARS_MAX:,} printable characters at most", code="invalid_source")
    kind = kind_of(source)
    place = os.path.realpath(Path(source).expanduser()) if kind == "folder" else source
    if is_trusted:
        return place
    patterns = entry.adapter_sources + (entry.adapter_patterns if kind == "hub" else [])
    if not any(_fits(place, pattern) for pattern in patterns):
        raise Forbidden(
            f"adapters from {source[:SHOWN_CHARS]} are not taken over the API: whoever runs this server lists what is, "
            "in deployments.adapter_sources; an adapter's own folder can be uploaded (`batchmill adapters add`)"
        )
    return place


def _fits(place: str, pattern: str) -> bool:
    """A pattern, or the beginning of a place up to one of its slashes."""
    return fnmatchcase(place, pattern) or place.startswith(pattern.rstrip("/") + "/") or place == pattern.rstrip("/")


def check_token(token: str | None, *, is_trusted: bool) -> str | None:
    """A reference to a token of a model hub. The text is not repeated: it may be the token. Raises: InvalidInput."""
    if token is None:
        return None
    kind, _, name = token.partition(":")
    if (kind == "secret" and NAME.fullmatch(name)) or (is_trusted and token.startswith(KINDS) and name):
        return token
    allowed = '"secret:NAME", "env:NAME" or "file:PATH"' if is_trusted else '"secret:NAME"'
    raise InvalidInput(f"the token is given as {allowed}, never itself", code="invalid_secret")


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
