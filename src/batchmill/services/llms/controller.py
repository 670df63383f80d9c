"""Engines of deployments: held while they are to stay, exchanged without a gap, given adapters before anybody asks.

Knows models and their engines, nothing of records: who it is told by keeps those.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from batchmill.errors import BatchmillError, Unavailable
from batchmill.ports import Clock
from batchmill.types import EngineEvent, EngineState, EngineView, LiveHead, LiveRequest, ModelSpec
from batchmill.wire.forms import COMPLETIONS

log = logging.getLogger("batchmill.llms")

LOOK_S = 1.0
EVENTS_MAX = 50  # of a deployment, besides its engine's own
UPDATING, UPDATED, UPDATE_FAILED = "updating", "updated", "update_failed"  # kinds of events
PRELOADED, PRELOAD_FAILED = "preloaded", "preload_failed"
READY = "ready"


class Engines(Protocol):
    """What `jobs.dispatcher.Dispatcher` knows of the replicas of models."""

    def engine_of(self, model: ModelSpec) -> EngineView: ...

    def keep(self, model: ModelSpec) -> None:
        """Have as many replicas as its scaling says at least, whether they are used or not; those there scale so."""

    def let_go(self, model: ModelSpec) -> None:
        """The end of `keep`."""


class Calls(Protocol):
    """What `jobs.live.LivePath` does for a model."""

    async def load(self, model: ModelSpec) -> None: ...

    def unload(self, model: ModelSpec) -> None: ...

    async def warm(self, model: ModelSpec) -> None: ...

    def predict(self, model: ModelSpec, request: LiveRequest) -> AsyncIterator[LiveHead | bytes]: ...


class _Kept:
    """The engine of one deployment."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model  # what calls and jobs get
        self.is_on = False  # it may have an engine
        self.held: ModelSpec | None = None  # what `keep` was told
        self.wanted: ModelSpec | None = None  # while an exchange is under way
        self.exchange: asyncio.Task[None] | None = None
        self.failed: ModelSpec | None = None  # what could not be started in its place
        self.preloaded: list[str] = []
        self.warmed_at = 0.0  # the last start of an engine that was given its adapters
        self.events: list[EngineEvent] = []


Moved = Callable[[str, str], Awaitable[None]]


