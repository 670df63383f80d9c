"""The LLM engine: a vLLM server that batchmill starts, keeps alive and keeps full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from msgspec import Struct

from batchmill.engines.clock import SystemClock
from batchmill.engines.llm import guard
from batchmill.engines.llm.adapter_cache import AdapterCache
from batchmill.engines.llm.adapters import Adapter, AdapterCounts
from batchmill.engines.llm.calls import LlmCalls
from batchmill.engines.llm.flow import Flow
from batchmill.engines.llm.launch import Hardware, adapter_slots, find_python, secret_variables
from batchmill.engines.llm.live import LlmLive
from batchmill.engines.llm.quarantine import Deaths, SuspectIsolation
from batchmill.engines.llm.row_queue import Flight, Yielding
from batchmill.engines.llm.server import VllmServer
from batchmill.errors import BatchmillError, JobPaused, ModelFailed, Unavailable
from batchmill.models.redaction import mask
from batchmill.models.worker_environment import inherited
from batchmill.ports.clock import Clock
from batchmill.ports.engines import Feed, Sink
from batchmill.states import PauseReason
from batchmill.types import EngineStats, LiveHead, LiveRequest, ModelSpec

RESTARTS_MAX = 5  # without a finished row between them
RESTARTS_WINDOW_S = 600.0
GIVEN_UP_MAX = 30  # rows given up one after another without an answer between them: then the rows are not the cause
RESTART_DELAY_MAX_S = 30.0


class LlmEngine:
    """Runs rows of `model.source` and its adapters on a vLLM server.

    `engine_args` are vLLM's flags. `limits.in_flight_max` bounds the rows in flight. `limits.attempt_timeout_s` is how
    long the engine may process no token before it is restarted; one row may take longer. `limits.adapters_max` is how
    many adapters are loaded at once. `secrets` are variables of the server's environment. `home` has the server's log
    (`engine-N.log`) and the record with which the next start ends a server that was left running. Engines that run at
    the same time should share it.
    """

    def __init__(
        self, model: ModelSpec, home: Path, *, clock: Clock | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        _refuse_settings(model)
        self._model = model
        self._home = home
        self._clock: Clock = clock or SystemClock()
        self._env = inherited() if env is None else dict(env)
        self._flight = Flight(limit_max=model.limits.in_flight_max)
        self._yielding = Yielding()
        self._calls = LlmCalls(model)
        self._adapter_cache = AdapterCache(
            self,
            slots_max=adapter_slots(model, Hardware.detect(self._env)),
            names=self._calls.names,
            counts=AdapterCounts(),
            clock=self._clock,
            timeout_s=model.limits.attempt_timeout_s,
        )
        self._deaths = Deaths(self._clock)
        self._isolation = SuspectIsolation(self, self._deaths, self._clock)
        self.learn = self._deaths.learn
        self._live = LlmLive(
            self,
            calls=self._calls,
            adapter_cache=self._adapter_cache,
            yielding=self._yielding,
            isolation=self._isolation,
            clock=self._clock,
        )
        self._given_up = 0  # rows in a row, without an answer between them
        self._restarts: list[float] = []  # when, on the monotonic clock
        self._server: VllmServer | None = None
        self._flow: Flow | None = None  # while rows run
        self._reviving: asyncio.Task[None] | None = None  # a restart while no rows run
        self._changed = asyncio.Event()  # set when a server has started or a run has ended; then replaced
        self._python = ""
        self._note = ""
        self._stopped = False

    @property
    def server(self) -> VllmServer:
        assert self._server is not None, "call start() first"
        return self._server

    @property
    def rows_in_flight(self) -> int:
        return self._flow.in_flight if self._flow is not None else 0

    async def start(self) -> None:
        self._set_note("looking for vLLM")
        self._python = await asyncio.to_thread(find_python, self._model, self._env, Path.cwd())
        await asyncio.to_thread(guard.sweep, self._home)
        await self._launch()
        self._calls.known = await self.server.fields(self._model.paths)

    async def run(self, feed: Feed, sink: Sink) -> None:
        self._flow = Flow(
            self,
            feed,
            sink,
            calls=self._calls,
            adapter_cache=self._adapter_cache,
            flight=self._flight,
            yielding=self._yielding,
            isolation=self._isolation,
        )
        try:
            await self._flow.run()
        finally:
            self._flow = None
            self._wake_waiting()

    def report_deaths(self, report: Callable[[Struct], None]) -> None:
        self._deaths.report = report

    def has_others(self, project: str) -> bool:
        return self._flow is not None and self._flow.has_others(project)

    def predict(self, request: LiveRequest) -> AsyncGenerator[LiveHead | bytes]:
        return self._live.predict(request)

    def wake_rows(self) -> None:
        if self._flow is not None:
            self._flow.wake()

    def recall_rows(self, adapter: Adapter) -> None:
        if self._flow is not None:
            self._flow.recall(adapter)

    async def wait_until_alive(self, wait_s: float) -> None:
        """Wait until the server is alive. Raises: Unavailable after `wait_s`, or when stopping."""
        until = self._clock.monotonic() + wait_s
        while not self.server.process.is_alive:
            left_s = until - self._clock.monotonic()
            if self._stopped or left_s <= 0:
                raise Unavailable(f"the engine is not running: {self._note or 'it was stopped'}", code="engine_lost")
            changed = self._changed
            self.wake_rows()
            if self._flow is None and self._reviving is None:
                self._reviving = asyncio.create_task(self._revive())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    async def _revive(self) -> None:
        """Restart the server while no rows run. A running flow restarts it itself."""
        try:
            await self.server.stop()
            self._deaths.record_death(self.server, self.server.process.complaint())
            await self.relaunch()
        except BatchmillError as error:
            self._note = error.message
            self._stopped = True
        finally:
            self._reviving = None
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stop(self) -> None:
        self._stopped = True
        self._wake_waiting()
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        await self._adapter_cache.stop()
        if self._server is not None:
            await self._server.stop()

    def stats(self) -> EngineStats:
        in_flight, now = self.rows_in_flight, self._clock.monotonic()
        gauges = self._flight.gauges
        return EngineStats(
            in_flight=in_flight,
            in_flight_limit=self._yielding.limit(self._flight.limit, in_flight, now),
            note=self._note
            or self._adapter_cache.note(self._flow.waiting_for_adapters if self._flow is not None else 0)
            or (self._flow.media_note if self._flow is not None else ""),
            live=self._yielding.live,
            kv_usage=gauges.kv_usage,
            cached_share=gauges.cached_share,
            adapters=self._adapter_cache.counts.stats(now),
            adapters_loaded=self._adapter_cache.loaded,
        )

    async def relaunch(self) -> None:
        """Replace the dead server.

        Raises: JobPaused after too many tries without a finished row.
        """
        why = self.server.process.complaint()
        while not self._stopped:
            delay_s = self._next_delay(why)
            self._set_note(f"vLLM died and restarts in {delay_s:g} s ({mask(why.splitlines()[0])})")
            await self._clock.sleep(delay_s)
            try:
                await self._launch()
                return
            except ModelFailed as error:
                why = error.message
        raise ModelFailed("the engine was stopped")

    def progressed(self) -> None:
        self._restarts.clear()
        self._given_up = 0

    def gave_up(self) -> None:
        self._restarts.clear()
        self._given_up += 1
        if self._given_up > GIVEN_UP_MAX:
            raise JobPaused(
                f"vLLM died with each of {self._given_up} rows in turn and answered none in between; its log: "
                f"{self.server.process.log_path}",
                reason=PauseReason.ENGINE_FAILED,
            )

    async def _launch(self) -> None:
        env = {**self._env, **secret_variables(self._model)}
        self._server = await VllmServer.launch(
            self._model, self._python, home=self._home, env=env, clock=self._clock, note=self._set_note
        )
        self._adapter_cache.restarted()
        self._wake_waiting()

    def _next_delay(self, why: str) -> float:
        now = self._clock.monotonic()
        self._restarts = [when for when in self._restarts if now - when < RESTARTS_WINDOW_S]
        if len(self._restarts) >= RESTARTS_MAX:
            raise JobPaused(
                f"vLLM died {RESTARTS_MAX + 1} times and finished no row in between; the last error: {why}\n"
                f"(its log: {self.server.process.log_path})",
                reason=PauseReason.ENGINE_FAILED,
            )
        self._restarts.append(now)
        tries = len(self._restarts)
        return 0.0 if tries == 1 else min(RESTART_DELAY_MAX_S, 2.0 ** (tries - 2))

    def _set_note(self, note: str) -> None:
        self._note = note


def _refuse_settings(model: ModelSpec) -> None:
    """Refuse settings that an engine started by batchmill cannot have. Raises: ModelFailed."""
    limits = model.limits
    reasons = {
        "base_url": (model.base_url, "batchmill starts its server; for one that runs already use openai:"),
        "api_key": (model.api_key, "its server needs no key"),
        "limits.requests_per_minute": (limits.requests_per_minute, "it runs as fast as it can; use in_flight_max"),
        "limits.tokens_per_minute": (limits.tokens_per_minute, "it runs as fast as it can; use in_flight_max"),
    }
    for name, (value, reason) in reasons.items():
        if value is not None:
            raise ModelFailed(
                f"{name} = {value!r} has no meaning for a managed engine: {reason}", code="invalid_config"
            )
