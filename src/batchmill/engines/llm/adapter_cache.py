"""AdapterCache: the adapters that an engine server holds, loaded ahead of need, evicted least recently used.

Senders of rows and live requests register here; adapters in use stay. Live requests go first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from msgspec import Struct

from batchmill.engines.llm.adapters import Adapter, AdapterCounts, AdapterNames
from batchmill.engines.llm.server import CallLost, VllmServer
from batchmill.errors import InvalidInput, Unavailable
from batchmill.ports import Clock

FAILED_S = 60.0  # how long a failed load is remembered
LOSSES_MAX = 3  # loads that the server did not outlive, of one adapter
DEADLY_S = 3600.0  # how long it is remembered then: the next server takes its time to start
LIVE_PATIENCE_S = 2.0  # how long a live request waits for rows to end, before those of an adapter are called back
LIVE_WAIT_S = 120.0


class Host(Protocol):
    """What the cache needs of the engine that owns the server."""

    server: VllmServer

    def wake_rows(self) -> None:
        """Called when an adapter is loaded, or could not be."""

    def recall_rows(self, adapter: Adapter) -> None:
        """Take the rows of an adapter out of the engine; they run again later."""

    async def revived(self, wait_s: float) -> None:
        """Wait until the server lives. Raises: Unavailable."""


class AdapterSlot(Struct, eq=False):
    """One adapter slot of the engine, with its current users."""

    adapter: Adapter
    is_loading: bool = True
    is_leaving: bool = False  # no more rows are sent to it: another adapter waits for its place
    rows: int = 0
    live: int = 0
    used: int = 0  # the larger the later

    @property
    def is_idle(self) -> bool:
        return not (self.is_loading or self.rows or self.live)


class AdapterCache:
    """The adapters of one engine. `room`: the number of slots. Concurrency: one event loop."""

    def __init__(
        self, host: Host, *, room: int, names: AdapterNames, counts: AdapterCounts, clock: Clock, timeout_s: float
    ) -> None:
        self.room = room
        self._host = host
        self._names = names
        self.counts = counts
        self._clock = clock
        self._timeout_s = timeout_s  # of one load
        self._slots: dict[Adapter, AdapterSlot] = {}
        self._wanted: dict[Adapter, int] = {}  # by rows that wait, in their order
        self._live: deque[Adapter] = deque()  # that live requests wait for
        self._failed: dict[Adapter, tuple[float, str]] = {}  # until when, why
        self._losses: dict[Adapter, int] = {}
        self._moving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced when it is set
        self._uses = 0
        self.bug: BaseException | None = None  # no exchange is meant to raise; what one does raise must not be lost

    @property
    def loaded(self) -> int:
        return sum(not slot.is_loading for slot in self._slots.values())

    def may_go(self, adapter: Adapter) -> bool:
        """Whether rows of this adapter may be sent now."""
        slot = self._slots.get(adapter)
        return slot is not None and not (slot.is_loading or slot.is_leaving)

    def failure(self, adapter: Adapter) -> str:
        """Why an adapter could not be loaded recently; empty: it could, or was not tried."""
        until, why = self._failed.get(adapter, (0.0, ""))
        return why if self._clock.monotonic() < until else ""

    def use(self, adapter: Adapter) -> AdapterSlot:
        """Count a row that is sent to an adapter that `may_go`; return the slot with `release`."""
        slot = self._slots[adapter]
        slot.rows += 1
        self._touch(slot)
        return slot

    def release(self, slot: AdapterSlot) -> None:
        slot.rows -= 1
        if slot.is_idle:
            self._move()
            self._publish()

    def want(self, adapters: Sequence[Adapter]) -> None:
        """Set the adapters that rows wait for, in this order."""
        self._wanted = {adapter: rank for rank, adapter in enumerate(adapters)}
        self._move()

    def make_way(self, adapter: Adapter) -> AdapterSlot | None:
        """Have rows leave a slot for this adapter. None: it has one, or no rows can leave."""
        if adapter in self._slots:
            return None
        leaving = [slot for slot in self._slots.values() if slot.is_leaving]
        if leaving:
            return leaving[0]
        rank = -1 if adapter in self._live else self._rank(adapter)
        others = [slot for slot in self._slots.values() if not slot.live and not slot.is_loading]
        others = [slot for slot in others if self._rank(slot.adapter) > rank]
        if not others:
            return None
        slot = max(others, key=lambda slot: (self._rank(slot.adapter), -slot.rows))
        slot.is_leaving = True
        return slot

    @contextlib.asynccontextmanager
    async def held(self, adapter: Adapter) -> AsyncGenerator[bool]:
        """Load the adapter for a live request and hold it; yields whether it was loaded before.

        Raises: InvalidInput for an adapter that cannot be loaded, Unavailable where no place becomes free in time.
        """
        was_there = self.may_go(adapter)
        self._live.append(adapter)
        try:
            slot = await self._reach(adapter)
        finally:
            self._live.remove(adapter)
        slot.live += 1
        self._touch(slot)
        try:
            yield was_there
        finally:
            slot.live -= 1
            if slot.is_idle:
                self._move()
                self._publish()

    def restarted(self) -> None:
        """Forget all slots: the server is a new one."""
        self._slots.clear()
        self._move()
        self._publish()

    async def stop(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.gather(self._moving, return_exceptions=True)

    def note(self, rows: int) -> str:
        """What these rows wait for, if it is an adapter; for users."""
        loading = [slot.adapter.name for slot in self._slots.values() if slot.is_loading]
        if loading:
            return (
                f"the adapter {loading[0]!r} is being loaded"
                if not rows
                else f"{rows} rows wait for the adapter {loading[0]!r}, which is being loaded"
            )
        return f"{rows} rows wait for one of the {self.room} adapter slots: all are in use" if rows else ""

    # -- who waits -----------------------------------------------------------------------------------------------------

    async def _reach(self, adapter: Adapter) -> AdapterSlot:
        until = self._clock.monotonic() + LIVE_WAIT_S
        patience_until = self._clock.monotonic() + LIVE_PATIENCE_S
        while True:
            if self.bug is not None:
                raise self.bug
            if why := self.failure(adapter):
                raise InvalidInput(why, code="bad_adapter")
            now = self._clock.monotonic()
            if now >= until:
                text = f"no place for the adapter {adapter.name!r} became free in {LIVE_WAIT_S:g} s: live requests "
                raise Unavailable(f"{text}use all {self.room}; try again later", code="adapters_busy")
            await self._host.revived(until - now)
            slot = self._slots.get(adapter)
            if slot is not None and not slot.is_loading:
                return slot
            changed = self._changed
            self._move()
            leaving = None if self._moving is not None else self.make_way(adapter)
            if leaving is not None and now >= patience_until:
                self._host.recall_rows(leaving.adapter)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    changed.wait(), LIVE_PATIENCE_S if now >= patience_until else patience_until - now
                )

    def _publish(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._host.wake_rows()

    def _touch(self, slot: AdapterSlot) -> None:
        self._uses += 1
        slot.used = self._uses

    def _rank(self, adapter: Adapter) -> float:
        return self._wanted.get(adapter, math.inf)

    # -- what moves ----------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Start the next load, if one is due and a slot is free or can be freed."""
        if self._moving is not None or not self._host.server.process.is_alive:
            return
        for adapter in (*self._live, *self._wanted):
            if adapter in self._slots or self.failure(adapter):
                continue
            evicted = None
            if len(self._slots) >= self.room:
                evicted = self._eviction_candidate(adapter)
                if evicted is None:
                    return
                del self._slots[evicted.adapter]
            self._slots[adapter] = AdapterSlot(adapter)
            self._moving = asyncio.create_task(self._exchange(evicted, adapter))
            self._moving.add_done_callback(self._moved)
            return
        leaving = [slot for slot in self._slots.values() if slot.is_leaving]
        for slot in leaving:
            slot.is_leaving = False
        if leaving:
            self._host.wake_rows()

    def _eviction_candidate(self, adapter: Adapter) -> AdapterSlot | None:
        """The slot to evict for an adapter: unused, and no earlier row waits for it."""
        rank = -1 if adapter in self._live else self._rank(adapter)
        idle = [slot for slot in self._slots.values() if slot.is_idle and slot.adapter not in self._live]
        idle = [slot for slot in idle if slot.is_leaving or self._rank(slot.adapter) > rank]
        return max(idle, key=lambda slot: (slot.is_leaving, self._rank(slot.adapter), -slot.used), default=None)

    async def _exchange(self, evicted: AdapterSlot | None, adapter: Adapter) -> None:
        server, slot = self._host.server, self._slots[adapter]
        try:
            if evicted is not None:
                await server.unload_adapter(self._names.of(evicted.adapter), self._timeout_s)
            why = await server.load_adapter(self._names.of(adapter), adapter.place, self._timeout_s)
            if why and not await server.is_healthy():
                raise CallLost(why)
        except CallLost as lost:
            self._slots.pop(adapter, None)
            self._lost(adapter, lost)
            if not await server.is_healthy():
                await server.stop()  # the rows and calls that wait start a new one
        else:
            self._settle(slot, why)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving = None
        if task.cancelled():
            return
        self.bug = task.exception()
        self._publish()
        if self.bug is None:
            asyncio.get_running_loop().call_soon(self._move)  # after rows that can go now have gone

    def _settle(self, slot: AdapterSlot, why: str) -> None:
        adapter = slot.adapter
        self._losses.pop(adapter, None)
        if why:
            self._slots.pop(adapter, None)
            if os.path.isabs(adapter.place):  # which callers need not know
                why = why.replace(adapter.place, "its folder")
            self._fail(adapter, f"the adapter {adapter.name!r} cannot be loaded: {why}")
            return
        slot.is_loading = False
        self._touch(slot)
        self.counts.loaded(adapter.name)

    def _lost(self, adapter: Adapter, lost: CallLost) -> None:
        losses = self._losses[adapter] = self._losses.get(adapter, 0) + 1
        if losses >= LOSSES_MAX:
            del self._losses[adapter]
            why = f"the engine did not live through {losses} loads of the adapter {adapter.name!r}: {lost}"
            self._fail(adapter, why, DEADLY_S)

    def _fail(self, adapter: Adapter, why: str, for_s: float = FAILED_S) -> None:
        now = self._clock.monotonic()
        self._failed = {each: failed for each, failed in self._failed.items() if failed[0] > now}
        self._failed[adapter] = (now + for_s, why)
