"""Replies: errors, common headers, streamed replies, files, and long replies that a child process rewrites.

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
from batchmill.errors import BatchmillError, RateLimited, to_storage_error
from batchmill.server.operations import Call, Dialect, json_reply
from batchmill.services.files.files import READ_BYTES, OpenFile
from batchmill.wire.error_statuses import STATUSES, status_of

log = logging.getLogger("batchmill.server")

RETRY_S = 1.0
# Statuses of the root's own refusals. They override the dialect's.
STATUS = {
    "method_not_allowed": 405, "request_timeout": 408, "unsupported_media_type": 415, "request_too_large": 413,
    "invalid_host": 400, "invalid_http": 400, "head_too_large": 431, "uri_too_long": 414, "too_many_requests": 503,
    "body_memory_full": 503, "database_silent": 503,
}  # fmt: skip
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}


def security_headers(given: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the security headers that a reply has not set itself. `given`: names of its headers, in lower case."""
    names = set(given)
    return [(name, value) for name, value in SECURITY_HEADERS.items() if name not in names]


def date() -> bytes:
    return formatdate(time.time(), usegmt=True).encode()


_ids = random.Random(secrets.randbits(256))  # ids must be unique, not secret


def new_request_id() -> str:
    return f"req_{_ids.getrandbits(96):024x}"


def refusal(dialect: Dialect, error: BatchmillError, methods: Sequence[str]) -> Response:
    """Render the reply to a failed request, and log faults of the server or a model. `error` has the request's id."""
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
        detail = error.message if error.blame == "system" else "see the reply"  # a model's message may quote row data
        log.warning("request %s: %s: %s", error.request_id, error.code, detail)
    return response


def mask_error(error: Exception, request_id: str) -> BatchmillError:
    """Log an unexpected exception, and return an error without its details for the client."""
    log.error("request %s failed", request_id, exc_info=error)
    system_error = to_storage_error(error) if isinstance(error, OSError) else None
    if system_error is not None:  # without the path
        return type(system_error)(
            f"the server's disk has failed or is full; see request {request_id} in the server's log"
        )
    return BatchmillError(f"the server failed to answer; see request {request_id} in its log")


EVENTS = "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # so that proxies do not buffer a reply
ANSWER_BYTES_MAX = 256 * 1024 * 1024  # of an answer that is not streamed: it is held in memory
T = TypeVar("T")


