"""The outbox of webhook events: makes events from ended jobs and sends them until they are delivered or given up.

An event is in the database before it is sent and is settled only by an endpoint's reply, so that it is delivered at
least once, even if this process crashes. A failing endpoint delays only its own events.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import BatchmillError, StorageFull
from batchmill.ports.clock import Clock
from batchmill.ports.jobs import Jobs
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.files.files import FileService
from batchmill.services.webhooks import endpoints as events
from batchmill.services.webhooks.endpoints import EndedJob, WebhookService
from batchmill.services.webhooks.sender import DeliveryResult
from batchmill.states import ENDED
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import jobs, outbox

KEPT_S = 3 * 86_400.0  # the age at which a delivered or given up event is deleted


class DueEvent(Struct, frozen=True):
    """An event that is due."""

    id: str
    endpoint: str
    payload: bytes
    attempts: int
    created: float
    project: str


class AttemptOutcome(Struct, frozen=True):
    """The outcome of one attempt. `due` None: there will be no other attempt."""

    id: str
    attempts: int
    due: float | None
    delivered: float | None
    failure: str


class _Spec(Struct):
    """The part of a job's spec that an event needs."""

    origin: dict[str, Any] | None = None


def unannounced(db: sa.Connection, limit: int) -> list[EndedJob]:
    """Return ended jobs without an event yet, in the order of their end."""
    columns = jobs.c
    query = (
        sa.select(
            columns.id,
            columns.generation,
            columns.state,
            columns.created,
            columns.finished,
            columns.project,
            columns.spec,
        )  # fmt: skip
        .where(columns.announced <= columns.generation, columns.state.in_(ENDED))
        .order_by(columns.finished, columns.id)
        .limit(limit)
    )
    return [_ended_job(row) for row in db.execute(query)]


def _ended_job(row: sa.Row) -> EndedJob:
    origin = msgspec.json.decode(row.spec, type=_Spec).origin or {}
    frontend, trace = origin.get("frontend"), origin.get("traceparent")
    finished = row.created if row.finished is None else row.finished
    return EndedJob(row.id, row.generation, row.state, row.created, finished, row.project, frontend, trace)


_ANNOUNCE = CompiledStatement(  # no view of a job has `announced`, so that records in memory stay
    jobs.update()
    .where(
        sa.tuple_(jobs.c.id, jobs.c.generation, jobs.c.state).in_(sa.bindparam("ended", expanding=True)),
        jobs.c.announced <= jobs.c.generation,
    )
    .values(announced=jobs.c.generation + 1)
    .returning(jobs.c.id)
)


def announce(
    db: sa.Connection,
    ended_jobs: Sequence[EndedJob],
    now: float,
    endpoints_for: Callable[[sa.Connection, str, str], list[str]],
) -> list[EndedJob]:
    """Put the events of ended jobs into the outbox and mark the jobs as announced. Returns the newly marked ones."""
    keys = [(ended.job, ended.generation, ended.state) for ended in ended_jobs]
    marked = {job for (job,) in _ANNOUNCE.rows(db, {"ended": keys})}
    new = [ended for ended in ended_jobs if ended.job in marked]  # others were retried meanwhile, or are announced
    endpoints: dict[tuple[str, str], list[str]] = {}  # of (project, type)
    for ended in new:
        if ended.type is not None:
            if (key := (ended.project, ended.type)) not in endpoints:
                endpoints[key] = endpoints_for(db, *key)
            _put(db, ended, now, endpoints[key])
    return new


def _put(db: sa.Connection, ended: EndedJob, now: float, endpoints: Iterable[str]) -> None:
    event = events.event_of(ended)
    for endpoint in endpoints:
        message = events.message_id(event, endpoint)
        if db.execute(sa.select(outbox.c.id).where(outbox.c.id == message)).first() is None:
            db.execute(
                outbox.insert().values(
                    id=message, endpoint=endpoint, project=ended.project, type=event.type,
                    payload=events.payload_of(event), created=now, due=now,
                )
            )  # fmt: skip


def due(
    db: sa.Connection, now: float, busy: Sequence[str], full: Sequence[str], sending: Sequence[str], limit: int
) -> list[DueEvent]:
    """Return events to send now, the longest due first.

    Args:
        busy: endpoints that cannot take another event now.
        full: projects that have reached their number of concurrent deliveries.
        sending: ids of events that are being sent.
    """
    columns = outbox.c
    is_free = columns.endpoint.not_in(busy) & columns.project.not_in(full)
    query = (
        sa.select(*(columns[name] for name in DueEvent.__struct_fields__))
        .where(columns.due <= now, is_free, columns.id.not_in(sending))
        .order_by(columns.due)
        .limit(limit)
    )
    return [DueEvent(*row) for row in db.execute(query)]


