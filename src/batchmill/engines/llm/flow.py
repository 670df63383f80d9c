"""Flow: runs rows on a server that may die. It tracks rows in flight, retries them and blames rows for deaths."""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from batchmill.datasets.media.loading import has_media
from batchmill.engines.llm.adapter_cache import AdapterCache, AdapterSlot
from batchmill.engines.llm.adapters import Adapter
from batchmill.engines.llm.calls import LlmCalls, LlmRow, stable_code
from batchmill.engines.llm.quarantine import SuspectIsolation
from batchmill.engines.llm.row_queue import AdapterQueue, Flight, QuarantineQueue, Yielding
from batchmill.engines.llm.server import CallLost, ReplyTooLarge, VllmServer
from batchmill.engines.retry import Reply, is_result, read_reply
from batchmill.engines.row_media import AHEAD_MAX, LoadingRow, RowMedia
from batchmill.errors import InvalidRow
from batchmill.ports.engines import Feed, ProjectFeed, Sink
from batchmill.types import Outcome, Row, RowError
from batchmill.types.models import ALONE_DEATHS_MAX

TUNE_S = 0.5
RETRY_S = 0.5  # doubled with each attempt of a row
QUIET_S = 2.0  # after others had no row for this long, rows of a project beyond its budget of deaths may run
LAST_ROWS = 16  # how many of those are taken at once
TAKE_SHARE = 16  # rows are taken when one in this many of the limit is free
QUARANTINED = "quarantined"
REFUSAL = (
    "the engine died twice with only this request in flight: it is refused for a while; the operator of the "
    "server can release it with `batchmill quarantine clear`"
)
AHEAD_MIN = 64  # rows to read beyond the limit, so that their adapters load before their turn


class Host(Protocol):
    """What a flow needs of the engine that owns the server."""

    server: VllmServer

    async def relaunch(self) -> None:
        """Replace a dead server. Raises: JobPaused after too many restarts."""

    def progressed(self) -> None:
        """Called when a row is finished."""

    def gave_up(self) -> None:
        """Called when a row that killed the server is given up. Raises: JobPaused after too many in a row."""


class _InFlight(Struct, eq=False):
    """A call in flight, and the slot of its adapter."""

    call: LlmRow
    server: VllmServer
    slot: AdapterSlot | None = None
    is_recalled: bool = False


class _Lost(Struct):
    """A call without a reply, or with a reply that reports a failure of the server."""

    call: LlmRow
    server: VllmServer
    cause: RowError
    outcome: Outcome | None = None


