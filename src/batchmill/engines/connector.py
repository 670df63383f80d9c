"""The engine for a remote HTTP API described as data: a row is one call of the connector's `predict` action.

When calls go and which are tried again is decided as for every service, in `pacing` and `retry`; how a call is made of
parameters and what a reply means is the connector's, in `models.connectors`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from msgspec.structs import replace

import batchmill
from batchmill.children.programs import Programs
from batchmill.engines.ahead import WAIT_MAX_S, Ahead
from batchmill.engines.clock import SystemClock
from batchmill.engines.connections import IDLE_TIMEOUT_S, Connections, allow_files
from batchmill.engines.connector_calls import Caller, Rows
from batchmill.engines.connector_credentials import Credentials
from batchmill.engines.connector_live import ConnectorLive
from batchmill.engines.dispatch import Dispatch
from batchmill.engines.pacing import IN_FLIGHT_CEILING, Pacer
from batchmill.engines.retry import Retries
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import provisions
from batchmill.models.addresses import EVERYWHERE
from batchmill.models.connectors.derived import find_action
from batchmill.ports import Clock, Feed, Sink
from batchmill.types import ClientConfig, Connector, EngineStats, Limits, LiveHead, LiveRequest, ModelSpec
from batchmill.types.connectors import PREDICT

ENDLESS = 1_000_000  # retries, where only their time has an end


class ConnectorEngine:
    """Calls `model.connector` with as many rows in flight as its service bears.

    With a `client_config` its times hold, and `max_connection` bounds the rows in flight; with its `max_retry_times`
    failed calls are made again as it says. Where it says nothing of retries (or 0, which ML Commons writes for
    nothing) rows are tried again as those of any service are. Calls that were throttled never count.

    Engine arguments: `idle_timeout_s`. Nothing is kept in `home`.
    """

    def __init__(
        self, model: ModelSpec, home: Path, *, clock: Clock | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        connector = _connector_of(model)
        self._limits = _limits(model.limits, connector.client_config)
        told = _told_retries(connector.client_config, jitter)
        self._retries = told or Retries(self._limits.attempts_max)
        ceiling = self._limits.in_flight_max or IN_FLIGHT_CEILING
        self._pacer = Pacer(
            self._limits, self._clock.monotonic(), jitter=jitter, ceiling=min(ceiling, allow_files(ceiling))
        )
        config = connector.client_config
        pool_wait_s = WAIT_MAX_S if config is None else float(config.connection_timeout)
        self._ahead = Ahead(self._pacer, self._clock, pool_wait_s=pool_wait_s)
        self._dispatch: Dispatch | None = None  # while rows are run
        self._credentials = Credentials(connector.credential)
        self._connections = _connections(model, connector, self._limits)
        self._programs = Programs(self._clock)
        try:
            action = find_action(connector, PREDICT)
            caller = Caller(connector, action, self._connections, self._credentials, self._clock, self._programs)
        except InvalidInput as wrong:
            raise ModelFailed(f"connector {connector.name!r}: {wrong.message}", code=wrong.code) from None
        self._rows = Rows(model, caller)
        self._live = ConnectorLive(
            caller, self._rows, self._connections, pacer=self._pacer, ahead=self._ahead, clock=self._clock
        )
        if told is not None:
            self._live.retries = told

    async def start(self) -> None:
        """Read the credentials and open the pool of connections; the service itself is not called yet.

        Raises: ModelFailed when a secret is missing.
        """
        self._credentials.load()
        await self._connections.start()

    async def run(self, feed: Feed, sink: Sink) -> None:
        dispatch = Dispatch(
            self._rows.call,
            self._rows.send,
            self._pacer,
            ahead=self._ahead,
            retries=self._retries,
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
        return self._live.predict(request)

    async def stop(self) -> None:
        await self._ahead.stop()
        await self._connections.stop()
        await self._programs.close()

    def stats(self) -> EngineStats:
        window = self._pacer.window
        live, note = self._ahead.in_flight, self._pacer.note(self._clock.monotonic())
        return EngineStats(window.in_flight - live, window.limit, note, live)


def _connector_of(model: ModelSpec) -> Connector:
    if model.connector is None:
        raise ModelFailed(f"model {model.name!r} names no connector", code="missing_connector")
    for name in model.engine_args.keys() - {"idle_timeout_s"}:
        raise ModelFailed(
            f"the connector engine has no argument {name!r}: it has idle_timeout_s", code="unknown_argument"
        )
    if model.python is not None:
        raise ModelFailed("the connector engine runs no interpreter: leave `python` out", code="unknown_argument")
    return model.connector


def _connections(model: ModelSpec, connector: Connector, limits: Limits) -> Connections:
    config = connector.client_config
    return Connections(
        limits,
        headers={"User-Agent": f"batchmill/{batchmill.__version__}"},
        private=EVERYWHERE if connector.is_trusted else provisions.private(),
        verify_tls=config is None or not config.skip_ssl_verification,
        idle_timeout_s=float(model.engine_args.get("idle_timeout_s") or IDLE_TIMEOUT_S),
        read_timeout_s=None if config is None else float(config.read_timeout),
    )


def _limits(limits: Limits, config: ClientConfig | None) -> Limits:
    """The stricter of what the model and what the connector allows in flight; the connector's time to connect."""
    if config is None:
        return limits
    in_flight = min(limits.in_flight_max or config.max_connection, config.max_connection)
    return replace(limits, in_flight_max=max(in_flight, 1), connect_timeout_s=float(config.connection_timeout))


def _told_retries(config: ClientConfig | None, jitter: Callable[[], float]) -> Retries | None:
    """Retries as a connector tells them; None where it does not."""
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

    calls_max = ENDLESS if config.max_retry_times < 0 else config.max_retry_times + 1
    return Retries(calls_max, delay_s, float(config.retry_timeout_seconds))
