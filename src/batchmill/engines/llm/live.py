"""Live requests to the server: they wait while it restarts, and end when their caller disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from batchmill.engines.llm.adapter_cache import AdapterCache
from batchmill.engines.llm.adapters import Adapter
from batchmill.engines.llm.calls import LlmCalls
from batchmill.engines.llm.flow import QUARANTINED, REFUSAL
from batchmill.engines.llm.quarantine import SuspectIsolation, Tracked, busy
from batchmill.engines.llm.row_queue import Yielding
from batchmill.engines.llm.server import CallLost, VllmServer
from batchmill.engines.retry import read_reply
from batchmill.errors import InvalidInput, Unavailable, UnknownName
from batchmill.ports.clock import Clock
from batchmill.types import LiveHead, LiveRequest, Usage
from batchmill.wire.error_statuses import decode_error
from batchmill.wire.json_bytes import join_object, split_object
from batchmill.wire.rows.forms import RESPONSES

COMPLETED = b"response.completed"
ENDS = {"incomplete": b"response.incomplete", "failed": b"response.failed"}  # by the status of the response
EVENT_BYTES_MAX = 64 * 1024 * 1024  # of an event that is parsed; a longer one is forwarded as it arrives
_END = b"\n\n"
_DATA = b"data:"


class _Response(Struct, frozen=True):
    status: str = ""


class _Event(Struct):
    response: _Response = _Response()


_event = msgspec.json.Decoder(_Event).decode


class ResponseEvents:
    """Assembles whole events, and names the last event after the status of the response."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """Return the events that are complete with this piece; buffer an incomplete one."""
        buffer = self._buffer
        searched = max(0, len(buffer) - 1)
        buffer += piece
        end = buffer.rfind(_END, searched)
        if end < 0:
            return self.flush() if len(buffer) > EVENT_BYTES_MAX else b""
        events = bytes(buffer[: end + len(_END)])
        del buffer[: end + len(_END)]
        if COMPLETED not in events:
            return events
        return b"".join(rename_event(event) + _END for event in events.split(_END)[:-1])

    def flush(self) -> bytes:
        """Return the buffered bytes at the end of the stream."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return rest