def settle(db: sa.Connection, outcomes: Sequence[AttemptOutcome]) -> None:
    """Store the outcomes of attempts."""
    for outcome in outcomes:
        values = {
            "attempts": outcome.attempts,
            "due": outcome.due,
            "delivered": outcome.delivered,
            "failure": outcome.failure,
        }
        db.execute(outbox.update().where(outbox.c.id == outcome.id).values(**values))


def sweep(db: sa.Connection, now: float) -> None:
    """Delete events that were settled long ago."""
    db.execute(outbox.delete().where(outbox.c.due.is_(None), outbox.c.created < now - KEPT_S))


def count_waiting(db: sa.Connection) -> int:
    return db.execute(sa.select(sa.func.count()).where(outbox.c.due >= 0)).scalar_one()


# Seconds between attempts. After the last one, an event is given up, about three days old.
DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
SPREAD = 0.1  # of a delay, so that events that failed together are not retried together
POLL_S = 1.0
PAGE = 100  # jobs or events per query
SENDING_MAX = 64
SENDING_EACH_MAX = 4  # to one endpoint
SENDING_PROJECT_MAX = 16  # to all endpoints of one project, so that slow ones delay only its own events
HOLD_MAX_S = 60.0  # a failing endpoint gets one event at a time, at most this far apart
SWEEP_S = 3600.0
GONE = 410  # the endpoint does not want this event

logger = logging.getLogger(__name__)


class _EndpointHealth(Struct):
    """The recent failures of an endpoint."""

    failures: int = 0  # in a row
    free_at: float = 0.0  # monotonic


class _Sending(Struct, frozen=True):
    """A delivery under way."""

    endpoint: str
    project: str
    task: asyncio.Task[None]


