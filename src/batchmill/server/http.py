"""The root of everything that is asked over HTTP: from a request to the operation it means, and to exactly one reply.

Knows no dialect by name: each hands in its operations and says in its own envelope what is wrong with a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from batchmill.children.programs import Programs
from batchmill.errors import BatchmillError, InvalidInput, Unavailable, UnknownName
from batchmill.ports import Clock
from batchmill.server import access_log
from batchmill.server.access_log import Served
from batchmill.server.admission_control import Admission, RequestSlot
from batchmill.server.auth import ANYBODY, Gate, Hosts
from batchmill.server.bodies import BodyReader, Receive, parse_query, read_body
from batchmill.server.delivery import Deliveries, is_listening
from batchmill.server.operations import Call, Dialect, Elsewhere, Match, Operation, Routes
from batchmill.server.replies import date, hidden, new_request_id, refusal, security_headers
from batchmill.services.trace_context import request_id
from batchmill.types import Caller

SEND_STALL_S = 120.0  # a client that takes nothing of its reply for so long is left
UNREADABLE = "-"  # the method, in the log, of what is no request
PIECE_BYTES = 64 * 1024  # of a reply that is whole in memory, which a client may take slowly
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Connection(Protocol):
    """What a request asks of the connection that it came on."""

    is_known: bool  # a key was right on it
    is_placed: bool  # its request has a place among those under way: it is not ended for another connection

    def know(self, project: str) -> None:
        """A key was right: it is no stranger's, but this project's."""

    def has_unread(self) -> bool:
        """More of the request's body is coming than is worth waiting for."""

    def linger(self) -> None:
        """The reply that begins now is the last one; what still comes is read for a moment, and dropped."""

    async def drained(self) -> None:
        """Returns when the client has taken what was sent, but for a little, or is gone: it is given so long."""


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
        admission: Admission,
        programs: Programs,
    ) -> None:
        """Args: `programs`, where what callers can make long is done."""
        frontends = [(dialect, dialect.operations()) for dialect in dialects]
        self.routes = Routes([*frontends, (fallback, own)], fallback)
        self.gate, self.hosts, self.clock, self.admission = gate, hosts, clock, admission
        self._fallback, self._programs = fallback, programs
        self._watchers: list[Callable[[Served], None]] = [access_log.write]
        self.deliveries = Deliveries()
        self._long_replies = asyncio.Lock()

    @property
    def under_way(self) -> int:
        """Requests that have a place."""
        return self.admission.places.total + self.admission.strangers.total

    def watch(self, watcher: Callable[[Served], None]) -> None:
        self._watchers.append(watcher)

    async def close(self) -> None:
        await self.deliveries.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"the listener lets no {scope['type']} through"
        served = Served(_request_id(scope["headers"]), scope["method"], started=self.clock.monotonic())
        request_id.set(served.id)
        found = self.routes.find(scope["method"], scope["path"])
        reply = _Reply(scope, send, served, found.dialect, self._long_replies)
        if found.route is not None:
            served.route = found.route.operation.path
        try:
            await self._answer(scope, receive, reply, found)
        except ClientDisconnect:
            served.status = served.status or 499
        finally:
            if reply.place is not None:
                reply.leave()
            served.seconds = self.clock.monotonic() - served.started
            served.bytes_out = reply.bytes
            self.ended(served)

    def unreadable(self, error: BatchmillError) -> Response:
        """The reply to what is no request that can be read. It is counted as one all the same."""
        served = Served(new_request_id(), UNREADABLE, started=self.clock.monotonic(), code=error.code)
        error.request_id = served.id
        response = refusal(self._fallback, error, ())
        served.status, served.bytes_out = response.status_code, len(response.body)
        response.headers["x-request-id"] = served.id
        for name, value in security_headers(key.lower() for key, _ in response.raw_headers):
            response.raw_headers.append((name, value))
        self.ended(served)
        return response

    def ended(self, served: Served) -> None:
        """Tell of a request that is over."""
        for watcher in self._watchers:
            watcher(served)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply, found: Match) -> None:
        served, call = reply.served, None
        try:
            call, response = await self._handle(scope, receive, reply, found)
            await response(scope, call.request.receive, reply.send)
            await reply.taken()
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

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply, found: Match) -> tuple[Call, Response]:
        headers, served = scope["headers"], reply.served
        self.hosts.check(scope["method"], headers)
        await self.deliveries.check()
        if found.route is None:
            raise _no_route(scope, found)
        operation = found.route.operation
        caller = await self._admit(scope, reply, operation)
        served.project, served.key = caller.project, caller.key
        spend = partial(self.gate.spend, caller)
        if operation.scope is not None and not operation.spends_itself:
            spend()
        query = None if operation.has_free_query else parse_query(scope["query_string"], operation.query)
        if operation.admits is not None:
            operation.admits(caller, found.parameters)
        place = reply.place
        assert place is not None, "it was let in"
        reader = BodyReader(
            receive,
            headers,
            operation,
            bytes_max=self.admission.body_bytes_max,
            pace=self.admission.pace,
            hold=place.hold,
        )
        try:
            raw, body = await read_body(operation, reader, self._programs, caller.project)
            scope["path_params"] = found.parameters
            scope["scheme"] = self.admission.proxies.scheme(_peer(scope), headers, scope["scheme"])
            request = Request(scope, reader.receive)
            call = Call(
                request, caller, served.id, query, body, raw, programs=self._programs,
                spend=spend, hold=lambda size: place.hold.grow_to(reader.bytes + size), belongs_to=place.move,
            )  # fmt: skip
            return call, await operation.handler(call)
        except Elsewhere as passed:
            return await self._pass_on(reply, found, msgspec.structs.replace(call, raw=passed.raw))
        finally:
            served.bytes_in = reader.bytes

    async def _admit(self, scope: Scope, reply: _Reply, operation: Operation) -> Caller:
        """Who asks, by their key and with its scope; from now on the request has a place among those under way."""
        headers, peer = scope["headers"], _peer(scope)
        if operation.scope is None:
            vital = operation.is_vital
            reply.enter(
                self.admission.vital_place() if vital else self.admission.strangers_place(peer, headers),
                holds=not vital,
            )
            return ANYBODY
        caller = await self.gate.admit(headers, peer, operation.scope)
        if caller.key is not None and reply.connection is not None:
            reply.connection.know(caller.project)
        reply.enter(self.admission.place(caller.project))
        return caller

    async def _pass_on(self, reply: _Reply, found: Match, call: Call) -> tuple[Call, Response]:
        """To the next operation whose template fits the path, which answers in its own dialect's words."""
        scope = call.request.scope
        other = self.routes.find(scope["method"], scope["path"], found.route)
        reply.dialect = other.dialect
        if other.route is None:
            raise _no_route(scope, other)
        scope["path_params"] = other.parameters
        reply.served.route = other.route.operation.path
        return call, await other.route.operation.handler(call)

    async def _refuse(self, scope: Scope, receive: Receive, reply: _Reply, found: Match, error: BatchmillError) -> None:
        reply.served.code, error.request_id = error.code, reply.served.id
        if reply.has_begun:
            return  # the connection is closed in the middle: whoever reads sees that something is missing
        response = refusal(reply.dialect, error, found.methods)
        await response(scope, receive, reply.send)


