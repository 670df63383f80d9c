"""Events on their way: made from jobs that came to rest, sent until an endpoint takes them or a day has passed often.

An event is in the database before anybody is told anything, and leaves it only by what an endpoint said: it is sent
at least once, however often this process dies. Endpoints that fail hold up nobody but themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable

from msgspec import Struct

from batchmill.errors import BatchmillError, StorageFull
from batchmill.ports import Clock, Jobs
from batchmill.services import outbox_records as records
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.courier import Answer
from batchmill.services.events import Ended
from batchmill.services.files import FileService
from batchmill.services.outbox_records import Settled, Waiting
from batchmill.services.webhooks import WebhookService
from batchmill.store.database import Database
from batchmill.store.service_tables import outbox

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
        heard: Callable[[Ended], None] | None = None,
    ) -> None:
        """`heard` is called once for each end of a job, whoever is told of it."""
        self._database, self._clock = database, clock
        self._steps = ClockSteps(database, clock, outbox)
        self._webhooks, self._jobs, self._files, self._heard = webhooks, jobs, files, heard
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
            await self._database.write(records.sweep, self._clock.now())

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
        ends = await self._database.read(records.unannounced, PAGE)
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
        told = await self._database.write(records.announce, ready, self._clock.now(), self._webhooks.listening)
        if len(ends) == PAGE:
            self._wake.set()
        for ended in told if self._heard is not None else ():
            self._heard(ended)

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
            found = await self._database.read(records.due, now, busy, full, list(self._sending), PAGE)
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

    def _begin(self, event: Waiting) -> bool:
        running = sum(event.endpoint == each.endpoint for each in self._sending.values())
        is_full = len(self._sending) >= SENDING_MAX or event.project in self._full()
        if is_full or not self._has_room(event.endpoint, running):
            return False
        self._sending[event.id] = _Sending(event.endpoint, event.project, asyncio.create_task(self._send(event)))
        return True

    async def _send(self, event: Waiting) -> None:
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

    async def _deliver(self, event: Waiting) -> Answer | None:
        """None where there is no such endpoint any more."""
        try:
            listener = await self._webhooks.listener(event.endpoint)
            return None if listener is None else await self._webhooks.deliver(listener, event.id, event.payload)
        except BatchmillError as error:  # above all: its secret cannot be read
            return Answer(failure=error.message)
        except Exception as error:  # the edge of a delivery: the event is tried again like any other
            logger.error("the event %s could not be sent", event.id, exc_info=error)
            return Answer(failure="it could not be sent")

    def _outcome(self, event: Waiting, answer: Answer | None) -> Settled:
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
            await self._database.write(records.settle, written)
            for each in written:
                self._settled.popleft()
                self._sending.pop(each.id, None)

    async def count_waiting(self) -> int:
        """Events that are still to be taken."""
        return await self._database.read(records.count_waiting)


def delay_s(message_id: str, attempts: int, rest_s: float = 0.0) -> float:
    """How long after its attempt number `attempts` an event is tried again; an endpoint may ask for more."""
    part = int(message_id[-4:], 16) / 0xFFFF  # of an id's hexadecimal digits: the same for the same event
    return max(DELAYS_S[attempts - 1] * (1 + SPREAD * part), rest_s)
