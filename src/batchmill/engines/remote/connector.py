"""The connector engine: a remote HTTP API described as data; a row is one call of its `predict` action.

`pacing` and `retry` decide when calls are sent and which are retried, as for every service. `models.connectors` builds
calls from parameters and interprets replies.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw
from msgspec.structs import replace

import batchmill
from batchmill.children.programs import Programs
from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import IDLE_TIMEOUT_S, Connections, allow_files
from batchmill.engines.remote.connector_calls import (
    BAD_FILTER,
    ActionCaller,
    ConnectorCall,
    ConnectorReply,
    ConnectorRows,
    Credentials,
    settle,
)
from batchmill.engines.remote.dispatch import Dispatch
from batchmill.engines.remote.pacing import IN_FLIGHT_CEILING, WAIT_MAX_S, LiveQueue, Pacer
from batchmill.engines.retry import REPLY_BYTES_MAX, Fault, FaultKind, NoReply, Retries
from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, ModelFailed, TooComplex, Unavailable
from batchmill.models import secrets
from batchmill.models.addresses import EVERYWHERE
from batchmill.models.connectors.urls import find_action
from batchmill.ports.clock import Clock
from batchmill.ports.engines import Feed, Sink
from batchmill.types import ClientConfig, Connector, EngineStats, Limits, LiveHead, LiveRequest, ModelSpec, Row
from batchmill.types.connectors import PREDICT
from batchmill.wire.json_bytes import encode

ML_COMMONS = "ml_commons"  # the form of a predict body of ML Commons
CALLS_AT_ONCE = 16  # concurrent calls of one request with many documents
BAD_GATEWAY = 502
CALLER_CODES = ("url_not_allowed", "invalid_url")  # errors that a call's own parameters may cause
_EVENTS = "text/event-stream"
_RETRYABLE = (FaultKind.THROTTLED, FaultKind.TRANSIENT, FaultKind.UNREACHABLE)


class _Failed(Exception):
    """One of a request's calls failed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error.message)
        self.fault = fault


