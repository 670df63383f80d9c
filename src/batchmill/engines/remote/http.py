"""The engine for a service with OpenAI's HTTP API, remote or on this machine.

Live requests share the rows' pacing and are sent before rows. The service's replies are forwarded to their callers.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import batchmill
from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import IDLE_TIMEOUT_S, Connections, allow_files, check_header
from batchmill.engines.remote.dispatch import Dispatch
from batchmill.engines.remote.outgoing import Composer, RemoteLiveCall, RemoteRow, text_bytes
from batchmill.engines.remote.pacing import IN_FLIGHT_CEILING, LiveQueue, Pacer
from batchmill.engines.retry import (
    REPLY_BYTES_MAX,
    Fault,
    FaultKind,
    NoReply,
    Reply,
    Retries,
    is_result,
    judge,
    read_reply,
)
from batchmill.errors import AuthRefused, InvalidInput, ModelFailed, Unavailable
from batchmill.models import secrets
from batchmill.models import secrets as provisions
from batchmill.models.providers import default_key
from batchmill.ports.clock import Clock
from batchmill.ports.engines import Feed, Sink
from batchmill.types import EngineStats, LiveHead, LiveRequest, ModelSpec, Outcome, Row, RowError

if TYPE_CHECKING:
    import aiohttp


CALLS_MAX = 2  # a second call only if the first got no connection


class HttpLive:
    """Live requests to the service. It reports the end of every call to the pacer exactly once."""

    def __init__(
        self, connections: Connections, composer: Composer, pacer: Pacer, live_queue: LiveQueue, clock: Clock
    ) -> None:
        self._connections = connections
        self._composer = composer
        self._pacer = pacer
        self._live_queue = live_queue
        self._clock = clock

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """See `ports.engines.Engine.predict`."""
        try:
            call = self._composer.live(request)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the body cannot be read as a request: {error}", code="invalid_json") from None
        response = await self._begin(call)
        has_head = False
        try:
            if request.stream and response.status == 200:
                yield LiveHead(200, response.headers.get("Content-Type", "text/event-stream"))
                while piece := await self._connections.read(response):
                    yield piece
                has_head = True
                self._pacer.answered(self._clock.monotonic())
            else:
                body = await self._read_whole(response)
                has_head = True
                status, body = self._settle(call, response, body)
                yield LiveHead(status)
                yield body
        except NoReply as lost:
            has_head = True
            self._pacer.failed(lost.fault, call.sent_at, self._clock.monotonic())
            raise Unavailable(lost.fault.error.message, code=lost.fault.error.code) from None
        finally:
            if not has_head:
                self._pacer.window.failed()
            if not response.content.at_eof():
                response.close()
            self._live_queue.release()

    async def _begin(self, call: RemoteLiveCall) -> aiohttp.ClientResponse:
        """Make a call and return the head of its reply. Only a call that got no connection is retried, once."""
        for number in range(1, CALLS_MAX + 1):
            call.charged = await self._live_queue.acquire(text_bytes(call))
            call.sent_at = self._clock.monotonic()
            try:
                return await self._connections.begin("POST", call.url, call.body, call.headers)
            except NoReply as lost:
                fault = lost.fault
                self._pacer.failed(fault, call.sent_at, self._clock.monotonic())
                self._live_queue.release()
                if number == CALLS_MAX or fault.error.code != "connection_failed":
                    raise Unavailable(fault.error.message, code=fault.error.code) from None
            except BaseException:
                self._pacer.window.failed()
                self._live_queue.release()
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

    def _settle(self, call: RemoteLiveCall, response: aiohttp.ClientResponse, body: bytes) -> tuple[int, bytes]:
        """Report the result to the pacer, and return the status and body for the caller.

        Raises: AuthRefused, since the credentials are not the caller's; ModelFailed for an invalid reply.
        """
        now = self._clock.monotonic()
        reply = read_reply(response.status, body)
        if is_result(reply):
            self._pacer.answered(now)
            if reply.usage is not None:
                used = (reply.usage.input_tokens, reply.usage.output_tokens)
                self._pacer.correct(text_bytes(call), call.charged, used)
            return response.status, body
        fault = judge(reply, response.headers, self._clock.now())
        match fault.kind:
            case FaultKind.THROTTLED:
                self._pacer.throttled(fault, call.sent_at, now)
            case FaultKind.TRANSIENT | FaultKind.UNREACHABLE:
                self._pacer.failed(fault, call.sent_at, now)
            case _:
                self._pacer.answered(now)
        return _forward_error(fault)


def _forward_error(fault: Fault) -> tuple[int, bytes]:
    """Forward an error of the service to the caller, with the service's body if it has one."""
    if fault.kind is FaultKind.AUTH:
        raise AuthRefused(f"the service refused the credentials that batchmill has for it: {fault.error.message}")
    reply: Reply | None = fault.reply
    if reply is None or reply.status < 400:
        raise ModelFailed(fault.error.message, code=fault.error.code)
    if reply.body is not None:
        return reply.status, reply.body
    error = {"message": fault.error.message, "type": "service_error", "param": None, "code": fault.error.code}
    return reply.status, msgspec.json.encode({"error": error})


IDEMPOTENCY_HEADER = "Idempotency-Key"


