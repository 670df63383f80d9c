"""The engine for a service that speaks OpenAI's HTTP API, remote or on this machine.

Owns the connections: sends calls, reads replies, and translates aiohttp's failures. When calls go and which are tried
again is decided in `pacing` and `retry`.
"""

from __future__ import annotations

import asyncio
import io
import random
import resource
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import aiohttp
from aiohttp import hdrs

import batchmill
from batchmill.engines.ahead import Ahead
from batchmill.engines.clock import SystemClock
from batchmill.engines.deadlines import Deadlines
from batchmill.engines.dispatch import Dispatch
from batchmill.engines.http_live import LiveWay, NoReply, Wire
from batchmill.engines.outgoing import Call, Composer, LiveCall, check_header
from batchmill.engines.pacing import IN_FLIGHT_CEILING, Pacer
from batchmill.engines.replies import REPLY_BYTES_MAX, Reply, read_reply
from batchmill.engines.retry import Fault, Kind, is_result, judge
from batchmill.errors import ModelFailed
from batchmill.models import secrets
from batchmill.ports import Clock, Feed, Sink
from batchmill.types import EngineStats, LiveHead, LiveRequest, ModelSpec, Outcome, RowError

IDLE_TIMEOUT_S = 60.0  # between two pieces of a reply that has begun
KEEPALIVE_S = 4.0  # below the 5 s after which common servers close: a call must not meet a connection being closed
ADDRESSES_S = 60  # how long a name's addresses are used without asking again
BODY_COPY_MAX = 512 * 1024  # a larger body goes out as a stream, so that it does not hold up the loop
FILES_SPARE = 128  # descriptors left for everything that is no connection
OPENAI_HOST = "api.openai.com"
IDEMPOTENCY_HEADER = "Idempotency-Key"


