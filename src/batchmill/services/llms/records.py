"""Database rows of language model deployments. Each function runs in its caller's transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, InvalidInput
from batchmill.states import ENDED
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import jobs, llm_deployments, secrets
from batchmill.types import LlmSettings, ModelSpec
from batchmill.wire.job_spec import JobSpec

SECRET = "secret:"
DEPLOYMENTS_MAX = 1_000  # of one server, because all are in memory


class LlmDeployment(Struct, frozen=True):
    """A language model that batchmill serves under a name, with its own engine."""

    id: str
    project: str
    name: str
    settings: LlmSettings  # the desired settings; a token in them is a reference
    description: str | None
    details: dict[str, Any]  # stored for a dialect; not read here
    created: float
    changed: float
    model: ModelSpec  # what jobs and calls get; of the old settings while an update runs or has failed
    is_configured: bool = False  # in batchmill.toml: it cannot be changed over an API
    is_stopped: bool = False  # it does not serve until it is started
    serving: LlmSettings | None = None  # the settings that are served instead of `settings`; None: `settings`
    problem: str = ""  # why the last update failed, or why it cannot be served
    is_broken: bool = False  # its base model no longer exists, so it cannot serve

    @property
    def is_updating(self) -> bool:
        return self.serving is not None and not self.problem

    @property
    def answers(self) -> bool:
        return not (self.is_stopped or self.is_broken)


class _Details(Struct, frozen=True, omit_defaults=True):
    """The column `details`."""

    description: str | None = None
    details: dict[str, Any] = {}
    is_stopped: bool = False
    serving: LlmSettings | None = None
    problem: str = ""


class Stored(Struct, frozen=True):
    """A deployment as stored: without its model, which is made from the current configuration."""

    id: str
    project: str
    name: str
    settings: LlmSettings
    details: _Details
    created: float
    changed: float

    def deployment(self, model: ModelSpec) -> LlmDeployment:
        details = self.details
        return LlmDeployment(
            self.id, self.project, self.name, self.settings, details.description, details.details, self.created,
            self.changed, model, is_stopped=details.is_stopped, problem=details.problem, serving=details.serving,
        )  # fmt: skip


def insert(db: sa.Connection, deployment: LlmDeployment, quota: int) -> None:
    """Raises: Conflict for a name that the project already uses; OverQuota, InvalidInput if there are too many."""
    columns = llm_deployments.c
    has_name = sa.and_(columns.project == deployment.project, columns.name == deployment.name)
    if db.execute(sa.select(columns.id).where(has_name)).first() is not None:
        raise Conflict(f"there is already a deployment {deployment.name!r}: update it, or choose another name")
    refuse_beyond(db, llm_deployments, quota, quota="llm_deployments", project=deployment.project, way_out="delete one")
    if (db.execute(sa.select(sa.func.count()).select_from(llm_deployments)).scalar() or 0) >= DEPLOYMENTS_MAX:
        raise InvalidInput(
            f"there are {DEPLOYMENTS_MAX:,} deployments, which is the maximum: delete one",
            code="too_many_deployments",
        )
    db.execute(llm_deployments.insert().values(_values(deployment)))


def update(db: sa.Connection, deployment: LlmDeployment) -> None:
    db.execute(
        llm_deployments.update().where(llm_deployments.c.id == deployment.id).values(_values(deployment))
    )  # fmt: skip


def delete(db: sa.Connection, deployment_id: str) -> None:
    db.execute(llm_deployments.delete().where(llm_deployments.c.id == deployment_id))


def read_all(db: sa.Connection) -> list[Stored]:
    """Return all deployments, oldest first."""
    order = (llm_deployments.c.created, llm_deployments.c.id)
    return [_stored(row) for row in db.execute(sa.select(llm_deployments).order_by(*order)).mappings()]


def used_secrets(db: sa.Connection) -> set[str]:
    """Return the names of the secrets that models of unfinished jobs refer to."""
    references: set[str] = set()
    for data in db.execute(sa.select(jobs.c.spec).where(jobs.c.state.not_in([each.value for each in ENDED]))).scalars():
        for model in msgspec.json.decode(data, type=JobSpec).models:
            references.update(model.secrets.values())
    return {each.removeprefix(SECRET) for each in references}


def secrets_before(db: sa.Connection, prefix: str, before: float) -> list[str]:
    """Return the names of secrets with this prefix that were stored before this time."""
    columns = secrets.c
    names = db.execute(sa.select(columns.name).where(columns.name.startswith(prefix), columns.changed < before))
    return list(names.scalars())


def _values(deployment: LlmDeployment) -> dict[str, Any]:
    details = _Details(
        deployment.description, deployment.details, deployment.is_stopped, deployment.serving, deployment.problem
    )
    return {
        "id": deployment.id, "project": deployment.project, "name": deployment.name,
        "settings": msgspec.json.encode(deployment.settings), "details": msgspec.json.encode(details),
        "created": deployment.created, "changed": deployment.changed,
    }  # fmt: skip


def _stored(row: sa.RowMapping) -> Stored:
    fields = msgspec.json.decode(row["details"], type=_Details)
    settings = msgspec.json.decode(row["settings"], type=LlmSettings)
    return Stored(row["id"], row["project"], row["name"], settings, fields, row["created"], row["changed"])
