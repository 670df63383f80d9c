"""Database rows of connectors. Each function here runs in its caller's transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from batchmill.errors import Conflict, InvalidInput
from batchmill.services.remote.stored import DEPLOYED, ConnectorRecord
from batchmill.states import ENDED
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import connectors, jobs, remote_models
from batchmill.types import Connector, ModelSpec
from batchmill.wire.job_spec import JobSpec

CONNECTORS_MAX = 10_000  # of one server, which holds them all in memory
SHOWN_MAX = 20  # ids in a message


def insert(db: sa.Connection, record: ConnectorRecord, quota: int) -> None:
    """Insert a connector. Raises: Conflict for an id that is taken; OverQuota, InvalidInput for too many."""
    if db.execute(sa.select(connectors.c.id).where(connectors.c.id == record.id)).first() is not None:
        raise Conflict(f"a connector with the id {record.id} exists already", code="connector_exists")
    refuse_beyond(db, connectors, quota, quota="connectors", project=record.project, way_out="delete one")
    if (db.execute(sa.select(sa.func.count()).select_from(connectors)).scalar() or 0) >= CONNECTORS_MAX:
        raise InvalidInput(
            f"the server has {CONNECTORS_MAX:,} connectors, which is the maximum: delete one",
            code="too_many_connectors",
        )
    db.execute(connectors.insert().values(_values(record)))


def update(db: sa.Connection, record: ConnectorRecord) -> None:
    db.execute(connectors.update().where(connectors.c.id == record.id).values(_values(record)))


def delete(db: sa.Connection, connector_id: str) -> None:
    """Delete a connector. Raises: Conflict while models or unfinished jobs use it."""
    users = list(db.execute(_users(connector_id)).scalars())
    if users:
        raise Conflict(
            f"{len(users)} models are still using this connector, please delete or update the models first: "
            f"{format_ids(users)}",
            code="connector_in_use",
        )
    refuse_unfinished(db, connector_id)
    db.execute(connectors.delete().where(connectors.c.id == connector_id))


def refuse_unfinished(db: sa.Connection, connector_id: str) -> None:
    """Raises: Conflict while unfinished jobs use the connector."""
    if connector_id in used_by_jobs(db):
        raise Conflict(
            f"an unfinished job uses the connector {connector_id}: cancel the job, or wait for it",
            code="connector_in_use",
        )


def deployed_users(db: sa.Connection, connector_id: str) -> list[str]:
    """The deployed models that use a connector."""
    return list(db.execute(_users(connector_id).where(remote_models.c.state == DEPLOYED)).scalars())


def format_ids(ids: list[str]) -> str:
    """Format ids for a message."""
    return f"[{', '.join(ids[:SHOWN_MAX])}{', …' if len(ids) > SHOWN_MAX else ''}]"


def check_size(connector: Connector, bytes_max: int) -> None:
    """Raises: InvalidInput for a connector that is too large."""
    if (size := len(msgspec.json.encode(connector))) > bytes_max:
        raise InvalidInput(
            f"the connector has {size:,} bytes; the maximum is {bytes_max:,}", code="connector_too_large"
        )


def read_all(db: sa.Connection) -> list[ConnectorRecord]:
    """All connectors, the oldest first."""
    order = (connectors.c.created, connectors.c.id)
    return [_record(row) for row in db.execute(sa.select(connectors).order_by(*order)).mappings()]


def used_by_jobs(db: sa.Connection) -> set[str]:
    """The ids of the connectors that unfinished jobs use."""
    ended = [state.value for state in ENDED]
    connector_ids: set[str] = set()
    for data in db.execute(sa.select(jobs.c.spec).where(jobs.c.state.not_in(ended))).scalars():
        spec = msgspec.json.decode(data, type=JobSpec)
        for model in spec.models:
            if not spec.used or model.name in spec.used:
                connector_ids |= {route.connector.id for route in _routes(model) if route.connector is not None}
    return connector_ids


def _routes(model: ModelSpec) -> list[ModelSpec]:
    return [model, *(each for route in model.routes for each in _routes(route))]


def _users(connector_id: str) -> sa.Select[tuple[str]]:
    return sa.select(remote_models.c.id).where(remote_models.c.connector == connector_id).order_by(remote_models.c.id)


def _values(record: ConnectorRecord) -> dict[str, Any]:
    columns = {name: getattr(record, name) for name in ("id", "project", "revision", "created", "changed")}
    return columns | {
        "name": record.connector.name,
        "spec": msgspec.json.encode(record.connector),
        "access": msgspec.json.encode(record.access),
    }


def _record(row: sa.RowMapping) -> ConnectorRecord:
    return ConnectorRecord(
        row["id"], row["project"], msgspec.json.decode(row["spec"], type=Connector),
        msgspec.json.decode(row["access"], type=dict[str, Any]), row["revision"], row["created"], row["changed"],
    )  # fmt: skip
