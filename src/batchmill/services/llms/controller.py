"""Controls the engines of deployments: keeps replicas, replaces engines without downtime, preloads adapters.

Knows models and their engines, but no records: its owner stores those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from batchmill.errors import BatchmillError, Unavailable
from batchmill.ports.clock import Clock
from batchmill.types import EngineEvent, EngineState, EngineView, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.rows.forms import COMPLETIONS

log = logging.getLogger("batchmill.llms")

POLL_S = 1.0
EVENTS_MAX = 50  # of a deployment, besides the events of its engine
UPDATING, UPDATED, UPDATE_FAILED = "updating", "updated", "update_failed"  # kinds of events
PRELOADED, PRELOAD_FAILED = "preloaded", "preload_failed"
READY = "ready"


class Engines(Protocol):
    """What `jobs.dispatcher.Dispatcher` does for the replicas of models."""

    def engine_of(self, model: ModelSpec) -> EngineView: ...

    def pin(self, model: ModelSpec) -> None:
        """Keep at least the minimum replicas of its scaling, even if idle. Running replicas get its scaling."""

    def unpin(self, model: ModelSpec) -> None:
        """Undo `pin`."""


class Calls(Protocol):
    """What `jobs.live.LivePath` does for a model."""

    async def load(self, model: ModelSpec) -> None: ...

    def unload(self, model: ModelSpec) -> None: ...

    async def warm(self, model: ModelSpec) -> None: ...

    def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]: ...


class _Deployed:
    """The engine of one deployment, and its desired state."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model  # the model that calls and jobs get
        self.is_on = False  # it may have an engine
        self.kept_model: ModelSpec | None = None  # the model of the last `Engines.keep`
        self.next_model: ModelSpec | None = None  # during a replacement
        self.replacement: asyncio.Task[None] | None = None
        self.failed_model: ModelSpec | None = None  # the model whose engine could not be started
        self.preloaded: list[str] = []
        self.preloaded_at = 0.0  # the start of the engine that last got its adapters
        self.events: list[EngineEvent] = []


ReplacedCallback = Callable[[str, str], Awaitable[None]]


