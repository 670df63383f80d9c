"""The database's rows of models that are a connector, and of their groups. Each function runs in its caller's
transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidInput
from batchmill.services.remote.connector_records import used_by_jobs
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import model_groups, remote_models
from batchmill.types import Connector, Quotas

MODELS_MAX = 10_000  # of one server, as of groups: they are all in memory
REGISTERED, DEPLOYED, UNDEPLOYED = "REGISTERED", "DEPLOYED", "UNDEPLOYED"


class ModelGroup(Struct, frozen=True):
    """A name for the versions of one model."""

    id: str
    project: str
    name: str
    latest: int  # the newest version within it
    details: dict[str, Any]  # access, description
    revision: int
    created: float
    changed: float


class RateLimiter(Struct, frozen=True):
    """How many calls of a model are answered."""

    limit: float
    unit: str  # of TimeUnit in Java: SECONDS, MINUTES, HOURS, DAYS …


class ModelDetails(Struct, frozen=True, omit_defaults=True):
    """What a model's record says besides its columns."""

    description: str | None = None
    is_enabled: bool = True
    is_auto_deploy: bool | None = None  # None: as the server's configuration says
    rate_limiter: RateLimiter | None = None
    interface: dict[str, str] | None = None  # schemas, as texts: `interfaces`
    deployed: float | None = None  # when it was last
    undeployed: float | None = None


class RemoteModel(Struct, frozen=True):
    """A model that is a connector."""

    id: str
    project: str
    name: str
    group: str
    version: int  # within its group
    connector: str | None  # None: its own
    own: Connector | None
    state: str  # REGISTERED, DEPLOYED, UNDEPLOYED
    details: ModelDetails
    revision: int
    created: float
    changed: float

    @property
    def is_deployed(self) -> bool:
        return self.state == DEPLOYED


def insert_group(db: sa.Connection, group: ModelGroup, quota: int) -> None:
    """Raises: OverQuota, InvalidInput where there are too many."""
    refuse_beyond(db, model_groups, quota, quota="model_groups", project=group.project, way_out="delete some")
    _refuse_more(db, model_groups, "model groups")
    db.execute(model_groups.insert().values(_group_values(group)))


def update_group(db: sa.Connection, group: ModelGroup) -> None:
    db.execute(model_groups.update().where(model_groups.c.id == group.id).values(_group_values(group)))


def delete_group(db: sa.Connection, group_id: str) -> bool:
    """Whether it is gone: one that holds models stays."""
    if db.execute(sa.select(remote_models.c.id).where(remote_models.c.group == group_id).limit(1)).first() is not None:
        return False
    db.execute(model_groups.delete().where(model_groups.c.id == group_id))
    return True


def read_groups(db: sa.Connection) -> list[ModelGroup]:
    """All of them, in the order of their making."""
    order = (model_groups.c.created, model_groups.c.id)
    return [_group(row) for row in db.execute(sa.select(model_groups).order_by(*order)).mappings()]


def insert(db: sa.Connection, model: RemoteModel, group: ModelGroup, quotas: Quotas) -> None:
    """A new version within its group, which may be new itself. Raises: OverQuota, InvalidInput where there are too
    many."""
    most, project = quotas.remote_models, model.project
    refuse_beyond(db, remote_models, most, quota="remote_models", project=project, way_out="delete some")
    _refuse_more(db, remote_models, "remote models")
    if not _update_group(db, group):
        insert_group(db, group, quotas.model_groups)
    db.execute(remote_models.insert().values(_values(model)))


def update(db: sa.Connection, model: RemoteModel, group: ModelGroup | None = None) -> None:
    """Write down what changed; `group`: the one that it moved to."""
    if group is not None:
        _update_group(db, group)
    db.execute(remote_models.update().where(remote_models.c.id == model.id).values(_values(model)))


def delete(db: sa.Connection, model: RemoteModel) -> None:
    """Raises: Conflict while a job that has not ended needs the connector that only this model has."""
    if model.own is not None and model.own.id in used_by_jobs(db):
        raise Conflict(
            f"the model {model.id} is used by a job that has not ended: cancel it, or wait", code="model_in_use"
        )
    db.execute(remote_models.delete().where(remote_models.c.id == model.id))


def read_all(db: sa.Connection) -> list[RemoteModel]:
    """All of them, in the order of their making."""
    order = (remote_models.c.created, remote_models.c.id)
    return [_model(row) for row in db.execute(sa.select(remote_models).order_by(*order)).mappings()]


def next_version(group: ModelGroup, now: float) -> ModelGroup:
    """The group once one more model is in it."""
    return replace(group, latest=group.latest + 1, revision=group.revision + 1, changed=max(now, group.changed))


def _update_group(db: sa.Connection, group: ModelGroup) -> bool:
    """Whether it is there."""
    changed = db.execute(model_groups.update().where(model_groups.c.id == group.id).values(_group_values(group)))
    return bool(changed.rowcount)


def _refuse_more(db: sa.Connection, table: sa.Table, what: str) -> None:
    if (db.execute(sa.select(sa.func.count()).select_from(table)).scalar() or 0) >= MODELS_MAX:
        raise InvalidInput(
            f"there are {MODELS_MAX:,} {what}, the most that there can be: delete one", code="too_many_models"
        )


def _group_values(group: ModelGroup) -> dict[str, Any]:
    return msgspec.structs.asdict(group) | {"details": msgspec.json.encode(group.details)}


def _group(row: sa.RowMapping) -> ModelGroup:
    return ModelGroup(**{**row, "details": msgspec.json.decode(row["details"], type=dict[str, Any])})


def _values(model: RemoteModel) -> dict[str, Any]:
    fields = msgspec.structs.asdict(model)
    own = fields.pop("own")
    fields["spec"] = None if own is None else msgspec.json.encode(own)
    return fields | {"details": msgspec.json.encode(model.details)}


def _model(row: sa.RowMapping) -> RemoteModel:
    fields = dict(row)
    spec = fields.pop("spec")
    fields["own"] = None if spec is None else msgspec.json.decode(spec, type=Connector)
    return RemoteModel(**{**fields, "details": msgspec.json.decode(row["details"], type=ModelDetails)})