class ConnectorLive:
    """Live requests to a connector. It reports the end of every call to the pacer exactly once."""

    def __init__(
        self,
        caller: ActionCaller,
        rows: ConnectorRows,
        connections: Connections,
        *,
        pacer: Pacer,
        live_queue: LiveQueue,
        clock: Clock,
    ) -> None:
        self._caller = caller
        self._rows = rows
        self._connections = connections
        self._pacer = pacer
        self._live_queue = live_queue
        self._clock = clock
        self.retries = Retries(1)  # a call without a connection is still made twice

    async def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        """See `ports.engines.Engine.predict`. In the form "ml_commons", errors of the service keep its status and have
        ML Commons' texts."""
        calls = self._calls(request)
        if request.stream:
            async with aclosing(self._stream(calls[0], request.project)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        project, is_ml_commons = request.project, request.form == ML_COMMONS
        try:
            body = await (self._infer(calls, project) if is_ml_commons else self._answer(calls[0], project))
        except _Failed as failed:
            status, body = (_ml_commons_error if is_ml_commons else _forward_error)(failed.fault)
            yield LiveHead(status)
            yield body
            return
        yield LiveHead(200)
        yield body

    def _calls(self, request: LiveRequest) -> list[ConnectorCall]:
        try:
            request.body.decode()  # fields that are not parsed must be text too
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

    async def _answer(self, call: ConnectorCall, project: str) -> bytes:
        return await self._body(call, await self._call(call), project)

    async def _infer(self, calls: list[ConnectorCall], project: str) -> bytes:
        """The results of all calls in order; the first failure cancels the others."""
        semaphore = asyncio.Semaphore(CALLS_AT_ONCE)

        async def infer(call: ConnectorCall) -> dict[str, Any]:
            async with semaphore:
                answer = await self._call(call)
            try:
                output = Raw(await self._caller.output(call, answer, project))
                return {"output": output, "status_code": answer.reply.status}
            except InvalidInput as wrong:
                raise _result_error(wrong) from None

        if len(calls) == 1:
            return encode({"inference_results": [await infer(calls[0])]})
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(infer(call)) for call in calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return encode({"inference_results": [task.result() for task in tasks]})

    async def _call(self, call: ConnectorCall) -> ConnectorReply:
        """Make a call with its retries. Raises: _Failed."""
        began, number = self._clock.monotonic(), 0
        while True:
            result = await self._once(call)
            if isinstance(result, ConnectorReply):
                return result
            number += 1
            delay_s = self._retry_delay_s(result, number, self._clock.monotonic() - began)
            if delay_s is None:
                raise _Failed(result)
            await self._clock.sleep(delay_s)

    def _retry_delay_s(self, fault: Fault, failed: int, lasted_s: float) -> float | None:
        """Seconds until the retry of a call; None if it is not retried."""
        delay_after = self.retries.delay_s
        if delay_after is None:
            return 0.0 if failed == 1 and fault.kind is FaultKind.UNREACHABLE else None
        if fault.kind not in _RETRYABLE or failed >= self.retries.attempts_max:
            return None
        delay_s = delay_after(failed)
        return delay_s if lasted_s + delay_s < self.retries.lasts_s else None

    async def _once(self, call: ConnectorCall) -> ConnectorReply | Fault:
        call.charged = await self._live_queue.acquire(len(call.body), is_admitted=call.is_admitted)
        call.sent_at = self._clock.monotonic()
        result: ConnectorReply | Fault | None = None
        try:
            result = await self._caller.send(call)
            return result
        finally:
            self._observe(call, result)
            self._live_queue.release()

    def _observe(self, call: ConnectorCall, result: ConnectorReply | Fault | None) -> None:
        """Report the end of a call to the pacer. `result` None: it was cancelled."""
        now, pacer = self._clock.monotonic(), self._pacer
        if result is None:
            pacer.window.failed()
        elif isinstance(result, ConnectorReply):
            pacer.answered(now)
            usage = result.reply.usage
            if usage is not None:
                pacer.correct(len(call.body), call.charged, (usage.input_tokens, usage.output_tokens))
        elif result.kind is FaultKind.THROTTLED:
            pacer.throttled(result, call.sent_at, now)
        elif result.kind in (FaultKind.TRANSIENT, FaultKind.UNREACHABLE):
            pacer.failed(result, call.sent_at, now)
        else:
            pacer.answered(now)

    async def _stream(self, call: ConnectorCall, project: str) -> AsyncGenerator[LiveHead | bytes]:
        """The service's events as they arrive; a reply that is not a stream is passed on whole."""
        call.charged = await self._live_queue.acquire(len(call.body), is_admitted=call.is_admitted)
        call.sent_at = self._clock.monotonic()
        response: aiohttp.ClientResponse | None = None
        has_head = False
        try:
            response = await self._caller.begin(call)
            kind = response.headers.get("Content-Type", "")
            if 200 <= response.status < 300 and kind.lower().startswith(_EVENTS):
                yield LiveHead(200, kind)
                while piece := await self._connections.read(response):
                    yield piece
                has_head = True
                self._pacer.answered(self._clock.monotonic())
            else:
                result = settle(response.status, response.headers, await self._read_whole(response), self._clock.now())
                has_head = True
                self._observe(call, result)
                status, body = await self._whole(call, result, project)
                yield LiveHead(status)
                yield body
        except NoReply as lost:
            has_head = True
            self._observe(call, lost.fault)
            raise _call_error(lost.fault) from None
        finally:
            if not has_head:
                self._observe(call, None)
            if response is not None and not response.content.at_eof():
                response.close()
            self._live_queue.release()

    async def _whole(self, call: ConnectorCall, result: ConnectorReply | Fault, project: str) -> tuple[int, bytes]:
        """Status and body of a complete reply."""
        return _forward_error(result) if isinstance(result, Fault) else (200, await self._body(call, result, project))

    async def _body(self, call: ConnectorCall, answer: ConnectorReply, project: str) -> bytes:
        try:
            return await self._caller.result(call, answer, project)
        except InvalidInput as wrong:
            raise _result_error(wrong) from None

    async def _read_whole(self, response: aiohttp.ClientResponse) -> bytes | None:
        pieces, total = [], 0
        while piece := await self._connections.read(response):
            total += len(piece)
            if total > REPLY_BYTES_MAX:
                return None
            pieces.append(piece)
        return b"".join(pieces)


def _result_error(wrong: InvalidInput) -> BatchmillError:
    """The error of a reply without a result: the caller's fault if the caller sent the filter."""
    if isinstance(wrong, TooComplex) or wrong.code == BAD_FILTER:
        return wrong
    return ModelFailed(wrong.message, code=wrong.code)


def _forward_error(fault: Fault) -> tuple[int, bytes]:
    """Forward an error of the service to the caller, with the service's body if it has one."""
    if fault.kind is FaultKind.AUTH:
        raise AuthRefused(f"the service refused the credentials that batchmill has for it: {fault.error.message}")
    reply = fault.reply
    if reply is None or reply.status < 400:
        raise _call_error(fault)
    if reply.body is not None and reply.error is not None:
        return reply.status, reply.body
    error = {"message": fault.error.message, "type": "service_error", "param": None, "code": fault.error.code}
    return reply.status, encode({"error": error})


def _ml_commons_error(fault: Fault) -> tuple[int, bytes]:
    """Forward an error in ML Commons' form: with the service's status, and its whole body in the message."""
    reply = fault.reply
    if fault.error.code == "bad_response":
        status, message = BAD_GATEWAY, fault.error.message
    elif reply is None or reply.status < 400:
        raise _call_error(fault)
    else:
        body = reply.text if reply.body is None else reply.body.decode()
        status, message = reply.status, f"Error from remote service: {body}"
    return status, encode({"error": {"message": message, "type": "service_error", "code": fault.error.code}})


def _call_error(fault: Fault) -> BatchmillError:
    """The error to raise if there is no reply to forward."""
    error = fault.error
    if fault.kind in (FaultKind.TRANSIENT, FaultKind.UNREACHABLE):
        return Unavailable(error.message, code=error.code)
    if error.code in CALLER_CODES:
        return InvalidInput(error.message, code=error.code)
    return ModelFailed(error.message, code=error.code)


UNLIMITED = 1_000_000  # retries that only `lasts_s` limits


class ConnectorEngine:
    """Calls `model.connector` with as many rows in flight as its service sustains.

    A `client_config` sets timeouts, its `max_connection` bounds the rows in flight, and its `max_retry_times` sets the
    retries. Without `max_retry_times` (or with 0, which means unset in ML Commons) the default retries apply. Throttled
    calls do not count as retries.

    Engine arguments: `idle_timeout_s`. `home` is not used.
    """

    def __init__(
        self, model: ModelSpec, home: Path, *, clock: Clock | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        connector = _connector_of(model)
        self._limits = _limits(model.limits, connector.client_config)
        retries = _configured_retries(connector.client_config, jitter)
        self._retries = retries or Retries(self._limits.attempts_max)
        ceiling = self._limits.in_flight_max or IN_FLIGHT_CEILING
        self._pacer = Pacer(
            self._limits, self._clock.monotonic(), jitter=jitter, ceiling=min(ceiling, allow_files(ceiling))
        )
        config = connector.client_config
        pool_wait_s = WAIT_MAX_S if config is None else float(config.connection_timeout)
        self._live_queue = LiveQueue(self._pacer, self._clock, pool_wait_s=pool_wait_s)
        self._dispatch: Dispatch | None = None  # while rows run
        self._credentials = Credentials(connector.credential)
        self._connections = _connections(model, connector, self._limits)
        self._programs = Programs(self._clock)
        try:
            action = find_action(connector, PREDICT)
            caller = ActionCaller(connector, action, self._connections, self._credentials, self._clock, self._programs)
        except InvalidInput as wrong:
            raise ModelFailed(f"connector {connector.name!r}: {wrong.message}", code=wrong.code) from None
        self._rows = ConnectorRows(model, caller)
        self._live = ConnectorLive(
            caller, self._rows, self._connections, pacer=self._pacer, live_queue=self._live_queue, clock=self._clock
        )
        if retries is not None:
            self._live.retries = retries

    async def start(self) -> None:
        """Read the credentials and open the connection pool. The service is not called yet.

        Raises: ModelFailed if a secret is missing.
        """
        self._credentials.load()
        await self._connections.start()

    async def run(self, feed: Feed, sink: Sink) -> None:
        dispatch = Dispatch(
            self._rows.call,
            self._rows.send,
            self._pacer,
            live_queue=self._live_queue,
            retries=self._retries,
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
        return self._live.predict(request)

    async def stop(self) -> None:
        await self._live_queue.stop()
        await self._connections.stop()
        await self._programs.close()

    def stats(self) -> EngineStats:
        window = self._pacer.window
        live, note = self._live_queue.in_flight, self._pacer.note(self._clock.monotonic())
        note = note or ("" if self._dispatch is None else self._dispatch.media_note)
        return EngineStats(window.in_flight - live, window.limit, note, live)


def _connector_of(model: ModelSpec) -> Connector:
    if model.connector is None:
        raise ModelFailed(f"model {model.name!r} has no connector", code="missing_connector")
    for name in model.engine_args.keys() - {"idle_timeout_s"}:
        raise ModelFailed(
            f"the connector engine has no argument {name!r}; its only argument is idle_timeout_s",
            code="unknown_argument",
        )
    if model.python is not None:
        raise ModelFailed(
            "the connector engine runs no Python interpreter: leave `python` out", code="unknown_argument"
        )
    return model.connector


def _connections(model: ModelSpec, connector: Connector, limits: Limits) -> Connections:
    config = connector.client_config
    return Connections(
        limits,
        headers={"User-Agent": f"batchmill/{batchmill.__version__}"},
        private=EVERYWHERE if connector.is_trusted else secrets.private(),
        verify_tls=config is None or not config.skip_ssl_verification,
        idle_timeout_s=float(model.engine_args.get("idle_timeout_s") or IDLE_TIMEOUT_S),
        read_timeout_s=None if config is None else float(config.read_timeout),
    )


def _limits(limits: Limits, config: ClientConfig | None) -> Limits:
    """The stricter limit of calls in flight of model and connector, and the connector's connect timeout."""
    if config is None:
        return limits
    in_flight = min(limits.in_flight_max or config.max_connection, config.max_connection)
    return replace(limits, in_flight_max=max(in_flight, 1), connect_timeout_s=float(config.connection_timeout))


def _configured_retries(config: ClientConfig | None, jitter: Callable[[], float]) -> Retries | None:
    """The retries that a connector configures; None if it does not."""
    if config is None or config.max_retry_times == 0:
        return None
    base_s = config.retry_backoff_millis / 1000

    def delay_s(failed: int) -> float:
        if config.retry_backoff_policy == "constant":
            return base_s
        span_s = min(base_s * 2 ** min(failed, 30), float(config.retry_timeout_seconds))
        if config.retry_backoff_policy == "exponential_equal_jitter":
            return span_s / 2 + jitter() * span_s / 2
        return jitter() * span_s

    calls_max = UNLIMITED if config.max_retry_times < 0 else config.max_retry_times + 1
    return Retries(calls_max, delay_s, float(config.retry_timeout_seconds))
