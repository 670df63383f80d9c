"""Models that are a connector: registered in groups, deployed, undeployed and deleted by the process that owns them."""

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
from batchmill.ports import Clock
from batchmill.services.directory import ModelDirectory
from batchmill.services.model_rows import ModelKind, ModelRow
from batchmill.services.remote import model_records as records
from batchmill.services.remote.changes import new_id
from batchmill.services.remote.connectors import ConnectorService
from batchmill.services.remote.groups import ModelGroups
from batchmill.services.remote.model_fields import (
    ModelRates,
    details_of,
    name_of,
    per_minute,
    refuse_strangers,
    require_remote,
)
from batchmill.services.remote.model_records import (
    DEPLOYED,
    REGISTERED,
    UNDEPLOYED,
    ModelDetails,
    ModelGroup,
    RemoteModel,
)
from batchmill.services.remote.task_records import refuse_running
from batchmill.store.database import Database
from batchmill.types import Caller, Connector, Limits, ModelSpec, Scope
from batchmill.types.connectors import BATCH_PREDICT, PREDICT
from batchmill.types.engine_traits import CONNECTOR, PROVIDER_BATCH, ROUTES

AUTO, BATCH, ONLINE = "auto", "batch", "online"
PROVIDER = "provider"  # the parameter of a connector that says whose batch API it speaks
_HOSTS = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "api.cohere.ai": "cohere",
}
_AZURE = ".openai.azure.com"
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_AWS_SERVICES = {"api.sagemaker": "sagemaker", "bedrock": "bedrock"}


def provider_of(connector: Connector) -> str | None:
    """Whose batch API the `batch_predict` action calls; None: there is no such action, or nobody knows the API.

    Raises: InvalidInput where the connector names a provider that nobody knows.
    """
    action = connector.action(BATCH_PREDICT)
    if action is None:
        return None
    named = connector.parameters.get(PROVIDER)
    if named is not None:
        if named not in PROVIDERS:
            raise InvalidInput(
                f"the connector {connector.name!r} names the provider {named[:40]!r}: known are {', '.join(PROVIDERS)}",
                code="unknown_provider",
            )
        return named
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
    """The model that `name` is, with the connector in it: what changes later changes no job that has begun.

    Args:
        alias: what else its rows may call it.
        route: "batch" or "online" for one way alone; "auto" for whichever there are.

    Raises: InvalidInput where that way, or any, does not exist.
    """
    provider = provider_of(connector)
    source = connector.parameters.get("model") or connector.name
    online = ModelSpec(name, CONNECTOR, source, connector=connector, alias=alias, limits=limits)
    ways = []
    if provider is not None and route != ONLINE:
        ways.append(replace(online, engine=PROVIDER_BATCH, provider=provider))
    if connector.action(PREDICT) is not None and route != BATCH:
        ways.append(online)
    if not ways:
        raise InvalidInput(_no_way(connector, route), code="no_route")
    return ways[0] if len(ways) == 1 else ModelSpec(name, ROUTES, source, alias=alias, routes=ways, limits=limits)


def _no_way(connector: Connector, route: str) -> str:
    place = f"the connector {connector.name!r}"
    if connector.action(BATCH_PREDICT) is not None and route != ONLINE:
        return (
            f"{place} hands batches to a service whose batch API is unknown: where it speaks OpenAI's, say so "
            f'with the parameter "{PROVIDER}": "openai"' + ("" if route == BATCH else "; or give it a predict action")
        )
    missing = {BATCH: "batch_predict action", ONLINE: "predict action"}.get(
        route, "predict action and no batch_predict"
    )
    return f"{place} has no {missing}: no row of a job can go through it"


__all__ = ["ModelDetails", "RemoteModel", "RemoteModels"]

SHOWN_CHARS = 80
NOT_UNDEPLOYED = "the model {} is not undeployed"


