"""Replies: errors, what every reply carries, replies piece by piece, files, and long replies that a child rewrites.

Source: RFC 9110 sections 13.1.5 (If-Range) and 14 (ranges), RFC 6266 (Content-Disposition).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from email.utils import formatdate
from typing import Any, TypeVar
from urllib.parse import quote

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.children.bounds import MIB, ResourceLimits
from batchmill.errors import BatchmillError, RateLimited, of_system
from batchmill.server.operations import Call, Dialect, json_reply
from batchmill.services.files import READ_BYTES, OpenFile
from batchmill.wire.error_statuses import STATUSES, status_of

log = logging.getLogger("batchmill.server")

RETRY_S = 1.0
# Of the root's own refusals, whatever a dialect makes of their codes.
STATUS = {
    "method_not_allowed": 405, "request_timeout": 408, "unsupported_media_type": 415, "request_too_large": 413,
    "invalid_host": 400, "invalid_http": 400, "head_too_large": 431, "uri_too_long": 414, "too_many_requests": 503,
    "body_memory_full": 503,
}  # fmt: skip
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}


def security_headers(given: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Those that a reply with the headers `given`, in lower case, has not set itself."""
    names = set(given)
    return [(name, value) for name, value in SECURITY_HEADERS.items() if name not in names]


def date() -> bytes:
    return formatdate(time.time(), usegmt=True).encode()


_ids = random.Random(secrets.randbits(256))  # to be told apart, not to be kept secret


def new_request_id() -> str:
    return f"req_{_ids.getrandbits(96):024x}"


def refusal(dialect: Dialect, error: BatchmillError, methods: Sequence[str]) -> Response:
    """The reply to a request that failed; `error` has the request's id. A fault of ours or a model's is logged."""
    response = dialect.refusal(error)
    response.status_code = STATUS.get(error.code, response.status_code)
    if response.status_code == 405:
        response.headers["allow"] = ", ".join(methods)
    if response.status_code == 401:
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimited):
        response.headers["retry-after"] = str(max(1, round(error.retry_after_s + 0.5)))
    elif response.status_code == 503:
        response.headers.setdefault("retry-after", f"{RETRY_S:.0f}")
    if response.status_code >= 500:
        detail = error.message if error.blame == "system" else "see the reply"  # a model's words may hold a row's
        log.warning("request %s: %s: %s", error.request_id, error.code, detail)
    return response


def hidden(error: Exception, request_id: str) -> BatchmillError:
    """Our own fault as whoever asked is told of it: that it is not theirs, and no more."""
    log.error("request %s failed", request_id, exc_info=error)
    system_error = of_system(error) if isinstance(error, OSError) else None
    if system_error is not None:  # without the path
        return type(system_error)(f"the server's disk is in trouble; its log has more under request {request_id}")
    return BatchmillError(f"the server failed to answer; its log has more under request {request_id}")


EVENTS = "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # so that no proxy waits for a whole reply
ANSWER_BYTES_MAX = 256 * 1024 * 1024  # of one that is no stream: it is in memory whole
T = TypeVar("T")


