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
from batchmill.ports import Clock
from batchmill.types import LiveHead, LiveRequest, Usage
from batchmill.wire.error_statuses import decode_error
from batchmill.wire.forms import RESPONSES
from batchmill.wire.json_bytes import join_object, split_object

COMPLETED = b"response.completed"
ENDS = {"incomplete": b"response.incomplete", "failed": b"response.failed"}  # by the status of the response
EVENT_BYTES_MAX = 64 * 1024 * 1024  # of one that is looked into: a longer one is handed on as it comes
_END = b"\n\n"
_DATA = b"data:"


class _Response(Struct, frozen=True):
    status: str = ""


class _Event(Struct):
    response: _Response = _Response()


_event = msgspec.json.Decoder(_Event).decode


class ResponseEvents:
    """Assembles whole events, and names the last one by its status."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """The complete events of this piece; an incomplete one is kept."""
        kept = self._kept
        seen = max(0, len(kept) - 1)
        kept += piece
        end = kept.rfind(_END, seen)
        if end < 0:
            return self.rest() if len(kept) > EVENT_BYTES_MAX else b""
        whole = bytes(kept[: end + len(_END)])
        del kept[: end + len(_END)]
        if COMPLETED not in whole:
            return whole
        return b"".join(named(event) + _END for event in whole.split(_END)[:-1])

    def rest(self) -> bytes:
        """The kept bytes, at the end."""
        kept, self._kept = bytes(self._kept), bytearray()
        return kept


def named(event: bytes) -> bytes:
    """An event with the name that its response's status requires; another kind unchanged."""
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


RESTART_WAIT_S = 120.0  # for a server that is being started again; who waits longer is sent away
END_S = 5.0  # a server that lost a call may take so long to have ended
EVENTS = "text/event-stream"
POLL_S = 0.05  # between looks at a server that takes no connection
DETAIL_BYTES_MAX = 4096  # of an error that may be FastAPI's own


class Host(Protocol):
    """What live requests need of the engine that owns the server."""

    server: VllmServer

    @property
    def rows_in_flight(self) -> int: ...

    def wake_rows(self) -> None:
        """Called when rows that were held back may run."""

    async def revived(self, wait_s: float) -> None:
        """Wait until the server lives. Raises: Unavailable."""


class _PendingCall(Struct, eq=False):
    """A live request in progress."""

    request: LiveRequest
    body: bytes
    adapter: Adapter | None
    tracked: Tracked
    server: VllmServer | None = None  # that was asked last
    usage: Usage | None = None  # if its reply reports it; of a stream, its chunks


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
        """As `ports.Engine.predict`."""
        body, adapter = self._calls.live(request)
        tracked = self._calls.tracked(request.project, request.url, body, adapter)
        if self._deaths.is_refused(tracked):
            raise InvalidInput(REFUSAL, code=QUARANTINED)
        self._yielding.began(self._clock.monotonic())
        try:
            async with (
                self._turn(request, tracked),
                aclosing(self._answer(_PendingCall(request, body, adapter, tracked))) as pieces,
            ):
                async for piece in pieces:
                    yield piece
        finally:
            self._yielding.ended(self._clock.monotonic())
            self._host.wake_rows()

    def _turn(self, request: LiveRequest, tracked: Tracked) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a request: beside others, or alone if it is suspect."""
        if not self._deaths.is_suspect(tracked):
            return self._isolation.beside(tracked, request.project)
        is_last = self._deaths.is_over_budget(request.project)
        if is_last and self._deaths.rests(request.project):
            raise busy()
        return self._isolation.alone(tracked, request.project, is_last=is_last)

    async def _answer(self, pending: _PendingCall) -> AsyncGenerator[LiveHead | bytes]:
        """The reply; repeated if no server received it, and once if a connection broke."""
        until = self._clock.monotonic() + RESTART_WAIT_S
        is_first = True
        while True:
            await self._host.revived(until - self._clock.monotonic())
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
                    self._deaths.gone(pending.server, pending.tracked)
                    if is_first and not has_begun:
                        is_first = False
                        continue
                else:
                    await self._lost(pending, pending.server)
                # A request that may have ended the server is not sent to the next one: its caller may do so.
                died = "" if is_up else "; it died and is started again"
                raise Unavailable(f"the engine did not answer to the end: {lost}{died}", code="engine_lost") from None

    async def _lost(self, pending: _PendingCall, server: VllmServer) -> None:
        """Handle a server that died with the request: only the caller may repeat it, and then it runs alone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.process.wait(), END_S)
        self._deaths.remember(pending.tracked)
        if not server.process.is_alive:
            self._deaths.died(server, server.process.complaint())
            self._isolation.died()

    async def _of_adapter(self, pending: _PendingCall, adapter: Adapter) -> AsyncGenerator[LiveHead | bytes]:
        """The reply, with its adapter held for the whole time and named as the caller knows it."""
        async with self._adapter_cache.held(adapter) as was_there:
            pending.server = self._host.server
            restorer = self._calls.names.restorer(adapter)
            self._counts.began(adapter.name, self._clock.monotonic())
            try:
                async with aclosing(self._reply(pending)) as pieces:
                    async for piece in pieces:
                        yield piece if restorer is None or isinstance(piece, LiveHead) else restorer.feed(piece)
                if restorer is not None:
                    yield restorer.rest()
                self._counts.answered(adapter.name, pending.usage, found=was_there)
            finally:
                self._counts.ended(adapter.name, self._clock.monotonic())

    async def _reply(self, pending: _PendingCall) -> AsyncGenerator[LiveHead | bytes]:
        server = pending.server
        assert server is not None, "a server is chosen before it is asked"
        self._deaths.began(server, pending.tracked)
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
                self._deaths.answered(server, pending.tracked)
            elif not is_lost:
                self._deaths.gone(server, pending.tracked)

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
            if events is not None and (rest := events.rest()):
                yield rest
        if head.status == 200:
            pending.usage = Usage(output_tokens=count) if count else read_reply(200, first).usage
            tokens = 0 if pending.usage is None else pending.usage.output_tokens
            self._yielding.answered((self._clock.monotonic() - began) / max(1, tokens), self._host.rows_in_flight)

    @staticmethod
    async def _refusal(request: LiveRequest, pieces: AsyncGenerator[LiveHead | bytes]) -> bytes:
        """The body of a 404. Raises: UnknownName if this model does not have the path."""
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
        if len(body) <= DETAIL_BYTES_MAX and not decode_error(body).has_envelope:
            text = f"the engine does not answer {request.url} for this model; a pooling model may need runner=pooling"
            raise UnknownName(text, code="url_not_supported")
        return body