def _peer(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0]


def _no_route(scope: Scope, found: Match) -> InvalidInput:
    method, path = scope["method"][:16], scope["path"][:256]
    error: InvalidInput = UnknownName(f"Invalid URL ({method} {path})", code="unknown_url")
    if found.methods:
        detail = f"Not allowed: {method} {path}; it has {', '.join(found.methods)}"
        error = InvalidInput(detail, code="method_not_allowed")
    error.asked = (method, path, found.methods)
    return error


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value.decode()
    return new_request_id()


class _Reply:
    """The way back to the client: headers that every reply has, and what became of it."""

    def __init__(self, scope: Scope, send: Send, served: Served, dialect: Dialect, turn: asyncio.Lock) -> None:
        """Args: turn: of all long replies."""
        self._send, self.served, self._turn = send, served, turn
        self.dialect = dialect  # whose words a refusal has
        state = scope.get("state", {})
        self.transport: asyncio.Transport | None = state.get("transport")
        self.connection: Connection | None = state.get("connection")
        self.place: RequestSlot | None = None  # once it is known whose the request is
        self.has_begun = False
        self.was_sent = False  # whole, to a client that was there
        self.bytes = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.served.status = message["status"]
            headers = [*message.get("headers", ()), *self._headers(message.get("headers", ()))]
            if is_last := (self.connection is not None and self.connection.has_unread()):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
            await self._send(message)
            if is_last:
                self.connection.linger()
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        self.bytes += len(body)
        is_whole = is_last and self.bytes == len(body) > PIECE_BYTES
        if is_whole:
            async with self._turn:  # one of them in each turn of the loop: the others have theirs in between
                await asyncio.sleep(0)
        if is_whole and self.connection is not None and not self.connection.is_known:  # no copy of it waits for them
            view = memoryview(body)
            for at in range(0, len(body), PIECE_BYTES):
                ends = is_last and at + PIECE_BYTES >= len(body)
                await self._send_piece(
                    {"type": message["type"], "body": view[at : at + PIECE_BYTES], "more_body": not ends}
                )
        else:
            await self._send_piece(message)

    async def _send_piece(self, message: MutableMapping[str, Any]) -> None:
        is_there = self.transport is None or is_listening(self.transport)
        if self.transport is not None and self.transport.get_write_buffer_size():
            async with self._patience():
                await self._send(message)
        else:
            await self._send(message)
        self.was_sent = not message.get("more_body", False) and is_there

    async def taken(self) -> None:
        """Wait until the client has most of a long reply, which is in memory until then."""
        if self.bytes > PIECE_BYTES and self.connection is not None:
            await self.connection.drained()

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """A client that takes nothing for too long is left."""
        assert self.transport is not None, "it is waited for"
        try:
            async with asyncio.timeout(SEND_STALL_S):
                yield
        except TimeoutError:
            self.transport.abort()
            raise ClientDisconnect from None

    def enter(self, place: RequestSlot, *, holds: bool = True) -> None:
        """Args: holds: its connection stays."""
        self.place = place
        if self.connection is not None:
            self.connection.is_placed = holds

    def leave(self) -> None:
        assert self.place is not None, "it has entered"
        self.place.leave()
        if self.connection is not None:
            self.connection.is_placed = False

    def _headers(self, given: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in given}
        added = security_headers(names)
        if b"date" not in names:
            added.append((b"date", date()))
        return [*added, (b"x-request-id", self.served.id.encode())]
