"""The database's rows of deployments of language models. Each function runs in its caller's transaction."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from batchmill.errors import Conflict, InvalidInput
from batchmill.states import ENDED
from batchmill.store.quotas import refuse_beyond
from batchmill.store.tables import jobs, llm_deployments, secrets
from batchmill.types import LlmSettings, ModelSpec
from batchmill.wire.job_spec import JobSpec

DEPLOYMENTS_MAX = 1_000  # of one server: they are all in memory


class LlmDeployment(Struct, frozen=True):
    """A language model that batchmill serves under a name, with an engine of its own."""

    id: str
    project: str
    name: str
    settings: LlmSettings  # as they are wanted; a token in them is a reference
    description: str | None
    details: dict[str, Any]  # what a dialect keeps of it and nothing here reads
    created: float
    changed: float
    model: ModelSpec  # what jobs and calls get; of the settings before, while an update is on its way or has failed
    is_configured: bool = False  # by batchmill.toml: nobody changes it here
    is_stopped: bool = False  # it answers nothing until it is started
    serving: LlmSettings | None = None  # what is served in place of `settings`; None: those
    problem: str = ""  # why the last update did not come about, or it cannot be served
    is_broken: bool = False  # its base model is no more: it answers nothing

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
    """A deployment as it lies in the database: without its model, which the configuration of now makes."""

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
    """Raises: Conflict for a name that the project has; OverQuota, InvalidInput where there are too many."""
    columns = llm_deployments.c
    same = sa.and_(columns.project == deployment.project, columns.name == deployment.name)
    if db.execute(sa.select(columns.id).where(same)).first() is not None:
        raise Conflict(f"there is a deployment {deployment.name!r} already: update it, or choose another name")
    refuse_beyond(db, llm_deployments, quota, quota="llm_deployments", project=deployment.project, way_out="delete one")
    if (db.execute(sa.select(sa.func.count()).select_from(llm_deployments)).scalar() or 0) >= DEPLOYMENTS_MAX:
        raise InvalidInput(
            f"there are {DEPLOYMENTS_MAX:,} deployments, the most that there can be: delete one",
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
    """All of them, in the order of their making."""
    order = (llm_deployments.c.created, llm_deployments.c.id)
    return [_stored(row) for row in db.execute(sa.select(llm_deployments).order_by(*order)).mappings()]


def used_secrets(db: sa.Connection) -> set[str]:
    """The references that jobs which have not ended have in their models."""
    found: set[str] = set()
    for data in db.execute(sa.select(jobs.c.spec).where(jobs.c.state.not_in([each.value for each in ENDED]))).scalars():
        for model in msgspec.json.decode(data, type=JobSpec).models:
            found.update(model.secrets.values())
    return found


def secrets_before(db: sa.Connection, prefix: str, before: float) -> list[str]:
    """The names of secrets that begin so and were put in before a moment."""
    columns = secrets.c
    found = db.execute(sa.select(columns.name).where(columns.name.startswith(prefix), columns.changed < before))
    return list(found.scalars())


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