class EngineController:
    def __init__(
        self, engines: Engines, calls: Calls, clock: Clock, *,
        on_replaced: ReplacedCallback, on_served: Callable[[str], None], on_poll: Callable[[], None],
    ) -> None:  # fmt: skip
        """Args:
        on_replaced: is called with a key and an error when a replacement ends. "": it succeeded.
        on_served: is called with a key when another model is served for it.
        on_poll: is called regularly, to change the desired models.
        """
        self._engines, self._calls, self._clock = engines, calls, clock
        self._on_replaced, self._on_served, self._on_poll = on_replaced, on_served, on_poll
        self._deployed: dict[str, _Deployed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = False

    def open(self) -> None:
        """Start to keep and replace engines. Before this call, models are only recorded."""
        self.is_open = True
        for deployed in self._deployed.values():
            self._update_kept(deployed)
        self._spawn(self._supervise())

    async def close(self) -> None:
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- views --------------------------------------------------------------------------------------------------------

    def model(self, key: str) -> ModelSpec:
        return self._deployed[key].model

    def view(self, key: str) -> EngineView:
        """Return the engine with the events of the deployment; an empty view if it has just been deleted."""
        deployed = self._deployed.get(key)
        if deployed is None:
            return EngineView()
        view = self._engines.engine_of(deployed.model)
        if not deployed.events:
            return view
        return replace(view, events=sorted([*view.events, *deployed.events], key=lambda event: event.at))

    def view_of(self, model: ModelSpec) -> EngineView:
        """Return the engine of a model without a deployment."""
        return self._engines.engine_of(model)

    # -- control ------------------------------------------------------------------------------------------------------

    def set_desired(self, key: str, model: ModelSpec, *, is_on: bool = True, preloaded: Sequence[str] = ()) -> bool:
        """Serve this model from now on. The engine that runs serves until the new one is ready.

        Args:
            is_on: False releases its engine.
            preloaded: names of adapters of the model that an engine loads after its start.

        Returns: whether the model is served now; if not, `on_replaced` reports the result.
        """
        deployed = self._deployed.setdefault(key, _Deployed(model))
        if deployed.preloaded != list(preloaded):
            deployed.preloaded, deployed.preloaded_at = list(preloaded), 0.0
        deployed.is_on, deployed.failed_model = is_on, None
        is_served = self._set_model(key, deployed, model)
        self._update_kept(deployed)
        return is_served

    def _set_model(self, key: str, deployed: _Deployed, model: ModelSpec) -> bool:
        if deployed.next_model is not None and _is_same_engine(deployed.next_model, model):
            deployed.next_model = model
            return False
        self._stop_replacement(deployed)
        if (
            not _is_same_engine(deployed.model, model)
            and self._engines.engine_of(deployed.model).ready
            and self.is_open
        ):
            deployed.next_model = model
            deployed.replacement = self._spawn(self._replace(key, deployed, model))
            return False
        if not _is_same_engine(deployed.model, model):
            deployed.preloaded_at = 0.0
        deployed.model = model
        return True

    def refresh(self, key: str, model: ModelSpec) -> bool:
        """Serve the same model with other adapters, with another engine if they need one.

        Returns: whether the model was accepted. It is not accepted during a replacement.
        """
        deployed = self._deployed[key]
        if deployed.next_model is not None:
            return False
        is_refused = deployed.failed_model is not None and _is_same_engine(deployed.failed_model, model)
        if deployed.model != model and not is_refused:
            self._set_model(key, deployed, model)
            self._update_kept(deployed)
        return True

    def start(self, key: str) -> None:
        """Start an engine. It stays as long as after a call."""
        deployed = self._deployed.get(key)
        if self.is_open and deployed is not None:  # else it was deleted meanwhile
            self._spawn(self._start(deployed.model))

    def remove(self, key: str) -> None:
        """Remove a deployment. Its engine ends when it is no longer used."""
        deployed = self._deployed.pop(key)
        self._stop_replacement(deployed)
        deployed.is_on = False
        self._update_kept(deployed)

    def add_event(self, key: str, kind: str, message: str = "") -> None:
        """Record an event of a deployment."""
        events = self._deployed[key].events
        events.append(EngineEvent(self._clock.now(), kind, message))
        del events[:-EVENTS_MAX]

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _update_kept(self, deployed: _Deployed) -> None:
        desired, kept_model = deployed.model if deployed.is_on and self.is_open else None, deployed.kept_model
        is_same = desired is not None and kept_model is not None and _is_same_engine(kept_model, desired)
        if kept_model is not None and not is_same:
            self._engines.unpin(kept_model)
        if desired is not None and not (is_same and kept_model is not None and kept_model.scaling == desired.scaling):
            self._engines.pin(desired)
        deployed.kept_model = desired

    async def _start(self, model: ModelSpec) -> None:
        try:
            await self._calls.warm(model)
        except BatchmillError as error:  # its view shows the error too
            log.warning("%s was not started: %s", model.name, error.message)

    # -- replacement --------------------------------------------------------------------------------------------------

    def _stop_replacement(self, deployed: _Deployed) -> None:
        if deployed.replacement is not None:
            deployed.replacement.cancel()
            deployed.replacement, deployed.next_model = None, None

    async def _replace(self, key: str, deployed: _Deployed, model: ModelSpec) -> None:
        """Replace the engine that runs. If the machine has no room for both, the old engine is released first."""
        old_model = deployed.model
        self.add_event(key, UPDATING)
        try:
            error_text = await self._load(key, deployed, model)
            deployed.model = old_model if error_text else deployed.next_model or model
            deployed.failed_model = model if error_text else None
            deployed.replacement, deployed.next_model = None, None
            deployed.preloaded_at = deployed.preloaded_at if error_text else 0.0
            self._update_kept(deployed)
            self._on_served(key)
        finally:
            self._calls.unload(model)
            if deployed.replacement is asyncio.current_task():  # cancelled, and no other replacement has started
                deployed.replacement, deployed.next_model = None, None
        # Before the event, so that a client that sees the event reads the final deployment.
        await self._on_replaced(key, error_text)
        if key in self._deployed:  # else it was deleted meanwhile
            self.add_event(key, UPDATE_FAILED if error_text else UPDATED, error_text)

    async def _load(self, key: str, deployed: _Deployed, model: ModelSpec) -> str:
        """Load the engine of a model. Returns the error if it could not be started; empty: it is ready."""
        while True:
            loading = asyncio.ensure_future(self._calls.load(model))
            try:
                while not loading.done():
                    await self._wait_for_load(loading)
                    if self._engines.engine_of(model).state == EngineState.WAITING and deployed.model is not model:
                        deployed.model = model
                        self._update_kept(deployed)
                        self._on_served(key)
                await loading
                return ""
            except Unavailable as error:
                if self._engines.engine_of(model).state not in (EngineState.WAITING, EngineState.STARTING):
                    return error.message
            except BatchmillError as error:
                return error.message
            finally:
                loading.cancel()

    async def _wait_for_load(self, loading: asyncio.Future[None]) -> None:
        """Wait until the engine is loaded or the next poll is due."""
        poll = asyncio.ensure_future(self._clock.sleep(POLL_S))
        try:
            await asyncio.wait({loading, poll}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poll.cancel()

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            self._on_poll()
            for key, deployed in list(self._deployed.items()):
                if deployed.preloaded:
                    self._preload_if_started(key, deployed)
            await self._clock.sleep(POLL_S)

    def _preload_if_started(self, key: str, deployed: _Deployed) -> None:
        """Preload the adapters into an engine that has started since the last preload."""
        view = self._engines.engine_of(deployed.model)
        started = max((event.at for event in view.events if event.kind == READY), default=0.0)
        if view.ready and started > deployed.preloaded_at:
            deployed.preloaded_at = started
            self._spawn(self._preload(key, deployed.model, deployed.preloaded, view.ready))

    async def _preload(self, key: str, model: ModelSpec, names: list[str], replicas: int) -> None:
        """Generate one token with each adapter, which makes the engine load it. Sends one request per replica."""
        for name in names:
            adapter_name = model.adapter_names.get(name, name)
            body = msgspec.json.encode({"model": adapter_name, "prompt": "a", "max_tokens": 1})
            request = LiveRequest(
                COMPLETIONS, body, adapter=adapter_name, adapter_place=model.adapters.get(adapter_name, "")
            )
            errors = await asyncio.gather(*(self._send(model, request) for _ in range(replicas)))
            error = next((each for each in errors if each), "")
            if key in self._deployed:
                self.add_event(
                    key, PRELOAD_FAILED if error else PRELOADED, f"{adapter_name}: {error}" if error else adapter_name
                )
            if error:
                log.warning("the adapter %s was not loaded into %s: %s", adapter_name, model.name, error)

    async def _send(self, model: ModelSpec, request: LiveRequest) -> str:
        """Send a request. Returns the error if it failed; empty: it succeeded."""
        status, body = 0, b""
        try:
            async for piece in self._calls.predict(model, request):
                if isinstance(piece, LiveHead):
                    status = piece.status
                else:
                    body += piece
        except BatchmillError as error:
            return error.message
        return "" if 200 <= status < 300 else f"status {status}: {body[:300].decode(errors='replace')}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_same_engine(mine: ModelSpec, other: ModelSpec) -> bool:
    """Tell whether the same engine can serve both, with any number of replicas.

    The set of adapters does not matter to an engine with room for adapters.
    """
    return _engine(mine) == _engine(other)


def _engine(model: ModelSpec) -> ModelSpec:
    model = replace(model, allowed=None, adapter_patterns=[], scaling=None)
    if model.adapter_rank:
        return replace(model, adapters={}, adapter_names={}, bad_adapters={})
    return model
