"""Registers, deploys, undeploys and deletes remote models, in the process that owns the data directory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from msgspec.structs import replace

from batchmill.config import MODEL_NAME
from batchmill.errors import BatchmillError, Conflict, Forbidden, InvalidInput, UnknownName
from batchmill.models.connectors.urls import own_url
from batchmill.models.providers import PROVIDERS
from batchmill.ports.clock import Clock
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ModelRow
from batchmill.services.remote import model_records as records
from batchmill.services.remote.changes import new_id
from batchmill.services.remote.connectors import ConnectorService
from batchmill.services.remote.groups import ModelGroups
from batchmill.services.remote.model_fields import (
    ModelRates,
    details_of,
    name_of,
    per_minute,
    refuse_unsupported,
    require_remote,
)
from batchmill.services.remote.model_records import ModelGroup
from batchmill.services.remote.stored import DEPLOYED, REGISTERED, UNDEPLOYED, ModelDetails, RemoteModel
from batchmill.services.remote.task_records import refuse_running
from batchmill.store.sql.database import Database
from batchmill.types import Caller, Connector, Limits, ModelSpec, Scope
from batchmill.types.connectors import BATCH_PREDICT, PREDICT
from batchmill.types.engine_traits import CONNECTOR, PROVIDER_BATCH, ROUTES

AUTO, BATCH, ONLINE = "auto", "batch", "online"
PROVIDER = "provider"  # the connector parameter that names the provider of its batch API
_HOSTS = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "api.cohere.ai": "cohere",
    "generativelanguage.googleapis.com": "gemini",
}
_AZURE = ".openai.azure.com"
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_AWS_SERVICES = {"api.sagemaker": "sagemaker", "bedrock": "bedrock"}


def find_batch_provider(connector: Connector) -> str | None:
    """The provider of the batch API that the `batch_predict` action calls; None without the action or if unknown.

    Raises: InvalidInput if the connector names an unknown provider.
    """
    action = connector.action(BATCH_PREDICT)
    if action is None:
        return None
    provider = connector.parameters.get(PROVIDER)
    if provider is not None:
        if provider not in PROVIDERS:
            raise InvalidInput(
                f"the connector {connector.name!r} names the provider {provider[:40]!r}, which is not one of "
                f"{', '.join(PROVIDERS)}",
                code="unknown_provider",
            )
        return provider
    host = (urlsplit(own_url(action.url, connector.parameters)).hostname or "").lower()
    if host in _HOSTS:
        return _HOSTS[host]
    if host.endswith(_AZURE):
        return "azure"
    if host.endswith(_AWS):
        service = host.removesuffix(".cn").removesuffix(".amazonaws.com").rpartition(".")[0]
        return _AWS_SERVICES.get(service.removesuffix("-fips"))
    return None


def spec_of(
    name: str, connector: Connector, *, alias: str | None = None, limits: Limits = Limits(), route: str = AUTO
) -> ModelSpec:
    """The spec of a remote model. It contains the connector, so that later changes do not affect running jobs.

    Args:
        alias: another name that rows may use.
        route: "batch" or "online" for one route only; "auto" for all that exist.

    Raises: InvalidInput if no such route exists.
    """
    provider = find_batch_provider(connector)
    source = connector.parameters.get("model") or connector.name
    online = ModelSpec(name, CONNECTOR, source, connector=connector, alias=alias, limits=limits)
    specs = []
    if provider is not None and route != ONLINE:
        specs.append(replace(online, engine=PROVIDER_BATCH, provider=provider))
    if connector.action(PREDICT) is not None and route != BATCH:
        specs.append(online)
    if not specs:
        raise InvalidInput(_no_route_message(connector, route), code="no_route")
    return specs[0] if len(specs) == 1 else ModelSpec(name, ROUTES, source, alias=alias, routes=specs, limits=limits)


def _no_route_message(connector: Connector, route: str) -> str:
    subject = f"the connector {connector.name!r}"
    if connector.action(BATCH_PREDICT) is not None and route != ONLINE:
        return (
            f"{subject} submits batches to a service with an unknown batch API: if it is compatible with OpenAI's, set "
            f'the parameter "{PROVIDER}": "openai"' + ("" if route == BATCH else "; or add a predict action")
        )
    missing = {BATCH: "batch_predict action", ONLINE: "predict action"}.get(
        route, "predict action and no batch_predict"
    )
    return f"{subject} has no {missing}: a job cannot send rows through it"


__all__ = ["ModelDetails", "RemoteModel", "RemoteModels"]

SHOWN_CHARS = 80
NOT_UNDEPLOYED = "the model {} is not undeployed"


class RemoteModels:
    """All methods raise UnknownName (`model_not_found`) for a model that is unknown or of another project.

    Args:
        auto_deploy: whether a call of a model deploys it, for models without a setting of their own.
    """

    def __init__(
        self, database: Database, connectors: ConnectorService, groups: ModelGroups, clock: Clock,
        directory: ModelDirectory, *, auto_deploy: bool = True,
    ) -> None:  # fmt: skip
        self._database, self._connectors, self._groups, self._clock = database, connectors, groups, clock
        self._auto_deploy = auto_deploy
        self._models: dict[str, RemoteModel] = {}
        self._rates = ModelRates(clock)
        self._directory = directory
        connectors.listen(self._connector_changed)

    async def load(self) -> None:
        """Read all models. Connectors and groups must be loaded before."""
        self._models = {each.id: each for each in await self._database.read(records.read_all)}
        self._publish(self._models.values())

    # -- lookup -------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, model_id: str) -> RemoteModel:
        model = self._models.get(model_id)
        if model is None or model.project != caller.project:
            raise UnknownName(
                f"Failed to find model with the provided model id: {model_id[:SHOWN_CHARS]}", code="model_not_found"
            )
        return model

    def all(self, caller: Caller) -> list[RemoteModel]:
        """The models of the caller's project, the oldest first."""
        return [each for each in self._models.values() if each.project == caller.project]

    def list_all(self) -> list[RemoteModel]:
        """The models of all projects, for the operator of the machine."""
        return list(self._models.values())

    def connector(self, model: RemoteModel) -> Connector:
        """The connector of a model. Raises: UnknownName if it was deleted."""
        if model.own is not None:
            return model.own
        assert model.connector is not None, "it has one or the other"
        return self._connectors.get(_project_reader(model), model.connector).connector

    def spec(self, model_id: str, *, route: str = AUTO) -> ModelSpec:
        """The model as part of a job spec, with the current connector.

        Args:
            route: "batch" or "online" for one route only; "auto" for all that exist.

        Raises: InvalidInput (`no_route`) if no such route exists.
        """
        model = self._models.get(model_id)
        if model is None:
            raise UnknownName(
                f"Failed to find model with the provided model id: {model_id[:SHOWN_CHARS]}", code="model_not_found"
            )
        limits = Limits(requests_per_minute=per_minute(model.details.rate_limiter))
        alias = model.name if MODEL_NAME.fullmatch(model.name) else None
        return spec_of(model_id, self.connector(model), alias=alias, limits=limits, route=route)

    def find(self, name: str, project: str | None = None) -> RemoteModel | None:
        """The callable model with this id, or the newest version in the only group whose models have this name.

        Args:
            project: of the model; None: any.
        """
        model = self._models.get(name)
        if model is None:
            models = [each for each in self._models.values() if each.name == name and project in (None, each.project)]
            model = self._newest_callable(models)
        is_of_project = model is not None and project in (None, model.project)
        return model if model is not None and is_of_project and self.is_callable(model) else None

    def _newest_callable(self, models: Iterable[RemoteModel]) -> RemoteModel | None:
        """The newest callable version among models of one name; None if two groups have such models."""
        callable_models = [each for each in models if MODEL_NAME.fullmatch(each.name) and self.is_callable(each)]
        return (
            max(callable_models, key=lambda each: each.version)
            if len({each.group for each in callable_models}) == 1
            else None
        )

    def for_job(self, model: RemoteModel) -> ModelSpec:
        """The spec for a job. Rows may use the model's id, and its name if that resolves to this model."""
        names = [model.id]
        if self.find(model.name, model.project) == model:
            names.append(model.name)
        return replace(self.spec(model.id), allowed=names)

    def is_callable(self, model: RemoteModel) -> bool:
        """Whether the model is enabled, and is deployed or will be at its first call."""
        is_auto_deploy = model.details.is_auto_deploy
        may_deploy = self._auto_deploy if is_auto_deploy is None else is_auto_deploy
        return model.details.is_enabled and (model.is_deployed or may_deploy)

    def admit(self, model_id: str) -> None:
        """Count a call of a model. Raises: RateLimited if its `rate_limiter` does not allow another call now."""
        self._rates.admit(model_id, self._models[model_id].details.rate_limiter)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _publish(self, changed: Iterable[RemoteModel]) -> None:
        """Publish stored changes, together with the models of the same names, which may resolve differently now."""
        names = {(each.project, each.name) for each in changed}
        models_by_name: dict[tuple[str, str], list[RemoteModel]] = {each: [] for each in names}
        for model in self._models.values():
            if (models := models_by_name.get((model.project, model.name))) is not None:
                models.append(model)
        self._directory.publish(
            {(ModelKind.REMOTE, *name): self._rows(name[1], models) for name, models in models_by_name.items()}
        )

    def _rows(self, name: str, models: list[RemoteModel]) -> list[ModelRow]:
        """A row for each model's id, and one for the name: of the model it resolves to, or to reserve it."""
        newest, rows = self._newest_callable(models), []
        for model in models:
            blank = ModelRow(
                model.id, ModelKind.REMOTE, model.project, base=model.id, listed=(model.id, name), created=model.created
            )
            rows.append(row := self._with_spec(blank, model, [name] if model is newest else []))
            if model is newest:
                rows.append(replace(row, name=name))
        if models and newest is None and MODEL_NAME.fullmatch(name):
            rows.append(ModelRow(name, ModelKind.REMOTE, models[0].project))
        return rows

    def _with_spec(self, row: ModelRow, model: RemoteModel, names: list[str]) -> ModelRow:
        """The row of a model with its spec, if it is callable."""
        if not self.is_callable(model):
            return row
        try:
            return replace(row, spec=replace(self.spec(model.id), allowed=[model.id, *names]))
        except BatchmillError as error:  # raised again for each caller
            return replace(row, refuse=partial(type(error), error.message, code=error.code))

    def _connector_changed(self, connector_id: str) -> None:
        self._publish([each for each in self._models.values() if each.connector == connector_id])

    # -- changing -----------------------------------------------------------------------------------------------------

    async def register(
        self, caller: Caller, fields: Mapping[str, Any], *, deploy: bool = False, is_trusted: bool = False
    ) -> RemoteModel:
        """Create a model from ML Commons' fields of a remote model, with a connector or the id of one.

        Raises: InvalidInput with ML Commons' message; UnknownName for the connector or the group.
        """
        name = name_of(fields)
        refuse_unsupported(fields)
        require_remote(fields)
        details = details_of(fields, ModelDetails())
        model_id = new_id()
        own, plain = await self._connector_of(caller, fields, model_id, is_trusted=is_trusted)
        now = self._clock.now()
        model = RemoteModel(
            model_id, caller.project, name, "", 0, None if own is not None else str(fields["connector_id"]), own,
            DEPLOYED if deploy else REGISTERED, replace(details, deployed=now) if deploy else details, 1, now, now,
        )  # fmt: skip
        if deploy:
            _refuse_disabled(model)
        return await self._connectors.changes.make(self._register(caller, model, fields.get("model_group_id"), plain))

    async def _connector_of(
        self, caller: Caller, fields: Mapping[str, Any], model_id: str, *, is_trusted: bool
    ) -> tuple[Connector | None, dict[str, str]]:
        """The model's own connector and its credentials; None if the fields have the id of an existing one."""
        if (connector_id := fields.get("connector_id")) is not None:
            self._connectors.get(caller, str(connector_id))
            return None, {}
        content = fields.get("connector")
        if not isinstance(content, Mapping):
            raise InvalidInput(
                "You must provide connector content when creating a remote model without connector id!",
                code="missing_connector",
            )
        own, plain = await self._connectors.read(caller.project, content, model_id, is_trusted=is_trusted)
        if own.action(PREDICT) is None:
            raise InvalidInput(
                "Connector endpoint is required when creating a remote model without connector id!",
                code="missing_action",
            )
        return own, plain

    async def _register(
        self, caller: Caller, model: RemoteModel, group_id: Any, plain: Mapping[str, str]
    ) -> RemoteModel:
        if model.connector is not None:
            self._connectors.get(caller, model.connector)  # it may have been deleted since
        group = self._group_for(caller, model.name, group_id)
        model = replace(model, group=group.id, version=group.latest)
        quotas = self._connectors.quotas.of(model.project)
        with self._claim(model):
            await self._connectors.store(
                lambda db: records.insert(db, model, group, quotas), model.project, plain=plain, new=model.own
            )
            self._groups.put(group)
            return self._put(model)

    @contextlib.contextmanager
    def _claim(self, model: RemoteModel) -> Iterator[None]:
        """Reserve the name of a model, if calls can use it. Raises: Conflict (`name_taken`)."""
        if not MODEL_NAME.fullmatch(model.name):
            yield
            return
        with self._directory.claim(model.project, model.name, ModelKind.REMOTE):
            yield

    def _group_for(self, caller: Caller, name: str, group_id: Any) -> ModelGroup:
        """The group for a model, with one more version: the given one, the one with the model's name, or a new one."""
        if group_id is None:
            group = self._groups.by_name(caller, name) or self._groups.new(caller, name)
        else:
            try:
                group = self._groups.get(caller, str(group_id))
            except UnknownName:
                raise UnknownName("Model group not found", code="group_not_found") from None
        return records.next_version(group, self._clock.now())

    async def update(self, caller: Caller, model_id: str, fields: Mapping[str, Any]) -> RemoteModel:
        """Change the given fields. Raises: InvalidInput; UnknownName for the connector or the group."""
        old = self.get(caller, model_id)
        refuse_unsupported(fields)
        own = await self._update_own_connector(old, fields["connector"]) if "connector" in fields else None
        return await self._connectors.changes.make(self._update(caller, old, dict(fields), own))

    async def _update(
        self,
        caller: Caller,
        base: RemoteModel,
        fields: dict[str, Any],
        changed: tuple[Connector, dict[str, str]] | None,
    ) -> RemoteModel:
        old, model_id = self.get(caller, base.id), base.id
        new = replace(
            old,
            name=name_of(fields) if "name" in fields else old.name,
            details=details_of(fields, old.details),
            revision=old.revision + 1,
            changed=max(self._clock.now(), old.changed),
        )
        plain: dict[str, str] = {}
        if "connector_id" in fields:
            new = replace(new, connector=self._switch_connector(caller, old, str(fields["connector_id"])))
        if changed is not None:
            if old.own != base.own:
                raise Conflict("another request changed the model meanwhile: send the change again")
            own, plain = changed
            new = replace(new, own=own)
        group = None
        if fields.get("model_group_id") not in (None, old.group):
            group = self._group_for(caller, new.name, fields["model_group_id"])
            new = replace(new, group=group.id, version=group.latest)
        is_elsewhere = new.connector != old.connector or bool(_keys(fields.get("connector")) - {"credential"})

        def write(db: sa.Connection) -> None:
            if is_elsewhere:
                refuse_running(db, [model_id], "the connector of the model {} is not changed")
            records.update(db, new, group)

        with self._claim(new):
            await self._connectors.store(write, new.project, plain=plain, new=new.own, old=old.own)
            if group is not None:
                self._groups.put(group)
            self._rates.forget(model_id)
            return self._put(new)

    def _switch_connector(self, caller: Caller, model: RemoteModel, connector_id: str) -> str:
        if model.own is not None:
            raise InvalidInput(
                "This remote does not have a connector_id field, maybe it uses an internal connector.",
                code="own_connector",
            )
        return self._connectors.get(caller, connector_id).id

    async def _update_own_connector(self, model: RemoteModel, content: Any) -> tuple[Connector, dict[str, str]]:
        if model.own is None or not isinstance(content, Mapping):
            raise InvalidInput(
                "This remote does not have an internal connector to update: change the connector itself, or choose "
                "another with connector_id",
                code="no_own_connector",
            )
        return await self._connectors.read_update(model.project, model.own, content)

    async def deploy(self, caller: Caller, model_id: str) -> RemoteModel:
        """Make a model callable. Raises: Forbidden if it is disabled."""
        _refuse_disabled(self.get(caller, model_id))
        return await self._connectors.changes.make(self._set_state(caller, model_id, DEPLOYED))

    async def undeploy(self, caller: Caller, model_id: str) -> RemoteModel:
        """Stop calls of a model, until a call or a user deploys it again. Running jobs continue.

        Raises: Conflict while a provider runs a batch of it.
        """
        self.get(caller, model_id)
        return await self._connectors.changes.make(self._set_state(caller, model_id, UNDEPLOYED))

    async def check_idle(self, ids: Collection[str]) -> None:
        """Raises: Conflict while a provider runs a batch of one of the models."""
        await self._database.read(refuse_running, ids, NOT_UNDEPLOYED)

    async def _set_state(self, caller: Caller, model_id: str, state: str) -> RemoteModel:
        model = self.get(caller, model_id)
        if model.state == state:
            return model
        self.connector(model)
        now = self._clock.now()
        timestamps = {"deployed": now} if state == DEPLOYED else {"undeployed": now}
        new = replace(
            model, state=state, details=replace(model.details, **timestamps), revision=model.revision + 1, changed=now
        )
        await self._database.write(_write_state, new)
        return self._put(new)

    async def ready(self, caller: Caller, model_id: str) -> RemoteModel:
        """The model, which is deployed first if a call may do that.

        Raises: Forbidden if it is disabled; InvalidInput (`not_deployed`) if a user must deploy it first.
        """
        model = self.get(caller, model_id)
        _refuse_disabled(model)
        if model.is_deployed:
            return model
        if model.details.is_auto_deploy is False:
            raise InvalidInput(
                "Auto deployment disabled for this model, please deploy model first Model ID: " + model_id,
                code="not_deployed",
            )
        if not self._auto_deploy and model.details.is_auto_deploy is None:
            raise InvalidInput(
                f"Model not ready yet. Please run this first: POST /_plugins/_ml/models/{model_id}/_deploy",
                code="not_deployed",
            )
        return await self.deploy(caller, model_id)

    async def delete(self, caller: Caller, model_id: str) -> RemoteModel:
        """Delete a model. Raises: InvalidInput while it is deployed; Conflict while an unfinished job uses its own
        connector, or a provider runs a batch of it."""
        self.get(caller, model_id)
        return await self._connectors.changes.make(self._delete(caller, model_id))

    async def _delete(self, caller: Caller, model_id: str) -> RemoteModel:
        model = self.get(caller, model_id)
        if model.is_deployed:
            raise InvalidInput(
                "Model cannot be deleted in deploying or deployed state. Try undeploy model first then delete",
                code="model_deployed",
            )

        def delete_record(db: sa.Connection) -> None:
            refuse_running(db, [model.id], "the model {} is not deleted")
            records.delete(db, model)

        await self._connectors.store(delete_record, model.project, old=model.own)
        del self._models[model_id]
        self._publish([model])
        self._rates.forget(model_id)
        return model

    def _put(self, model: RemoteModel) -> RemoteModel:
        old = self._models.get(model.id, model)
        self._models[model.id] = model
        self._publish([old, model])  # the name may have changed
        return model


def _write_state(db: sa.Connection, model: RemoteModel) -> None:
    """Store the state of a model. Raises: Conflict when undeploying a model while a provider runs a batch of it."""
    if model.state == UNDEPLOYED:
        refuse_running(db, [model.id], NOT_UNDEPLOYED)
    records.update(db, model)


def _keys(fields: Any) -> set[str]:
    return set(fields) if isinstance(fields, Mapping) else set()


def _refuse_disabled(model: RemoteModel) -> None:
    if not model.details.is_enabled:
        raise Forbidden("Model is disabled.")


def _project_reader(model: RemoteModel) -> Caller:
    """A caller of the model's own project."""
    return Caller(model.project, Scope.READ)
