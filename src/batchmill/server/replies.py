"""Replies: what every one of them carries, errors, replies piece by piece, and long ones that a child rewrites."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from email.utils import formatdate
from typing import Any, TypeVar

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmill.children.bounds import MIB, Bounds
from batchmill.errors import BatchmillError, RateLimited, of_system
from batchmill.server.operations import Call, Dialect, json_reply
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
        told = error.message if error.blame == "system" else "see the reply"  # a model's words may hold a row's
        log.warning("request %s: %s: %s", error.request_id, error.code, told)
    return response


def hidden(error: Exception, request_id: str) -> BatchmillError:
    """Our own fault as whoever asked is told of it: that it is not theirs, and no more."""
    log.error("request %s failed", request_id, exc_info=error)
    told = of_system(error) if isinstance(error, OSError) else None
    if told is not None:  # without the path
        return type(told)(f"the server's disk is in trouble; its log has more under request {request_id}")
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
BOUNDS = Bounds(cpu_s=10.0, wall_s=30.0, memory_bytes=1024 * MIB, answer_bytes=256 * MIB)

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
