"""The engine for a service that speaks OpenAI's HTTP API, remote or on this machine.

Says what is sent and what a reply means. `connections` sends it; when calls go and which are tried again is decided in
`pacing` and `retry`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import batchmill
from batchmill.engines.ahead import Ahead
from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import IDLE_TIMEOUT_S, Connections, NoReply, allow_files
from batchmill.engines.dispatch import Dispatch
from batchmill.engines.http_live import LiveWay
from batchmill.engines.outgoing import Call, Composer, check_header
from batchmill.engines.pacing import IN_FLIGHT_CEILING, Pacer
from batchmill.engines.replies import REPLY_BYTES_MAX, Reply, read_reply
from batchmill.engines.retry import Fault, Kind, Retries, is_result, judge
from batchmill.errors import ModelFailed
from batchmill.models import provisions, secrets
from batchmill.models.providers import key_meant
from batchmill.ports import Clock, Feed, Sink
from batchmill.types import EngineStats, LiveHead, LiveRequest, ModelSpec, Outcome, RowError

IDEMPOTENCY_HEADER = "Idempotency-Key"


class HttpEngine:
    """Calls `model.base_url` with as many rows in flight as the service bears.

    Engine arguments: `header.NAME`, a further header of every call (a value "env:NAME", "file:PATH" or "secret:NAME" is
    read from there); `idempotency_header`, the name of the header that stays the same over a row's attempts, or false
    for none; `idle_timeout_s`. Nothing is kept in `home`.
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
        self._provided = provisions.version()  # whose secrets the headers hold
        ceiling = self._limits.in_flight_max or IN_FLIGHT_CEILING
        self._pacer = Pacer(
            self._limits, self._clock.monotonic(), jitter=jitter, ceiling=min(ceiling, allow_files(ceiling))
        )
        self._ahead = Ahead(self._pacer, self._clock)
        self._dispatch: Dispatch | None = None  # while rows are run
        self._live = LiveWay(self._connections, self._composer, self._pacer, self._ahead, self._clock)

    async def start(self) -> None:
        """Read the credentials and open the pool of connections; the service itself is not called yet.

        Raises: ModelFailed when a key is missing.
        """
        self._read_headers()
        await self._connections.start()

    def _read_headers(self) -> None:
        self._provided = provisions.version()
        headers = self._common_headers()
        for name, value in headers.items():
            check_header(name, value)
        self._connections.set_headers(headers)

    async def run(self, feed: Feed, sink: Sink) -> None:
        dispatch = Dispatch(
            self._composer.call,
            self._send,
            self._pacer,
            ahead=self._ahead,
            retries=Retries(self._limits.attempts_max),
            clock=self._clock,
        )
        self._dispatch = dispatch
        try:
            await dispatch.run(feed, sink)
        finally:
            self._dispatch = None

    def fail_rows(self, job_id: str) -> None:
        """See `ports.PatientEngine`."""
        if self._dispatch is not None:
            self._dispatch.fail_rows(job_id)

    def forget(self, job_id: str) -> None:
        """See `ports.PatientEngine`."""
        if self._dispatch is not None:
            self._dispatch.forget(job_id)

    def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        if provisions.version() != self._provided:
            self._read_headers()
        return self._live.predict(request)

    async def stop(self) -> None:
        await self._ahead.stop()
        await self._connections.stop()

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
        reference = self._model.api_key or key_meant(self._model)
        if reference is not None:
            headers["Authorization"] = f"Bearer {secrets.resolve(reference).reveal()}"
        for name, value in self._headers.items():
            text = str(value)
            headers[name] = secrets.resolve(text).reveal() if text.startswith(secrets.KINDS) else text
        return headers

    async def _send(self, call: Call) -> Outcome | Fault:
        """One call and what became of it."""
        if provisions.version() != self._provided:  # a key was changed while this worker runs
            self._read_headers()
        try:
            response, body = await self._connections.exchange("POST", call.url, call.body, call.headers)
        except NoReply as lost:
            return lost.fault
        status, headers = response.status, response.headers
        request_id = headers.get("x-request-id")
        if body is None:
            text = f"the reply is larger than {REPLY_BYTES_MAX // 2**20} MiB"
            return Fault(Kind.PERMANENT, RowError("reply_too_large", text), Reply(0), None, request_id)
        reply = read_reply(status, body)
        if is_result(reply):
            return reply.ok(call.row, request_id)
        return judge(reply, headers, self._clock.now(), request_id=request_id)