class HttpEngine:
    """Calls `model.base_url` with as many rows in flight as the service sustains.

    Engine arguments: `header.NAME`, an additional header of every call (a value "env:NAME", "file:PATH" or
    "secret:NAME" is read from there); `idempotency_header`, the name of a header with the same value for all attempts
    of a row, or false for none; `idle_timeout_s`. `home` is not used.
    """

    def __init__(
        self, model: ModelSpec, home: Path, *, clock: Clock | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self._model = model
        self._limits = model.limits
        self._clock: Clock = clock or SystemClock()
        arguments = dict(model.engine_args)
        header = arguments.pop("idempotency_header", IDEMPOTENCY_HEADER)
        self._composer = Composer(model, str(header) if header else None)
        idle_timeout_s = float(arguments.pop("idle_timeout_s", None) or IDLE_TIMEOUT_S)
        self._connections = Connections(self._limits, idle_timeout_s=idle_timeout_s)
        self._headers = {name[7:]: arguments.pop(name) for name in list(arguments) if name.startswith("header.")}
        self._refuse_unknown(arguments)
        self._secrets_version = provisions.version()  # of the secrets in the headers
        ceiling = self._limits.in_flight_max or IN_FLIGHT_CEILING
        self._pacer = Pacer(
            self._limits, self._clock.monotonic(), jitter=jitter, ceiling=min(ceiling, allow_files(ceiling))
        )
        self._live_queue = LiveQueue(self._pacer, self._clock)
        self._dispatch: Dispatch | None = None  # while rows run
        self._live = HttpLive(self._connections, self._composer, self._pacer, self._live_queue, self._clock)

    async def start(self) -> None:
        """Read the credentials and open the connection pool. The service is not called yet.

        Raises: ModelFailed if a key is missing.
        """
        self._read_headers()
        await self._connections.start()

    def _read_headers(self) -> None:
        self._secrets_version = provisions.version()
        headers = self._common_headers()
        for name, value in headers.items():
            check_header(name, value)
        self._connections.set_headers(headers)

    async def run(self, feed: Feed, sink: Sink) -> None:
        dispatch = Dispatch(
            self._composer.call,
            self._send,
            self._pacer,
            live_queue=self._live_queue,
            retries=Retries(self._limits.attempts_max),
            clock=self._clock,
        )
        self._dispatch = dispatch
        try:
            await dispatch.run(feed, sink)
        finally:
            self._dispatch = None

    def fail_rows(self, job_id: str) -> None:
        """See `ports.engines.RetryingEngine`."""
        if self._dispatch is not None:
            self._dispatch.fail_rows(job_id)

    def give_back(self, job_id: str) -> list[Row]:
        """See `ports.engines.RetryingEngine`."""
        return [] if self._dispatch is None else self._dispatch.give_back(job_id)

    def forget(self, job_id: str) -> None:
        """See `ports.engines.RetryingEngine`."""
        if self._dispatch is not None:
            self._dispatch.forget(job_id)

    def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        if provisions.version() != self._secrets_version:
            self._read_headers()
        return self._live.predict(request)

    async def stop(self) -> None:
        await self._live_queue.stop()
        await self._connections.stop()

    def stats(self) -> EngineStats:
        window = self._pacer.window
        live, note = self._live_queue.in_flight, self._pacer.note(self._clock.monotonic())
        note = note or ("" if self._dispatch is None else self._dispatch.media_note)
        return EngineStats(window.in_flight - live, window.limit, note, live)

    def _refuse_unknown(self, arguments: dict[str, str | int | float | bool | None]) -> None:
        known = "header.NAME, idempotency_header and idle_timeout_s"
        for name in arguments:
            raise ModelFailed(
                f"the http engine has no argument {name!r}; its arguments are {known}", code="unknown_argument"
            )
        if self._model.python is not None:
            raise ModelFailed("the http engine runs no Python interpreter: leave `python` out", code="unknown_argument")

    def _common_headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            # On this machine or a local network, compression costs more than it saves.
            "Accept-Encoding": "gzip, deflate" if self._composer.is_tls else "identity",
            "User-Agent": f"batchmill/{batchmill.__version__}",
        }
        reference = self._model.api_key or default_key(self._model)
        if reference is not None:
            headers["Authorization"] = f"Bearer {secrets.resolve(reference).reveal()}"
        for name, value in self._headers.items():
            text = str(value)
            headers[name] = secrets.resolve(text).reveal() if text.startswith(secrets.KINDS) else text
        return headers

    async def _send(self, call: RemoteRow) -> Outcome | Fault:
        """Make one call and classify its result."""
        if provisions.version() != self._secrets_version:  # a key has changed since the worker started
            self._read_headers()
        try:
            response, body = await self._connections.exchange("POST", call.url, call.body, call.headers)
        except NoReply as lost:
            return lost.fault
        status, headers = response.status, response.headers
        request_id = headers.get("x-request-id")
        if body is None:
            text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
            return Fault(FaultKind.PERMANENT, RowError("reply_too_large", text), Reply(0), None, request_id)
        reply = read_reply(status, body)
        if is_result(reply):
            return reply.ok(call.row, request_id)
        return judge(reply, headers, self._clock.now(), request_id=request_id)
