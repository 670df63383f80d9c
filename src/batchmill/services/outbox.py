"""Events on their way: made from jobs that came to rest, sent until an endpoint takes them or a day has passed often.

An event is in the database before anybody is told anything, and leaves it only by what an endpoint said: it is sent
at least once, however often this process dies. Endpoints that fail hold up nobody but themselves.
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
from batchmill.ports import Clock, Jobs
from batchmill.services import webhooks as events
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.files import FileService
from batchmill.services.webhook_sender import DeliveryResult
from batchmill.services.webhooks import Ended, WebhookService
from batchmill.states import ENDED
from batchmill.store.database import Database
from batchmill.store.tables import jobs, outbox

KEPT_S = 3 * 86_400.0  # an event that was delivered, or given up, is forgotten then


class DueEvent(Struct, frozen=True):
    """An event that is due."""

    id: str
    endpoint: str
    payload: bytes
    attempts: int
    created: float
    project: str


class Settled(Struct, frozen=True):
    """What came of one attempt. `due` None: there will be no other."""

    id: str
    attempts: int
    due: float | None
    delivered: float | None
    failure: str


class _Spec(Struct):
    """What of a job's description an event needs."""

    origin: dict[str, Any] | None = None


def unannounced(db: sa.Connection, limit: int) -> list[Ended]:
    """Jobs at rest of which nobody was told, those first that ended first."""
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
        .order_by(columns.finished)
        .limit(limit)
    )
    return [_ended(found) for found in db.execute(query)]


def _ended(found: sa.Row) -> Ended:
    origin = msgspec.json.decode(found.spec, type=_Spec).origin or {}
    frontend, trace = origin.get("frontend"), origin.get("traceparent")
    finished = found.created if found.finished is None else found.finished
    return Ended(found.id, found.generation, found.state, found.created, finished, found.project, frontend, trace)


def announce(
    db: sa.Connection, ends: Sequence[Ended], now: float, listening: Callable[[sa.Connection, str, str], list[str]]
) -> list[Ended]:
    """Put the events of these ends into the outbox and mark them as announced; returns those that are new."""
    new = []
    for ended in ends:
        still = (jobs.c.id == ended.job) & (jobs.c.generation == ended.generation) & (jobs.c.state == ended.state)
        mark = jobs.update().where(still, jobs.c.announced <= ended.generation).values(announced=ended.generation + 1)
        if db.execute(mark).rowcount == 0:
            continue  # it was opened again meanwhile, or is announced
        new.append(ended)
        if ended.type is not None:
            _put(db, ended, now, listening(db, ended.project, ended.type))
    return new


def _put(db: sa.Connection, ended: Ended, now: float, endpoints: Iterable[str]) -> None:
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
    db: sa.Connection, now: float, busy: Sequence[str], full: Sequence[str], taken: Sequence[str], limit: int
) -> list[DueEvent]:
    """Events to be sent now, the longest due first, apart from those in hand (`taken`).

    Args:
        busy: endpoints that take nothing more now.
        full: projects that have their share of deliveries under way.
    """
    columns = outbox.c
    is_free = columns.endpoint.not_in(busy) & columns.project.not_in(full)
    query = (
        sa.select(*(columns[name] for name in DueEvent.__struct_fields__))
        .where(columns.due <= now, is_free, columns.id.not_in(taken))
        .order_by(columns.due)
        .limit(limit)
    )
    return [DueEvent(*found) for found in db.execute(query)]


def settle(db: sa.Connection, settled: Sequence[Settled]) -> None:
    """Write down what came of attempts."""
    for each in settled:
        values = {"attempts": each.attempts, "due": each.due, "delivered": each.delivered, "failure": each.failure}
        db.execute(outbox.update().where(outbox.c.id == each.id).values(**values))


def sweep(db: sa.Connection, now: float) -> None:
    """Forget what was settled long ago."""
    db.execute(outbox.delete().where(outbox.c.due.is_(None), outbox.c.created < now - KEPT_S))


