"""The ASGI application: it routes each HTTP request to its operation, and sends exactly one reply.

It knows no dialect by name. Each dialect provides its operations, and renders refusals in its own envelope.
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
from batchmill.ports.clock import Clock
from batchmill.server import access_log
from batchmill.server.access_log import RequestRecord
from batchmill.server.admission_control import Admission, RequestSlot
from batchmill.server.auth import ANYBODY, Gate, Hosts
from batchmill.server.bodies import BodyReader, Receive, parse_query, read_body
from batchmill.server.delivery import Deliveries, is_listening
from batchmill.server.operations import Call, Dialect, Match, Operation, Routes, TryNextRoute
from batchmill.server.replies import mask_error, new_request_id, refusal, security_headers
from batchmill.server.reply_heads import LONG_BYTES, ReplyHeads
from batchmill.services.trace_context import request_id
from batchmill.types import Caller

SEND_STALL_S = 120.0  # the connection is aborted if the client reads nothing of its reply for this long
UNREADABLE = "-"  # the method in the log for bytes that are not a valid request
BODILESS = frozenset({204, 304})  # statuses of replies without a body, and without its length
PIECE_BYTES = 64 * 1024  # of a reply that is whole in memory, and that a client may read slowly
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Connection(Protocol):
    """The part of a connection that its requests use."""

    is_authenticated: bool  # a request on it had a valid key
    has_slot: bool  # its request has a slot, so that the connection is not evicted

    def mark_authenticated(self, project: str) -> None:
        """Record that a request had a valid key of this project."""

    def has_unread(self) -> bool:
        """Whether more of the request's body is still arriving than is worth reading."""

    def linger(self) -> None:
        """Make the reply that begins now the last one; later bytes are read for a short time, and dropped."""

    async def wait_until_drained(self) -> None:
        """Wait until the client has read almost all of what was sent, or has disconnected."""

    def is_last(self, cycle: Any) -> bool | None:
        """Whether the reply to a request is the last one, if it can be sent at once; None: ASGI sends it."""

    def send_at_once(self, cycle: Any, data: bytes) -> None:
        """Send the whole reply to a request. `is_last` has just returned that this is possible."""


Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Any]


