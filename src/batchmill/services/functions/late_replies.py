"""Calls whose answers are sent to a URL of the caller's. A promise is in the database before anybody hears of it.

A call that has not begun when this process dies is made by the next one. One that had begun is made again only for a
function that is declared idempotent; otherwise its answer is an error that says so. An answer is sent until it is
taken, or about three days have passed: at least once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import BatchmillError, ModelFailed, TooLarge, Unavailable
from batchmill.ports import Clock
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.outbox import DELAYS_S, GONE, delay_s
from batchmill.services.webhook_sender import DeliveryResult as DeliveryResult
from batchmill.services.webhook_sender import WebhookSender
from batchmill.store.database import Database
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import late_calls
from batchmill.types import Caller, ProjectQuotas, Scope
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget


CALLS_MAX = 10_000  # that wait at once, of all projects
BYTES_MAX = 4 * 1024**3  # of them
PROJECT_BYTES_MAX = 1024**3  # of those of one project


class Order(Struct, frozen=True):
    """How a call is asked, and how its answer is told."""

    frontend: str  # whose words the answer has
    form: str  # of the body
    url: str
    header: str  # that holds the id of the call
    ignores_timeout: bool = False  # a URL that takes long to answer has heard it
    state: str = ""  # of the frontend


class LateCall(Struct, frozen=True):
    """A call as it was written down."""

    id: str
    project: str
    key: str | None
    name: str
    branch: str
    number: int
    order: Order
    body: bytes
    reply: bytes | None = None
    created: float = 0.0
    begun: float | None = None
    attempts: int = 0


_COLUMNS = [late_calls.c[name] for name in LateCall.__struct_fields__]


def insert(db: sa.Connection, call: LateCall, quota: int) -> None:
    """Raises: OverQuota; Unavailable when too many wait, of all projects."""
    way_out = "come again when some have been answered"
    refuse_beyond(db, late_calls, quota, quota="late_calls", project=call.project, way_out=way_out)
    mine = sa.select(sa.func.coalesce(sa.func.sum(late_calls.c.bytes), 0)).where(late_calls.c.project == call.project)
    if (bytes_ := db.execute(mine).scalar_one()) + len(call.body) > PROJECT_BYTES_MAX:
        raise Unavailable(f"{bytes_:,} bytes of this project's calls are to be answered later", code="too_many_bytes")
    waiting, held = db.execute(sa.select(sa.func.count(), sa.func.sum(late_calls.c.bytes))).one()
    if waiting >= CALLS_MAX:
        raise Unavailable(f"{waiting:,} calls are to be answered later; try again", code="too_many_calls")
    if (held or 0) + len(call.body) > BYTES_MAX:
        raise Unavailable(f"{held:,} bytes of calls are to be answered later; try again", code="too_many_bytes")
    values = {name: getattr(call, name) for name in LateCall.__struct_fields__ if name != "order"}
    order = msgspec.json.encode(call.order)
    db.execute(late_calls.insert().values(**values, order=order, bytes=len(call.body), due=call.created))


def due(db: sa.Connection, now: float, taken: Sequence[str], full: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """The ids of calls to go on with and their projects, the longest due first, apart from those in hand.

    Args: full: projects that have their share in hand.
    """
    columns = late_calls.c
    wanted = (columns.due <= now, columns.id.not_in(taken), columns.project.not_in(full))
    query = sa.select(columns.id, columns.project).where(*wanted).order_by(columns.due).limit(limit)
    return [tuple(found) for found in db.execute(query)]


def find(db: sa.Connection, call_id: str) -> LateCall | None:
    found = db.execute(sa.select(*_COLUMNS).where(late_calls.c.id == call_id)).mappings().first()
    if found is None:
        return None
    return LateCall(**{**found, "order": msgspec.json.decode(found["order"], type=Order)})


def begin(db: sa.Connection, call_id: str, now: float | None) -> None:
    """It is being asked; None: it was not, after all."""
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(begun=now))


def answer(db: sa.Connection, call_id: str, reply: bytes, now: float) -> None:
    values = {"reply": reply, "body": b"", "bytes": len(reply), "due": now, "attempts": 0}
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(**values))


def put_off(db: sa.Connection, call_id: str, attempts: int, due: float) -> None:
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(attempts=attempts, due=due))


def forget(db: sa.Connection, call_id: str) -> None:
    """It was told, or given up."""
    db.execute(late_calls.delete().where(late_calls.c.id == call_id))


def count(db: sa.Connection) -> int:
    return db.execute(sa.select(sa.func.count()).select_from(late_calls)).scalar_one()


__all__ = ["LateCall", "LateReplies", "Order"]

BODY_BYTES_MAX = 32 * 1024 * 1024
IN_HAND_MAX = 16  # calls that are made, or answers that are sent, at once
IN_HAND_PROJECT_MAX = 4  # of one project: its slow functions and URLs hold up its own replies alone
LOOK_S = 1.0
DRAIN_S = 10.0  # calls that are being made may end in so long when the server stops
RETRY_S, RETRY_MAX_S = 5.0, 600.0  # a function that cannot be called now is called later

log = logging.getLogger("batchmill.server")

Write = Callable[[LateCall, FunctionReply | BatchmillError], Awaitable[bytes]]


class LateReplies:
    """`open` it once every frontend has said, with `speak`, how its answers are written."""

    def __init__(
        self, database: Database, clock: Clock, functions: FunctionCalls, webhook_sender: WebhookSender,
        quotas: ProjectQuotas = ProjectQuotas(),
    ) -> None:  # fmt: skip
        self._quotas = quotas
        self._database, self._clock, self._functions, self._webhook_sender = database, clock, functions, webhook_sender
        self._steps = ClockSteps(database, clock, late_calls)
        self._writers: dict[str, Write] = {}
        self._in_hand: dict[str, tuple[str, asyncio.Task[None]]] = {}  # call -> its project, task
        self._calling: set[str] = set()
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def speak(self, frontend: str, write: Write) -> None:
        """`write` makes the body that is sent, of an answer or of an error."""
        self._writers[frontend] = write

    async def promise(self, caller: Caller, target: VersionTarget, body: bytes, order: Order) -> str:
        """Write down a call; the id under which its answer will be sent.

        Raises: InvalidInput (`url_not_allowed`), TooLarge, Unavailable when too many wait, StorageFull.
        """
        self._webhook_sender.check(order.url)
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(
                f"a call that is answered later may have {BODY_BYTES_MAX:,} bytes, not {len(body):,}",
                code="request_too_large",
            )
        call = LateCall(
            secrets.token_hex(16), caller.project, caller.key, target.name, target.branch, target.number, order, body,
            created=self._clock.now(),
        )  # fmt: skip
        await self._database.write(insert, call, self._quotas.of(caller.project).late_calls)
        self._wake.set()
        return call.id

    async def count_waiting(self) -> int:
        """Calls that are still to be made, or answers to be taken."""
        return await self._database.read(count)

    def open(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def close(self, *, at_once: bool) -> None:
        """Calls that are being made may end, in a while; answers are sent again by the next process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        tasks = {call_id: task for call_id, (_, task) in self._in_hand.items()}
        for call_id, task in tasks.items():
            if call_id not in self._calling:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=0 if at_once else DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except BatchmillError as error:  # a full disk, above all
                log.warning("late replies wait: %s", error.message)
            except Exception as error:  # the edge of this task: it must not end with one call
                log.error("late replies wait", exc_info=error)
            await self._rest()

    async def _turn(self) -> None:
        """Begin with what is due, of each project up to its share."""
        await self._steps.look()
        while (room := IN_HAND_MAX - len(self._in_hand)) > 0:
            running = Counter(project for project, _ in self._in_hand.values())
            full = [project for project, count in running.items() if count >= IN_HAND_PROJECT_MAX]
            found = await self._database.read(due, self._clock.now(), list(self._in_hand), full, room)
            for call_id, project in found:
                if running[project] < IN_HAND_PROJECT_MAX:
                    running[project] += 1
                    self._begin(call_id, project)
            if len(found) < room:
                return

    def _begin(self, call_id: str, project: str) -> None:
        task = asyncio.create_task(self._go_on(call_id))
        self._in_hand[call_id] = project, task
        task.add_done_callback(lambda _: self._let_go(call_id))

    def _let_go(self, call_id: str) -> None:
        del self._in_hand[call_id]
        self._wake.set()

    async def _rest(self) -> None:
        waits = {asyncio.ensure_future(self._clock.sleep(LOOK_S)), asyncio.ensure_future(self._wake.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)
        self._wake.clear()

    # -- one call ------------------------------------------------------------------------------------------------------

    async def _go_on(self, call_id: str) -> None:
        try:
            call = await self._database.read(find, call_id)
            if call is None:
                return
            if call.reply is None:
                await self._answer(call)
            else:
                await self._send(call, call.reply)
        except BatchmillError as error:  # what is written down stays so, and is gone on with
            log.warning("the late reply %s waits: %s", call_id, error.message)
            await self._clock.sleep(RETRY_S)
        except Exception as error:  # the edge of one call
            log.error("the late reply %s waits", call_id, exc_info=error)
            await self._clock.sleep(RETRY_S)

    async def _answer(self, call: LateCall) -> None:
        self._calling.add(call.id)
        try:
            try:
                answered: FunctionReply | BatchmillError = await self._ask(call)
            except Unavailable as error:
                if call.attempts < len(DELAYS_S):
                    return await self._put_off(call, error)
                answered = error
            except BatchmillError as error:
                answered = error
            reply = await self._writers[call.order.frontend](call, answered)
            await self._database.write(answer, call.id, reply, self._clock.now())
        finally:
            self._calling.discard(call.id)

    async def _ask(self, call: LateCall) -> FunctionReply:
        caller = Caller(call.project, Scope.SUBMIT, call.key)
        target = self._functions.find(caller, call.name, call.branch, str(call.number))
        function = target.model.function
        if call.begun is not None and not (function is not None and function.is_idempotent):
            raise ModelFailed(
                "the server ended while the function ran, and it is not declared idempotent: it is not called again",
                code="worker_crashed",
            )
        await self._database.write(begin, call.id, self._clock.now())
        return await self._functions.ask(caller, target, call.order.form, call.body)

    async def _put_off(self, call: LateCall, error: Unavailable) -> None:
        """It was not called: that is done later."""
        log.info("the late call %s waits: %s", call.id, error.message)
        await self._database.write(begin, call.id, None)
        due = self._clock.now() + min(RETRY_S * 2**call.attempts, RETRY_MAX_S)
        await self._database.write(put_off, call.id, call.attempts + 1, due)

    async def _send(self, call: LateCall, reply: bytes) -> None:
        order = call.order
        result = await self._webhook_sender.deliver(order.url, call.id, reply, (), headers={order.header: call.id})
        attempts = call.attempts + 1
        if not result.failure or (result.is_late and order.ignores_timeout):
            await self._database.write(forget, call.id)
        elif attempts > len(DELAYS_S) or result.status == GONE:
            log.warning("the late reply %s is given up: %s", call.id, result.failure)
            await self._database.write(forget, call.id)
        else:
            await self._database.write(put_off, call.id, attempts, self._next(call.id, attempts, result))

    def _next(self, call_id: str, attempts: int, result: DeliveryResult) -> float:
        return self._clock.now() + delay_s(call_id, attempts, result.rest_s)