class RemoteModels:
    """Raises, everywhere: UnknownName (`model_not_found`) for a model of another project, or of none.

    Args:
        auto_deploy: a call of a model deploys it, unless the model says otherwise.
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
        """Read what there is; connectors and groups have been."""
        self._models = {each.id: each for each in await self._database.read(records.read_all)}
        self._publish(self._models.values())

    # -- looking ------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, model_id: str) -> RemoteModel:
        found = self._models.get(model_id)
        if found is None or found.project != caller.project:
            raise UnknownName(
                f"Failed to find model with the provided model id: {model_id[:SHOWN_CHARS]}", code="model_not_found"
            )
        return found

    def all(self, caller: Caller) -> list[RemoteModel]:
        """Those of the caller's project, in the order of their making."""
        return [each for each in self._models.values() if each.project == caller.project]

    def every(self) -> list[RemoteModel]:
        """Those of all projects, for whoever runs the machine."""
        return list(self._models.values())

    def connector(self, model: RemoteModel) -> Connector:
        """What a model calls through. Raises: UnknownName where that is gone."""
        if model.own is not None:
            return model.own
        assert model.connector is not None, "it has one or the other"
        return self._connectors.get(_owner(model), model.connector).connector

    def spec(self, model_id: str, *, route: str = AUTO) -> ModelSpec:
        """The model as a job has it, with its connector as it is now.

        Args:
            route: "batch" or "online" for one way alone; "auto" for whichever there are.

        Raises: InvalidInput (`no_route`) where that way does not exist.
        """
        found = self._models.get(model_id)
        if found is None:
            raise UnknownName(
                f"Failed to find model with the provided model id: {model_id[:SHOWN_CHARS]}", code="model_not_found"
            )
        limits = Limits(requests_per_minute=per_minute(found.details.rate_limiter))
        alias = found.name if MODEL_NAME.fullmatch(found.name) else None
        return spec_of(model_id, self.connector(found), alias=alias, limits=limits, route=route)

    def find(self, name: str, project: str | None = None) -> RemoteModel | None:
        """The model with this id, or the newest version of the one group whose models are called so. Callable ones.

        Args:
            project: whose; None: anybody's.
        """
        found = self._models.get(name)
        if found is None:
            named = [each for each in self._models.values() if each.name == name and project in (None, each.project)]
            found = self._meant(named)
        is_theirs = found is not None and project in (None, found.project)
        return found if found is not None and is_theirs and self.is_callable(found) else None

    def _meant(self, named: Iterable[RemoteModel]) -> RemoteModel | None:
        """Which of the models of a name it means: the newest version; nothing where two groups have such models."""
        found = [each for each in named if MODEL_NAME.fullmatch(each.name) and self.is_callable(each)]
        return max(found, key=lambda each: each.version) if len({each.group for each in found}) == 1 else None

    def for_job(self, model: RemoteModel) -> ModelSpec:
        """The model as a job has it whose rows may name it by its id, and by its name where that means it."""
        names = [model.id]
        if self.find(model.name, model.project) == model:
            names.append(model.name)
        return replace(self.spec(model.id), allowed=names)

    def is_callable(self, model: RemoteModel) -> bool:
        """It is enabled, and deployed or will be when it is called."""
        is_auto_deploy = model.details.is_auto_deploy
        may_deploy = self._auto_deploy if is_auto_deploy is None else is_auto_deploy
        return model.details.is_enabled and (model.is_deployed or may_deploy)

    def admit(self, model_id: str) -> None:
        """Count a call of a model. Raises: RateLimited where its `rate_limiter` says that it is one too many."""
        self._rates.admit(model_id, self._models[model_id].details.rate_limiter)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _publish(self, changed: Iterable[RemoteModel]) -> None:
        """Publish what was written down: the models that share a name with it may mean something else now."""
        names = {(each.project, each.name) for each in changed}
        named: dict[tuple[str, str], list[RemoteModel]] = {each: [] for each in names}
        for model in self._models.values():
            if (same := named.get((model.project, model.name))) is not None:
                same.append(model)
        self._directory.publish({(ModelKind.REMOTE, *name): self._rows(name[1], same) for name, same in named.items()})

    def _rows(self, name: str, models: list[RemoteModel]) -> list[ModelRow]:
        """Each model by its id, and the one that their name means by that. Others hold the name."""
        meant, rows = self._meant(models), []
        for model in models:
            blank = ModelRow(
                model.id, ModelKind.REMOTE, model.project, base=model.id, listed=(model.id, name), created=model.created
            )
            rows.append(found := self._answering(blank, model, [name] if model is meant else []))
            if model is meant:
                rows.append(replace(found, name=name))
        if models and meant is None and MODEL_NAME.fullmatch(name):
            rows.append(ModelRow(name, ModelKind.REMOTE, models[0].project))
        return rows

    def _answering(self, row: ModelRow, model: RemoteModel, names: list[str]) -> ModelRow:
        """The row of a model with what it answers with, if it may be called."""
        if not self.is_callable(model):
            return row
        try:
            return replace(row, spec=replace(self.spec(model.id), allowed=[model.id, *names]))
        except BatchmillError as error:  # told to whoever calls it
            return replace(row, refuse=partial(type(error), error.message, code=error.code))

    def _connector_changed(self, connector_id: str) -> None:
        self._publish([each for each in self._models.values() if each.connector == connector_id])

    # -- changing -----------------------------------------------------------------------------------------------------

    async def register(
        self, caller: Caller, fields: Mapping[str, Any], *, deploy: bool = False, is_trusted: bool = False
    ) -> RemoteModel:
        """Make a model of the fields that ML Commons has for a remote one: a connector's id, or a connector.

        Raises: InvalidInput with ML Commons' words; UnknownName for the connector, or the group.
        """
        name = name_of(fields)
        refuse_strangers(fields)
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
        """The connector that only this model is to have; None: it names one that there is."""
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
        """Hold the name of a model, if calls may name it so. Raises: Conflict (`name_taken`)."""
        if not MODEL_NAME.fullmatch(model.name):
            yield
            return
        with self._directory.claim(model.project, model.name, ModelKind.REMOTE):
            yield

    def _group_for(self, caller: Caller, name: str, group_id: Any) -> ModelGroup:
        """The group that a model joins, with one version more: the one that is named, of its name, or a new one."""
        if group_id is None:
            found = self._groups.named(caller, name) or self._groups.new(caller, name)
        else:
            try:
                found = self._groups.get(caller, str(group_id))
            except UnknownName:
                raise UnknownName("Model group not found", code="group_not_found") from None
        return records.next_version(found, self._clock.now())

    async def update(self, caller: Caller, model_id: str, fields: Mapping[str, Any]) -> RemoteModel:
        """Change what is said and keep the rest. Raises: InvalidInput; UnknownName for the connector, or the group."""
        old = self.get(caller, model_id)
        refuse_strangers(fields)
        own = await self._own_changed(old, fields["connector"]) if "connector" in fields else None
        return await self._connectors.changes.make(self._update(caller, old, dict(fields), own))

    async def _update(
        self,
        caller: Caller,
        read: RemoteModel,
        fields: dict[str, Any],
        changed: tuple[Connector, dict[str, str]] | None,
    ) -> RemoteModel:
        old, model_id = self.get(caller, read.id), read.id
        new = replace(
            old,
            name=name_of(fields) if "name" in fields else old.name,
            details=details_of(fields, old.details),
            revision=old.revision + 1,
            changed=max(self._clock.now(), old.changed),
        )
        plain: dict[str, str] = {}
        if "connector_id" in fields:
            new = replace(new, connector=self._other_connector(caller, old, str(fields["connector_id"])))
        if changed is not None:
            if old.own != read.own:
                raise Conflict("the model was changed by somebody else meanwhile: send the change again")
            own, plain = changed
            new = replace(new, own=own)
        group = None
        if fields.get("model_group_id") not in (None, old.group):
            group = self._group_for(caller, new.name, fields["model_group_id"])
            new = replace(new, group=group.id, version=group.latest)
        is_elsewhere = new.connector != old.connector or bool(_parts(fields.get("connector")) - {"credential"})

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

    def _other_connector(self, caller: Caller, model: RemoteModel, connector_id: str) -> str:
        if model.own is not None:
            raise InvalidInput(
                "This remote does not have a connector_id field, maybe it uses an internal connector.",
                code="own_connector",
            )
        return self._connectors.get(caller, connector_id).id

    async def _own_changed(self, model: RemoteModel, content: Any) -> tuple[Connector, dict[str, str]]:
        if model.own is None or not isinstance(content, Mapping):
            raise InvalidInput(
                "This remote does not have an internal connector to update: change the connector itself, or name "
                "another with connector_id",
                code="no_own_connector",
            )
        return await self._connectors.reread(model.project, model.own, content)

    async def deploy(self, caller: Caller, model_id: str) -> RemoteModel:
        """Let it be called. Raises: Forbidden where it is disabled."""
        _refuse_disabled(self.get(caller, model_id))
        return await self._connectors.changes.make(self._move(caller, model_id, DEPLOYED))

    async def undeploy(self, caller: Caller, model_id: str) -> RemoteModel:
        """Let it be called no more, unless a call deploys it again. Jobs that have begun go on.

        Raises: Conflict while a batch of it runs at its provider.
        """
        self.get(caller, model_id)
        return await self._connectors.changes.make(self._move(caller, model_id, UNDEPLOYED))

    async def check_idle(self, ids: Collection[str]) -> None:
        """Raises: Conflict while a batch of one of them runs at its provider."""
        await self._database.read(refuse_running, ids, NOT_UNDEPLOYED)

    async def _move(self, caller: Caller, model_id: str, state: str) -> RemoteModel:
        model = self.get(caller, model_id)
        if model.state == state:
            return model
        self.connector(model)
        now = self._clock.now()
        seen = {"deployed": now} if state == DEPLOYED else {"undeployed": now}
        new = replace(
            model, state=state, details=replace(model.details, **seen), revision=model.revision + 1, changed=now
        )
        await self._database.write(_moved, new)
        return self._put(new)

    async def ready(self, caller: Caller, model_id: str) -> RemoteModel:
        """The model, deployed where it was not and may be by a call.

        Raises: Forbidden where it is disabled; InvalidInput (`not_deployed`) where somebody must deploy it first.
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
        """Raises: InvalidInput while it is deployed; Conflict while a job needs the connector that only it has, or a
        batch of it runs at its provider."""
        self.get(caller, model_id)
        return await self._connectors.changes.make(self._delete(caller, model_id))

    async def _delete(self, caller: Caller, model_id: str) -> RemoteModel:
        model = self.get(caller, model_id)
        if model.is_deployed:
            raise InvalidInput(
                "Model cannot be deleted in deploying or deployed state. Try undeploy model first then delete",
                code="model_deployed",
            )

        def forget(db: sa.Connection) -> None:
            refuse_running(db, [model.id], "the model {} is not deleted")
            records.delete(db, model)

        await self._connectors.store(forget, model.project, old=model.own)
        del self._models[model_id]
        self._publish([model])
        self._rates.forget(model_id)
        return model

    def _put(self, model: RemoteModel) -> RemoteModel:
        before = self._models.get(model.id, model)
        self._models[model.id] = model
        self._publish([before, model])  # it may have had another name
        return model


def _moved(db: sa.Connection, model: RemoteModel) -> None:
    """Raises: Conflict for one that is to be undeployed while a batch of it runs."""
    if model.state == UNDEPLOYED:
        refuse_running(db, [model.id], NOT_UNDEPLOYED)
    records.update(db, model)


def _parts(fields: Any) -> set[str]:
    return set(fields) if isinstance(fields, Mapping) else set()


def _refuse_disabled(model: RemoteModel) -> None:
    if not model.details.is_enabled:
        raise Forbidden("Model is disabled.")


def _owner(model: RemoteModel) -> Caller:
    """Whoever looks for what belongs to the model's own project."""
    return Caller(model.project, Scope.READ)
