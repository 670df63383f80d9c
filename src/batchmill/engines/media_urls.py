"""Fetches URLs in cells of media columns, when their rows are about to be sent: through the guard of all URLs that
callers give, bounded in bytes and time, and again where another attempt may help.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol
from urllib.parse import urljoin

import aiohttp
from blake3 import blake3
from msgspec import Struct
from yarl import URL

from batchmill.engines.media_hosts import MediaHosts
from batchmill.engines.retry import backoff_s, requested_wait_s
from batchmill.errors import InvalidInput, InvalidRow
from batchmill.models import secrets
from batchmill.models.addresses import Private, read_url
from batchmill.models.downloads import failure_of
from batchmill.models.guarded_http import CONNECT_S, GuardedHttp, refusal_of
from batchmill.ports.clock import Clock
from batchmill.types import FetchedPart
from batchmill.wire.input_urls import shown

REDIRECTS_MAX = 5
ATTEMPT_S = 30.0  # for the head and the pieces of one reply together; waiting for memory does not count
WAIT_MAX_S = 60.0  # that a server may ask for before another attempt
KEPT_ALIVE_S = 15.0
PIECE_BYTES = 256 * 1024
RECENT_BYTES_MAX = 16 * 1024 * 1024  # of contents that are kept for the next rows with the same URL
RECENT_S = 60.0
FAILURES_MAX = 1024  # that are remembered as long
VALIDATOR_CHARS_MAX = 256  # of an ETag, and of a date
NOT_MODIFIED = 304
SHOWN_CHARS = 32  # of what a server sends, in a message
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429)  # statuses below 500 of requests that may succeed later
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "batchmill"}


class Holder(Protocol):
    """A row whose media are loaded."""

    number: int  # of older rows it is smaller
    run: str  # which of its job: what failed in one is tried again by the next

    async def hold(self, more: int) -> None:
        """Wait until so many bytes more may be held; of fewer than 0: fewer are held from now on."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        """The row waits inside for what takes neither network nor processor: others load meanwhile."""


class Fetched(Struct, frozen=True):
    """What a URL led to."""

    data: bytes
    about: FetchedPart


class _Later(Exception):
    """The attempt failed, and another may succeed."""

    def __init__(self, why: str, wait_s: float | None = None, *, is_down: bool = True) -> None:
        super().__init__(why)
        self.wait_s = wait_s  # that the server asks for
        self.is_down = is_down  # it may be that the server answers nobody


class MediaUrls:
    """Fetches URLs for the rows of one engine.

    Args:
        allowed: the private hosts that may be reached; those of a worker come with its secrets.
        attempts_max: to fetch a URL for one row.
        on_wait: is called when a row waits for another one: see `fetcher_for`.
    """

    def __init__(
        self, attempts_max: int, on_wait: Callable[[], None], *, clock: Clock, jitter: Callable[[], float],
        allowed: Callable[[], Private] = secrets.private,
    ) -> None:  # fmt: skip
        self._attempts_max, self._on_wait, self._clock, self._jitter = attempts_max, on_wait, clock, jitter
        self._allowed = allowed
        self._private: Private | None = None  # that the session was made with
        self._guard: GuardedHttp | None = None
        self._session: aiohttp.ClientSession | None = None
        self._recent: OrderedDict[str, tuple[float, Fetched]] = OrderedDict()
        self._recent_bytes = 0
        self._failures: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()  # URL and run -> when, and why
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # URL -> how many rows want it now
        self._fetching: dict[str, int] = {}  # URL -> number of the row that fetches it
        self._waiting: dict[int, str] = {}  # number of a row -> the URL that another row fetches
        self._hosts = MediaHosts()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._guard is not None:
            self._guard.close()

    @property
    def note(self) -> str:
        """Which servers are given up; empty: none is."""
        return self._hosts.note(self._clock.monotonic())

    def fetcher_for(self, number: int) -> int:
        """The row that a row waits for, because both want the same URL; itself if it waits for none."""
        return self._fetching.get(self._waiting.get(number, ""), number)

    async def get(self, url: str, bytes_max: int, holder: Holder) -> Fetched:
        """The content of a URL. Rows that want the same one at about the same time fetch it once, and fail together.

        Raises: InvalidRow: `media_not_allowed`, `media_missing`, `media_too_large`; `media_unavailable` after the last
        attempt.
        """
        async with self._turn_of(url, holder):
            found = self._recent_content(url)
            if found is None:
                self._check_failures(url, holder.run)
                found = await self._fetch(url, bytes_max, holder)
                self._remember(url, found)
            elif len(found.data) > bytes_max:
                raise too_large(url, bytes_max)
            else:
                await holder.hold(len(found.data))
            return found

    @asynccontextmanager
    async def _turn_of(self, url: str, holder: Holder) -> AsyncIterator[None]:
        number = holder.number
        lock, users = self._turns.get(url, (asyncio.Lock(), 0))
        self._turns[url] = lock, users + 1
        self._waiting[number] = url
        is_mine = False
        try:
            async with holder.resting() if lock.locked() else nullcontext():
                if lock.locked():
                    self._on_wait()
                is_mine = await lock.acquire()
                del self._waiting[number]
                self._fetching[url] = number
            yield
        finally:
            if is_mine:
                lock.release()
            self._waiting.pop(number, None)
            if self._fetching.get(url) == number:
                del self._fetching[url]
            lock, users = self._turns.pop(url)
            if users > 1:
                self._turns[url] = lock, users - 1

    def _recent_content(self, url: str) -> Fetched | None:
        since, found = self._recent.get(url, (0.0, None))
        if found is not None and self._clock.monotonic() - since > RECENT_S:
            self._forget(url)
            return None
        return found

    def _remember(self, url: str, found: Fetched) -> None:
        if len(found.data) > RECENT_BYTES_MAX // 4:
            return
        self._recent[url] = self._clock.monotonic(), found
        self._recent_bytes += len(found.data)
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._forget(next(iter(self._recent)))

    def _forget(self, url: str) -> None:
        self._recent_bytes -= len(self._recent.pop(url)[1].data)

    def _check_failures(self, url: str, run: str) -> None:
        """Raises: InvalidRow if the URL has failed a moment ago: attempts for each row would follow each other."""
        since, why = self._failures.get((url, run), (0.0, ""))
        if why and self._clock.monotonic() - since <= RECENT_S:
            raise InvalidRow(why, code="media_unavailable")
        self._failures.pop((url, run), None)

    async def _fetch(self, url: str, bytes_max: int, holder: Holder) -> Fetched:
        attempt = 0
        while True:
            attempt += 1
            reading = _Reading(url, bytes_max, holder)
            try:
                return await self._attempt(url, reading)
            except _Later as error:
                is_last = attempt >= self._attempts_max or (error.wait_s or 0.0) > WAIT_MAX_S
                if error.is_down:
                    self._hosts.failed(reading.at, str(error), self._clock.monotonic(), is_last=is_last)
                else:
                    self._hosts.answered(reading.at)
                if is_last:
                    times = "" if attempt == 1 else f", {attempt} times"
                    why = f"{shown(url)} could not be fetched: {error}{times}; `batchmill retry` tries it again"
                    self._failures[url, holder.run] = self._clock.monotonic(), why
                    if len(self._failures) > FAILURES_MAX:
                        self._failures.popitem(last=False)
                    raise InvalidRow(why, code="media_unavailable") from None
                wait_s = error.wait_s or backoff_s(attempt, self._jitter)
            async with holder.resting():
                await self._clock.sleep(wait_s)

    async def _attempt(self, url: str, reading: _Reading) -> Fetched:
        """One request. What was held of a reply that failed is let go. Raises: _Later, InvalidRow."""
        is_read = False
        try:
            async with self._opened(url, reading) as reply:
                data = await reading.read(reply)
            self._hosts.answered(reading.at)
            is_read = True
            digest = await asyncio.to_thread(lambda: blake3(data).hexdigest())
            return Fetched(data, FetchedPart(digest, _validator(reply, "ETag"), _validator(reply, "Last-Modified")))
        except TimeoutError:
            raise _Later("the server took too long") from None
        finally:
            if not is_read:
                await reading.let_go()

    async def is_same(self, url: str, before: FetchedPart, bytes_max: int) -> bool | None:
        """Whether a URL leads to what it led to before: its server says so, or its bytes do. One attempt.

        None: the server did not answer, or asks to come again later.
        """
        conditions = {"If-None-Match": before.etag} if before.etag else {}
        if not conditions and before.last_modified:
            conditions = {"If-Modified-Since": before.last_modified}
        reading = _Reading(url, bytes_max, _Passing())
        try:
            async with self._opened(url, reading, conditions) as reply:
                if reply.status == NOT_MODIFIED:
                    return True
                return await reading.digest(reply) == before.digest
        except InvalidRow:
            return False
        except (_Later, TimeoutError):
            return None

    @asynccontextmanager
    async def _opened(
        self, url: str, reading: _Reading, conditions: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the reply, after redirects. Each URL and each address is checked. Raises: _Later, InvalidRow."""
        at, session = url, await self._session_now()
        for _ in range(REDIRECTS_MAX + 1):
            self._check_url(at)
            self._hosts.check(at, self._clock.monotonic())
            reading.at = at
            try:
                async with reading.timed():
                    reply = await session.get(
                        URL(at, encoded=True), headers={**_HEADERS, **(conditions or {})}, allow_redirects=False
                    )
                async with reply:
                    if reply.status not in _REDIRECTS:
                        if reply.status != NOT_MODIFIED or not conditions:
                            self._check(url, reply)
                        yield reply
                        return
                    self._hosts.answered(at)
                    at = _redirected(at, reply)
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise
                if reason := refusal_of(error):
                    raise InvalidRow(f"{shown(url)} was not called: {reason}", code="media_not_allowed") from None
                raise _Later(failure_of(error)) from None
        raise InvalidRow(f"{shown(url)} is redirected more than {REDIRECTS_MAX} times", code="media_missing")

    def _check_url(self, url: str) -> None:
        """Raises: InvalidRow for a URL that the guard refuses by its text."""
        assert self._private is not None, "there is a session"
        try:
            read_url(url, self._private)
        except InvalidInput as error:
            raise InvalidRow(error.message, code="media_not_allowed") from None

    def _check(self, url: str, reply: aiohttp.ClientResponse) -> None:
        """Raises: _Later, InvalidRow for a reply without the content."""
        status = reply.status
        if status >= 500 or status in _LATER:
            wait_s = requested_wait_s(_lower(reply), self._clock.now())
            raise _Later(f"the server answers {status}", wait_s, is_down=status >= 500)
        if status != 200:
            self._hosts.answered(str(reply.url))
            way_out = "; use a URL that needs no login" if status in (401, 403) else ""
            gone = "there is nothing at" if status in (404, 410) else "the server refuses"
            raise InvalidRow(f"{gone} {shown(url)}: it answers {status}{way_out}", code="media_missing")
        if (codec := _header(reply, "Content-Encoding").lower()) not in ("", "identity"):
            raise InvalidRow(
                f"the server sends {shown(url)} packed ({codec[:SHOWN_CHARS]!r}) although it was asked not to",
                code="media_missing",
            )
        if reply.content_length is None and "chunked" not in _header(reply, "Transfer-Encoding").lower():
            raise InvalidRow(
                f"the server does not say where {shown(url)} ends: one that is cut off would look whole",
                code="media_missing",
            )

    async def _session_now(self) -> aiohttp.ClientSession:
        """A session with the hosts that are allowed now."""
        private = self._allowed()
        if self._session is None or private is not self._private:
            await self.close()
            self._private, self._guard = private, GuardedHttp(private)
            self._session = aiohttp.ClientSession(
                connector=self._guard.connections(keepalive_s=KEPT_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False,
            )  # fmt: skip
        return self._session


class _Passing:
    """A holder of bytes that are read and not kept."""

    number, run = 0, ""

    async def hold(self, more: int) -> None:
        """There is room."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class _Reading:
    """The body of one reply: how much of it is held, and how long its server took."""

    def __init__(self, url: str, bytes_max: int, holder: Holder) -> None:
        self._url, self._bytes_max, self._holder = url, bytes_max, holder
        self._held = 0
        self._left_s = ATTEMPT_S
        self.at = url  # after redirects

    @asynccontextmanager
    async def timed(self) -> AsyncIterator[None]:
        """What is done inside counts to the time of the attempt. Raises: TimeoutError."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        async with asyncio.timeout(max(0.0, self._left_s)):
            yield
        self._left_s -= loop.time() - since

    async def read(self, reply: aiohttp.ClientResponse) -> bytes:
        """Raises: InvalidRow for more bytes than there may be; TimeoutError."""
        data = bytearray()
        async for piece in self._pieces(reply):
            data += piece
        return bytes(data)

    async def digest(self, reply: aiohttp.ClientResponse) -> str:
        """BLAKE3 of the body, which is not kept. Raises as `read`."""
        hasher = blake3()
        async for piece in self._pieces(reply):
            hasher.update(piece)
        return hasher.hexdigest()

    async def _pieces(self, reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        await self._take(reply.content_length or 0)
        size = 0
        while True:
            async with self.timed():
                piece = await reply.content.read(PIECE_BYTES)
            if not piece:
                return
            size += len(piece)
            await self._take(size - self._held)
            yield piece

    async def _take(self, more: int) -> None:
        if self._held + more > self._bytes_max:
            raise too_large(self._url, self._bytes_max)
        if more > 0:
            await self._holder.hold(more)
            self._held += more

    async def let_go(self) -> None:
        await self._holder.hold(-self._held)


def too_large(url: str, bytes_max: int) -> InvalidRow:
    return InvalidRow(
        f"{shown(url)} has more than {bytes_max:,} bytes: make it smaller, or raise limits.media_bytes_max "
        "(limits.media_row_bytes_max for those of a row)",
        code="media_too_large",
    )


def _redirected(url: str, reply: aiohttp.ClientResponse) -> str:
    location = _header(reply, "Location")
    try:
        return urljoin(url, location)
    except ValueError:
        raise InvalidRow(
            f"{shown(url)} is redirected to what is no URL: {shown(location)[:SHOWN_CHARS]!r}", code="media_missing"
        ) from None


def _header(reply: aiohttp.ClientResponse, name: str) -> str:
    return reply.headers.get(name, "")


def _validator(reply: aiohttp.ClientResponse, name: str) -> str:
    """A header that says which content it was; none that is too long to keep, or would be no header again."""
    value = _header(reply, name)
    return value if len(value) <= VALIDATOR_CHARS_MAX and value.isascii() and value.isprintable() else ""


def _lower(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items()}
