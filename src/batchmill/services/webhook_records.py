"""The records of webhook endpoints: what the table `webhook_endpoints` says. Secrets stay encrypted here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.store.quotas import refuse_beyond
from batchmill.store.service_tables import outbox, webhook_endpoints

SHOWN_CHARS = 80


class Endpoint(Struct, frozen=True):
    """Where events go. `hint` tells its secret from another without showing it."""

    id: str
    project: str
    name: str
    url: str
    events: list[str]
    created: float
    updated: float
    hint: str | None = None


def owner_of(project: str, endpoint_id: str) -> str:
    """What its secret is sealed for."""
    return f"webhook_endpoint {endpoint_id} of {project}"


def endpoint_of(record: sa.RowMapping, hint: str | None = None) -> Endpoint:
    told: dict[str, Any] = {name: record[name] for name in ("id", "project", "name", "url", "created", "updated")}
    return Endpoint(**told, events=msgspec.json.decode(record["events"], type=list[str]), hint=hint)


def find(db: sa.Connection, project: str, endpoint_id: str) -> sa.RowMapping:
    query = sa.select(webhook_endpoints).where(
        webhook_endpoints.c.id == endpoint_id, webhook_endpoints.c.project == project
    )
    found = db.execute(query).mappings().first()
    if found is None:
        raise UnknownName(
            f"there is no webhook endpoint {endpoint_id[:SHOWN_CHARS]!r}", code="unknown_webhook_endpoint"
        )
    return found


def look_up(db: sa.Connection, endpoint_id: str) -> sa.RowMapping | None:
    return db.execute(sa.select(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)).mappings().first()


def page(db: sa.Connection, project: str, after: str | None, limit: int) -> Sequence[sa.RowMapping]:
    columns = webhook_endpoints.c
    query = sa.select(webhook_endpoints).where(columns.project == project)
    if after is not None:
        mark = find(db, project, after)
        query = query.where(sa.tuple_(columns.created, columns.id) < (mark["created"], mark["id"]))
    return db.execute(query.order_by(columns.created.desc(), columns.id.desc()).limit(limit)).mappings().all()


def insert(db: sa.Connection, made: Endpoint, sealed: bytes, quota: int) -> None:
    """Raises: OverQuota."""
    refuse_beyond(db, webhook_endpoints, quota, quota="webhook_endpoints", project=made.project, way_out="delete one")
    db.execute(webhook_endpoints.insert().values(id=made.id, project=made.project, secret=sealed, **columns_of(made)))


def update(db: sa.Connection, project: str, endpoint_id: str, values: dict[str, Any]) -> None:
    find(db, project, endpoint_id)
    db.execute(webhook_endpoints.update().where(webhook_endpoints.c.id == endpoint_id).values(**values))


def columns_of(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "events": msgspec.json.encode(endpoint.events).decode(),
        "created": endpoint.created,
        "updated": endpoint.updated,
    }


def delete(db: sa.Connection, project: str, endpoint_id: str) -> None:
    find(db, project, endpoint_id)
    db.execute(webhook_endpoints.delete().where(webhook_endpoints.c.id == endpoint_id))
    db.execute(outbox.delete().where(outbox.c.endpoint == endpoint_id))


def events_of(db: sa.Connection, project: str) -> list[tuple[str, list[str]]]:
    """The ids of a project's endpoints, and the types of events each hears of."""
    columns = webhook_endpoints.c
    found = db.execute(sa.select(columns.id, columns.events).where(columns.project == project))
    return [(each.id, msgspec.json.decode(each.events, type=list[str])) for each in found]