async def run_until_disconnect(call: Call, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel the work and return None."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(call.wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, disconnect)


async def whole_answer(pieces: AsyncGenerator[bytes]) -> bytes:
    """Join the pieces of an answer that is not streamed. Raises: BatchmillError if it is too large for memory."""
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
    """A streamed reply. It always closes `pieces`, even if the client disconnects before the first one."""

    def __init__(self, pieces: AsyncGenerator[bytes], *, media: str, status: int = 200) -> None:
        super().__init__(None, status, UNBUFFERED)
        del self.headers["content-length"]
        self.headers["content-type"] = media
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing, leaving = (
            asyncio.ensure_future(self._write(send)),
            asyncio.ensure_future(_wait_for_disconnect(receive)),
        )
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _cancel(writing, leaving)
            await self._pieces.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BatchmillError as error:
            await send({"type": "http.response.body", "body": self.render_late_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def render_late_error(self, error: BatchmillError) -> bytes:
        """Render an error after the status was sent. Raising it instead breaks the connection off."""
        raise error


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SCHEMA: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class Envelope(Struct, frozen=True):
    error: str


def text_reply(error: BatchmillError, message: str, table: Mapping[str, int] = STATUSES) -> Response:
    """Make the reply to a failed request. `message` may be shown to the caller; `table`: the dialect's statuses."""
    return error_reply(error, Envelope(message), status_of(error, table))


def error_reply(error: BatchmillError, envelope: Struct, status: int) -> Response:
    """Make the reply to a failed request, in a dialect's envelope. It never raises.

    `x-should-retry` is for the openai package and similar clients, which otherwise retry 408, 409 and every 5xx.
    """
    headers = {}
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if not error.retryable and (status in (408, 409) or status >= 500):
        headers["x-should-retry"] = "false"
    return json_reply(envelope, status, headers)


INLINE_BYTES_MAX = 256 * 1024  # a reply up to this size is rewritten in this process
BOUNDS = ResourceLimits(cpu_s=10.0, wall_s=30.0, memory_bytes=1024 * MIB, answer_bytes=256 * MIB)

Progress = Callable[[float], None]
Rewrite = Callable[[bytes, Progress], bytes]


async def rewritten(call: Call, rewrite: Rewrite, order: bytes) -> bytes:
    """Run `rewrite` on an order that holds the reply; for a long one, in a child process.

    Args: rewrite: a function at module level, so that the child process can import it.

    Raises: what `rewrite` raises; TooComplex at a resource limit; RateLimited.
    """
    if len(order) <= INLINE_BYTES_MAX or call.programs is None:
        return rewrite(order, _ignore_progress)
    target = f"{rewrite.__module__}:{rewrite.__name__}"
    return await call.programs.run(target, order, who=call.caller.project, work="the engine's answer", bounds=BOUNDS)


def _ignore_progress(share: float) -> None:
    """Ignore progress."""


OCTETS = "application/octet-stream"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)
_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")


class ContentRange(Struct, frozen=True):
    """The bytes first <= n < last. The range is empty if both are equal."""

    first: int
    last: int


NOTHING = ContentRange(0, 0)


async def _do_nothing() -> None:
    """Do nothing."""


class FileReply(Response):
    """Sends a file or a range of it, and closes `file` at the end. HEAD gets the headers only; a request for several
    ranges gets the whole file.

    `before_the_end` is called before the last byte of the file is sent. If it raises, a small file is replaced by the
    error's reply, and the reply with a larger file is broken off.
    """

    def __init__(
        self,
        request: Request,
        file: OpenFile,
        *,
        filename: str,
        media: str = OCTETS,
        before_the_end: Callable[[], Awaitable[None]] = _do_nothing,
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
        if (requested := _requested_range(request, tag)) is not None:
            span = parse_range(requested, size)
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
        """Whether the reply has the last byte of the file: a client that received it needs no more."""
        return not self._is_head and self.status_code != 416 and self._span.last == self._file.size_bytes

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        is_one_piece = self._span.last - self._span.first <= READ_BYTES
        try:
            if self.is_to_the_end and is_one_piece:
                await self._before_the_end()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at = self._span.last if self._is_head else self._span.first
            while at < self._span.last and not leaving.done():
                data = await self._file.read(at, min(READ_BYTES, self._span.last - at))
                if not data:
                    raise EOFError(f"{self._file.record.id} is shorter than its record says")
                at += len(data)
                if self.is_to_the_end and at == self._span.last and not is_one_piece:
                    await self._before_the_end()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not leaving.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()
            await self._file.close()
        if self.background is not None:
            await self.background()


async def _until_disconnect(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    """Wait for the client's disconnect message. Sending to a disconnected client does not fail."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _requested_range(request: Request, tag: str) -> str | None:
    """Return the Range header if it applies: `If-Range` must name this file."""
    if request.method not in ("GET", "HEAD"):
        return None
    begun = request.headers.get("if-range")
    return request.headers.get("range") if begun is None or begun.strip() == tag else None


def parse_range(header: str, size: int) -> ContentRange | None:
    """Parse a Range header. NOTHING: the range has no bytes of the file; None: the header is ignored."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        return ContentRange(size - length, size) if length else NOTHING
    first = int(match[1])
    last = size if match[2] == "" else int(match[2]) + 1
    if match[2] and last <= first:
        return None  # not a valid range
    return ContentRange(first, min(last, size)) if first < size else NOTHING


def disposition(filename: str) -> str:
    """Render `attachment` with a file name that is safe: no folders, nothing that ends the header."""
    name = re.split(r"[/\\]", filename)[-1].lstrip(".") or "file"
    plain = _UNSAFE.sub("_", name)
    if plain == name:
        return f'attachment; filename="{name}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
