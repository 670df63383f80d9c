"""Database rows of remote models and their groups. Each function here runs in its caller's transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidInput
from batchmill.services.remote.connector_records import used_by_jobs
from batchmill.services.remote.stored import ModelDetails, RemoteModel
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import model_groups, remote_models
from batchmill.types import Connector, Quotas

MODELS_MAX = 10_000  # of one server, which holds them all in memory; the same for groups


class ModelGroup(Struct, frozen=True):
    """The versions of one model under a name."""

    id: str
    project: str
    name: str
    latest: int  # its newest version
    details: dict[str, Any]  # access, description
    revision: int
    created: float
    changed: float


def insert_group(db: sa.Connection, group: ModelGroup, quota: int) -> None:
    """Insert a group. Raises: OverQuota, InvalidInput for too many."""
    refuse_beyond(db, model_groups, quota, quota="model_groups", project=group.project, way_out="delete some")
    _refuse_above_max(db, model_groups, "model groups")
    db.execute(model_groups.insert().values(_group_values(group)))


def update_group(db: sa.Connection, group: ModelGroup) -> None:
    db.execute(model_groups.update().where(model_groups.c.id == group.id).values(_group_values(group)))


def delete_group(db: sa.Connection, group_id: str) -> bool:
    """Delete a group unless it has models. Returns whether it was deleted."""
    if db.execute(sa.select(remote_models.c.id).where(remote_models.c.group == group_id).limit(1)).first() is not None:
        return False
    db.execute(model_groups.delete().where(model_groups.c.id == group_id))
    return True


def read_groups(db: sa.Connection) -> list[ModelGroup]:
    """All of them, in the order of their making."""
    order = (model_groups.c.created, model_groups.c.id)
    return [_group(row) for row in db.execute(sa.select(model_groups).order_by(*order)).mappings()]


def insert(db: sa.Connection, model: RemoteModel, group: ModelGroup, quotas: Quotas) -> None:
    """Insert a model and update or insert its group. Raises: OverQuota, InvalidInput for too many."""
    model_quota, project = quotas.remote_models, model.project
    refuse_beyond(db, remote_models, model_quota, quota="remote_models", project=project, way_out="delete some")
    _refuse_above_max(db, remote_models, "remote models")
    if not _update_group(db, group):
        insert_group(db, group, quotas.model_groups)
    db.execute(remote_models.insert().values(_values(model)))


def update(db: sa.Connection, model: RemoteModel, group: ModelGroup | None = None) -> None:
    """Update a model, and `group` if the model moved there."""
    if group is not None:
        _update_group(db, group)
    db.execute(remote_models.update().where(remote_models.c.id == model.id).values(_values(model)))


def delete(db: sa.Connection, model: RemoteModel) -> None:
    """Delete a model. Raises: Conflict while an unfinished job uses the model's own connector."""
    if model.own is not None and model.own.id in used_by_jobs(db):
        raise Conflict(
            f"an unfinished job uses the model {model.id}: cancel the job, or wait for it", code="model_in_use"
        )
    db.execute(remote_models.delete().where(remote_models.c.id == model.id))


def read_all(db: sa.Connection) -> list[RemoteModel]:
    """All of them, in the order of their making."""
    order = (remote_models.c.created, remote_models.c.id)
    return [_model(row) for row in db.execute(sa.select(remote_models).order_by(*order)).mappings()]


def next_version(group: ModelGroup, now: float) -> ModelGroup:
    """The group after another model was added."""
    return replace(group, latest=group.latest + 1, revision=group.revision + 1, changed=max(now, group.changed))


def _update_group(db: sa.Connection, group: ModelGroup) -> bool:
    """Update a group. Returns whether it exists."""
    changed = db.execute(model_groups.update().where(model_groups.c.id == group.id).values(_group_values(group)))
    return bool(changed.rowcount)


def _refuse_above_max(db: sa.Connection, table: sa.Table, items: str) -> None:
    if (db.execute(sa.select(sa.func.count()).select_from(table)).scalar() or 0) >= MODELS_MAX:
        raise InvalidInput(
            f"the server has {MODELS_MAX:,} {items}, which is the maximum: delete one", code="too_many_models"
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