class Flow:
    """One run of a feed. Rows go out in the feed's order, and again in that order after the server has died."""

    def __init__(
        self,
        host: Host,
        feed: Feed,
        sink: Sink,
        *,
        calls: LlmCalls,
        adapter_cache: AdapterCache,
        flight: Flight,
        yielding: Yielding,
        isolation: SuspectIsolation,
    ) -> None:
        self._deaths, self._isolation, clock = isolation.deaths, isolation, isolation.clock
        self._host = host
        self._feed = feed
        self._sink = sink
        self._calls = calls
        self._adapter_cache = adapter_cache
        self._counts = adapter_cache.counts
        self._flight = flight
        self._yielding = yielding
        self._limits = calls.limits
        self._clock = clock
        self._queue = AdapterQueue()
        self._suspects = QuarantineQueue()  # rows that wait to run in isolation
        self._trial: set[LlmRow] = set()  # suspects that run now
        self._holds_back = False  # rows of projects beyond their budget wait in the feed
        self._others_at: dict[str, float] = {}  # project -> when it last had a running or waiting row
        self._media = RowMedia(self._media_bytes, attempts_max=calls.limits.attempts_max, clock=isolation.clock)
        self._loading: set[asyncio.Task[None]] = set()  # rows whose media are being loaded
        self._in_flight: dict[asyncio.Task[None], _InFlight] = {}
        self._overtaken: tuple[Adapter | None, int] = None, 0  # a blocked adapter, and how many later rows were sent
        self._lost_calls: list[_Lost] = []
        self._take_task: asyncio.Task[None] | None = None
        self._ended = False
        self._finished = 0  # rows
        self._adapter_waits = 0  # rows that wait only for their adapters
        self._bug: BaseException | None = None
        self._wake = asyncio.Event()
        self._progress_at = clock.monotonic()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def wake(self) -> None:
        """Check again: the server may have died while nothing was in flight."""
        self._wake.set()

    @property
    def waiting_for_adapters(self) -> int:
        """The number of rows that wait only for their adapters."""
        return self._adapter_waits

    def recall(self, adapter: Adapter) -> None:
        """Take rows of an adapter out of the engine; they keep their turn."""
        for task, entry in self._in_flight.items():
            if entry.call.adapter == adapter and task.cancel():
                entry.is_recalled = True

    def _limit(self) -> int:
        """The limit of rows in flight."""
        return self._yielding.limit(self._flight.limit, len(self._in_flight), self._clock.monotonic())

    async def run(self) -> None:
        """Run until the feed has ended and every row has its outcome."""
        tuning = asyncio.create_task(self._tune())
        tuning.add_done_callback(self._on_task_end)
        try:
            while not self._is_done():
                if self._lost_calls or not self._host.server.process.is_alive:
                    await self._recover()
                self._hold_back()
                self._send()
                self._load()
                self._take()
                self._media.wake()
                self._raise_bug()
                if not self._is_done():
                    await self._wake.wait()
                    self._wake.clear()
            self._raise_bug()
        finally:
            taking = [self._take_task] if self._take_task else []
            await self._cancel([tuning, *self._in_flight, *self._loading, *taking])
            await self._media.close()
            self._isolation.release(self)
            self._adapter_cache.set_waiting([])

    def _is_done(self) -> bool:
        left = self._queue or self._suspects or self._in_flight or self._lost_calls or self._loading
        return self._ended and not left

    def _raise_bug(self) -> None:
        if (bug := self._bug or self._adapter_cache.bug) is not None:
            raise bug

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_task_end(self, task: asyncio.Task) -> None:
        """Note the unexpected error of a task; `run` raises it."""
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
        self._wake.set()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self._ended or self._take_task is not None:
            return
        limit = self._limit()
        room = limit + self._ahead() - len(self._in_flight) - len(self._queue) - max(0, len(self._loading) - AHEAD_MAX)
        if any(self._deaths.is_over_budget(project) for project in self._suspects.projects()):
            room = min(room, LAST_ROWS)
        if room > 0 and room * TAKE_SHARE >= limit:
            self._take_task = asyncio.create_task(self._take_rows(room))
            self._take_task.add_done_callback(self._on_rows_taken)

    def _ahead(self) -> int:
        """The number of rows to take before they can be sent."""
        return max(AHEAD_MIN, self._flight.limit // 2) if self._adapter_cache.slots_max else 0

    def _on_rows_taken(self, task: asyncio.Task[None]) -> None:
        self._take_task = None
        self._on_task_end(task)

    async def _take_rows(self, room: int) -> None:
        """Take rows and queue their calls. The media of others are loaded first, beside them."""
        rows = await self._feed.take(room)
        self._ended = not rows
        for row in rows:
            self._deaths.record_work(getattr(row.lease, "project", ""))
        self._add([(row, self._calls.read(row)) for row in rows if not has_media(row)])
        for row in filter(has_media, rows):
            task = asyncio.create_task(self._load_media(self._media.begin(row), row))
            self._loading.add(task)
            task.add_done_callback(self._on_loaded)

    async def _load_media(self, loading: LoadingRow, row: Row) -> None:
        """Queue the call of a row once its media are there."""
        try:
            call = await loading.make(self._calls.read)
        except InvalidRow as error:
            call = RowError(error.code, error.message)
        finally:
            loading.close()
        self._add([(row, call)])

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        self._loading.discard(task)
        self._on_task_end(task)

    @property
    def media_note(self) -> str:
        """What keeps media of rows from being loaded; empty: nothing."""
        return self._media.note

    def _media_bytes(self) -> int:
        """Of the calls with media in flight and of those that wait."""
        in_flight = [entry.call for entry in self._in_flight.values()]
        lost = [each.call for each in self._lost_calls]
        calls = (*in_flight, *lost, *self._queue.calls(), *self._suspects.calls)
        return sum(len(call.body) for call in calls if has_media(call.row))

    def _add(self, read: list[tuple[Row, LlmRow | RowError]]) -> None:
        """Queue calls; rows without one get their errors."""
        refused = []
        for row, call in read:
            if isinstance(call, RowError):
                refused.append(Outcome(row, error=call, status=0))
            elif self._deaths.is_refused(call.tracked):
                refused.append(Outcome(row, error=RowError(QUARANTINED, REFUSAL), status=0))
            elif self._deaths.is_suspect(call.tracked):
                self._suspect(call)
            else:
                self._queue.push(call)
        if refused:
            self._sink.put(refused)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Fill the engine, or run suspects in isolation."""
        if self._trial or self._isolation.is_closed(self):
            return
        if self._suspects and self._run_suspects():
            return
        limit = self._limit()
        blocked = self._first_blocked()
        while len(self._in_flight) < limit and (call := self._queue.pop(self._adapter_cache.can_send)) is not None:
            self._start(call)
            if blocked is not None and call.turn > blocked[1]:
                self._overtaken = blocked[0], self._overtaken[1] + 1
        if blocked is not None and self._overtaken[1] > limit:
            self._adapter_cache.vacate_slot(blocked[0])

    # -- suspects ------------------------------------------------------------------------------------------------------

    def _suspect(self, call: LlmRow) -> None:
        self._queue.assign_turn(call)
        self._suspects.add(call)

    def _run_suspects(self) -> bool:
        """Start the next suspects once nothing else is in flight. Returns whether other rows must wait."""
        group = self._suspects.next_group(is_last=self._deaths.is_over_budget, can_send=self._can_run_suspect)
        has_others = bool(self._queue) or bool(self._in_flight)
        is_ours = self._isolation.is_closed() or self._isolation.can_start(has_others=has_others)
        if not group or not is_ours:
            self._isolation.release(self)
            return False
        if not self._isolation.hold(self) or self._in_flight:
            return True
        self._suspects.start(group)
        self._trial = set(group)
        for call in group:
            self._start(call)
        return True

    def _can_run_suspect(self, call: LlmRow) -> bool:
        """Whether a suspect may run: its adapter is loaded, and its project's turn has come."""
        if call.adapter is not None and not self._adapter_cache.can_send(call.adapter):
            return False
        return not self._deaths.is_over_budget(call.project) or self._is_turn_of(call.project)

    def _is_turn_of(self, project: str) -> bool:
        """Whether a project may run suspects: one beyond its budget of deaths only if no other has work."""
        return not (self._deaths.must_wait(project) or self.has_others(project))

    def has_others(self, project: str) -> bool:
        """Whether rows of other projects run or wait, or did so a moment ago."""
        now = self._clock.monotonic()
        calls = [*self._suspects.calls, *(entry.call for entry in self._in_flight.values())]
        for name in {call.project for call in calls} | self._queue.projects():
            if name == project or not self._deaths.is_over_budget(name):
                self._others_at[name] = now
        self._others_at = {name: at for name, at in self._others_at.items() if now - at < QUIET_S}
        return any(name != project for name in self._others_at) or self._isolation.has_live_of_others(project)

    def _hold_back(self) -> None:
        """Hold rows of projects beyond their budget back until their turn."""
        over = self._deaths.over_budget()
        for call in self._queue.take_projects(over) if over else ():
            self._suspects.add(call)
        if isinstance(self._feed, ProjectFeed):
            held_back = frozenset(project for project in over if not self._is_turn_of(project))
            self._feed.hold_back(held_back)
            self._holds_back = bool(held_back)

    def _first_blocked(self) -> tuple[Adapter, int] | None:
        """The first adapter whose rows cannot run, and the turn of the first of them."""
        adapter = next((each for each in self._queue.adapters() if not self._adapter_cache.can_send(each)), None)
        if self._overtaken[0] != adapter:
            self._overtaken = adapter, 0
        return None if adapter is None else (adapter, self._queue.first_turn(adapter))

    def _load(self) -> None:
        """Request the adapters of waiting rows in the rows' order; fail rows whose adapter cannot be loaded."""
        if not self._adapter_cache.slots_max:
            return
        waiting = list(dict.fromkeys([*self._suspects.adapters(), *self._queue.adapters()]))
        for adapter in waiting:
            if why := self._adapter_cache.failure(adapter):
                self._fail_rows(adapter, why)
        self._adapter_cache.set_waiting([adapter for adapter in waiting if not self._adapter_cache.failure(adapter)])
        room = max(0, self._limit() - len(self._in_flight))
        self._adapter_waits = self._queue.mark_late(
            (a for a in waiting if self._queue.waiting(a) and not self._adapter_cache.can_send(a)), room
        )

    def _fail_rows(self, adapter: Adapter, why: str) -> None:
        error = RowError("bad_adapter", why)
        refused = [*self._suspects.take(adapter), *self._queue.take_adapter(adapter)]
        self._sink.put([Outcome(call.row, error=error, status=0) for call in refused])

    def _start(self, call: LlmRow) -> None:
        if not self._in_flight:
            self._progress_at = self._clock.monotonic()
        slot = None
        if call.adapter is not None:
            slot = self._adapter_cache.use(call.adapter)
            self._counts.record_start(call.adapter.name, self._clock.monotonic())
        server = self._host.server
        self._deaths.record_start(server, call.tracked)
        task = asyncio.create_task(self._call(call, server))
        self._in_flight[task] = _InFlight(call, server, slot)
        task.add_done_callback(self._on_call_end)

    def _on_call_end(self, task: asyncio.Task[None]) -> None:
        entry = self._in_flight.pop(task)
        self._on_task_end(task)
        if entry.slot is not None:
            self._counts.record_end(entry.slot.adapter.name, self._clock.monotonic())
            self._adapter_cache.release(entry.slot)
        call = entry.call
        if entry.is_recalled and task.cancelled():
            self._deaths.withdraw(entry.server, call.tracked)
            if call in self._trial:
                self._suspect(call)
            else:
                self._queue.push(call)
        if call in self._trial:
            self._trial.discard(call)
            if not self._trial:
                self._isolation.release(self)

    async def _call(self, call: LlmRow, server: VllmServer) -> None:
        if call.attempts:
            await self._clock.sleep(RETRY_S * 2 ** (call.attempts - 1))
        try:
            status, data = await server.post(call.url, call.body)
        except CallLost as fault:
            cause = RowError("connection_failed", f"the connection to the engine broke: {fault}")
            self._lost_calls.append(_Lost(call, server, cause))
            return
        except ReplyTooLarge as fault:
            self._deaths.record_reply(server, call.tracked)
            self._finish(call, Outcome(call.row, error=RowError("reply_too_large", str(fault)), status=0))
            return
        if call.adapter is not None and (restorer := self._calls.names.restorer(call.adapter)) is not None:
            data = restorer.restore(data)
        reply = read_reply(status, data)
        if is_result(reply) or not (status < 300 or (status >= 500 and status != 501)):
            self._deaths.record_reply(server, call.tracked)
        if is_result(reply):
            self._finish(call, reply.ok(call.row))
        elif status < 300 or (status >= 500 and status != 501):
            self._lost_calls.append(_Lost(call, server, reply.row_error(), _error_outcome(call, reply)))
        elif status == 404 and (reply.error is None or not reply.error.code):
            text = f"the engine does not answer {call.url} for this model; a pooling model may need runner=pooling"
            self._finish(call, Outcome(call.row, reply.body, RowError("url_not_supported", text), status))
        else:
            self._finish(call, _error_outcome(call, reply))

    def _finish(self, call: LlmRow, outcome: Outcome) -> None:
        self._sink.put([outcome])
        if call.adapter is not None:
            self._counts.record_reply(call.adapter.name, outcome.usage, was_loaded=call.adapter_was_loaded)
        self._finished += 1
        self._progress_at = self._clock.monotonic()
        self._host.progressed()

    # -- when calls are lost -------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        server = self._host.server
        if server.process.is_alive and await server.is_healthy():
            self._retry_lost()
            return
        await server.stop()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        self._deaths.record_death(server, server.process.complaint())
        self._isolation.record_death()
        self._queue_suspects()
        await self._host.relaunch()
        self._flight.restarted()
        self._progress_at = self._clock.monotonic()

    def _take_lost_calls(self) -> list[_Lost]:
        lost, self._lost_calls = self._lost_calls, []
        return sorted(lost, key=lambda lost: lost.call.row.position)

    def _retry_lost(self) -> None:
        """Retry lost calls while the server lives: the row caused the fault, or it is temporary."""
        for lost in self._take_lost_calls():
            call = lost.call
            call.attempts += 1
            if call.attempts >= self._limits.attempts_max:
                self._deaths.record_reply(lost.server, call.tracked)
                self._finish(call, lost.outcome or Outcome(call.row, error=lost.cause, status=0))
                continue
            self._deaths.withdraw(lost.server, call.tracked)
            if self._deaths.is_suspect(call.tracked):
                self._suspect(call)
            else:
                self._queue.push(call)

    def _queue_suspects(self) -> None:
        """Queue the rows of a dead server as suspects, to run in small groups, then one by one."""
        for lost in self._take_lost_calls():
            call = lost.call
            call.deaths += 1
            call.must_run_alone = call.must_run_alone or call.deaths > 1 or bool(call.tracked.alone)
            is_over_budget = self._deaths.is_over_budget(call.project)
            if call.tracked.alone >= ALONE_DEATHS_MAX or (is_over_budget and call.tracked.alone and call.deaths > 1):
                complaint = self._host.server.process.complaint()
                message = (
                    f"the engine died {call.deaths} times with this row in flight, the last time with no other: "
                    f"{complaint}"
                )
                self._sink.put([Outcome(call.row, error=RowError("engine_crashed", message), status=0)])
                self._host.gave_up()
            else:
                self._suspect(call)

    # -- watching the engine -------------------------------------------------------------------------------------------

    async def _tune(self) -> None:
        """Follow the server's metrics; end a server that no longer makes progress, so that it is restarted."""
        tokens = -1
        while True:
            await self._clock.sleep(TUNE_S)
            server = self._host.server
            if self._suspects or self._holds_back or self._deaths.over_budget():
                self._wake.set()  # it may be their turn
            is_idle = not (self._in_flight or self._yielding.live or self._flight.gauges.running)
            if is_idle or not server.process.is_alive:
                continue
            gauges = await server.gauges()
            if server is not self._host.server:
                continue
            now = self._clock.monotonic()
            if gauges is not None and not self._in_flight:
                self._flight.gauges = gauges  # of live requests only, which do not show how many rows fit
                self._wake.set()  # rows may run beside them again
            elif gauges is not None:
                if gauges.tokens != tokens:
                    tokens, self._progress_at = gauges.tokens, now
                self._flight.observe(gauges, len(self._in_flight))
                self._yielding.observe(gauges.running, self._finished, now)
                self._wake.set()
            if now - self._progress_at > self._limits.attempt_timeout_s and self._in_flight:
                await server.stop()


def _error_outcome(call: LlmRow, reply: Reply) -> Outcome:
    """The error outcome of a reply, with a stable code."""
    outcome = reply.refused(call.row)
    assert outcome.error is not None
    return replace(outcome, error=RowError(stable_code(outcome.error.code), outcome.error.message))