class HttpEngine:
    """Calls `model.base_url` with as many rows in flight as the service bears.

    Engine arguments: `header.NAME`, a further header of every call (a value "env:NAME" or "file:PATH" is read from
    there); `idempotency_header`, the name of the header that stays the same over a row's attempts, or false for none;
    `idle_timeout_s`. Nothing is kept in `home`.
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
        self._idle_timeout_s = float(arguments.pop("idle_timeout_s", None) or IDLE_TIMEOUT_S)
        self._headers = {name[7:]: arguments.pop(name) for name in list(arguments) if name.startswith("header.")}
        self._refuse_unknown(arguments)
        self._secrets: list[bytes] = []  # what no reply may repeat into a result file
        self._session: aiohttp.ClientSession | None = None
        self._deadlines = Deadlines(self._limits.attempt_timeout_s)
        ceiling = self._limits.in_flight_max or IN_FLIGHT_CEILING
        self._pacer = Pacer(
            self._limits, self._clock.monotonic(), jitter=jitter, ceiling=min(ceiling, _allow_files(ceiling))
        )
        self._ahead = Ahead(self._pacer, self._clock)
        wire = Wire(self._begin_live, self._read_live, self._secrets)
        self._live = LiveWay(wire, self._composer, self._pacer, self._ahead, self._clock)

    async def start(self) -> None:
        """Read the credentials and open the pool of connections; the service itself is not called yet.

        Raises: ModelFailed when a key is missing.
        """
        headers = self._common_headers()
        for name, value in headers.items():
            check_header(name, value)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=ADDRESSES_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            # The time of a whole call is kept by `Deadlines`.
            timeout=aiohttp.ClientTimeout(total=None, connect=self._limits.connect_timeout_s),
            trust_env=False,
        )

    async def run(self, feed: Feed, sink: Sink) -> None:
        dispatch = Dispatch(
            self._composer.call,
            self._send,
            self._pacer,
            ahead=self._ahead,
            attempts_max=self._limits.attempts_max,
            clock=self._clock,
        )
        await dispatch.run(feed, sink)

    def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        return self._live.predict(request)

    async def stop(self) -> None:
        await self._ahead.stop()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def stats(self) -> EngineStats:
        window = self._pacer.window
        live, note = self._ahead.in_flight, self._pacer.note(self._clock.monotonic())
        return EngineStats(window.in_flight - live, window.limit, note, live)

    def _refuse_unknown(self, arguments: dict[str, str | int | float | bool | None]) -> None:
        known = "header.NAME, idempotency_header and idle_timeout_s"
        for name in arguments:
            raise ModelFailed(f"the http engine has no argument {name!r}: it has {known}", code="unknown_argument")
        if self._model.python is not None:
            raise ModelFailed("the http engine runs no interpreter: leave `python` out", code="unknown_argument")

    def _common_headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            # On this machine or beside it packing costs more than it saves.
            "Accept-Encoding": "gzip, deflate" if self._composer.is_tls else "identity",
            "User-Agent": f"batchmill/{batchmill.__version__}",
        }
        reference = self._model.api_key
        if reference is None and self._composer.host == OPENAI_HOST:
            reference = "env:OPENAI_API_KEY"
        if reference is not None:
            headers["Authorization"] = f"Bearer {self._reveal(reference)}"
        for name, value in self._headers.items():
            text = str(value)
            headers[name] = self._reveal(text) if text.startswith(("env:", "file:")) else text
        return headers

    def _reveal(self, reference: str) -> str:
        key = secrets.resolve(reference).reveal()
        self._secrets.append(key.encode())
        return key

    async def _send(self, call: Call) -> Outcome | Fault:
        """One call and what became of it."""
        task = call.task
        assert task is not None
        self._deadlines.begin(task)
        try:
            response, body = await self._exchange(call)
        except asyncio.CancelledError:
            if self._deadlines.is_late(task):
                return self._translate(TimeoutError())
            raise
        except (aiohttp.ClientError, OSError) as error:
            return self._translate(error)
        finally:
            self._deadlines.end(task)
        status, headers = response.status, response.headers
        request_id = headers.get("x-request-id")
        if body is None:
            text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
            return Fault(Kind.PERMANENT, RowError("reply_too_large", text), Reply(0), None, request_id)
        reply = read_reply(status, body)
        if is_result(reply):
            return reply.ok(call.row, request_id)
        for secret in self._secrets:
            if secret in body:
                body = body.replace(secret, b"***")
                reply = read_reply(status, body)
        return judge(reply, headers, self._clock.now(), request_id=request_id)

    async def _exchange(self, call: Call) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Send a call and read the whole reply, decoded; None for one that is too large."""
        assert self._session is not None, "start() comes first"
        data = call.body if len(call.body) <= BODY_COPY_MAX else io.BytesIO(call.body)
        response = await self._session.post(call.url, data=data, headers=call.headers, allow_redirects=False)
        content = response.content
        try:
            # Most replies are there with their head. What is packed may unpack to anything, so it is read in pieces.
            if content.is_eof() and hdrs.CONTENT_ENCODING not in response.headers:
                body = content.read_nowait()
            else:
                body = await self._read_pieces(content)
        except BaseException:
            response.close()
            raise
        if body is None:
            response.close()
        return response, body

    async def _read_pieces(self, content: aiohttp.StreamReader) -> bytes | None:
        pieces, total = [], 0
        async with asyncio.timeout(self._idle_timeout_s) as idle:
            while piece := await content.readany():
                total += len(piece)
                if total > REPLY_BYTES_MAX:
                    return None
                pieces.append(piece)
                idle.reschedule(asyncio.get_running_loop().time() + self._idle_timeout_s)
        return b"".join(pieces)

    async def _begin_live(self, call: LiveCall) -> aiohttp.ClientResponse:
        """Send a live call; its reply's head. Raises: NoReply."""
        assert self._session is not None, "start() comes first"
        data = call.body if len(call.body) <= BODY_COPY_MAX else io.BytesIO(call.body)
        try:
            async with asyncio.timeout(self._limits.attempt_timeout_s):
                return await self._session.post(call.url, data=data, headers=call.headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error)) from None

    async def _read_live(self, response: aiohttp.ClientResponse) -> bytes:
        """The next piece of a live reply; empty at its end. Raises: NoReply."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise NoReply(self._translate(error)) from None

    def _translate(self, error: aiohttp.ClientError | OSError) -> Fault:
        where = self._composer.address
        match error:
            case aiohttp.ConnectionTimeoutError():
                text = f"no connection to {where} within {self._limits.connect_timeout_s:g} s"
                return Fault(Kind.UNREACHABLE, RowError("connection_failed", text))
            case aiohttp.ClientConnectorError():
                return Fault(Kind.UNREACHABLE, RowError("connection_failed", f"no connection to {where}: {error}"))
            case TimeoutError():
                text = f"no whole reply within {self._limits.attempt_timeout_s:g} s, or none of it for too long"
                return Fault(Kind.TRANSIENT, RowError("timeout", text))
            case aiohttp.ServerDisconnectedError():
                # Most often a kept-alive connection that the service closed at this very moment: try again at once.
                text = f"{where} ended the connection without a reply"
                return Fault(Kind.TRANSIENT, RowError("connection_failed", text), rest_s=0.0)
            case aiohttp.ClientPayloadError() | aiohttp.ClientResponseError():
                return Fault(Kind.TRANSIENT, RowError("bad_response", f"the reply of {where} is broken: {error}"))
            case _:
                text = f"the connection to {where} broke: {error or type(error).__name__}"
                return Fault(Kind.TRANSIENT, RowError("connection_failed", text))


def _allow_files(wanted: int) -> int:
    """How many connections this process may hold, once it has asked the kernel for as many as are wanted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = wanted + FILES_SPARE
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == unlimited else max(1, soft - FILES_SPARE)
