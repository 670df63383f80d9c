"""Connections of engines that call services: kept alive, bounded in time and size, with uniform errors.

It does not know rows, pacing or retries. It translates aiohttp's errors: a call without a complete reply raises
NoReply.
"""

from __future__ import annotations

import asyncio
import io
import re
import resource
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
from aiohttp import hdrs
from msgspec import Struct
from yarl import URL

from batchmill.engines.retry import REPLY_BYTES_MAX, Fault, FaultKind, NoReply
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models.addresses import SHOWN_CHARS, Private
from batchmill.models.guarded_http import ADDRESSES_S, GuardedHttp, refusal_of
from batchmill.types import Limits, RowError

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")  # a header's name
TICKS = 8  # a call may exceed its timeout by one in this many parts, and by at most TICK_MAX_S
TICK_MAX_S = 1.0


class Deadlines:
    """Cancels tasks whose call has run for `timeout_s`.

    Call `begin` before a call and always `end` after it. If the task is cancelled, `is_late` says whether the deadline
    did it.
    Concurrency: one call at a time in each task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tick_s = min(timeout_s / TICKS, TICK_MAX_S)
        # All calls have the same timeout, so the first to begin is the first to be late.
        self._due: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any]) -> None:
        loop = task.get_loop()
        self._due[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._sweep, loop)

    def end(self, task: asyncio.Task[Any]) -> None:
        self._due.pop(task, None)
        if self._late:
            self._late.discard(task)

    def is_late(self, task: asyncio.Task[Any]) -> bool:
        """Whether only the deadline caused this cancellation. Undoes the deadline's cancellation."""
        return task in self._late and task.uncancel() == 0

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        while self._due:
            task, due = next(iter(self._due.items()))
            if due > now:
                break
            del self._due[task]
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(self._tick_s, self._sweep, loop) if self._due else None


IDLE_TIMEOUT_S = 60.0  # between two pieces of a reply
KEEPALIVE_S = 4.0  # below the 5 s of common servers, so that no call uses a connection that the server is closing
BODY_COPY_MAX = 512 * 1024  # a larger body is streamed, so that it does not block the event loop
FILES_SPARE = 128  # file descriptors kept for everything except connections
PIECE_BYTES = 1024 * 1024  # read at a time from a file that is sent


class FileRange(Struct, frozen=True):
    """A range of a file to send."""

    path: Path
    size: int  # bytes
    first: int = 0


