"""Calls whose replies are sent to a URL of the caller. A call is in the database before it is acknowledged.

The next process makes a call that has not started when this process dies. It repeats a started call only if the
function is declared idempotent; otherwise the reply is an error that says so. A reply is sent at least once: until the
URL accepts it, or for about three days.
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
from batchmill.ports.clock import Clock
from batchmill.services.clock_steps import ClockSteps
from batchmill.services.webhooks.outbox import DELAYS_S, GONE, delay_s
from batchmill.services.webhooks.sender import DeliveryResult as DeliveryResult
from batchmill.services.webhooks.sender import WebhookSender
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import late_calls
from batchmill.types import Caller, ProjectQuotas, Scope
from batchmill.wire.messages import FunctionReply

if TYPE_CHECKING:
    from batchmill.services.functions.calls import FunctionCalls, VersionTarget


CALLS_MAX = 10_000  # stored calls, of all projects
BYTES_MAX = 4 * 1024**3  # their bytes
PROJECT_BYTES_MAX = 1024**3  # bytes of the stored calls of one project


class LateCallOptions(Struct, frozen=True):
    """How a call is made, and how its reply is sent."""

    frontend: str  # whose format the reply has
    form: str  # of the body
    url: str
    header: str  # the name of the header with the id of the call
    ignores_timeout: bool = False  # a URL that answers too late has received the reply
    state: str = ""  # of the frontend


class LateCall(Struct, frozen=True):
    """A stored call."""

    id: str
    project: str
    key: str | None
    name: str
    branch: str
    number: int
    order: LateCallOptions
    body: bytes
    reply: bytes | None = None
    created: float = 0.0
    begun: float | None = None
    attempts: int = 0


_COLUMNS = [late_calls.c[name] for name in LateCall.__struct_fields__]


def insert(db: sa.Connection, call: LateCall, quota: int) -> None:
    """Store a call. Raises: OverQuota; Unavailable when too many calls wait, of all projects."""
    way_out = "try again after some of them were answered"
    refuse_beyond(db, late_calls, quota, quota="late_calls", project=call.project, way_out=way_out)
    project_bytes = sa.select(sa.func.coalesce(sa.func.sum(late_calls.c.bytes), 0)).where(
        late_calls.c.project == call.project
    )
    if (size_bytes := db.execute(project_bytes).scalar_one()) + len(call.body) > PROJECT_BYTES_MAX:
        raise Unavailable(f"calls of this project with {size_bytes:,} bytes wait for replies", code="too_many_bytes")
    call_count, total_bytes = db.execute(sa.select(sa.func.count(), sa.func.sum(late_calls.c.bytes))).one()
    if call_count >= CALLS_MAX:
        raise Unavailable(f"{call_count:,} calls wait for replies; try again later", code="too_many_calls")
    if (total_bytes or 0) + len(call.body) > BYTES_MAX:
        raise Unavailable(f"calls with {total_bytes:,} bytes wait for replies; try again later", code="too_many_bytes")
    values = {name: getattr(call, name) for name in LateCall.__struct_fields__ if name != "order"}
    order = msgspec.json.encode(call.order)
    db.execute(late_calls.insert().values(**values, order=order, bytes=len(call.body), due=call.created))


def due(
    db: sa.Connection, now: float, running: Sequence[str], full: Sequence[str], limit: int
) -> list[tuple[str, str]]:
    """The ids and projects of calls that are due, the longest due first.

    Args:
        running: ids of calls to leave out.
        full: projects to leave out, because they have their share running.
    """
    columns = late_calls.c
    conditions = (columns.due <= now, columns.id.not_in(running), columns.project.not_in(full))
    query = sa.select(columns.id, columns.project).where(*conditions).order_by(columns.due).limit(limit)
    return [tuple(row) for row in db.execute(query)]


def find(db: sa.Connection, call_id: str) -> LateCall | None:
    row = db.execute(sa.select(*_COLUMNS).where(late_calls.c.id == call_id)).mappings().first()
    if row is None:
        return None
    return LateCall(**{**row, "order": msgspec.json.decode(row["order"], type=LateCallOptions)})


def begin(db: sa.Connection, call_id: str, now: float | None) -> None:
    """Record when a call was made. None: the call was not made."""
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(begun=now))


def answer(db: sa.Connection, call_id: str, reply: bytes, now: float) -> None:
    values = {"reply": reply, "body": b"", "bytes": len(reply), "due": now, "attempts": 0}
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(**values))


def postpone(db: sa.Connection, call_id: str, attempts: int, due: float) -> None:
    db.execute(late_calls.update().where(late_calls.c.id == call_id).values(attempts=attempts, due=due))


def forget(db: sa.Connection, call_id: str) -> None:
    """Delete a call whose reply was sent or given up."""
    db.execute(late_calls.delete().where(late_calls.c.id == call_id))


def count(db: sa.Connection) -> int:
    return db.execute(sa.select(sa.func.count()).select_from(late_calls)).scalar_one()


__all__ = ["LateCall", "LateCallOptions", "LateReplies"]

BODY_BYTES_MAX = 32 * 1024 * 1024
RUNNING_MAX = 16  # calls being made or replies being sent at once
RUNNING_PROJECT_MAX = 4  # of one project, so that its slow functions and URLs delay only its own replies
POLL_S = 1.0
DRAIN_S = 10.0  # how long running calls may take to end when the server stops
RETRY_S, RETRY_MAX_S = 5.0, 600.0  # wait before another attempt at a function that is unavailable

log = logging.getLogger("batchmill.server")

Write = Callable[[LateCall, FunctionReply | BatchmillError], Awaitable[bytes]]


class LateReplies:
    """Makes late calls and sends their replies. Call `set_writer` for each frontend before `open`."""

    def __init__(
        self, database: Database, clock: Clock, functions: FunctionCalls, webhook_sender: WebhookSender,
        quotas: ProjectQuotas = ProjectQuotas(),
    ) -> None:  # fmt: skip
        self._quotas = quotas
        self._database, self._clock, self._functions, self._webhook_sender = database, clock, functions, webhook_sender
        self._steps = ClockSteps(database, clock, late_calls)
        self._writers: dict[str, Write] = {}
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # call id -> project, task
        self._calling: set[str] = set()
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def set_writer(self, frontend: str, write: Write) -> None:
        """Set the function that makes the body to send from a reply or an error."""
        self._writers[frontend] = write

    async def store_call(self, caller: Caller, target: VersionTarget, body: bytes, order: LateCallOptions) -> str:
        """Store a call and return the id under which its reply will be sent.

        Raises: InvalidInput (`url_not_allowed`), TooLarge, Unavailable when too many calls wait, StorageFull.
        """
        self._webhook_sender.check(order.url)
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(
                f"a call with a late reply may have {BODY_BYTES_MAX:,} bytes, not {len(body):,}",
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
        """The number of stored calls: still to be made, or with a reply to send."""
        return await self._database.read(count)

    def open(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def close(self, *, at_once: bool) -> None:
        """Stop. Running calls have `DRAIN_S` to end, without `at_once`. The next process sends unsent replies again."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        tasks = {call_id: task for call_id, (_, task) in self._running.items()}
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
                await self._start_due()
            except BatchmillError as error:  # most often a full disk
                log.warning("late replies are delayed: %s", error.message)
            except Exception as error:  # one call must not end this task
                log.error("late replies are delayed", exc_info=error)
            await self._wait()

    async def _start_due(self) -> None:
        """Start the calls that are due, of each project up to its share."""
        await self._steps.check()
        while (slots := RUNNING_MAX - len(self._running)) > 0:
            running = Counter(project for project, _ in self._running.values())
            full = [project for project, count in running.items() if count >= RUNNING_PROJECT_MAX]
            calls = await self._database.read(due, self._clock.now(), list(self._running), full, slots)
            for call_id, project in calls:
                if running[project] < RUNNING_PROJECT_MAX:
                    running[project] += 1
                    self._start(call_id, project)
            if len(calls) < slots:
                return

    def _start(self, call_id: str, project: str) -> None:
        task = asyncio.create_task(self._advance(call_id))
        self._running[call_id] = project, task
        task.add_done_callback(lambda _: self._remove(call_id))

    def _remove(self, call_id: str) -> None:
        del self._running[call_id]
        self._wake.set()

    async def _wait(self) -> None:
        waits = {asyncio.ensure_future(self._clock.sleep(POLL_S)), asyncio.ensure_future(self._wake.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)
        self._wake.clear()

    # -- one call ------------------------------------------------------------------------------------------------------

    async def _advance(self, call_id: str) -> None:
        try:
            call = await self._database.read(find, call_id)
            if call is None:
                return
            if call.reply is None:
                await self._answer(call)
            else:
                await self._send(call, call.reply)
        except BatchmillError as error:  # the call stays stored, and a later turn picks it up
            log.warning("the late reply %s is delayed: %s", call_id, error.message)
            await self._clock.sleep(RETRY_S)
        except Exception as error:  # one call must not end the others
            log.error("the late reply %s is delayed", call_id, exc_info=error)
            await self._clock.sleep(RETRY_S)

    async def _answer(self, call: LateCall) -> None:
        self._calling.add(call.id)
        try:
            try:
                result: FunctionReply | BatchmillError = await self._call(call)
            except Unavailable as error:
                if call.attempts < len(DELAYS_S):
                    return await self._postpone(call, error)
                result = error
            except BatchmillError as error:
                result = error
            reply = await self._writers[call.order.frontend](call, result)
            await self._database.write(answer, call.id, reply, self._clock.now())
        finally:
            self._calling.discard(call.id)

    async def _call(self, call: LateCall) -> FunctionReply:
        caller = Caller(call.project, Scope.SUBMIT, call.key)
        target = self._functions.find(caller, call.name, call.branch, str(call.number))
        function = target.model.function
        if call.begun is not None and not (function is not None and function.is_idempotent):
            raise ModelFailed(
                "the server ended while the function ran, and it is not declared idempotent: it is not called again",
                code="worker_crashed",
            )
        await self._database.write(begin, call.id, self._clock.now())
        return await self._functions.call(caller, target, call.order.form, call.body)

    async def _postpone(self, call: LateCall, error: Unavailable) -> None:
        """Call again later, because the function was unavailable."""
        log.info("the late call %s is delayed: %s", call.id, error.message)
        await self._database.write(begin, call.id, None)
        due = self._clock.now() + min(RETRY_S * 2**call.attempts, RETRY_MAX_S)
        await self._database.write(postpone, call.id, call.attempts + 1, due)

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
            await self._database.write(postpone, call.id, attempts, self._retry_at(call.id, attempts, result))

    def _retry_at(self, call_id: str, attempts: int, result: DeliveryResult) -> float:
        return self._clock.now() + delay_s(call_id, attempts, result.retry_after_s)