class HttpRoot:
    """The ASGI application. Watchers get the record of each ended request; they must be quick and must not raise."""

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
        """Args: programs: the child processes for work whose length depends on the caller."""
        frontends = [(dialect, dialect.operations()) for dialect in dialects]
        self.routes = Routes([*frontends, (fallback, own)], fallback)
        self.gate, self.hosts, self.clock, self.admission = gate, hosts, clock, admission
        self._fallback, self._programs = fallback, programs
        self._watchers: list[Callable[[RequestRecord], None]] = [access_log.write]
        self.deliveries = Deliveries()
        self.heads = ReplyHeads(clock)
        self._long_replies = asyncio.Lock()

    @property
    def under_way(self) -> int:
        """How many requests hold a slot."""
        return self.admission.project_requests.total + self.admission.anonymous_requests.total

    def watch(self, watcher: Callable[[RequestRecord], None]) -> None:
        self._watchers.append(watcher)

    async def close(self) -> None:
        await self.deliveries.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"the listener must not pass on {scope['type']}"
        record = RequestRecord(_request_id(scope["headers"]), scope["method"], started=self.clock.monotonic())
        request_id.set(record.id)
        match = self.routes.find(scope["method"], scope["path"])
        reply = _Reply(scope, send, record, match.dialect, self._long_replies, self.heads)
        if match.route is not None:
            record.route = match.route.operation.path
        try:
            await self._answer(scope, receive, reply, match)
        except ClientDisconnect:
            record.status = record.status or 499
        finally:
            if reply.slot is not None:
                reply.leave()
            record.seconds = self.clock.monotonic() - record.started
            record.bytes_out = reply.bytes
            self.report(record)

    def unreadable(self, error: BatchmillError) -> Response:
        """Return the reply to an unreadable request. It is logged and counted like any request."""
        record = RequestRecord(new_request_id(), UNREADABLE, started=self.clock.monotonic(), code=error.code)
        error.request_id = record.id
        response = refusal(self._fallback, error, ())
        record.status, record.bytes_out = response.status_code, len(response.body)
        response.headers["x-request-id"] = record.id
        for name, value in security_headers(key.lower() for key, _ in response.raw_headers):
            response.raw_headers.append((name, value))
        self.report(record)
        return response

    def report(self, record: RequestRecord) -> None:
        """Hand the record of an ended request to the watchers."""
        for watcher in self._watchers:
            watcher(record)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply, match: Match) -> None:
        record, call = reply.record, None
        try:
            call, response = await self._handle(scope, receive, reply, match)
            if not reply.send_at_once(response, is_tracked=bool(call.callbacks)):
                await response(scope, call.request.receive, reply.send)
                await reply.wait_until_read()
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:  # the server is stopping, and the time for requests has passed
            await self._refuse(scope, receive, reply, match, Unavailable("the server is stopping; try again"))
        except BatchmillError as error:
            await self._refuse(scope, receive, reply, match, error)
        except Exception as error:  # the edge: the client learns that it is a fault of the server, and no details
            await self._refuse(scope, receive, reply, match, mask_error(error, record.id))
        else:
            if call.callbacks and reply.was_sent and reply.transport is not None:
                await self.deliveries.track(reply.transport, call.callbacks)

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply, match: Match) -> tuple[Call, Response]:
        headers, record = scope["headers"], reply.record
        self.hosts.check(scope["method"], headers)
        if match.route is None:
            raise _no_route(scope, match)
        operation = match.route.operation
        if not operation.is_upload:  # for which no delivery matters
            await self.deliveries.check()
        caller = await self._admit(scope, reply, operation)
        record.project, record.key = caller.project, caller.key
        spend = partial(self.gate.spend, caller)
        if operation.scope is not None and not operation.spends_itself:
            spend()
        query = None if operation.has_free_query else parse_query(scope["query_string"], operation.query)
        if operation.check_access is not None:
            operation.check_access(caller, match.parameters)
        slot = reply.slot
        assert slot is not None, "the request was admitted"
        reader = BodyReader(
            receive,
            headers,
            operation,
            bytes_max=self.admission.body_bytes_max,
            pace=self.admission.pace,
            hold=slot.hold,
        )
        try:
            raw, body = await read_body(operation, reader, self._programs, caller.project)
            scope["path_params"] = match.parameters
            scope["scheme"] = self.admission.proxies.scheme(_peer(scope), headers, scope["scheme"])
            request = Request(scope, reader.receive)
            call = Call(
                request, caller, record.id, query, body, raw, programs=self._programs, belongs_to=slot.move,
                spend=spend, unspend=partial(self.gate.give_back, caller),
                hold=lambda size: slot.hold.grow_to(reader.bytes + size),
            )  # fmt: skip
            return call, await operation.handler(call)
        except TryNextRoute as passed:
            return await self._pass_on(reply, match, msgspec.structs.replace(call, raw=passed.raw))
        finally:
            record.bytes_in = reader.bytes

    async def _admit(self, scope: Scope, reply: _Reply, operation: Operation) -> Caller:
        """Authenticate the caller, check its scope, and take a slot for the request."""
        headers, peer = scope["headers"], _peer(scope)
        if operation.scope is None:
            vital = operation.is_vital
            reply.enter(
                self.admission.vital_slot() if vital else self.admission.anonymous_slot(peer, headers),
                holds=not vital,
            )
            return ANYBODY
        caller = await self.gate.admit(headers, peer, operation.scope)
        if caller.key is not None and reply.connection is not None:
            reply.connection.mark_authenticated(caller.project)
        reply.enter(self.admission.slot(caller.project))
        return caller

    async def _pass_on(self, reply: _Reply, previous: Match, call: Call) -> tuple[Call, Response]:
        """Hand the call to the next operation whose template fits the path; it answers in its own dialect."""
        scope = call.request.scope
        match = self.routes.find(scope["method"], scope["path"], previous.route)
        reply.dialect = match.dialect
        if match.route is None:
            raise _no_route(scope, match)
        scope["path_params"] = match.parameters
        reply.record.route = match.route.operation.path
        return call, await match.route.operation.handler(call)

    async def _refuse(self, scope: Scope, receive: Receive, reply: _Reply, match: Match, error: BatchmillError) -> None:
        reply.record.code, error.request_id = error.code, reply.record.id
        if reply.has_begun:
            return  # the connection closes in the middle of the reply, so the client sees that it is incomplete
        response = refusal(reply.dialect, error, match.methods)
        if not reply.send_at_once(response):
            await response(scope, receive, reply.send)


def _peer(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0]


