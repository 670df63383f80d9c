"""Live requests to a service: they share the rows' pacing and go first, and its answers are handed on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from batchmill.engines.ahead import Ahead
from batchmill.engines.connections import Connections, NoReply
from batchmill.engines.outgoing import Composer, LiveCall
from batchmill.engines.pacing import Pacer
from batchmill.engines.replies import REPLY_BYTES_MAX, Reply, read_reply
from batchmill.engines.retry import Fault, Kind, is_result, judge
from batchmill.errors import AuthRefused, InvalidInput, ModelFailed, Unavailable
from batchmill.ports import Clock
from batchmill.types import LiveHead, LiveRequest

if TYPE_CHECKING:
    import aiohttp

CALLS_MAX = 2  # the second where the first found no connection


class LiveWay:
    """Hands live requests to the service. Every call that goes out is told to the pacer once, however it ends."""

    def __init__(self, connections: Connections, composer: Composer, pacer: Pacer, ahead: Ahead, clock: Clock) -> None:
        self._connections = connections
        self._composer = composer
        self._pacer = pacer
        self._ahead = ahead
        self._clock = clock

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """As `ports.Engine.predict`."""
        try:
            call = self._composer.live(request)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body cannot be read as a request: {error}", code="invalid_json") from None
        response = await self._begin(call)
        told = False
        try:
            if request.stream and response.status == 200:
                yield LiveHead(200, response.headers.get("Content-Type", "text/event-stream"))
                while piece := await self._connections.read(response):
                    yield piece
                told = True
                self._pacer.answered(self._clock.monotonic())
            else:
                body = await self._read_whole(response)
                told = True
                status, body = self._settle(call, response, body)
                yield LiveHead(status)
                yield body
        except NoReply as lost:
            told = True
            self._pacer.failed(lost.fault, call.sent_at, self._clock.monotonic())
            raise Unavailable(lost.fault.error.message, code=lost.fault.error.code) from None
        finally:
            if not told:
                self._pacer.window.failed()
            if not response.content.at_eof():
                response.close()
            self._ahead.ended()

    async def _begin(self, call: LiveCall) -> aiohttp.ClientResponse:
        """The reply's head. A call that finds no connection is made once more; nothing else is."""
        for number in range(1, CALLS_MAX + 1):
            call.charged = await self._ahead.go(len(call.body))
            call.sent_at = self._clock.monotonic()
            try:
                return await self._connections.begin("POST", call.url, call.body, call.headers)
            except NoReply as lost:
                fault = lost.fault
                self._pacer.failed(fault, call.sent_at, self._clock.monotonic())
                self._ahead.ended()
                if number == CALLS_MAX or fault.error.code != "connection_failed":
                    raise Unavailable(fault.error.message, code=fault.error.code) from None
            except BaseException:
                self._pacer.window.failed()
                self._ahead.ended()
                raise
        raise AssertionError("the last call returns or raises")

    async def _read_whole(self, response: aiohttp.ClientResponse) -> bytes:
        pieces, total = [], 0
        while piece := await self._connections.read(response):
            total += len(piece)
            if total > REPLY_BYTES_MAX:
                text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
                raise ModelFailed(text, code="reply_too_large")
            pieces.append(piece)
        return b"".join(pieces)

    def _settle(self, call: LiveCall, response: aiohttp.ClientResponse, body: bytes) -> tuple[int, bytes]:
        """Tell the pacer what came, and say what is handed on: status and body.

        Raises: AuthRefused, since the credentials are not the caller's; ModelFailed for what is no answer.
        """
        now = self._clock.monotonic()
        reply = read_reply(response.status, body)
        if is_result(reply):
            self._pacer.answered(now)
            if reply.usage is not None:
                used = (reply.usage.input_tokens, reply.usage.output_tokens)
                self._pacer.correct(len(call.body), call.charged, used)
            return response.status, body
        fault = judge(reply, response.headers, self._clock.now())
        match fault.kind:
            case Kind.THROTTLED:
                self._pacer.throttled(fault, call.sent_at, now)
            case Kind.TRANSIENT | Kind.UNREACHABLE:
                self._pacer.failed(fault, call.sent_at, now)
            case _:
                self._pacer.answered(now)
        return _handed_on(fault)


def _handed_on(fault: Fault) -> tuple[int, bytes]:
    """An error of the service for whoever waits: its own words where it has any."""
    if fault.kind is Kind.AUTH:
        raise AuthRefused(f"the service refused the credentials that batchmill has for it: {fault.error.message}")
    reply: Reply | None = fault.reply
    if reply is None or reply.status < 400:
        raise ModelFailed(fault.error.message, code=fault.error.code)
    if reply.body is not None:
        return reply.status, reply.body
    error = {"message": fault.error.message, "type": "service_error", "param": None, "code": fault.error.code}
    return reply.status, msgspec.json.encode({"error": error})