def count_waiting(db: sa.Connection) -> int:
    return db.execute(sa.select(sa.func.count()).where(outbox.c.due >= 0)).scalar_one()


# Seconds between one attempt and the next; after the last one an event is given up, about three days old.
DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
SPREAD = 0.1  # of a delay, so that what failed together does not come back together
LOOK_S = 1.0
PAGE = 100  # jobs, or events, looked at in one go
SENDING_MAX = 64
SENDING_EACH_MAX = 4  # to one endpoint
SENDING_PROJECT_MAX = 16  # to all endpoints of one project: its slow ones hold up its own events alone
HOLD_MAX_S = 60.0  # an endpoint that fails is tried with one event at a time, this far apart at most
SWEEP_S = 3600.0
GONE = 410  # the endpoint wants no more of this

logger = logging.getLogger(__name__)


class _Standing(Struct):
    """How an endpoint did lately."""

    failures: int = 0  # in a row
    free_at: float = 0.0  # monotonic


class _Sending(Struct, frozen=True):
    """A delivery under way."""

    endpoint: str
    project: str
    task: asyncio.Task[None]


class Outbox:
    """`run` until it is cancelled. `counts` has the attempts so far by what came of them."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        webhooks: WebhookService,
        jobs: Jobs,
        files: FileService,
        on_ended: Callable[[Ended], None] | None = None,
    ) -> None:
        """`on_ended` is called once for each end of a job, whoever is told of it."""
        self._database, self._clock = database, clock
        self._steps = ClockSteps(database, clock, outbox)
        self._webhooks, self._jobs, self._files, self._on_ended = webhooks, jobs, files, on_ended
        self._sending: dict[str, _Sending] = {}  # by message
        self._settled: deque[Settled] = deque()
        self._standing: dict[str, _Standing] = {}
        self._wake = asyncio.Event()
        self._swept = 0.0
        self.counts: Counter[str] = Counter(delivered=0, failed=0, given_up=0)

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.turn()
                except BatchmillError as error:  # a full disk, above all: what is to be written stays in hand
                    logger.warning("webhooks wait: %s", error.message)
                except Exception as error:  # the edge of this task: it must not end with one event
                    logger.error("webhooks wait", exc_info=error)
                await self._rest()
        finally:
            tasks = [each.task for each in self._sending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def turn(self) -> None:
        """Write down what came of attempts, tell of jobs that ended, and begin to send what is due."""
        await self._steps.look()
        await self._settle()
        await self._announce()
        await self._send_due()
        if self._clock.monotonic() - self._swept >= SWEEP_S:
            self._swept = self._clock.monotonic()
            await self._database.write(sweep, self._clock.now())

    async def _rest(self) -> None:
        """Until an attempt ends, or it is time to look again."""
        waits = {asyncio.ensure_future(self._clock.sleep(LOOK_S)), asyncio.ensure_future(self._wake.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)  # whoever ends `run` in this very moment is heard
        self._wake.clear()

    # -- what ended ---------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        ends = await self._database.read(unannounced, PAGE)
        ready: list[Ended] = []
        for ended in ends:
            try:
                await self._adopt(ended)
            except StorageFull:
                break  # its results cannot be downloaded yet
            except BatchmillError as error:  # asking for the job will say the same
                logger.warning("the results of %s are not ready: %s", ended.job, error.message)
            ready.append(ended)
        if not ready:
            return
        announced = await self._database.write(announce, ready, self._clock.now(), self._webhooks.listening)
        if len(ends) == PAGE:
            self._wake.set()
        for ended in announced if self._on_ended is not None else ():
            self._on_ended(ended)

    async def _adopt(self, ended: Ended) -> None:
        """Have its result files ready for whoever is told."""
        if ended.type is None:
            return
        if await self._database.read(self._webhooks.listening, ended.project, ended.type):
            await self._files.adopt_results(await self._jobs.show(ended.job))

    # -- what is due --------------------------------------------------------------------------------------------------

    async def _send_due(self) -> None:
        while len(self._sending) < SENDING_MAX:
            now, busy, full = self._clock.now(), self._busy(), self._full()
            found = await self._database.read(due, now, busy, full, list(self._sending), PAGE)
            begun = [each for each in found if self._begin(each)]
            if not begun:
                return

    def _busy(self) -> list[str]:
        """The endpoints that take nothing more now."""
        running = Counter(each.endpoint for each in self._sending.values())
        return [each for each in {*running, *self._standing} if not self._has_room(each, running[each])]

    def _full(self) -> list[str]:
        """The projects that have their share under way."""
        running = Counter(each.project for each in self._sending.values())
        return [project for project, count in running.items() if count >= SENDING_PROJECT_MAX]

    def _has_room(self, endpoint: str, running: int) -> bool:
        standing = self._standing.get(endpoint)
        if standing is None:
            return running < SENDING_EACH_MAX
        return running == 0 and standing.free_at <= self._clock.monotonic()

    def _begin(self, event: DueEvent) -> bool:
        running = sum(event.endpoint == each.endpoint for each in self._sending.values())
        is_full = len(self._sending) >= SENDING_MAX or event.project in self._full()
        if is_full or not self._has_room(event.endpoint, running):
            return False
        self._sending[event.id] = _Sending(event.endpoint, event.project, asyncio.create_task(self._send(event)))
        return True

    async def _send(self, event: DueEvent) -> None:
        answer = await self._deliver(event)
        if answer is not None and not answer.failure:
            self._standing.pop(event.endpoint, None)
        elif answer is not None:
            standing = self._standing.setdefault(event.endpoint, _Standing())
            standing.failures += 1
            held = max(min(2.0**standing.failures / 2, HOLD_MAX_S), min(answer.rest_s, HOLD_MAX_S))
            standing.free_at = self._clock.monotonic() + held
        self._settled.append(self._outcome(event, answer))
        self._wake.set()

    async def _deliver(self, event: DueEvent) -> DeliveryResult | None:
        """None where there is no such endpoint any more."""
        try:
            listener = await self._webhooks.listener(event.endpoint)
            return None if listener is None else await self._webhooks.deliver(listener, event.id, event.payload)
        except BatchmillError as error:  # above all: its secret cannot be read
            return DeliveryResult(failure=error.message)
        except Exception as error:  # the edge of a delivery: the event is tried again like any other
            logger.error("the event %s could not be sent", event.id, exc_info=error)
            return DeliveryResult(failure="it could not be sent")

    def _outcome(self, event: DueEvent, answer: DeliveryResult | None) -> Settled:
        attempts, now = event.attempts + 1, self._clock.now()
        if answer is None:
            return Settled(event.id, event.attempts, None, None, "the endpoint is no longer registered")
        if not answer.failure:
            self.counts["delivered"] += 1
            return Settled(event.id, attempts, None, now, "")
        self.counts["failed"] += 1
        if attempts > len(DELAYS_S) or answer.status == GONE:
            self.counts["given_up"] += 1
            logger.warning("the event %s to %s is given up: %s", event.id, event.endpoint, answer.failure)
            return Settled(event.id, attempts, None, None, answer.failure)
        return Settled(event.id, attempts, now + delay_s(event.id, attempts, answer.rest_s), None, answer.failure)

    async def _settle(self) -> None:
        """Write outcomes down, and only then let go of their events."""
        written = list(self._settled)
        if written:
            await self._database.write(settle, written)
            for each in written:
                self._settled.popleft()
                self._sending.pop(each.id, None)

    async def count_waiting(self) -> int:
        """Events that are still to be taken."""
        return await self._database.read(count_waiting)


def delay_s(message_id: str, attempts: int, rest_s: float = 0.0) -> float:
    """How long after its attempt number `attempts` an event is tried again; an endpoint may ask for more."""
    part = int(message_id[-4:], 16) / 0xFFFF  # of an id's hexadecimal digits: the same for the same event
    return max(DELAYS_S[attempts - 1] * (1 + SPREAD * part), rest_s)