class Connections:
    """One pool of connections. No proxies, no .netrc, no cookies, no redirects.

    With `private` None, all addresses may be called. Otherwise `private` and the rules of `models.addresses` decide for
    each socket; `addresses.EVERYWHERE` allows all addresses but those that are never called.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        headers: Mapping[str, str] | None = None,
        private: Private | None = None,
        verify_tls: bool = True,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        read_timeout_s: float | None = None,
    ) -> None:
        """Args: `headers`, of every call; `read_timeout_s`, how long a service may send nothing, also before its reply
        (None: as long as a call may last)."""
        self._limits = limits
        self._headers = dict(headers or {})
        self._guard = None if private is None else GuardedHttp(private)
        self._verify_tls = verify_tls
        self._idle_timeout_s = idle_timeout_s
        self._read_timeout_s = read_timeout_s
        self._deadlines = Deadlines(limits.attempt_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool; nothing is called yet."""
        if self._guard is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=ADDRESSES_S, ssl=self._verify_tls
            )
        else:
            connector = self._guard.connections(keepalive_s=KEEPALIVE_S, verify_tls=self._verify_tls)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            # `Deadlines` limits the time of a whole call.
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._limits.connect_timeout_s, sock_read=self._read_timeout_s
            ),
            trust_env=False,
        )

    async def stop(self) -> None:
        """Close everything. Safe to call twice, and before `start`."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._guard is not None:
            self._guard.close()

    def set_headers(self, headers: Mapping[str, str]) -> None:
        """Replace the headers of all later calls."""
        self._headers = dict(headers)
        if self._session is not None:
            self._session.headers.clear()
            self._session.headers.update(self._headers)

    async def exchange(
        self, method: str, url: URL | str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Make a call and read its whole reply, decoded; None if it exceeds REPLY_BYTES_MAX.

        A URL given as text must be percent-encoded and is sent unchanged. Raises: NoReply.
        """
        target = _read_url(url) if isinstance(url, str) else url
        task = asyncio.current_task()
        assert task is not None
        self._deadlines.begin(task)
        try:
            response = await self._send(method, target, body, headers)
            return response, await self._read_whole(response)
        except asyncio.CancelledError:
            if self._deadlines.is_late(task):
                raise NoReply(self._translate(TimeoutError(), target)) from None
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error, target)) from None
        finally:
            self._deadlines.end(task)

    async def begin(
        self, method: str, url: URL | str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Make a call and return the head of the reply. The caller reads the rest, and closes it. Raises: NoReply."""
        target = _read_url(url) if isinstance(url, str) else url
        try:
            async with asyncio.timeout(self._limits.attempt_timeout_s):
                return await self._send(method, target, body, headers)
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error, target)) from None

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The next piece of a reply, of any length; empty at its end. Raises: NoReply."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error, response.url)) from None

    async def upload(
        self,
        method: str,
        url: URL | str,
        parts: Sequence[bytes | FileRange],
        headers: Mapping[str, str] | None = None,
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Send the parts as one body, with one piece in memory at a time; return the reply as `exchange` does.

        The upload has no total timeout, but the service must read something every `idle_timeout_s`. Raises: NoReply.
        """
        target = _read_url(url) if isinstance(url, str) else url
        size = sum(part.size if isinstance(part, FileRange) else len(part) for part in parts)
        sent_headers = {**(headers or {}), hdrs.CONTENT_LENGTH: str(size)}
        session = self._open(target)
        try:
            with ExitStack() as opened:
                async with asyncio.timeout(self._idle_timeout_s) as timeout:
                    body = self._pieces(parts, timeout, opened)
                    response = await session.request(
                        method, target, data=body, headers=sent_headers, allow_redirects=False
                    )
                    timeout.reschedule(None)
                    return response, await self._read_whole(response)
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error, target)) from None

    async def _pieces(
        self, parts: Sequence[bytes | FileRange], timeout: asyncio.Timeout, opened: ExitStack
    ) -> AsyncIterator[bytes]:
        """Yield the body in pieces, and extend the timeout for each; after the last, to the timeout of a call.

        `opened` closes the files of a body that is not sent to its end.
        """
        for part in parts:
            if isinstance(part, bytes):
                _extend(timeout, self._idle_timeout_s)
                yield part
                continue
            file = opened.enter_context(_open_part(part))
            left = part.size
            while left:
                piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, left))
                if not piece:
                    raise EOFError(f"{part.path} has become shorter")
                left -= len(piece)
                _extend(timeout, self._idle_timeout_s)
                yield piece
        _extend(timeout, self._limits.attempt_timeout_s)

    def _open(self, target: URL) -> aiohttp.ClientSession:
        """The session for a call to this address. Raises: NoReply if the address is not allowed."""
        assert self._session is not None, "call start() first"
        if self._guard is not None:
            try:
                self._guard.admit(str(target))
            except InvalidInput as refused:
                raise NoReply(Fault(FaultKind.PERMANENT, RowError(refused.code, refused.message))) from None
        return self._session

    async def _send(
        self, method: str, target: URL, body: bytes | None, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        session = self._open(target)
        data = body if body is None or len(body) <= BODY_COPY_MAX else io.BytesIO(body)
        return await session.request(method, target, data=data, headers=headers, allow_redirects=False)

    async def _read_whole(self, response: aiohttp.ClientResponse) -> bytes | None:
        content = response.content
        try:
            # Most replies are complete with their head. A compressed reply may have any size, so it is read in pieces.
            if content.is_eof() and hdrs.CONTENT_ENCODING not in response.headers:
                body = content.read_nowait()
                body = body if len(body) <= REPLY_BYTES_MAX else None
            else:
                body = await self._read_pieces(content)
        except BaseException:
            response.close()
            raise
        if body is None:
            response.close()
        return body

    async def _read_pieces(self, content: aiohttp.StreamReader) -> bytes | None:
        pieces, total = [], 0
        async with asyncio.timeout(self._idle_timeout_s) as idle:
            while piece := await content.readany():
                total += len(piece)
                if total > REPLY_BYTES_MAX:
                    return None
                pieces.append(piece)
                idle.reschedule(asyncio.get_running_loop().time() + self._idle_timeout_s)
        return b"".join(pieces)

    def _translate(self, error: aiohttp.ClientError | OSError, url: URL) -> Fault:
        """Translate an error of aiohttp."""
        where = f"{url.scheme}://{url.raw_authority}"
        if self._guard is not None and (reason := refusal_of(error)):
            text = f"{where} is not called: {reason}"
            return Fault(FaultKind.PERMANENT, RowError("url_not_allowed", text))
        match error:
            case aiohttp.ConnectionTimeoutError():
                text = f"no connection to {where} within {self._limits.connect_timeout_s:g} s"
                return Fault(FaultKind.UNREACHABLE, RowError("connection_failed", text))
            case aiohttp.ClientConnectorError():
                return Fault(FaultKind.UNREACHABLE, RowError("connection_failed", f"no connection to {where}: {error}"))
            case aiohttp.InvalidURL():
                return Fault(FaultKind.PERMANENT, RowError("invalid_url", f"{where} cannot be called: {error}"))
            case TimeoutError():
                text = f"no complete reply within {self._limits.attempt_timeout_s:g} s, or no part of it for too long"
                return Fault(FaultKind.TRANSIENT, RowError("timeout", text))
            case aiohttp.ServerDisconnectedError():
                # Usually a kept-alive connection that the service has just closed: retry at once.
                text = f"{where} ended the connection without a reply"
                return Fault(FaultKind.TRANSIENT, RowError("connection_failed", text), retry_after_s=0.0)
            case aiohttp.ClientPayloadError() | aiohttp.ClientResponseError():
                return Fault(FaultKind.TRANSIENT, RowError("bad_response", f"the reply of {where} is broken: {error}"))
            case _:
                text = f"the connection to {where} broke: {error or type(error).__name__}"
                return Fault(FaultKind.TRANSIENT, RowError("connection_failed", text))


def _read_url(text: str) -> URL:
    """Parse a URL. Raises: NoReply if it is not one."""
    try:
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise ValueError("it has characters that must be percent-encoded")
        url = URL(text, encoded=True)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("it does not begin with https:// and a host")
    except ValueError as error:
        fault = Fault(FaultKind.PERMANENT, RowError("invalid_url", f"{text[:SHOWN_CHARS]!r} cannot be called: {error}"))
        raise NoReply(fault) from None
    return url


def _extend(timeout: asyncio.Timeout, wait_s: float) -> None:
    if timeout.when() is not None:  # None: the service has replied before it read everything
        timeout.reschedule(asyncio.get_running_loop().time() + wait_s)


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files for this many connections; return how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = connections + FILES_SPARE
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == unlimited else max(1, soft - FILES_SPARE)


def _open_part(part: FileRange) -> BinaryIO:
    """Open a file at its range. Not in a thread: a file that is opened after a cancellation would stay open."""
    file = part.path.open("rb")
    file.seek(part.first)
    return file


def check_header(name: str, value: str) -> None:
    """Raises: ModelFailed for a name or value that is not a valid header."""
    if not _TOKEN.fullmatch(name) or not value.isascii() or not value.isprintable():
        raise ModelFailed(
            f"{name!r} with its value is not an HTTP header: both must be plain text", code="invalid_header"
        )
