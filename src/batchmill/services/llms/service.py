"""Deployments of language models: creates, changes and deletes them, and makes the models that jobs define.

The process that owns the data directory has the only LlmService, with all deployments in memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from batchmill.errors import BatchmillError, Conflict, Forbidden, InvalidInput, Unavailable, UnknownName
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.jobs.pools.resources import hide_names
from batchmill.ports.clock import Clock
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import Key, ModelKind, ModelRow
from batchmill.services.functions.names import RESERVED_NAMES
from batchmill.services.llms import records
from batchmill.services.llms.controller import Calls, EngineController, Engines
from batchmill.services.llms.records import LlmDeployment, Stored
from batchmill.services.llms.settings import HubTokens, is_reference, is_same_engine, model_of, read, tokens_of
from batchmill.services.remote.changes import Changes, new_id
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import Caller, EngineState, EngineView, LlmSettings, ModelSpec, Scaling
from batchmill.types.engine_traits import LLM
from batchmill.types.models import Suspect, visible_event

__all__ = ["LlmDeployment", "LlmService"]

log = logging.getLogger("batchmill.llms")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHOWN_CHARS = 80
DESCRIPTION_CHARS_MAX = 4_096
STARTED = (EngineState.READY, EngineState.STARTING)


class LlmService:
    """Raises, everywhere: UnknownName (`llm_not_found`) for a deployment that the project does not have."""

    def __init__(
        self,
        database: Database,
        vault: Vault,
        directory: ModelDirectory,
        clock: Clock,
        *,
        engines: Engines,
        calls: Calls,
        quarantine: Quarantine,
        gpus: int | None = None,
    ) -> None:
        """Args:
        quarantine: the quarantine of the engines.
        gpus: the number of GPUs of the machine; None: unknown.
        """
        self._database, self._vault, self._clock, self._gpus = database, vault, clock, gpus
        self._tokens = HubTokens(database, vault, clock)
        self._directory, self._configuration = directory, directory.configured
        self.quarantine = quarantine
        self._controller = EngineController(
            engines,
            calls,
            clock,
            on_replaced=self._on_replaced,
            on_served=self._on_served,
            on_poll=self._update_adapters,
        )
        self._records: dict[str, dict[str, LlmDeployment]] = {}  # project -> name -> deployment
        self._changes = Changes()
        self._configured_deployments: list[LlmDeployment] | None = None  # of the configuration
        self._is_stale = False  # adapters have changed since the engines got theirs
        self._started_at = clock.now()
        directory.listen(self._on_adapters_changed)

    async def load(self) -> None:
        """Read all deployments. One whose base model no longer exists is kept, and its use raises an error."""
        for stored in await self._database.read(records.read_all):
            # No engine runs that the update could replace, so that it is complete.
            if stored.details.serving is not None and not stored.details.problem:
                stored = replace(stored, details=replace(stored.details, serving=None))
            deployment = self._deployment_of(stored)
            self._records.setdefault(deployment.project, {})[deployment.name] = deployment
            self._apply(deployment)
        self._publish(self._all())

    def _deployment_of(self, stored: Stored) -> LlmDeployment:
        settings = stored.details.serving or stored.settings
        try:
            base = self._configuration.get(settings.base_model)
        except BatchmillError as error:
            log.warning("the deployment %s cannot be served: %s", stored.name, error.message)
            deployment = stored.deployment(ModelSpec(stored.name, LLM, settings.base_model))
            return replace(deployment, is_broken=True, problem=error.message)
        return stored.deployment(model_of(base, settings, name=stored.name))

    def open(self) -> None:
        """Start to keep the engines that have a minimum of replicas."""
        for deployment in self._all():  # all names are known now
            self._apply(deployment)
        for deployment in self._configured():
            self._controller.set_desired(deployment.id, self._adapted("", deployment.name, deployment.model))
        self._controller.open()

    async def close(self) -> None:
        await self._controller.close()

    # -- read ---------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, name: str) -> LlmDeployment:
        deployment = self.find(caller, name)
        if deployment is None:
            deployment = next(
                (each for each in self._configured() if each.name == name and self._may(caller, each)), None
            )
        if deployment is None:
            raise _unknown(name)
        return deployment if not deployment.is_configured else replace(deployment, project=caller.project)

    def list(self, caller: Caller) -> list[LlmDeployment]:
        """Return the deployments of the configuration, then those of the caller's project, oldest first."""
        configured = [replace(each, project=caller.project) for each in self._configured() if self._may(caller, each)]
        return configured + self.deployed(caller)

    def deployed(self, caller: Caller) -> list[LlmDeployment]:
        """Return the deployments that were created over an API, with their current adapters."""
        return [self._with_served_model(each) for each in self._of(caller.project).values() if self._may(caller, each)]

    def find(self, caller: Caller, name: str) -> LlmDeployment | None:
        """Return a deployment that was created over an API; None if there is none that this caller may use."""
        deployment = self._of(caller.project).get(name)
        return self._with_served_model(deployment) if deployment is not None and self._may(caller, deployment) else None

    def view(self, deployment: LlmDeployment) -> EngineView:
        """Return the state of its engine, with recent events."""
        if deployment.is_configured:
            return self._controller.view_of(self._adapted(deployment.project, deployment.name, deployment.model))
        view = self._controller.view(deployment.id)
        if deployment.is_broken:
            return replace(view, state=EngineState.FAILED, message=deployment.problem)
        if deployment.problem:
            problem = f"the update failed, and the settings before it are still served: {deployment.problem}"
            return replace(view, message=" / ".join(filter(None, (problem, view.message))))
        return view

    def shown(self, caller: Caller, deployment: LlmDeployment) -> EngineView:
        """As `view`, without the names of models that the caller may not see."""
        view = self.view(deployment)

        def message(text: str) -> str:
            return hide_names(text, lambda name: self._directory.sees(caller, name))

        events = [visible_event(each, caller.project, message(each.message)) for each in view.events]
        return replace(view, message=message(view.message), events=events)

    def quarantined(self, project: str | None, digest: str | None = None, *, clear: bool = False) -> list[Suspect]:
        """Return the quarantined requests of a project, or of all: they crashed engines. `clear`: release them."""
        return self.quarantine.clear(project, digest) if clear else self.quarantine.list(project)

    def bases(self, caller: Caller) -> list[str]:
        """Return the names of models that can be deployed. Ids of a model hub are not listed."""
        return self._configuration.bases(caller)

    def base_models(self, caller: Caller) -> list[ModelSpec]:
        """Return the named models that can be deployed."""
        return [self._configuration.get(name) for name in self.bases(caller)]

    def spec(self, caller: Caller, settings: LlmSettings, *, name: str | None = None) -> ModelSpec:
        """Return the model for a job with its own settings. A running deployment with the same settings serves it too.

        Raises: UnknownName (`unknown_base_model`), InvalidInput for settings that callers may not use. Store a token
        before (`keep_token`).
        """
        settings = self._read(settings)
        _check_token_stored(settings)
        base = self._configuration.base(caller, settings.base_model)
        for deployment in self._of(caller.project).values() if name is None else ():
            is_usable = self._may(caller, deployment) and not deployment.is_stopped
            if is_usable and self._serves(deployment, settings):
                return self._for_rows(caller, self._with_served_model(deployment).model, settings)
        model = self._with_adapters(caller.project, settings, model_of(base, settings, name=name))
        return self._for_rows(caller, model, settings)

    def _for_rows(self, caller: Caller, model: ModelSpec, settings: LlmSettings) -> ModelSpec:
        """Return a model that rows name by its base or not at all, with the adapters that the caller may use."""
        return self._directory.limited(caller, model, list(dict.fromkeys([model.name, settings.base_model])))

    def _serves(self, deployment: LlmDeployment, settings: LlmSettings) -> bool:
        """Tell whether its engine runs with these settings. One with a token also serves jobs without a token."""
        served = deployment.serving or deployment.settings
        if settings.hf_token is None:
            settings = replace(settings, hf_token=served.hf_token)
        return is_same_engine(served, settings) and self._controller.view(deployment.id).state in STARTED

    # -- change -------------------------------------------------------------------------------------------------------

    async def create(
        self,
        caller: Caller,
        name: str,
        settings: LlmSettings,
        *,
        description: str | None = None,
        details: Mapping[str, Any] | None = None,
        is_trusted: bool = False,
    ) -> LlmDeployment:
        """Deploy a language model. Its engine starts at the first call, or now if it has a minimum of replicas.

        Args:
            settings: `hf_token` is the token itself. Only the operator (`is_trusted`) may give a reference.
            details: what a dialect stores with it.

        Raises: InvalidInput; UnknownName for the base model or an adapter; Conflict for a name in use.
        """
        return await self._changes.make(
            self._create(caller, name, settings, description, dict(details or {}), is_trusted)
        )

    async def _create(
        self,
        caller: Caller,
        name: str,
        settings: LlmSettings,
        description: str | None,
        details: dict[str, Any],
        is_trusted: bool,
    ) -> LlmDeployment:
        self._check_name(caller, name)
        _check_description(description)
        deployment_id = new_id()
        settings, tokens = self._tokens.split(deployment_id, self._read(settings), is_trusted=is_trusted)
        base = self._configuration.base(caller, settings.base_model)
        now = self._clock.now()
        model = model_of(base, settings, name=name)
        deployment = LlmDeployment(
            deployment_id, caller.project, name, settings, description, details, now, now, model
        )  # fmt: skip
        self._check_preloaded(deployment)
        quota = self._vault.quotas.of(caller.project).llm_deployments
        with self._directory.claim(caller.project, name, ModelKind.LLM):
            await self._vault.change(
                tokens, also=lambda db: records.insert(db, deployment, quota), project=caller.project
            )
            return await self._settle(deployment)

    async def update(
        self,
        caller: Caller,
        name: str,
        settings: LlmSettings | None = None,
        description: str | None | UnsetType = UNSET,
        details: Mapping[str, Any] | None = None,
        *,
        is_trusted: bool = False,
    ) -> LlmDeployment:
        """Change the given fields; others are unchanged. The running engine serves until the new one is ready.

        If the new engine cannot start, the old one stays and the deployment's `problem` has the error.

        Args:
            settings: the complete settings. `hf_token` may be the current reference, which keeps the token.

        Raises: as `create`; Conflict for a deployment of the configuration.
        """
        return await self._changes.make(self._update(caller, name, settings, description, details, is_trusted))

    async def _update(
        self,
        caller: Caller,
        name: str,
        settings: LlmSettings | None,
        description: str | None | UnsetType,
        details: Mapping[str, Any] | None,
        is_trusted: bool,
    ) -> LlmDeployment:
        old = self._find_changeable(caller, name)
        new = replace(old, changed=max(self._clock.now(), old.changed))
        if description is not UNSET:
            _check_description(description)
            new = replace(new, description=description)
        if details is not None:
            new = replace(new, details=dict(details))
        tokens: dict[str, str] = {}
        if settings is not None:
            is_kept = settings.hf_token is not None and settings.hf_token == old.settings.hf_token
            settings, tokens = self._tokens.split(old.id, self._read(settings), is_trusted=is_trusted or is_kept)
            self._configuration.base(caller, settings.base_model)
            serving = (old.serving or old.settings) if settings != (old.serving or old.settings) else None
            new = replace(new, settings=settings, serving=serving, problem="")
            self._check_preloaded(new)
        await self._vault.change(
            tokens, remove=tokens_of(old) - tokens_of(new), unless=records.used_secrets,
            also=lambda db: records.update(db, new), project=new.project,
        )  # fmt: skip
        return await self._settle(new)

    async def delete(self, caller: Caller, name: str) -> LlmDeployment:
        """Delete a deployment and its token. Calls are refused at once. Running jobs keep their model."""
        return await self._changes.make(self._delete(caller, name))

    async def _delete(self, caller: Caller, name: str) -> LlmDeployment:
        deployment = self._find_changeable(caller, name)
        await self._vault.change(
            {}, remove=tokens_of(deployment), unless=records.used_secrets,
            also=lambda db: records.delete(db, deployment.id),
        )  # fmt: skip
        del self._records[deployment.project][deployment.name]
        self._controller.remove(deployment.id)
        self._directory.publish({_key(deployment): ()})
        return deployment

    async def start(self, caller: Caller, name: str) -> LlmDeployment:
        """Start a deployment and its engine. Returns at once; the view shows the progress."""
        deployment = self.get(caller, name)
        if not deployment.is_configured:
            deployment = await self._changes.make(self._set_stopped(caller, name, is_stopped=False))
        self._controller.start(deployment.id)
        return deployment

    async def stop(self, caller: Caller, name: str) -> LlmDeployment:
        """Stop a deployment until it is started. Its engine ends when it is no longer used."""
        return await self._changes.make(self._set_stopped(caller, name, is_stopped=True))

    async def _set_stopped(self, caller: Caller, name: str, *, is_stopped: bool) -> LlmDeployment:
        old = self._find_changeable(caller, name)
        if not is_stopped:
            self._configuration.get((old.serving or old.settings).base_model)
        new = replace(old, is_stopped=is_stopped, changed=max(self._clock.now(), old.changed))
        await self._database.write(records.update, new)
        return await self._settle(new)

    async def _settle(self, deployment: LlmDeployment) -> LlmDeployment:
        """Apply the desired state to the engine. An update without a running engine completes at once."""
        self._records.setdefault(deployment.project, {})[deployment.name] = deployment
        if self._apply(deployment) and deployment.is_updating:
            deployment = await self._store_update(deployment, "")
        else:
            self._publish([deployment])
        return self._with_served_model(deployment)

    async def _store_update(self, deployment: LlmDeployment, error: str) -> LlmDeployment:
        """Store the result of an update."""
        settings = deployment.settings
        if error:
            new = replace(deployment, problem=error)
        else:
            model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
            new = replace(deployment, serving=None, model=model)
        await self._database.write(records.update, new)
        self._records[new.project][new.name] = new
        self._publish([new])
        return new

    async def _on_replaced(self, deployment_id: str, error: str) -> None:
        """Handle the end of an engine replacement."""
        await self._changes.make(self._finish_update(deployment_id, error))

    async def _finish_update(self, deployment_id: str, error: str) -> None:
        deployment = next((each for each in self._all() if each.id == deployment_id), None)
        if deployment is not None and deployment.is_updating:
            await self._store_update(deployment, error)

    # -- tokens -------------------------------------------------------------------------------------------------------

    async def keep_token(self, caller: Caller, settings: LlmSettings) -> LlmSettings:
        """Store the token of a job's settings. Returns the settings with a reference instead of it.

        The same token of a project has one name, so that jobs with it share an engine. `sweep` removes it.
        """
        return await self._tokens.keep(caller.project, settings)

    async def sweep(self) -> None:
        """Remove tokens that no deployment and no unfinished job needs. Tokens of jobs stay for some days."""
        await self._tokens.sweep({name for each in self._all() for name in tokens_of(each)})

    # -- private ------------------------------------------------------------------------------------------------------

    def _read(self, settings: LlmSettings) -> LlmSettings:
        return read(settings, gpus_max=self._gpus)

    def _apply(self, deployment: LlmDeployment) -> bool:
        settings = deployment.serving if deployment.serving is not None and deployment.problem else deployment.settings
        if deployment.is_broken:
            return self._controller.set_desired(deployment.id, deployment.model, is_on=False)
        model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
        return self._controller.set_desired(
            deployment.id,
            self._with_adapters(deployment.project, settings, model),
            is_on=not deployment.is_stopped,
            preloaded=settings.preloaded_adapters,
        )

    def _with_adapters(self, project: str, settings: LlmSettings, model: ModelSpec) -> ModelSpec:
        return self._adapted(project, settings.base_model, model) if settings.takes_adapters else model

    def _adapted(self, project: str, base: str, model: ModelSpec) -> ModelSpec:
        is_own = model.name != base and model.name in self._of(project)
        return self._directory.adapted(project, model, base, is_own=is_own)

    def _with_served_model(self, deployment: LlmDeployment) -> LlmDeployment:
        """Return the deployment with the model that is served now."""
        return replace(deployment, model=self._controller.model(deployment.id))

    def _publish(self, deployments: Iterable[LlmDeployment]) -> None:
        self._directory.publish({_key(each): [_row(self._with_served_model(each))] for each in deployments})

    def _on_served(self, deployment_id: str) -> None:
        """Publish a deployment for which another model is served now."""
        self._publish([each for each in self._all() if each.id == deployment_id])

    def _on_adapters_changed(self) -> None:
        self._is_stale = True
        self._update_adapters()

    def _update_adapters(self) -> None:
        """Give engines the adapters that were registered since, with a larger rank where they need it."""
        if not self._is_stale:
            return
        accepted = [self._refresh(each) for each in self._all()]
        for each in self._kept_of_configuration():
            adapted = self._adapted("", each.name, each.model)
            accepted.append(self._controller.refresh(each.id, adapted))
        self._publish(self._all())
        self._is_stale = not all(accepted)  # retry after a replacement that runs now

    def _kept_of_configuration(self) -> list[LlmDeployment]:
        """Return the deployments of the configuration with a minimum of replicas, once engines are kept."""
        configured = self._configured() if self._controller.is_open else []
        return [each for each in configured if each.settings.scaling.replicas_min]

    def _refresh(self, deployment: LlmDeployment) -> bool:
        settings = deployment.serving or deployment.settings
        model = self._with_adapters(deployment.project, settings, deployment.model)
        return self._controller.refresh(deployment.id, model)

    def _of(self, project: str) -> dict[str, LlmDeployment]:
        return self._records.get(project, {})

    def _all(self) -> list[LlmDeployment]:
        return [each for by_name in self._records.values() for each in by_name.values()]

    def _configured(self) -> list[LlmDeployment]:
        """Return every language model of the configuration, without a project."""
        if self._configured_deployments is None:
            self._configured_deployments = [self._as_deployment(name) for name in self._configuration.language_models()]
        return self._configured_deployments

    def _as_deployment(self, name: str) -> LlmDeployment:
        model = self._configuration.get(name)
        args = {flag: True if value is None else value for flag, value in model.engine_args.items()}
        scaling = model.scaling or Scaling(replicas_max=model.workers)
        settings = LlmSettings(name, args, scaling=scaling, needs=model.needs)
        opened = self._started_at
        return LlmDeployment(f"models.{name}", "", name, settings, None, {}, opened, opened, model, is_configured=True)

    @staticmethod
    def _allows_name(caller: Caller, deployment: LlmDeployment) -> bool:
        return caller.models is None or deployment.name in caller.models

    def _may(self, caller: Caller, deployment: LlmDeployment) -> bool:
        if deployment.is_configured:
            return self._configuration.allows(caller, deployment.name)
        return deployment.project == caller.project and self._allows_name(caller, deployment)

    def _find_changeable(self, caller: Caller, name: str) -> LlmDeployment:
        """Return a deployment that may be changed. Raises: Conflict for one of the configuration."""
        deployment = self._of(caller.project).get(name)
        if deployment is not None and self._may(caller, deployment):
            return deployment
        if self.get(caller, name).is_configured:
            raise Conflict(
                f"{name!r} is defined in the configuration: change models.{name} there, and restart the server",
                code="llm_configured",
            )
        raise _unknown(name)

    def _check_name(self, caller: Caller, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InvalidInput(
                f"a deployment's name has at most 100 letters, digits and . _ -, the first a letter or digit: "
                f"{name[:SHOWN_CHARS]!r} is not valid",
                code="invalid_name",
            )
        if name in RESERVED_NAMES:
            raise InvalidInput(f"{name!r} is a reserved name: choose another", code="reserved_name")
        if caller.models is not None and name not in caller.models:
            raise Forbidden(f"this key may not use the model {name!r}, so it cannot deploy it")
        self._directory.refuse_taken(caller.project, name, ModelKind.LLM)

    def _check_preloaded(self, deployment: LlmDeployment) -> None:
        settings = deployment.settings
        model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
        adapted = self._with_adapters(deployment.project, settings, model)
        for name in settings.preloaded_adapters:
            if name not in adapted.adapters and name not in adapted.adapter_names:
                raise UnknownName(
                    f"there is no ready adapter {name[:SHOWN_CHARS]!r} of {settings.base_model!r}: register it "
                    "first, or leave it out of preloaded_adapters",
                    code="unknown_adapter",
                )


def _check_description(description: str | None) -> None:
    if description is not None and len(description) > DESCRIPTION_CHARS_MAX:
        raise InvalidInput(
            f"the description has {len(description):,} characters, {DESCRIPTION_CHARS_MAX:,} at most",
            code="invalid_setting",
        )


def _check_token_stored(settings: LlmSettings) -> None:
    if settings.hf_token is not None and not is_reference(settings.hf_token):
        raise InvalidInput("the hf_token of a job must be stored before its model is made", code="invalid_secret")


def _unknown(name: str) -> UnknownName:
    return UnknownName(f"there is no deployment {name[:SHOWN_CHARS]!r} that you may use", code="llm_not_found")


def _key(deployment: LlmDeployment) -> Key:
    return ModelKind.LLM, deployment.project, deployment.name


def _row(deployment: LlmDeployment) -> ModelRow:
    name = deployment.name
    refuse = None
    if not deployment.answers:
        reason = deployment.problem if deployment.is_broken else "it is stopped, so start it first"
        refuse = partial(Unavailable, f"the deployment {name!r} cannot be called: {reason}", code="llm_stopped")
    return ModelRow(
        name, ModelKind.LLM, deployment.project, deployment.model, base=deployment.settings.base_model,
        listed=(name,), created=deployment.created,
        takes_adapters=deployment.settings.takes_adapters, refuse=refuse,
    )  # fmt: skip
