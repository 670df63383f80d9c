"""The database's rows of connectors. Each function runs in its caller's transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, InvalidInput
from batchmill.states import ENDED
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import connectors, jobs, remote_models
from batchmill.types import Connector, ModelSpec
from batchmill.wire.job_spec import JobSpec

CONNECTORS_MAX = 10_000  # of one server: they are all in memory
DEPLOYED = "DEPLOYED"
SHOWN_MAX = 20  # ids in a message


class ConnectorRecord(Struct, frozen=True):
    """A connector as it is kept. Its credentials are references: what they stand for is in the vault."""

    id: str
    project: str
    connector: Connector
    access: dict[str, Any]  # what a dialect keeps of it and nothing here reads
    revision: int  # 1 at first, one more with every change
    created: float
    changed: float


def insert(db: sa.Connection, record: ConnectorRecord, quota: int) -> None:
    """Raises: Conflict for an id that is taken; OverQuota, InvalidInput where there are too many."""
    if db.execute(sa.select(connectors.c.id).where(connectors.c.id == record.id)).first() is not None:
        raise Conflict(f"a connector with the id {record.id} exists already", code="connector_exists")
    refuse_beyond(db, connectors, quota, quota="connectors", project=record.project, way_out="delete one")
    if (db.execute(sa.select(sa.func.count()).select_from(connectors)).scalar() or 0) >= CONNECTORS_MAX:
        raise InvalidInput(
            f"there are {CONNECTORS_MAX:,} connectors, the most that there can be: delete one",
            code="too_many_connectors",
        )
    db.execute(connectors.insert().values(_values(record)))


def update(db: sa.Connection, record: ConnectorRecord) -> None:
    db.execute(connectors.update().where(connectors.c.id == record.id).values(_values(record)))


def delete(db: sa.Connection, connector_id: str) -> None:
    """Raises: Conflict while models, or jobs that have not ended, use it."""
    users = list(db.execute(_users(connector_id)).scalars())
    if users:
        raise Conflict(
            f"{len(users)} models are still using this connector, please delete or update the models first: "
            f"{shown(users)}",
            code="connector_in_use",
        )
    refuse_unfinished(db, connector_id)
    db.execute(connectors.delete().where(connectors.c.id == connector_id))


def refuse_unfinished(db: sa.Connection, connector_id: str) -> None:
    """Raises: Conflict while jobs that have not ended use it."""
    if connector_id in used_by_jobs(db):
        raise Conflict(
            f"the connector {connector_id} is used by a job that has not ended: cancel it, or wait",
            code="connector_in_use",
        )


def deployed_users(db: sa.Connection, connector_id: str) -> list[str]:
    """The deployed models that use a connector."""
    return list(db.execute(_users(connector_id).where(remote_models.c.state == DEPLOYED)).scalars())


def shown(ids: list[str]) -> str:
    """Ids as a message lists them."""
    return f"[{', '.join(ids[:SHOWN_MAX])}{', …' if len(ids) > SHOWN_MAX else ''}]"


def check_size(connector: Connector, bytes_max: int) -> None:
    """Raises: InvalidInput for a connector that is longer than one has to be."""
    if (size := len(msgspec.json.encode(connector))) > bytes_max:
        raise InvalidInput(f"the connector has {size:,} bytes, and may have {bytes_max:,}", code="connector_too_large")


def read_all(db: sa.Connection) -> list[ConnectorRecord]:
    """All of them, in the order of their making."""
    order = (connectors.c.created, connectors.c.id)
    return [_record(row) for row in db.execute(sa.select(connectors).order_by(*order)).mappings()]


def used_by_jobs(db: sa.Connection) -> set[str]:
    """The ids of the connectors that jobs which have not ended run on."""
    ended = [state.value for state in ENDED]
    found: set[str] = set()
    for data in db.execute(sa.select(jobs.c.spec).where(jobs.c.state.not_in(ended))).scalars():
        spec = msgspec.json.decode(data, type=JobSpec)
        for model in spec.models:
            if not spec.used or model.name in spec.used:
                found |= {way.connector.id for way in _ways(model) if way.connector is not None}
    return found


def _ways(model: ModelSpec) -> list[ModelSpec]:
    return [model, *(way for route in model.routes for way in _ways(route))]


def _users(connector_id: str) -> sa.Select[tuple[str]]:
    return sa.select(remote_models.c.id).where(remote_models.c.connector == connector_id).order_by(remote_models.c.id)


def _values(record: ConnectorRecord) -> dict[str, Any]:
    kept = {name: getattr(record, name) for name in ("id", "project", "revision", "created", "changed")}
    return kept | {
        "name": record.connector.name,
        "spec": msgspec.json.encode(record.connector),
        "access": msgspec.json.encode(record.access),
    }


def _record(row: sa.RowMapping) -> ConnectorRecord:
    return ConnectorRecord(
        row["id"], row["project"], msgspec.json.decode(row["spec"], type=Connector),
        msgspec.json.decode(row["access"], type=dict[str, Any]), row["revision"], row["created"], row["changed"],
    )  # fmt: skip
