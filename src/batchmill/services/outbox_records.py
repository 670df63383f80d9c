"""The records of the outbox, and of the jobs whose end nobody was told of yet. One function, one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.services import events
from batchmill.services.events import Ended
from batchmill.states import ENDED
from batchmill.store.service_tables import outbox
from batchmill.store.tables import jobs

KEPT_S = 3 * 86_400.0  # an event that was delivered, or given up, is forgotten then


class Waiting(Struct, frozen=True):
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
    door, trace = origin.get("door"), origin.get("traceparent")
    finished = found.created if found.finished is None else found.finished
    return Ended(found.id, found.generation, found.state, found.created, finished, found.project, door, trace)


def announce(
    db: sa.Connection, ends: Sequence[Ended], now: float, listening: Callable[[sa.Connection, str, str], list[str]]
) -> list[Ended]:
    """Put the events of these ends into the outbox and mark them as told; those that were not told before."""
    told = []
    for ended in ends:
        still = (jobs.c.id == ended.job) & (jobs.c.generation == ended.generation) & (jobs.c.state == ended.state)
        mark = jobs.update().where(still, jobs.c.announced <= ended.generation).values(announced=ended.generation + 1)
        if db.execute(mark).rowcount == 0:
            continue  # it was opened again meanwhile, or told already
        told.append(ended)
        if ended.type is not None:
            _put(db, ended, now, listening(db, ended.project, ended.type))
    return told


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
) -> list[Waiting]:
    """Events to be sent now, the longest due first, apart from those in hand (`taken`).

    Args:
        busy: endpoints that take nothing more now.
        full: projects that have their share of deliveries under way.
    """
    columns = outbox.c
    is_free = columns.endpoint.not_in(busy) & columns.project.not_in(full)
    query = (
        sa.select(*(columns[name] for name in Waiting.__struct_fields__))
        .where(columns.due <= now, is_free, columns.id.not_in(taken))
        .order_by(columns.due)
        .limit(limit)
    )
    return [Waiting(*found) for found in db.execute(query)]


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