def rename_event(event: bytes) -> bytes:
    """Name a final event after its response's status; return any other event unchanged."""
    lines = event.split(b"\n")
    at = next((number for number, line in enumerate(lines) if line.startswith(_DATA)), None)
    if at is None or COMPLETED not in event:
        return event
    data = lines[at].removeprefix(_DATA)
    try:
        members = split_object(data)
        if bytes(members.get("type", b"")) != b'"%b"' % COMPLETED:
            return event
        name = ENDS.get(_event(data).response.status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return event
    if name is None:
        return event
    members["type"] = Raw(b'"%b"' % name)
    lines[at] = _DATA + b" " + join_object(members)
    return b"\n".join(b"event: " + name if line.startswith(b"event:") else line for line in lines)


RESTART_WAIT_S = 120.0  # how long a request waits for a server that restarts; then it fails
END_S = 5.0  # how long a server that lost a call may take to end
EVENTS = "text/event-stream"
POLL_S = 0.05  # between attempts to reach a server that accepts no connection
DETAIL_BYTES_MAX = 4096  # a larger error is not FastAPI's own


class Host(Protocol):
    """What live requests need of the engine that owns the server."""

    server: VllmServer

    @property
    def rows_in_flight(self) -> int: ...

    def wake_rows(self) -> None:
        """Called when rows that waited may run."""

    async def wait_until_alive(self, wait_s: float) -> None:
        """Wait until the server is alive. Raises: Unavailable."""


class _PendingCall(Struct, eq=False):
    """A live request in progress."""

    request: LiveRequest
    body: bytes
    adapter: Adapter | None
    tracked: Tracked
    server: VllmServer | None = None  # that the request was last sent to
    usage: Usage | None = None  # as the reply reports it; for a stream, the number of its chunks


class LlmLive:
    """Sends live requests to the server, and reports their duration to `yielding`."""

    def __init__(
        self,
        host: Host,
        *,
        calls: LlmCalls,
        adapter_cache: AdapterCache,
        yielding: Yielding,
        isolation: SuspectIsolation,
        clock: Clock,
    ) -> None:
        self._deaths, self._isolation = isolation.deaths, isolation
        self._host = host
        self._calls = calls
        self._adapter_cache = adapter_cache
        self._counts = adapter_cache.counts
        self._yielding = yielding
        self._limits = calls.limits
        self._clock = clock

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """As `ports.engines.Engine.predict`."""
        body, adapter = self._calls.live(request)
        tracked = self._calls.tracked(request.project, request.url, body, adapter)
        if self._deaths.is_refused(tracked):
            raise InvalidInput(REFUSAL, code=QUARANTINED)
        self._yielding.record_start(self._clock.monotonic())
        try:
            async with (
                self._turn(request, tracked),
                aclosing(self._send(_PendingCall(request, body, adapter, tracked))) as pieces,
            ):
                async for piece in pieces:
                    yield piece
        finally:
            self._yielding.record_end(self._clock.monotonic())
            self._host.wake_rows()

    def _turn(self, request: LiveRequest, tracked: Tracked) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a request. It runs beside others, or alone if it is suspect."""
        if not self._deaths.is_suspect(tracked):
            return self._isolation.run_beside(tracked, request.project)
        is_last = self._deaths.is_over_budget(request.project)
        if is_last and self._deaths.must_wait(request.project):
            raise busy()
        return self._isolation.run_alone(tracked, request.project, is_last=is_last)

    async def _send(self, pending: _PendingCall) -> AsyncGenerator[LiveHead | bytes]:
        """Stream the reply. Send again if no server received the request, and once if the connection broke."""
        until = self._clock.monotonic() + RESTART_WAIT_S
        is_first = True
        while True:
            await self._host.wait_until_alive(until - self._clock.monotonic())
            pending.server = self._host.server
            reply = self._reply(pending) if pending.adapter is None else self._of_adapter(pending, pending.adapter)
            has_begun = False
            try:
                async with aclosing(reply) as pieces:
                    async for piece in pieces:
                        has_begun = True
                        yield piece
                return
            except CallLost as lost:
                if not lost.was_sent and self._clock.monotonic() < until:
                    await self._clock.sleep(POLL_S)
                    continue
                is_up = await pending.server.is_healthy()
                if is_up:
                    self._deaths.withdraw(pending.server, pending.tracked)
                    if is_first and not has_begun:
                        is_first = False
                        continue
                else:
                    await self._record_death(pending, pending.server)
                # A request that may have killed the server is not sent to the next one; its caller may send it again.
                died = "" if is_up else "; it died and is started again"
                raise Unavailable(f"the engine did not complete its answer: {lost}{died}", code="engine_lost") from None

    async def _record_death(self, pending: _PendingCall, server: VllmServer) -> None:
        """Handle a server that died with the request. Only the caller may send it again, and then it runs alone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.process.wait(), END_S)
        self._deaths.remember(pending.tracked)
        if not server.process.is_alive:
            self._deaths.record_death(server, server.process.complaint())
            self._isolation.record_death()

    async def _of_adapter(self, pending: _PendingCall, adapter: Adapter) -> AsyncGenerator[LiveHead | bytes]:
        """Stream the reply of an adapter, which stays loaded. The reply has the name that the caller uses."""
        async with self._adapter_cache.hold(adapter) as was_loaded:
            pending.server = self._host.server
            restorer = self._calls.names.restorer(adapter)
            self._counts.record_start(adapter.name, self._clock.monotonic())
            try:
                async with aclosing(self._reply(pending)) as pieces:
                    async for piece in pieces:
                        yield piece if restorer is None or isinstance(piece, LiveHead) else restorer.feed(piece)
                if restorer is not None:
                    yield restorer.flush()
                self._counts.record_reply(adapter.name, pending.usage, was_loaded=was_loaded)
            finally:
                self._counts.record_end(adapter.name, self._clock.monotonic())

    async def _reply(self, pending: _PendingCall) -> AsyncGenerator[LiveHead | bytes]:
        server = pending.server
        assert server is not None, "a server is chosen before the request is sent"
        self._deaths.record_start(server, pending.tracked)
        is_lost = is_whole = False
        try:
            async with aclosing(self._pieces(pending, server)) as pieces:
                async for piece in pieces:
                    yield piece
            is_whole = True
        except CallLost:
            is_lost = True
            raise
        finally:
            if is_whole:
                self._deaths.record_reply(server, pending.tracked)
            elif not is_lost:
                self._deaths.withdraw(server, pending.tracked)

    async def _pieces(self, pending: _PendingCall, server: VllmServer) -> AsyncGenerator[LiveHead | bytes]:
        began, count, first = self._clock.monotonic(), 0, b""
        request = pending.request
        async with aclosing(server.predict(request.url, pending.body, self._limits.attempt_timeout_s)) as pieces:
            head = await anext(pieces)
            assert isinstance(head, LiveHead), "a reply begins with its head"
            is_response = request.url == RESPONSES and head.content_type.startswith(EVENTS)
            events = ResponseEvents() if is_response else None
            if head.status == 404:
                first = await self._refusal(request, pieces)
            yield head
            if first:
                yield first
            async for piece in pieces:
                assert isinstance(piece, bytes), "a reply has one head"
                count += piece.count(b"data: ")
                first = first or piece
                sent = piece if events is None else events.feed(piece)
                if sent:
                    yield sent
            if events is not None and (rest := events.flush()):
                yield rest
        if head.status == 200:
            pending.usage = Usage(output_tokens=count) if count else read_reply(200, first).usage
            tokens = 0 if pending.usage is None else pending.usage.output_tokens
            self._yielding.record_reply((self._clock.monotonic() - began) / max(1, tokens), self._host.rows_in_flight)

    @staticmethod
    async def _refusal(request: LiveRequest, pieces: AsyncGenerator[LiveHead | bytes]) -> bytes:
        """The body of a 404. Raises: UnknownName if this model does not have the path."""
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
        if len(body) <= DETAIL_BYTES_MAX and not decode_error(body).has_envelope:
            text = f"the engine does not answer {request.url} for this model; a pooling model may need runner=pooling"
            raise UnknownName(text, code="url_not_supported")
        return body
