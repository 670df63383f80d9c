"""The root of everything that is asked over HTTP: from a request to the operation it means, and to exactly one reply.

Knows no dialect by name: each hands in its operations and says in its own envelope what is wrong with a request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from batchmill.children.programs import Programs
from batchmill.errors import BatchmillError, InvalidInput, Unavailable, UnknownName
from batchmill.ports import Clock
from batchmill.server import access_log
from batchmill.server.access_log import Served
from batchmill.server.auth import ANYBODY, Gate
from batchmill.server.bodies import BodyReader, Receive, parse_query, read_body
from batchmill.server.delivery import Deliveries, is_listening
from batchmill.server.hosts import Hosts
from batchmill.server.operations import Call, Dialect, Elsewhere, Operation
from batchmill.server.replies import date, hidden, new_request_id, refusal, security_headers
from batchmill.server.routing import Found, Routes

REQUESTS_MAX = 5000  # under way at once; a further one is told to come again
SEND_STALL_S = 120.0  # a client that takes nothing of its reply for so long is left
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

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
        programs: Programs,
    ) -> None:
        """Args: `programs`, where what callers can make long is done."""
        doors = [(dialect, dialect.operations()) for dialect in dialects]
        self.routes = Routes([*doors, (fallback, own)], fallback)
        self.gate, self.hosts, self.clock, self.body_bytes_max = gate, hosts, clock, body_bytes_max
        self._programs = programs
        self._watchers: list[Callable[[Served], None]] = [access_log.write]
        self.deliveries = Deliveries()
        self.under_way = 0

    def watch(self, watcher: Callable[[Served], None]) -> None:
        self._watchers.append(watcher)

    async def close(self) -> None:
        await self.deliveries.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"the listener lets no {scope['type']} through"
        served = Served(_request_id(scope["headers"]), scope["method"], started=self.clock.monotonic())
        found = self.routes.find(scope["method"], scope["path"])
        reply = _Reply(scope, send, served, found.dialect)
        if found.route is not None:
            served.route = found.route.operation.path
        self.under_way += 1
        try:
            await self._answer(scope, receive, reply, found)
        except ClientDisconnect:
            served.status = served.status or 499
        finally:
            self.under_way -= 1
            served.seconds = self.clock.monotonic() - served.started
            served.bytes_out = reply.bytes
            self.ended(served)

    def ended(self, served: Served) -> None:
        """Tell of a request that is over."""
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
            await self._refuse(scope, receive, reply, found, hidden(error, served.id))
        else:
            if call.callbacks and reply.was_sent and reply.transport is not None:
                await self.deliveries.follow(reply.transport, call.callbacks)

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply, found: Found) -> tuple[Call, Response]:
        headers, served = scope["headers"], reply.served
        self.hosts.check(scope["method"], headers)
        await self.deliveries.look()
        if found.route is None:
            raise _no_route(scope, found)
        if self.under_way > REQUESTS_MAX:
            raise Unavailable(f"more than {REQUESTS_MAX:,} requests are under way; try again")
        operation = found.route.operation
        address = (scope.get("client") or ("",))[0]
        caller = ANYBODY if operation.scope is None else await self.gate.admit(headers, address, operation.scope)
        served.project, served.key = caller.project, caller.key
        spend = partial(self.gate.spend, caller)
        if operation.scope is not None and not operation.spends_itself:
            spend()
        query = parse_query(scope["query_string"], operation.query)
        limit = self.body_bytes_max if operation.body_bytes_max is None else operation.body_bytes_max
        reader = BodyReader(receive, headers, limit, any_encoding=operation.is_raw)
        try:
            raw, body = await read_body(operation, reader, self._programs, caller.project)
            scope["path_params"] = found.parameters
            request = Request(scope, reader.receive)
            call = Call(request, caller, served.id, query, body, raw, programs=self._programs, spend=spend)
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
        response = refusal(reply.dialect, error, found.methods)
        await response(scope, receive, reply.send)


def _no_route(scope: Scope, found: Found) -> InvalidInput:
    method, path = scope["method"][:16], scope["path"][:256]
    error: InvalidInput = UnknownName(f"Invalid URL ({method} {path})", code="unknown_url")
    if found.methods:
        told = f"Not allowed: {method} {path}; it has {', '.join(found.methods)}"
        error = InvalidInput(told, code="method_not_allowed")
    error.asked = (method, path, found.methods)
    return error


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value.decode()
    return new_request_id()


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
        added = security_headers(names)
        if b"date" not in names:
            added.append((b"date", date()))
        return [*added, (b"x-request-id", self.served.id.encode())]
