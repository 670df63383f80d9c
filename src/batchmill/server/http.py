"""The root of everything that is asked over HTTP: from a request to the operation it means, and to exactly one reply.

Knows no dialect by name: each hands in its operations and says in its own envelope what is wrong with a request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, MutableMapping, Sequence
from email.utils import formatdate
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from batchmill.errors import BatchmillError, InvalidInput, RateLimited, Unavailable, UnknownName
from batchmill.ports import Clock
from batchmill.server import access_log
from batchmill.server.access_log import Served
from batchmill.server.auth import ANYBODY, Gate
from batchmill.server.bodies import BodyReader, Receive, parse_query, read_body
from batchmill.server.delivery import Deliveries, is_listening
from batchmill.server.hosts import Hosts
from batchmill.server.operations import Call, Dialect, Elsewhere, Operation
from batchmill.server.routing import Found, Routes

log = logging.getLogger("batchmill.server")

REQUESTS_MAX = 5000  # under way at once; a further one is told to come again
SEND_STALL_S = 120.0  # a client that takes nothing of its reply for so long is left
RETRY_S = 1.0
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Of the root's own refusals, whatever a dialect makes of their codes.
STATUS = {
    "method_not_allowed": 405, "request_timeout": 408, "unsupported_media_type": 415, "request_too_large": 413,
    "invalid_host": 400,
}  # fmt: skip
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Any]


class HttpRoot:
    """An ASGI application. `watch` hears of every request that has ended; it must be quick and must not raise."""

    def __init__(
        self,
        dialects: Sequence[Dialect],
        *,
        fallback: Dialect,
        own: Sequence[Operation] = (),
        gate: Gate,
        hosts: Hosts,
        clock: Clock,
        body_bytes_max: int,
    ) -> None:
        doors = [(dialect, dialect.operations()) for dialect in dialects]
        self.routes = Routes([*doors, (fallback, own)], fallback)
        self._gate, self._hosts, self._clock, self._body_max = gate, hosts, clock, body_bytes_max
        self._watchers: list[Callable[[Served], None]] = [access_log.write]
        self._deliveries = Deliveries()
        self._under_way = 0

    def watch(self, watcher: Callable[[Served], None]) -> None:
        self._watchers.append(watcher)

    async def close(self) -> None:
        await self._deliveries.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"the listener lets no {scope['type']} through"
        served = Served(_request_id(scope["headers"]), scope["method"], started=self._clock.monotonic())
        found = self.routes.find(scope["method"], scope["path"])
        reply = _Reply(scope, send, served, found.dialect)
        if found.route is not None:
            served.route = found.route.operation.path
        self._under_way += 1
        try:
            await self._answer(scope, receive, reply, found)
        except ClientDisconnect:
            served.status = served.status or 499
        finally:
            self._under_way -= 1
            served.seconds = self._clock.monotonic() - served.started
            served.bytes_out = reply.bytes
            for watcher in self._watchers:
                watcher(served)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply, found: Found) -> None:
        served, call = reply.served, None
        try:
            call, response = await self._handle(scope, receive, reply, found)
            await response(scope, call.request.receive, reply.send)
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:  # the time that requests had when the server stopped is over
            await self._refuse(scope, receive, reply, found, Unavailable("the server is stopping; try again"))
        except BatchmillError as error:
            await self._refuse(scope, receive, reply, found, error)
        except Exception as error:  # the edge: whoever asked is told that it is not their fault, and no more
            log.error("request %s failed", served.id, exc_info=error)
            hidden = BatchmillError(f"the server failed to answer; its log has more under request {served.id}")
            await self._refuse(scope, receive, reply, found, hidden)
        else:
            if call.callbacks and reply.was_sent and reply.transport is not None:
                await self._deliveries.follow(reply.transport, call.callbacks)

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply, found: Found) -> tuple[Call, Response]:
        headers, served = scope["headers"], reply.served
        self._hosts.check(scope["method"], headers)
        await self._deliveries.look()
        if found.route is None:
            raise _no_route(scope, found)
        if self._under_way > REQUESTS_MAX:
            raise Unavailable(f"more than {REQUESTS_MAX:,} requests are under way; try again")
        operation = found.route.operation
        address = (scope.get("client") or ("",))[0]
        caller = ANYBODY if operation.scope is None else await self._gate.admit(headers, address, operation.scope)
        served.project, served.key = caller.project, caller.key
        spend = partial(self._gate.spend, caller)
        if operation.scope is not None and not operation.spends_itself:
            spend()
        query = parse_query(scope["query_string"], operation.query)
        limit = self._body_max if operation.body_bytes_max is None else operation.body_bytes_max
        reader = BodyReader(receive, headers, limit, any_encoding=operation.is_raw)
        try:
            raw, body = await read_body(operation, reader)
            scope["path_params"] = found.parameters
            request = Request(scope, reader.receive)
            call = Call(request, caller, served.id, query, body, raw, spend=spend)
            return call, await operation.handler(call)
        except Elsewhere as passed:
            return await self._pass_on(reply, found, msgspec.structs.replace(call, raw=passed.raw))
        finally:
            served.bytes_in = reader.bytes

    async def _pass_on(self, reply: _Reply, found: Found, call: Call) -> tuple[Call, Response]:
        """To the next operation whose template fits the path, which answers in its own dialect's words."""
        scope = call.request.scope
        other = self.routes.find(scope["method"], scope["path"], found.route)
        reply.dialect = other.dialect
        if other.route is None:
            raise _no_route(scope, other)
        scope["path_params"] = other.parameters
        reply.served.route = other.route.operation.path
        return call, await other.route.operation.handler(call)

    async def _refuse(self, scope: Scope, receive: Receive, reply: _Reply, found: Found, error: BatchmillError) -> None:
        reply.served.code, error.request_id = error.code, reply.served.id
        if reply.has_begun:
            return  # the connection is closed in the middle: whoever reads sees that something is missing
        response = reply.dialect.refusal(error)
        response.status_code = STATUS.get(error.code, response.status_code)
        if response.status_code == 405:
            response.headers["allow"] = ", ".join(found.methods)
        if response.status_code == 401:
            response.headers["www-authenticate"] = "Bearer"
        if isinstance(error, RateLimited):
            response.headers["retry-after"] = str(max(1, round(error.retry_after_s + 0.5)))
        elif response.status_code == 503:
            response.headers.setdefault("retry-after", f"{RETRY_S:.0f}")
        if response.status_code >= 500:
            told = error.message if error.blame == "system" else "see the reply"  # a model's words may hold a row's
            log.warning("request %s: %s: %s", reply.served.id, error.code, told)
        await response(scope, receive, reply.send)