class Outbox:
    """Call `run` as a task. `counts` has the attempts so far by outcome."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        webhooks: WebhookService,
        jobs: Jobs,
        files: FileService,
        on_ended: Callable[[EndedJob], None] | None = None,
    ) -> None:
        """Args: `on_ended`: is called once for each end of a job, even if no endpoint gets its event."""
        self._database, self._clock = database, clock
        self._steps = ClockSteps(database, clock, outbox)
        self._webhooks, self._jobs, self._files, self._on_ended = webhooks, jobs, files, on_ended
        self._sending: dict[str, _Sending] = {}  # by message
        self._outcomes: deque[AttemptOutcome] = deque()
        self._health: dict[str, _EndpointHealth] = {}
        self._wake = asyncio.Event()
        self._swept = 0.0
        self.counts: Counter[str] = Counter(delivered=0, failed=0, given_up=0)

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.run_once()
                except BatchmillError as error:  # most often a full disk: unwritten outcomes stay in memory
                    logger.warning("webhook events are delayed: %s", error.message)
                except Exception as error:  # the edge of this task: one event must not end it
                    logger.error("webhook events are delayed", exc_info=error)
                await self._wait()
        finally:
            tasks = [each.task for each in self._sending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run_once(self) -> None:
        """Store the outcomes of attempts, make events of ended jobs, and start to send due events."""
        await self._steps.check()
        await self._settle()
        await self._announce()
        await self._send_due()
        if self._clock.monotonic() - self._swept >= SWEEP_S:
            self._swept = self._clock.monotonic()
            await self._database.write(sweep, self._clock.now())

    async def _wait(self) -> None:
        """Wait until an attempt ends or the next poll is due."""
        waits = {asyncio.ensure_future(self._clock.sleep(POLL_S)), asyncio.ensure_future(self._wake.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)  # also delivers a cancellation of `run` at this moment
        self._wake.clear()

    # -- ended jobs ---------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        ended_jobs = await self._database.read(unannounced, PAGE)
        if not ended_jobs:
            return
        ready: list[EndedJob] = []
        heard = await self._database.read(self._heard, {(each.project, each.type) for each in ended_jobs})
        for ended in ended_jobs:
            try:
                if (ended.project, ended.type) in heard:
                    await self._files.adopt_results(await self._jobs.show(ended.job))  # before its event is sent
            except StorageFull:
                break  # its results cannot be downloaded yet
            except BatchmillError as error:  # a request for the job gets the same error
                logger.warning("the results of %s are not ready: %s", ended.job, error.message)
            ready.append(ended)
        if not ready:
            return
        announced = await self._database.write(announce, ready, self._clock.now(), self._webhooks.endpoints_for)
        if len(ended_jobs) == PAGE:
            self._wake.set()
        for ended in announced if self._on_ended is not None else ():
            self._on_ended(ended)

    def _heard(self, db: sa.Connection, ends: set[tuple[str, str | None]]) -> set[tuple[str, str | None]]:
        """Return those of (project, type of event) that an endpoint listens to."""
        return {end for end in ends if end[1] is not None and self._webhooks.endpoints_for(db, end[0], end[1])}

    # -- due events ---------------------------------------------------------------------------------------------------

    async def _send_due(self) -> None:
        while len(self._sending) < SENDING_MAX:
            now, busy, full = self._clock.now(), self._busy(), self._full()
            events_due = await self._database.read(due, now, busy, full, list(self._sending), PAGE)
            started = [each for each in events_due if self._start(each)]
            if not started:
                return

    def _busy(self) -> list[str]:
        """Return the endpoints that cannot take another event now."""
        running = Counter(each.endpoint for each in self._sending.values())
        return [each for each in {*running, *self._health} if not self._has_room(each, running[each])]

    def _full(self) -> list[str]:
        """Return the projects that have reached their number of concurrent deliveries."""
        running = Counter(each.project for each in self._sending.values())
        return [project for project, count in running.items() if count >= SENDING_PROJECT_MAX]

    def _has_room(self, endpoint: str, running: int) -> bool:
        health = self._health.get(endpoint)
        if health is None:
            return running < SENDING_EACH_MAX
        return running == 0 and health.free_at <= self._clock.monotonic()

    def _start(self, event: DueEvent) -> bool:
        running = sum(event.endpoint == each.endpoint for each in self._sending.values())
        is_full = len(self._sending) >= SENDING_MAX or event.project in self._full()
        if is_full or not self._has_room(event.endpoint, running):
            return False
        self._sending[event.id] = _Sending(event.endpoint, event.project, asyncio.create_task(self._send(event)))
        return True

    async def _send(self, event: DueEvent) -> None:
        result = await self._deliver(event)
        if result is not None and not result.failure:
            self._health.pop(event.endpoint, None)
        elif result is not None:
            health = self._health.setdefault(event.endpoint, _EndpointHealth())
            health.failures += 1
            hold_s = max(min(2.0**health.failures / 2, HOLD_MAX_S), min(result.retry_after_s, HOLD_MAX_S))
            health.free_at = self._clock.monotonic() + hold_s
        self._outcomes.append(self._outcome(event, result))
        self._wake.set()

    async def _deliver(self, event: DueEvent) -> DeliveryResult | None:
        """Send an event. Returns None if the endpoint was deleted."""
        try:
            target = await self._webhooks.delivery_target(event.endpoint)
            return None if target is None else await self._webhooks.deliver(target, event.id, event.payload)
        except BatchmillError as error:  # most often a secret that cannot be read
            return DeliveryResult(failure=error.message)
        except Exception as error:  # the edge of a delivery: the event is retried like any other
            logger.error("the event %s could not be sent", event.id, exc_info=error)
            return DeliveryResult(failure="it could not be sent")

    def _outcome(self, event: DueEvent, result: DeliveryResult | None) -> AttemptOutcome:
        attempts, now = event.attempts + 1, self._clock.now()
        if result is None:
            return AttemptOutcome(event.id, event.attempts, None, None, "the endpoint is no longer registered")
        if not result.failure:
            self.counts["delivered"] += 1
            return AttemptOutcome(event.id, attempts, None, now, "")
        self.counts["failed"] += 1
        if attempts > len(DELAYS_S) or result.status == GONE:
            self.counts["given_up"] += 1
            logger.warning("the event %s to %s is given up: %s", event.id, event.endpoint, result.failure)
            return AttemptOutcome(event.id, attempts, None, None, result.failure)
        return AttemptOutcome(
            event.id, attempts, now + delay_s(event.id, attempts, result.retry_after_s), None, result.failure
        )

    async def _settle(self) -> None:
        """Store outcomes, and only then forget their events."""
        outcomes = list(self._outcomes)
        if outcomes:
            await self._database.write(settle, outcomes)
            for each in outcomes:
                self._outcomes.popleft()
                self._sending.pop(each.id, None)

    async def count_waiting(self) -> int:
        """Return the number of events that are not settled."""
        return await self._database.read(count_waiting)


def delay_s(message_id: str, attempts: int, retry_after_s: float = 0.0) -> float:
    """Return the delay after attempt number `attempts`. An endpoint may ask for a longer one."""
    fraction = int(message_id[-4:], 16) / 0xFFFF  # from the id's hexadecimal digits: the same for the same event
    return max(DELAYS_S[attempts - 1] * (1 + SPREAD * fraction), retry_after_s)