def _no_route(scope: Scope, match: Match) -> InvalidInput:
    method, path = scope["method"][:16], scope["path"][:256]
    error: InvalidInput = UnknownName(f"Invalid URL ({method} {path})", code="unknown_url")
    if match.methods:
        detail = f"Not allowed: {method} {path}; allowed methods: {', '.join(match.methods)}"
        error = InvalidInput(detail, code="method_not_allowed")
    error.unmatched_request = (method, path, match.methods)
    return error


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value.decode()
    return new_request_id()


class _Reply:
    """Sends the reply to the client: adds the headers that every reply has, and records the outcome."""

    def __init__(
        self, scope: Scope, send: Send, record: RequestRecord, dialect: Dialect, long_reply_lock: asyncio.Lock,
        heads: ReplyHeads,
    ) -> None:  # fmt: skip
        """Args: long_reply_lock: the lock that all long replies share."""
        self._send, self.record, self._long_reply_lock, self._heads = send, record, long_reply_lock, heads
        self.dialect = dialect  # it renders a refusal
        state = scope.get("state", {})
        # uvicorn's cycle of the request, if a reply may be sent around ASGI; no reference to it is left in its scope.
        self._cycle = state.pop("cycle", None) if scope["method"] != "HEAD" else None
        self.transport: asyncio.Transport | None = state.get("transport")
        self.connection: Connection | None = state.get("connection")
        self.slot: RequestSlot | None = None  # once the request is admitted
        self.has_begun = False
        self.was_sent = False  # whole, to a connected client
        self.bytes = 0

    def send_at_once(self, response: Response, *, is_tracked: bool = False) -> bool:
        """Send a reply that is whole in memory, with one write. False: nothing is sent, it goes through ASGI.

        Args: is_tracked: a caller asks whether it is delivered.
        """
        cycle, connection = self._cycle, self.connection
        if cycle is None or connection is None or type(response) is not Response or response.background is not None:
            return False
        body = response.body
        if self.has_begun or len(body) >= LONG_BYTES or response.status_code in BODILESS:
            return False
        if (is_last := connection.is_last(cycle)) is None:
            return False
        pieces = self._heads.render(
            response.status_code, response.raw_headers, bytes(body), self.record.id, is_last=is_last
        )
        self.was_sent = is_tracked and (self.transport is None or is_listening(self.transport))
        self.has_begun, self.bytes, self.record.status = True, len(body), response.status_code
        connection.send_at_once(cycle, pieces[0])
        return True

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.record.status = message["status"]
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
            async with (
                self._long_reply_lock
            ):  # one long reply in each turn of the event loop, so that others run in between
                await asyncio.sleep(0)
        if (
            is_whole and self.connection is not None and not self.connection.is_authenticated
        ):  # send pieces without a copy
            view = memoryview(body)
            for at in range(0, len(body), PIECE_BYTES):
                ends = is_last and at + PIECE_BYTES >= len(body)
                await self._send_piece(
                    {"type": message["type"], "body": view[at : at + PIECE_BYTES], "more_body": not ends}
                )
        else:
            await self._send_piece(message)

    async def _send_piece(self, message: MutableMapping[str, Any]) -> None:
        is_listening_now = self.transport is None or is_listening(self.transport)
        if self.transport is not None and self.transport.get_write_buffer_size():
            async with self._abort_if_stalled():
                await self._send(message)
        else:
            await self._send(message)
        self.was_sent = not message.get("more_body", False) and is_listening_now

    async def wait_until_read(self) -> None:
        """Wait until the client has read most of a long reply, which stays in memory until then."""
        if self.bytes > PIECE_BYTES and self.connection is not None:
            await self.connection.wait_until_drained()

    @contextlib.asynccontextmanager
    async def _abort_if_stalled(self) -> AsyncIterator[None]:
        """Abort the connection if the client reads nothing for too long."""
        assert self.transport is not None, "there is a connection to wait for"
        try:
            async with asyncio.timeout(SEND_STALL_S):
                yield
        except TimeoutError:
            self.transport.abort()
            raise ClientDisconnect from None

    def enter(self, slot: RequestSlot, *, holds: bool = True) -> None:
        """Take over the slot. Args: holds: the slot protects the connection from eviction."""
        self.slot = slot
        if self.connection is not None:
            self.connection.has_slot = holds

    def leave(self) -> None:
        assert self.slot is not None, "it has entered"
        self.slot.leave()
        if self.connection is not None:
            self.connection.has_slot = False

    def _headers(self, given: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in given}
        added = security_headers(names)
        if b"date" not in names:
            added.append((b"date", self._heads.date()))
        return [*added, (b"x-request-id", self.record.id.encode())]