def _no_route(scope: Scope, found: Found) -> InvalidInput:
    method, path = scope["method"][:16], scope["path"][:256]
    if found.methods:
        return InvalidInput(
            f"Not allowed: {method} {path}; it has {', '.join(found.methods)}", code="method_not_allowed"
        )
    return UnknownName(f"Invalid URL ({method} {path})", code="unknown_url")


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value.decode()
    return f"req_{secrets.token_hex(12)}"


class _Reply:
    """The way back to the client: headers that every reply has, and what became of it."""

    def __init__(self, scope: Scope, send: Send, served: Served, dialect: Dialect) -> None:
        self._send, self.served = send, served
        self.dialect = dialect  # whose words a refusal has
        self.transport: asyncio.Transport | None = scope.get("state", {}).get("transport")
        self.has_begun = False
        self.was_sent = False  # whole, to a client that was there
        self.bytes = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.served.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers(message.get("headers", ()))]
            await self._send(message)
            return
        body = message.get("body", b"")
        self.bytes += len(body)
        is_last = not message.get("more_body", False)
        is_there = self.transport is None or is_listening(self.transport)
        if self.transport is not None and self.transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(SEND_STALL_S):
                    await self._send(message)
            except TimeoutError:
                self.transport.abort()
                raise ClientDisconnect from None
        else:
            await self._send(message)
        self.was_sent = is_last and is_there

    def _headers(self, given: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in given}
        added = [(name, value) for name, value in SECURITY_HEADERS.items() if name not in names]
        if b"date" not in names:
            added.append((b"date", formatdate(time.time(), usegmt=True).encode()))
        return [*added, (b"x-request-id", self.served.id.encode())]
