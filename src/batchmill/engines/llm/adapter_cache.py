"""AdapterCache: the adapters that an engine server has loaded. It loads ahead of need and evicts by LRU.

Rows and live requests register the adapters that they use, which then stay loaded. Live requests go first.
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
from batchmill.ports.clock import Clock

FAILED_S = 60.0  # how long a failed load is remembered
CRASHES_MAX = 3  # server crashes while one adapter loads, before the adapter is given up
CRASHED_S = 3600.0  # how long that is remembered: the next server takes its time to start
LIVE_PATIENCE_S = 2.0  # how long a live request waits for rows to end, before the rows of an adapter are recalled
LIVE_WAIT_S = 120.0  # how long a live request waits for a slot


class Host(Protocol):
    """What the cache needs of the engine that owns the server."""

    server: VllmServer

    def wake_rows(self) -> None:
        """Called when an adapter is loaded, or could not be."""

    def recall_rows(self, adapter: Adapter) -> None:
        """Take the rows of an adapter out of the engine; they run again later."""

    async def wait_until_alive(self, wait_s: float) -> None:
        """Wait until the server is alive. Raises: Unavailable."""


class AdapterSlot(Struct, eq=False):
    """One adapter slot of the engine, with its current users."""

    adapter: Adapter
    is_loading: bool = True
    is_leaving: bool = False  # no more rows are sent to it: another adapter waits for the slot
    rows: int = 0
    live: int = 0
    used: int = 0  # a counter: the larger, the more recent the last use

    @property
    def is_idle(self) -> bool:
        return not (self.is_loading or self.rows or self.live)


class AdapterCache:
    """The adapters of one engine, in at most `slots_max` slots. Concurrency: one event loop."""

    def __init__(
        self, host: Host, *, slots_max: int, names: AdapterNames, counts: AdapterCounts, clock: Clock, timeout_s: float
    ) -> None:
        self.slots_max = slots_max
        self._host = host
        self._names = names
        self.counts = counts
        self._clock = clock
        self._timeout_s = timeout_s  # of one load
        self._slots: dict[Adapter, AdapterSlot] = {}
        self._row_ranks: dict[Adapter, int] = {}  # the adapters that rows wait for, in the order of the rows
        self._live: deque[Adapter] = deque()  # the adapters that live requests wait for
        self._failed: dict[Adapter, tuple[float, str]] = {}  # until when on the monotonic clock, and the reason
        self._crashes: dict[Adapter, int] = {}
        self._load_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced when it is set
        self._uses = 0
        self.bug: BaseException | None = None  # an unexpected error of a load; `Flow` and live requests raise it

    @property
    def loaded(self) -> int:
        return sum(not slot.is_loading for slot in self._slots.values())

    def can_send(self, adapter: Adapter) -> bool:
        """Whether rows of this adapter may be sent now."""
        slot = self._slots.get(adapter)
        return slot is not None and not (slot.is_loading or slot.is_leaving)

    def failure(self, adapter: Adapter) -> str:
        """Why a recent load of an adapter failed; empty if none failed."""
        until, why = self._failed.get(adapter, (0.0, ""))
        return why if self._clock.monotonic() < until else ""

    def use(self, adapter: Adapter) -> AdapterSlot:
        """Count a row that is sent to an adapter for which `can_send` is true. `release` gives the slot back."""
        slot = self._slots[adapter]
        slot.rows += 1
        self._touch(slot)
        return slot

    def release(self, slot: AdapterSlot) -> None:
        slot.rows -= 1
        if slot.is_idle:
            self._start_next_load()
            self._publish()

    def set_waiting(self, adapters: Sequence[Adapter]) -> None:
        """Set the adapters that rows wait for, in this order."""
        self._row_ranks = {adapter: rank for rank, adapter in enumerate(adapters)}
        self._start_next_load()

    def vacate_slot(self, adapter: Adapter) -> AdapterSlot | None:
        """Send no more rows to one slot, so that this adapter gets it. None: it has a slot, or none can be vacated."""
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
    async def hold(self, adapter: Adapter) -> AsyncGenerator[bool]:
        """Load the adapter for a live request and hold it; yields whether it was loaded before.

        Raises: InvalidInput for an adapter that cannot be loaded, Unavailable if no slot becomes free in time.
        """
        was_loaded = self.can_send(adapter)
        self._live.append(adapter)
        try:
            slot = await self._wait_for_slot(adapter)
        finally:
            self._live.remove(adapter)
        slot.live += 1
        self._touch(slot)
        try:
            yield was_loaded
        finally:
            slot.live -= 1
            if slot.is_idle:
                self._start_next_load()
                self._publish()

    def restarted(self) -> None:
        """Forget all slots: the server is a new one."""
        self._slots.clear()
        self._start_next_load()
        self._publish()

    async def stop(self) -> None:
        if self._load_task is not None:
            self._load_task.cancel()
            await asyncio.gather(self._load_task, return_exceptions=True)

    def note(self, rows: int) -> str:
        """Tell users what `rows` waiting rows wait for; empty if they wait for no adapter."""
        loading = [slot.adapter.name for slot in self._slots.values() if slot.is_loading]
        if loading:
            return (
                f"the adapter {loading[0]!r} is being loaded"
                if not rows
                else f"{rows} rows wait for the adapter {loading[0]!r}, which is being loaded"
            )
        return f"{rows} rows wait for one of the {self.slots_max} adapter slots: all are in use" if rows else ""

    # -- live requests -------------------------------------------------------------------------------------------------

    async def _wait_for_slot(self, adapter: Adapter) -> AdapterSlot:
        until = self._clock.monotonic() + LIVE_WAIT_S
        patience_until = self._clock.monotonic() + LIVE_PATIENCE_S
        while True:
            if self.bug is not None:
                raise self.bug
            if why := self.failure(adapter):
                raise InvalidInput(why, code="bad_adapter")
            now = self._clock.monotonic()
            if now >= until:
                text = f"no adapter slot became free for {adapter.name!r} in {LIVE_WAIT_S:g} s: live requests use "
                raise Unavailable(f"{text}all {self.slots_max}; try again later", code="adapters_busy")
            await self._host.wait_until_alive(until - now)
            slot = self._slots.get(adapter)
            if slot is not None and not slot.is_loading:
                return slot
            changed = self._changed
            self._start_next_load()
            leaving = None if self._load_task is not None else self.vacate_slot(adapter)
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
        return self._row_ranks.get(adapter, math.inf)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def _start_next_load(self) -> None:
        """Start the next load, if one is due and a slot is free or can be freed."""
        if self._load_task is not None or not self._host.server.process.is_alive:
            return
        for adapter in (*self._live, *self._row_ranks):
            if adapter in self._slots or self.failure(adapter):
                continue
            evicted = None
            if len(self._slots) >= self.slots_max:
                evicted = self._eviction_candidate(adapter)
                if evicted is None:
                    return
                del self._slots[evicted.adapter]
            self._slots[adapter] = AdapterSlot(adapter)
            self._load_task = asyncio.create_task(self._exchange(evicted, adapter))
            self._load_task.add_done_callback(self._on_load_end)
            return
        leaving = [slot for slot in self._slots.values() if slot.is_leaving]
        for slot in leaving:
            slot.is_leaving = False
        if leaving:
            self._host.wake_rows()

    def _eviction_candidate(self, adapter: Adapter) -> AdapterSlot | None:
        """The slot to evict for an adapter: an unused one whose adapter no earlier row waits for."""
        rank = -1 if adapter in self._live else self._rank(adapter)
        idle = [slot for slot in self._slots.values() if slot.is_idle and slot.adapter not in self._live]
        idle = [slot for slot in idle if slot.is_leaving or self._rank(slot.adapter) > rank]
        return max(idle, key=lambda slot: (slot.is_leaving, self._rank(slot.adapter), -slot.used), default=None)

    async def _exchange(self, evicted: AdapterSlot | None, adapter: Adapter) -> None:
        """Unload the evicted adapter and load the other."""
        server, slot = self._host.server, self._slots[adapter]
        try:
            if evicted is not None:
                await server.unload_adapter(self._names.of(evicted.adapter), self._timeout_s)
            why = await server.load_adapter(self._names.of(adapter), adapter.path, self._timeout_s)
            if why and not await server.is_healthy():
                raise CallLost(why)
        except CallLost as lost:
            self._slots.pop(adapter, None)
            self._record_crash(adapter, lost)
            if not await server.is_healthy():
                await server.stop()  # waiting rows and live requests start a new one
        else:
            self._record_load(slot, why)

    def _on_load_end(self, task: asyncio.Task[None]) -> None:
        self._load_task = None
        if task.cancelled():
            return
        self.bug = task.exception()
        self._publish()
        if self.bug is None:
            asyncio.get_running_loop().call_soon(self._start_next_load)  # after the rows that can run now are sent

    def _record_load(self, slot: AdapterSlot, why: str) -> None:
        adapter = slot.adapter
        self._crashes.pop(adapter, None)
        if why:
            self._slots.pop(adapter, None)
            if os.path.isabs(adapter.path):  # which callers must not see
                why = why.replace(adapter.path, "its folder")
            self._remember_failure(adapter, f"the adapter {adapter.name!r} cannot be loaded: {why}")
            return
        slot.is_loading = False
        self._touch(slot)
        self.counts.record_load(adapter.name)

    def _record_crash(self, adapter: Adapter, lost: CallLost) -> None:
        crashes = self._crashes[adapter] = self._crashes.get(adapter, 0) + 1
        if crashes >= CRASHES_MAX:
            del self._crashes[adapter]
            why = f"the engine crashed {crashes} times while it loaded the adapter {adapter.name!r}: {lost}"
            self._remember_failure(adapter, why, CRASHED_S)

    def _remember_failure(self, adapter: Adapter, why: str, for_s: float = FAILED_S) -> None:
        now = self._clock.monotonic()
        self._failed = {each: failure for each, failure in self._failed.items() if failure[0] > now}
        self._failed[adapter] = (now + for_s, why)
