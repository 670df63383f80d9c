"""The deployed versions, the connectors and the tokens of a job that is to run: one that was removed since its order
was checked is found as the job, or its retry, is stored.

Until the job ends, none of them is removed: `services/functions/records.py`, `services/remote/connector_records.py` and
`services/llms/records.py` look at the jobs in the transaction that removes one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from batchmill.errors import Conflict, UnknownName
from batchmill.models.secrets import LLM_TOKENS
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.tables import adapters, connectors, model_routes, model_versions, remote_models, secrets
from batchmill.types import Connector, ModelSpec, SchemaVersion
from batchmill.wire.bundles import READY, unknown_version
from batchmill.wire.job_spec import JobSpec

_STATES = CompiledStatement(
    sa.select(model_versions.c.branch, model_versions.c.number, model_versions.c.state)
    .where(model_versions.c.name == sa.bindparam("of_name"))
    .order_by(model_versions.c.branch, model_versions.c.number)
)
_SECRET = "secret:"
PAGE = 500  # ids in one statement
REMOVED = "removed"  # the state of such an adapter
_LABELS = CompiledStatement(
    sa.select(model_routes.c.label)
    .where(model_routes.c.name == sa.bindparam("of_name"), model_routes.c.label.startswith("@"))
    .order_by(model_routes.c.label)
)


class ModelsRemoved(UnknownName):
    """Versions of functions, connectors or tokens of models that rows of a job may name were removed."""

    def __init__(self, message: str, models: list[ModelSpec]) -> None:
        super().__init__(message, code="model_not_found")
        self._removed = {_key_of(model) for model in models}

    def left_of(self, models: list[ModelSpec]) -> list[ModelSpec]:
        """The models without those that were removed."""
        return [model for model in models if _key_of(model) not in self._removed]


def refuse_removed(db: sa.Connection, spec: JobSpec, models: Sequence[ModelSpec] | None = None) -> None:
    """Args: models: those that rows of a retry go to; None: it is a new job, and these are all that its rows name.

    Raises: UnknownName for the class of its schema; ModelsRemoved; Conflict for a connector that was changed since the
    order was checked. A retry calls what its job was ordered with.
    """
    if (schema := spec.form.schema) is not None and schema.version is not None:
        _refuse_class(db, schema.version)
    used = [model for model in spec.models if not spec.used or model.name in spec.used] if models is None else models
    states = {model.name: _STATES.rows(db, {"of_name": model.name}) for model in used if _is_deployed(model)}
    gone = [model for model in used if _is_deployed(model) and _state(model, states[model.name]) != READY]
    if gone:
        raise ModelsRemoved(_problem(db, gone[0], states[gone[0].name]), gone)
    _refuse_connectors(db, used, is_new=models is None)
    if models is None:
        _refuse_tokens(db, used)
        _refuse_adapters(db, used)


def _key_of(model: ModelSpec) -> tuple[str, str]:
    """Name and version; empty: it has none."""
    return model.name, "" if model.function is None else model.function.version


def _is_deployed(model: ModelSpec) -> bool:
    return model.function is not None and bool(model.function.folder)


def _state(model: ModelSpec, states: list[tuple[str, int, str]]) -> str | None:
    assert model.function is not None, "it is deployed"
    found = [state for branch, number, state in states if f"{branch}/{number}" == model.function.version]
    return found[0] if found else None


def _problem(db: sa.Connection, model: ModelSpec, states: list[tuple[str, int, str]]) -> str:
    assert model.function is not None, "it is deployed"
    ready = [f"{branch}/{number}" for branch, number, state in states if state == READY]
    aliases = [label for (label,) in _LABELS.rows(db, {"of_name": model.name})]
    return unknown_version(model.name, model.function.version, _state(model, states), ready, aliases)


def _refuse_connectors(db: sa.Connection, models: Sequence[ModelSpec], *, is_new: bool) -> None:
    used = [
        (model, each.connector)
        for model in models
        for each in (model, *model.routes)
        if each.connector is not None and each.connector.is_stored
    ]
    if not used:
        return
    stored = _stored_connectors(db, {connector.id for _, connector in used})
    if gone := [(model, connector) for model, connector in used if connector.id not in stored]:
        model, connector = gone[0]
        raise ModelsRemoved(
            f"the connector {connector.id} of the model {model.name} was removed: choose another model",
            [model for model, _ in gone],
        )
    for model, connector in used if is_new else ():
        if msgspec.json.decode(stored[connector.id], type=Connector) != connector:
            raise Conflict(
                f"the connector {connector.id} of the model {model.name} was changed meanwhile: send the order again",
                code="connector_changed",
            )


def _stored_connectors(db: sa.Connection, ids: set[str]) -> dict[str, bytes]:
    """Those that are shared, and those that are a model's own: they have its id."""
    own = sa.select(remote_models.c.id, remote_models.c.spec).where(
        remote_models.c.id.in_(ids), remote_models.c.spec.is_not(None)
    )
    shared = sa.select(connectors.c.id, connectors.c.spec).where(connectors.c.id.in_(ids))
    return {id_: spec for query in (shared, own) for id_, spec in db.execute(query)}


def _refuse_tokens(db: sa.Connection, models: Sequence[ModelSpec]) -> None:
    used = [
        (model, reference.removeprefix(_SECRET))
        for model in models
        for reference in model.secrets.values()
        if reference.startswith(_SECRET + LLM_TOKENS)
    ]
    if not used:
        return
    names = {name for _, name in used}
    stored = set(db.execute(sa.select(secrets.c.name).where(secrets.c.name.in_(names))).scalars())
    if gone := [model for model, name in used if name not in stored]:
        raise ModelsRemoved(f"the model {gone[0].name}, or its token, was removed: choose another model", gone)


def _refuse_adapters(db: sa.Connection, models: Sequence[ModelSpec]) -> None:
    """Adapters that were removed since the order was checked. Their ids are the names of their folders."""
    names = {os.path.basename(folder): name for model in models for name, folder in model.adapters.items()}
    ids = list(names)
    for first in range(0, len(ids), PAGE):
        some = adapters.c.id.in_(ids[first : first + PAGE])
        for gone in db.execute(sa.select(adapters.c.id).where(some, adapters.c.state == REMOVED)).scalars():
            raise Conflict(
                f"the adapter {names[gone]} was removed meanwhile: send the order again", code="adapter_removed"
            )


def _refuse_class(db: sa.Connection, version: SchemaVersion) -> None:
    name, branch, number = version.key
    if (branch, number, READY) not in _STATES.rows(db, {"of_name": name}):
        raise UnknownName(
            f"the class {version.reference}, which validates answers, was removed meanwhile: deploy it again",
            code="validator_not_found",
        )
