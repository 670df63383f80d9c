"""Live requests to the service behind a connector: they share the rows' pacing and go first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from batchmill.engines.ahead import Ahead
from batchmill.engines.connections import Connections, NoReply
from batchmill.engines.connector_calls import BAD_FILTER, Caller, ConnectorCall, Rows
from batchmill.engines.connector_replies import Answer, settle
from batchmill.engines.pacing import Pacer
from batchmill.engines.replies import REPLY_BYTES_MAX
from batchmill.engines.retry import Fault, Kind, Retries
from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, ModelFailed, TooComplex, Unavailable
from batchmill.ports import Clock
from batchmill.types import LiveHead, LiveRequest
from batchmill.wire.json_bytes import encode

ML_COMMONS = "ml_commons"  # the form of a predict body of ML Commons
CALLS_AT_ONCE = 16  # of one request with many documents
BAD_GATEWAY = 502
CALLERS = ("url_not_allowed", "invalid_url")  # what a call's own parameters may have brought about
_EVENTS = "text/event-stream"
_AGAIN = (Kind.THROTTLED, Kind.TRANSIENT, Kind.UNREACHABLE)


class _Failed(Exception):
    """One of a request's calls brought no result."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error.message)
        self.fault = fault


class ConnectorLive:
    """Every call that goes out is told to the pacer once, however it ends."""

    def __init__(
        self, caller: Caller, rows: Rows, connections: Connections, *, pacer: Pacer, ahead: Ahead, clock: Clock
    ) -> None:
        self._caller = caller
        self._rows = rows
        self._connections = connections
        self._pacer = pacer
        self._ahead = ahead
        self._clock = clock
        self.retries = Retries(1)  # but for a call that found no connection, which is made twice

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """As `ports.Engine.predict`. In the form "ml_commons" errors of the service have its status and are worded
        as ML Commons words them."""
        calls = self._calls(request)
        if request.stream:
            async with aclosing(self._stream(calls[0], request.project)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        try:
            who = request.project
            body = await (self._inferred(calls, who) if request.form == ML_COMMONS else self._answered(calls[0], who))
        except _Failed as failed:
            status, body = (_worded if request.form == ML_COMMONS else _handed_on)(failed.fault)
            yield LiveHead(status)
            yield body
            return
        yield LiveHead(200)
        yield body

    def _calls(self, request: LiveRequest) -> list[ConnectorCall]:
        try:
            request.body.decode()  # the parts that are not looked into must be text too
            body = msgspec.json.decode(request.body, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body cannot be read as a request: {error}", code="invalid_json") from None
        if request.form == ML_COMMONS:
            calls = [ConnectorCall(None, each, is_typed=False) for each in self._caller.documents(body)]
        else:
            calls = [ConnectorCall(None, self._rows.parameters(body), is_typed=True)]
        for call in calls:
            call.is_admitted = request.is_admitted
            call.is_predict = request.form == ML_COMMONS
            call.url = "" if call.is_predict else request.url
            self._caller.compose(call)
        return calls

    async def _answered(self, call: ConnectorCall, who: str) -> bytes:
        return await self._body(call, await self._call(call), who)

    async def _inferred(self, calls: list[ConnectorCall], who: str) -> bytes:
        """The results of all calls, in their order; the first that fails ends the others."""
        places = asyncio.Semaphore(CALLS_AT_ONCE)

        async def infer(call: ConnectorCall) -> dict[str, Any]:
            async with places:
                answer = await self._call(call)
            try:
                output = Raw(await self._caller.output(call, answer, who))
                return {"output": output, "status_code": answer.reply.status}
            except InvalidInput as wrong:
                raise _unread(wrong) from None

        if len(calls) == 1:
            return encode({"inference_results": [await infer(calls[0])]})
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(infer(call)) for call in calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return encode({"inference_results": [task.result() for task in tasks]})

    async def _call(self, call: ConnectorCall) -> Answer:
        """Raises: _Failed once no further call is to be made."""
        began, number = self._clock.monotonic(), 0
        while True:
            result = await self._once(call)
            if isinstance(result, Answer):
                return result
            number += 1
            delay_s = self._again_in(result, number, self._clock.monotonic() - began)
            if delay_s is None:
                raise _Failed(result)
            await self._clock.sleep(delay_s)

    def _again_in(self, fault: Fault, failed: int, lasted_s: float) -> float | None:
        """Seconds until the call is made again; None: it is not."""
        told = self.retries.delay_s
        if told is None:
            return 0.0 if failed == 1 and fault.kind is Kind.UNREACHABLE else None
        if fault.kind not in _AGAIN or failed >= self.retries.attempts_max:
            return None
        delay_s = told(failed)
        return delay_s if lasted_s + delay_s < self.retries.lasts_s else None

    async def _once(self, call: ConnectorCall) -> Answer | Fault:
        call.charged = await self._ahead.go(len(call.body), is_admitted=call.is_admitted)
        call.sent_at = self._clock.monotonic()
        result: Answer | Fault | None = None
        try:
            result = await self._caller.send(call)
            return result
        finally:
            self._tell(call, result)
            self._ahead.ended()

    def _tell(self, call: ConnectorCall, result: Answer | Fault | None) -> None:
        """Tell the pacer how a call ended; None: it was given up."""
        now, pacer = self._clock.monotonic(), self._pacer
        if result is None:
            pacer.window.failed()
        elif isinstance(result, Answer):
            pacer.answered(now)
            usage = result.reply.usage
            if usage is not None:
                pacer.correct(len(call.body), call.charged, (usage.input_tokens, usage.output_tokens))
        elif result.kind is Kind.THROTTLED:
            pacer.throttled(result, call.sent_at, now)
        elif result.kind in (Kind.TRANSIENT, Kind.UNREACHABLE):
            pacer.failed(result, call.sent_at, now)
        else:
            pacer.answered(now)

    async def _stream(self, call: ConnectorCall, who: str) -> AsyncGenerator[LiveHead | bytes]:
        """The service's own events as they come; a reply that is none is handed on whole."""
        call.charged = await self._ahead.go(len(call.body), is_admitted=call.is_admitted)
        call.sent_at = self._clock.monotonic()
        response: aiohttp.ClientResponse | None = None
        told = False
        try:
            response = await self._caller.begin(call)
            kind = response.headers.get("Content-Type", "")
            if 200 <= response.status < 300 and kind.lower().startswith(_EVENTS):
                yield LiveHead(200, kind)
                while piece := await self._connections.read(response):
                    yield piece
                told = True
                self._pacer.answered(self._clock.monotonic())
            else:
                result = settle(response.status, response.headers, await self._read_whole(response), self._clock.now())
                told = True
                self._tell(call, result)
                status, body = await self._whole(call, result, who)
                yield LiveHead(status)
                yield body
        except NoReply as lost:
            told = True
            self._tell(call, lost.fault)
            raise _unanswered(lost.fault) from None
        finally:
            if not told:
                self._tell(call, None)
            if response is not None and not response.content.at_eof():
                response.close()
            self._ahead.ended()

    async def _whole(self, call: ConnectorCall, result: Answer | Fault, who: str) -> tuple[int, bytes]:
        """Status and body of what came in one piece."""
        return _handed_on(result) if isinstance(result, Fault) else (200, await self._body(call, result, who))

    async def _body(self, call: ConnectorCall, answer: Answer, who: str) -> bytes:
        try:
            return await self._caller.result(call, answer, who)
        except InvalidInput as wrong:
            raise _unread(wrong) from None

    async def _read_whole(self, response: aiohttp.ClientResponse) -> bytes | None:
        pieces, total = [], 0
        while piece := await self._connections.read(response):
            total += len(piece)
            if total > REPLY_BYTES_MAX:
                return None
            pieces.append(piece)
        return b"".join(pieces)


def _unread(wrong: InvalidInput) -> BatchmillError:
    """Whose fault it is that a reply came to nothing: a filter that the caller sent is the caller's."""
    if isinstance(wrong, TooComplex) or wrong.code == BAD_FILTER:
        return wrong
    return ModelFailed(wrong.message, code=wrong.code)


def _handed_on(fault: Fault) -> tuple[int, bytes]:
    """An error of the service for whoever waits: its own words where it has any."""
    if fault.kind is Kind.AUTH:
        raise AuthRefused(f"the service refused the credentials that batchmill has for it: {fault.error.message}")
    reply = fault.reply
    if reply is None or reply.status < 400:
        raise _unanswered(fault)
    if reply.body is not None and reply.error is not None:
        return reply.status, reply.body
    error = {"message": fault.error.message, "type": "service_error", "param": None, "code": fault.error.code}
    return reply.status, encode({"error": error})


def _worded(fault: Fault) -> tuple[int, bytes]:
    """The same as ML Commons has it: the service's status, and its whole body in a sentence."""
    reply = fault.reply
    if fault.error.code == "bad_response":
        status, message = BAD_GATEWAY, fault.error.message
    elif reply is None or reply.status < 400:
        raise _unanswered(fault)
    else:
        said = reply.text if reply.body is None else reply.body.decode()
        status, message = reply.status, f"Error from remote service: {said}"
    return status, encode({"error": {"message": message, "type": "service_error", "code": fault.error.code}})


def _unanswered(fault: Fault) -> BatchmillError:
    """What is raised where there is nothing to hand on."""
    error = fault.error
    if fault.kind in (Kind.TRANSIENT, Kind.UNREACHABLE):
        return Unavailable(error.message, code=error.code)
    if error.code in CALLERS:
        return InvalidInput(error.message, code=error.code)
    return ModelFailed(error.message, code=error.code)