async def unless_gone(call: Call, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None when the client left before: the work has then been cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(call.until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end(working, leaving)


async def whole_answer(pieces: AsyncGenerator[bytes]) -> bytes:
    """An answer that is no stream, in one piece. Raises: BatchmillError for one that no memory should hold."""
    whole = bytearray()
    try:
        async for piece in pieces:
            whole += piece
            if len(whole) > ANSWER_BYTES_MAX:
                raise BatchmillError(f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes", code="answer_too_large")
    finally:
        await pieces.aclose()
    return bytes(whole)


class PieceReply(Response):
    """`pieces` is closed in any case, also where the client left before the first one."""

    def __init__(self, pieces: AsyncGenerator[bytes], *, media: str, status: int = 200) -> None:
        super().__init__(None, status, UNBUFFERED)
        del self.headers["content-length"]
        self.headers["content-type"] = media
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, leaving = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _end(writing, leaving)
            await self._pieces.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BatchmillError as error:
            await send({"type": "http.response.body", "body": self.late(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def late(self, error: BatchmillError) -> bytes:
        """What is said of an error for which no status can be sent any more. Raising it breaks the connection off."""
        raise error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SCHEMA: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class Envelope(Struct, frozen=True):
    error: str


def text_reply(error: BatchmillError, message: str, table: Mapping[str, int] = STATUSES) -> Response:
    """The reply to a request that failed. `message` may be shown to the caller; `table`: the dialect's statuses."""
    return error_reply(error, Envelope(message), status_of(error, table))


def error_reply(error: BatchmillError, envelope: Struct, status: int) -> Response:
    """The reply to a request that failed, in a dialect's envelope. It never raises.

    `x-should-retry` is for the openai package and those made like it, which repeat 408, 409 and every 5xx otherwise.
    """
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.retryable and (status in (408, 409) or status >= 500):
        headers["x-should-retry"] = "false"
    return json_reply(envelope, status, headers)


INLINE_BYTES_MAX = 256 * 1024  # of a reply that is rewritten in place
BOUNDS = ResourceLimits(cpu_s=10.0, wall_s=30.0, memory_bytes=1024 * MIB, answer_bytes=256 * MIB)

Progress = Callable[[float], None]
Rewrite = Callable[[bytes, Progress], bytes]


async def rewritten(call: Call, rewrite: Rewrite, order: bytes) -> bytes:
    """What `rewrite` makes of an order that holds the reply.

    Args: `rewrite`, a function at its module's own level, where a child finds it.

    Raises: what it raises; TooComplex at a bound, RateLimited.
    """
    if len(order) <= INLINE_BYTES_MAX or call.programs is None:
        return rewrite(order, _unseen)
    target = f"{rewrite.__module__}:{rewrite.__name__}"
    return await call.programs.run(target, order, who=call.caller.project, work="the engine's answer", bounds=BOUNDS)


def _unseen(share: float) -> None:
    """Nobody looks at how far it is."""


OCTETS = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")


class ContentRange(Struct, frozen=True):
    """Bytes first <= n < last; none of them where both are one."""

    first: int
    last: int


NOTHING = ContentRange(0, 0)


async def _nothing() -> None:
    """Nobody wants to know."""


class FileReply(Response):
    """Closes `file` in the end. HEAD gets the same head and no body; who asks for several ranges gets the whole.

    `before_the_end` is called before the last byte of the file is sent. What it raises is the reply, where the file is
    small; otherwise the reply is broken off.
    """

    def __init__(
        self,
        request: Request,
        file: OpenFile,
        *,
        filename: str,
        media: str = OCTETS,
        before_the_end: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._file, self._is_head = file, request.method == "HEAD"
        self._before_the_end = before_the_end
        tag, size = f'"{file.record.id}"', file.size_bytes
        headers = {
            "accept-ranges": "bytes",
            "etag": tag,
            "content-disposition": disposition(filename),
            "cache-control": "private, no-transform",
        }
        self._span, status = ContentRange(0, size), 200
        if (asked := _asked(request, tag)) is not None:
            span = span_of(asked, size)
            if span == NOTHING:
                self._span, status = span, 416
                headers["content-range"] = f"bytes */{size}"
            elif span is not None:
                self._span, status = span, 206
                headers["content-range"] = f"bytes {span.first}-{span.last - 1}/{size}"
        headers["content-length"] = str(self._span.last - self._span.first)
        super().__init__(None, status, headers, media_type=media)

    @property
    def is_to_the_end(self) -> bool:
        """It has the last byte of the file: who has taken it needs no more of it."""
        return not self._is_head and self.status_code != 416 and self._span.last == self._file.size_bytes

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        is_one_piece = self._span.last - self._span.first <= READ_BYTES
        try:
            if self.is_to_the_end and is_one_piece:
                await self._before_the_end()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at = self._span.last if self._is_head else self._span.first
            while at < self._span.last and not gone.done():
                data = await self._file.read(at, min(READ_BYTES, self._span.last - at))
                if not data:
                    raise EOFError(f"{self._file.record.id} is shorter than its record says")
                at += len(data)
                if self.is_to_the_end and at == self._span.last and not is_one_piece:
                    await self._before_the_end()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            await self._file.close()
        if self.background is not None:
            await self.background()


async def _until_gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    """Sending to a client that left succeeds: only its goodbye tells that there is nobody to read for."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _asked(request: Request, tag: str) -> str | None:
    """The range that is asked for, if it still counts: `If-Range` names the file it was begun with."""
    if request.method not in ("GET", "HEAD"):
        return None
    begun = request.headers.get("if-range")
    return request.headers.get("range") if begun is None or begun.strip() == tag else None


def span_of(asked: str, size: int) -> ContentRange | None:
    """The bytes that a Range header means: NOTHING where there are none of them, None where it is to be ignored."""
    match = _RANGE.fullmatch(asked.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        return ContentRange(size - length, size) if length else NOTHING
    first = int(match[1])
    last = size if match[2] == "" else int(match[2]) + 1
    if match[2] and last <= first:
        return None  # no range at all, by the grammar
    return ContentRange(first, min(last, size)) if first < size else NOTHING


def disposition(filename: str) -> str:
    """`attachment` with a name that is safe to save under: no folders, nothing that ends the header."""
    name = re.split(r"[/\\]", filename)[-1].lstrip(".") or "file"
    plain = _UNSAFE.sub("_", name)
    if plain == name:
        return f'attachment; filename="{name}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