class EngineController:
    def __init__(
        self, engines: Engines, calls: Calls, clock: Clock, *,
        moved: Moved, served: Callable[[str], None], look: Callable[[], None],
    ) -> None:  # fmt: skip
        """Args:
        moved: called with a key and why, or "", once an exchange has failed, or come about.
        served: called with a key once another model has taken the place of one that ran.
        look: called again and again, to say what is to be served otherwise.
        """
        self._engines, self._calls, self._clock, self._moved, self._look = engines, calls, clock, moved, look
        self._served = served
        self._kept: dict[str, _Kept] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = False

    def open(self) -> None:
        """From now on engines are held and exchanged; before, models are only remembered."""
        self.is_open = True
        for kept in self._kept.values():
            self._hold(kept)
        self._spawn(self._look_after())

    async def close(self) -> None:
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- looking ------------------------------------------------------------------------------------------------------

    def model(self, key: str) -> ModelSpec:
        return self._kept[key].model

    def view(self, key: str) -> EngineView:
        """The engine, and what became of the deployment besides; of one that was deleted a moment ago, none."""
        kept = self._kept.get(key)
        if kept is None:
            return EngineView()
        view = self._engines.engine_of(kept.model)
        if not kept.events:
            return view
        return replace(view, events=sorted([*view.events, *kept.events], key=lambda event: event.at))

    def view_of(self, model: ModelSpec) -> EngineView:
        """The engine of a model that nobody deployed."""
        return self._engines.engine_of(model)

    # -- telling ------------------------------------------------------------------------------------------------------

    def want(self, key: str, model: ModelSpec, *, is_on: bool = True, preloaded: Sequence[str] = ()) -> bool:
        """Serve this model from now on; one that runs in its place goes on until the new one is ready.

        Args:
            is_on: False lets its engine go.
            preloaded: names of adapters of the model that an engine is given when it has started.

        Returns: whether it is served already; if not, `moved` tells how it went.
        """
        kept = self._kept.setdefault(key, _Kept(model))
        if kept.preloaded != list(preloaded):
            kept.preloaded, kept.warmed_at = list(preloaded), 0.0
        kept.is_on, kept.failed = is_on, None
        is_served = self._want(key, kept, model)
        self._hold(kept)
        return is_served

    def _want(self, key: str, kept: _Kept, model: ModelSpec) -> bool:
        if kept.wanted is not None and _is_one_engine(kept.wanted, model):
            kept.wanted = model
            return False
        self._stop_exchange(kept)
        if not _is_one_engine(kept.model, model) and self._engines.engine_of(kept.model).ready and self.is_open:
            kept.wanted = model
            kept.exchange = self._spawn(self._exchange(key, kept, model))
            return False
        if not _is_one_engine(kept.model, model):
            kept.warmed_at = 0.0
        kept.model = model
        return True

    def refresh(self, key: str, model: ModelSpec) -> bool:
        """Serve the same with other adapters; with another engine, where they need one.

        Returns: whether it was taken in: it is not while an exchange is under way.
        """
        kept = self._kept[key]
        if kept.wanted is not None:
            return False
        is_refused = kept.failed is not None and _is_one_engine(kept.failed, model)
        if kept.model != model and not is_refused:
            self._want(key, kept, model)
            self._hold(kept)
        return True

    def start(self, key: str) -> None:
        """Have an engine ready, which stays as if it had just been called."""
        kept = self._kept.get(key)
        if self.is_open and kept is not None:  # nobody deleted it meanwhile
            self._spawn(self._start(kept.model))

    def drop(self, key: str) -> None:
        """Let go of it: its engine ends when nobody uses it."""
        kept = self._kept.pop(key)
        self._stop_exchange(kept)
        kept.is_on = False
        self._hold(kept)

    def note(self, key: str, kind: str, message: str = "") -> None:
        """Remember what became of a deployment."""
        events = self._kept[key].events
        events.append(EngineEvent(self._clock.now(), kind, message))
        del events[:-EVENTS_MAX]

    # -- holding ------------------------------------------------------------------------------------------------------

    def _hold(self, kept: _Kept) -> None:
        wanted, held = kept.model if kept.is_on and self.is_open else None, kept.held
        is_one = wanted is not None and held is not None and _is_one_engine(held, wanted)
        if held is not None and not is_one:
            self._engines.let_go(held)
        if wanted is not None and not (is_one and held is not None and held.scaling == wanted.scaling):
            self._engines.keep(wanted)
        kept.held = wanted

    async def _start(self, model: ModelSpec) -> None:
        try:
            await self._calls.warm(model)
        except BatchmillError as error:  # its view says so too
            log.warning("%s was not started: %s", model.name, error.message)

    # -- exchanging ---------------------------------------------------------------------------------------------------

    def _stop_exchange(self, kept: _Kept) -> None:
        if kept.exchange is not None:
            kept.exchange.cancel()
            kept.exchange, kept.wanted = None, None

    async def _exchange(self, key: str, kept: _Kept, model: ModelSpec) -> None:
        """Put another engine in the place of one that runs; where the machine has no room for both, that one goes
        first."""
        before = kept.model
        self.note(key, UPDATING)
        try:
            why = await self._loaded(key, kept, model)
            kept.model = before if why else kept.wanted or model
            kept.failed = model if why else None
            kept.exchange, kept.wanted = None, None
            kept.warmed_at = kept.warmed_at if why else 0.0
            self._hold(kept)
            self._served(key)
        finally:
            self._calls.unload(model)
            if kept.exchange is asyncio.current_task():  # it was cancelled: nobody else has begun one
                kept.exchange, kept.wanted = None, None
        await self._moved(key, why)  # before the event: a client that sees the event reads a deployment that is settled
        if key in self._kept:  # else it was deleted meanwhile
            self.note(key, UPDATE_FAILED if why else UPDATED, why)

    async def _loaded(self, key: str, kept: _Kept, model: ModelSpec) -> str:
        """Why the engine of a model could not be started; empty: it is ready."""
        while True:
            loading = asyncio.ensure_future(self._calls.load(model))
            try:
                while not loading.done():
                    await self._either(loading)
                    if self._engines.engine_of(model).state == EngineState.WAITING and kept.model is not model:
                        kept.model = model
                        self._hold(kept)
                        self._served(key)
                await loading
                return ""
            except Unavailable as error:
                if self._engines.engine_of(model).state not in (EngineState.WAITING, EngineState.STARTING):
                    return error.message
            except BatchmillError as error:
                return error.message
            finally:
                loading.cancel()

    async def _either(self, loading: asyncio.Future[None]) -> None:
        """Return when it is loaded, or it is time to look."""
        look = asyncio.ensure_future(self._clock.sleep(LOOK_S))
        try:
            await asyncio.wait({loading, look}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            look.cancel()

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        while True:
            self._look()
            for key, kept in list(self._kept.items()):
                if kept.preloaded:
                    self._look_at(key, kept)
            await self._clock.sleep(LOOK_S)

    def _look_at(self, key: str, kept: _Kept) -> None:
        """An engine that has started since is given the adapters that are to be in it."""
        view = self._engines.engine_of(kept.model)
        started = max((event.at for event in view.events if event.kind == READY), default=0.0)
        if view.ready and started > kept.warmed_at:
            kept.warmed_at = started
            self._spawn(self._preload(key, kept.model, kept.preloaded, view.ready))

    async def _preload(self, key: str, model: ModelSpec, names: list[str], replicas: int) -> None:
        """Ask each adapter for one token: that has the engine load it. As many requests as there are replicas."""
        for name in names:
            own = model.adapter_names.get(name, name)
            body = msgspec.json.encode({"model": own, "prompt": "a", "max_tokens": 1})
            request = LiveRequest(COMPLETIONS, body, adapter=own, adapter_place=model.adapters.get(own, ""))
            whys = await asyncio.gather(*(self._asked(model, request) for _ in range(replicas)))
            why = next((each for each in whys if each), "")
            if key in self._kept:
                self.note(key, PRELOAD_FAILED if why else PRELOADED, f"{own}: {why}" if why else own)
            if why:
                log.warning("the adapter %s was not loaded into %s: %s", own, model.name, why)

    async def _asked(self, model: ModelSpec, request: LiveRequest) -> str:
        """Why a request got no answer; empty: it got one."""
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


def _is_one_engine(mine: ModelSpec, other: ModelSpec) -> bool:
    """The same engine serves both, however many replicas of it there are to be.

    Which adapters there are does not matter to one that has room for them.
    """
    return _engine(mine) == _engine(other)


def _engine(model: ModelSpec) -> ModelSpec:
    model = replace(model, allowed=None, adapter_patterns=[], scaling=None)
    if model.adapter_rank:
        return replace(model, adapters={}, adapter_names={}, bad_adapters={})
    return model
