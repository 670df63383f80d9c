"""Deployments of language models: made, changed and deleted by those who may; what jobs bring as settings of their own.

The process that owns the data directory holds the one LlmService, and all deployments in memory.
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
from batchmill.jobs.pools.resources import veiled
from batchmill.ports import Clock
from batchmill.services.directory import ModelDirectory
from batchmill.services.functions.names import RESERVED_NAMES
from batchmill.services.llms import records
from batchmill.services.llms.controller import Calls, EngineController, Engines
from batchmill.services.llms.records import LlmDeployment, Stored
from batchmill.services.llms.settings import HubTokens, is_reference, is_same_engine, model_of, read, tokens_of
from batchmill.services.model_rows import Key, ModelKind, ModelRow
from batchmill.services.remote.changes import Changes, new_id
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.types import Caller, EngineState, EngineView, LlmSettings, ModelSpec, Scaling
from batchmill.types.engine_traits import LLM
from batchmill.types.models import Suspect, seen

__all__ = ["LlmDeployment", "LlmService"]

log = logging.getLogger("batchmill.llms")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHOWN_CHARS = 80
DESCRIPTION_CHARS_MAX = 4_096
STARTED = (EngineState.READY, EngineState.STARTING)


class LlmService:
    """Raises, everywhere: UnknownName (`llm_not_found`) for a deployment of another project, or of none."""

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
        quarantine: of whoever runs the engines.
        gpus: what the machine has; None: nobody knows.
        """
        self._database, self._vault, self._clock, self._gpus = database, vault, clock, gpus
        self._tokens = HubTokens(database, vault, clock)
        self._directory, self._configuration = directory, directory.configured
        self.quarantine = quarantine
        self._controller = EngineController(
            engines, calls, clock, moved=self._moved, served=self._served, look=self._look
        )
        self._records: dict[str, dict[str, LlmDeployment]] = {}  # project -> name -> deployment
        self._changes = Changes()
        self._shown: list[LlmDeployment] | None = None  # those of the configuration
        self._is_stale = False  # engines that stay are to get adapters which were registered since
        self._opened = clock.now()
        directory.listen(self._adapters_changed)

    async def load(self) -> None:
        """Read what there is. One whose base is no more is kept, and says so when it is used."""
        for stored in await self._database.read(records.read_all):
            if (
                stored.details.serving is not None and not stored.details.problem
            ):  # nothing runs that could be exchanged
                stored = replace(stored, details=replace(stored.details, serving=None))
            deployment = self._loaded(stored)
            self._records.setdefault(deployment.project, {})[deployment.name] = deployment
            self._want(deployment)
        self._publish(self._all())

    def _loaded(self, stored: Stored) -> LlmDeployment:
        settings = stored.details.serving or stored.settings
        try:
            base = self._configuration.get(settings.base_model)
        except BatchmillError as error:
            log.warning("the deployment %s cannot be served: %s", stored.name, error.message)
            broken = stored.deployment(ModelSpec(stored.name, LLM, settings.base_model))
            return replace(broken, is_broken=True, problem=error.message)
        return stored.deployment(model_of(base, settings, name=stored.name))

    def open(self) -> None:
        """Hold the engines that are to stay."""
        for deployment in self._all():  # what has names is known now
            self._want(deployment)
        for deployment in self._configured():
            self._controller.want(deployment.id, self._adapted("", deployment.name, deployment.model))
        self._controller.open()

    async def close(self) -> None:
        await self._controller.close()

    # -- looking ------------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, name: str) -> LlmDeployment:
        found = self.find(caller, name)
        if found is None:
            found = next((each for each in self._configured() if each.name == name and self._may(caller, each)), None)
        if found is None:
            raise _unknown(name)
        return found if not found.is_configured else replace(found, project=caller.project)

    def list(self, caller: Caller) -> list[LlmDeployment]:
        """Those of the configuration, then those of the caller's project in the order of their making."""
        own = [replace(each, project=caller.project) for each in self._configured() if self._may(caller, each)]
        return own + self.deployed(caller)

    def deployed(self, caller: Caller) -> list[LlmDeployment]:
        """Those that were deployed over an API, with the adapters of now."""
        return [self._fresh(each) for each in self._of(caller.project).values() if self._may(caller, each)]

    def find(self, caller: Caller, name: str) -> LlmDeployment | None:
        """One that was deployed over an API; None: there is none that this caller may use."""
        found = self._of(caller.project).get(name)
        return self._fresh(found) if found is not None and self._may(caller, found) else None

    def view(self, deployment: LlmDeployment) -> EngineView:
        """Its engine, and what became of it lately."""
        if deployment.is_configured:
            return self._controller.view_of(self._adapted(deployment.project, deployment.name, deployment.model))
        view = self._controller.view(deployment.id)
        if deployment.is_broken:
            return replace(view, state=EngineState.FAILED, message=deployment.problem)
        if deployment.problem:
            problem = f"the update failed, and what was there before it is served: {deployment.problem}"
            return replace(view, message=" / ".join(filter(None, (problem, view.message))))
        return view

    def shown(self, caller: Caller, deployment: LlmDeployment) -> EngineView:
        """As `view`, without the names of models that the caller may not know of."""
        view = self.view(deployment)

        def message(text: str) -> str:
            return veiled(text, lambda name: self._directory.sees(caller, name))

        events = [seen(each, caller.project, message(each.message)) for each in view.events]
        return replace(view, message=message(view.message), events=events)

    def quarantined(self, project: str | None, digest: str | None = None, *, clear: bool = False) -> list[Suspect]:
        """Requests of a project, or of all, that engines died of; `clear`: let them go, or the one of this digest."""
        return self.quarantine.clear(project, digest) if clear else self.quarantine.list(project)

    def bases(self, caller: Caller) -> list[str]:
        """The names of what may be deployed; ids of a model hub have none."""
        return self._configuration.bases(caller)

    def base_models(self, caller: Caller) -> list[ModelSpec]:
        """What has a name among what may be deployed."""
        return [self._configuration.get(name) for name in self.bases(caller)]

    def spec(self, caller: Caller, settings: LlmSettings, *, name: str | None = None) -> ModelSpec:
        """The model for a job that brings its own settings. A deployment that runs with the same serves it too.

        Raises: UnknownName (`unknown_base_model`), InvalidInput for what callers may not set; a token is to be kept
        before (`keep_token`).
        """
        settings = self._read(settings)
        _refuse_plain(settings)
        base = self._configuration.base(caller, settings.base_model)
        for deployment in self._of(caller.project).values() if name is None else ():
            is_ours = self._may(caller, deployment) and not deployment.is_stopped
            if is_ours and self._serves(deployment, settings):
                return self._for_rows(caller, self._fresh(deployment).model, settings)
        made = self._with_adapters(caller.project, settings, model_of(base, settings, name=name))
        return self._for_rows(caller, made, settings)

    def _for_rows(self, caller: Caller, model: ModelSpec, settings: LlmSettings) -> ModelSpec:
        """A model that rows call by its base's name, or none, and whose adapters are those that the caller may use."""
        return self._directory.limited(caller, model, list(dict.fromkeys([model.name, settings.base_model])))

    def _serves(self, deployment: LlmDeployment, settings: LlmSettings) -> bool:
        """Its engine runs, with just these settings. One that was given a token serves jobs that bring none."""
        served = deployment.serving or deployment.settings
        if settings.hf_token is None:
            settings = replace(settings, hf_token=served.hf_token)
        return is_same_engine(served, settings) and self._controller.view(deployment.id).state in STARTED

    # -- changing -----------------------------------------------------------------------------------------------------

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
        """Deploy a language model; its engine starts when it is called, or at once where replicas are to stay.

        Args:
            settings: `hf_token` is the token itself; a reference only of one who runs the machine (`is_trusted`).
            details: what a dialect keeps of it.

        Raises: InvalidInput; UnknownName for the base model or an adapter; Conflict for a name that is taken.
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
        settings, plain = self._tokens.split(deployment_id, self._read(settings), is_trusted=is_trusted)
        base = self._configuration.base(caller, settings.base_model)
        now = self._clock.now()
        model = model_of(base, settings, name=name)
        made = LlmDeployment(
            deployment_id, caller.project, name, settings, description, details, now, now, model
        )  # fmt: skip
        self._check_preloaded(made)
        quota = self._vault.quotas.of(caller.project).llm_deployments
        with self._directory.claim(caller.project, name, ModelKind.LLM):
            await self._vault.change(plain, also=lambda db: records.insert(db, made, quota), project=caller.project)
            return await self._settle(made)

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
        """Change what is said, and keep the rest. What runs goes on until an engine with the new settings is ready;
        where that cannot be started it stays, and the deployment's `problem` says so.

        Args:
            settings: all of them. `hf_token` may be the reference that the deployment has: the token stays.

        Raises: as `create`; Conflict for one of the configuration.
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
        old = self._own(caller, name)
        new = replace(old, changed=max(self._clock.now(), old.changed))
        if description is not UNSET:
            _check_description(description)
            new = replace(new, description=description)
        if details is not None:
            new = replace(new, details=dict(details))
        plain: dict[str, str] = {}
        if settings is not None:
            is_kept = settings.hf_token is not None and settings.hf_token == old.settings.hf_token
            settings, plain = self._tokens.split(old.id, self._read(settings), is_trusted=is_trusted or is_kept)
            self._configuration.base(caller, settings.base_model)
            serving = (old.serving or old.settings) if settings != (old.serving or old.settings) else None
            new = replace(new, settings=settings, serving=serving, problem="")
            self._check_preloaded(new)
        gone = await self._tokens.unused(tokens_of(old) - tokens_of(new))
        await self._vault.change(plain, remove=gone, also=lambda db: records.update(db, new), project=new.project)
        return await self._settle(new)

    async def delete(self, caller: Caller, name: str) -> LlmDeployment:
        """It answers no more, at once. Jobs that have begun go on with what they were given; its token goes too."""
        return await self._changes.make(self._delete(caller, name))

    async def _delete(self, caller: Caller, name: str) -> LlmDeployment:
        gone = self._own(caller, name)
        unused = await self._tokens.unused(tokens_of(gone))
        await self._vault.change({}, remove=unused, also=lambda db: records.delete(db, gone.id))
        del self._records[gone.project][gone.name]
        self._controller.drop(gone.id)
        self._directory.publish({_key(gone): ()})
        return gone

    async def start(self, caller: Caller, name: str) -> LlmDeployment:
        """Let it answer, and have an engine ready now. Returns at once: its view tells how that goes."""
        found = self.get(caller, name)
        if not found.is_configured:
            found = await self._changes.make(self._stopped(caller, name, is_stopped=False))
        self._controller.start(found.id)
        return found

    async def stop(self, caller: Caller, name: str) -> LlmDeployment:
        """Let it answer nothing until it is started; its engine ends when nobody uses it any more."""
        return await self._changes.make(self._stopped(caller, name, is_stopped=True))

    async def _stopped(self, caller: Caller, name: str, *, is_stopped: bool) -> LlmDeployment:
        old = self._own(caller, name)
        if not is_stopped:
            self._configuration.get((old.serving or old.settings).base_model)
        new = replace(old, is_stopped=is_stopped, changed=max(self._clock.now(), old.changed))
        await self._database.write(records.update, new)
        return await self._settle(new)

    async def _settle(self, deployment: LlmDeployment) -> LlmDeployment:
        """Have an engine run as it is wanted; an update that replaces nothing that runs has come about at once."""
        self._records.setdefault(deployment.project, {})[deployment.name] = deployment
        if self._want(deployment) and deployment.is_updating:
            deployment = await self._updated(deployment, "")
        else:
            self._publish([deployment])
        return self._fresh(deployment)

    async def _updated(self, deployment: LlmDeployment, why: str) -> LlmDeployment:
        """Write down what became of an update."""
        settings = deployment.settings
        if why:
            new = replace(deployment, problem=why)
        else:
            model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
            new = replace(deployment, serving=None, model=model)
        await self._database.write(records.update, new)
        self._records[new.project][new.name] = new
        self._publish([new])
        return new

    async def _moved(self, deployment_id: str, why: str) -> None:
        """What the keeper says of an exchange."""
        await self._changes.make(self._note_move(deployment_id, why))

    async def _note_move(self, deployment_id: str, why: str) -> None:
        found = next((each for each in self._all() if each.id == deployment_id), None)
        if found is not None and found.is_updating:
            await self._updated(found, why)

    # -- tokens -------------------------------------------------------------------------------------------------------

    async def keep_token(self, caller: Caller, settings: LlmSettings) -> LlmSettings:
        """The settings of a job with a reference in the place of their token, which is kept; others as they are.

        The same token of a project has one name, so that jobs with it share an engine. See `sweep` for its end.
        """
        return await self._tokens.keep(caller.project, settings)

    async def sweep(self) -> None:
        """Remove tokens that no deployment and no unfinished job needs; those of jobs only after a while."""
        await self._tokens.sweep({name for each in self._all() for name in tokens_of(each)})

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _read(self, settings: LlmSettings) -> LlmSettings:
        return read(settings, gpus_max=self._gpus)

    def _want(self, deployment: LlmDeployment) -> bool:
        settings = deployment.serving if deployment.serving is not None and deployment.problem else deployment.settings
        if deployment.is_broken:
            return self._controller.want(deployment.id, deployment.model, is_on=False)
        model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
        return self._controller.want(
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

    def _fresh(self, deployment: LlmDeployment) -> LlmDeployment:
        """With the model that is served."""
        return replace(deployment, model=self._controller.model(deployment.id))

    def _publish(self, deployments: Iterable[LlmDeployment]) -> None:
        self._directory.publish({_key(each): [_row(self._fresh(each))] for each in deployments})

    def _served(self, deployment_id: str) -> None:
        """What the keeper says of a model that took the place of another."""
        self._publish([each for each in self._all() if each.id == deployment_id])

    def _adapters_changed(self) -> None:
        self._is_stale = True
        self._look()

    def _look(self) -> None:
        """Engines get adapters that were registered since, those that stay also room for them."""
        if not self._is_stale:
            return
        taken = [self._refresh(each) for each in self._all()]
        for each in self._staying():
            adapted = self._adapted("", each.name, each.model)
            taken.append(self._controller.refresh(each.id, adapted))
        self._publish(self._all())
        self._is_stale = not all(taken)  # an exchange may be under way: look again

    def _staying(self) -> list[LlmDeployment]:
        """Those of the configuration whose engines stay, once they are held."""
        known = self._configured() if self._controller.is_open else []
        return [each for each in known if each.settings.scaling.replicas_min]

    def _refresh(self, deployment: LlmDeployment) -> bool:
        settings = deployment.serving or deployment.settings
        merged = self._with_adapters(deployment.project, settings, deployment.model)
        return self._controller.refresh(deployment.id, merged)

    def _of(self, project: str) -> dict[str, LlmDeployment]:
        return self._records.get(project, {})

    def _all(self) -> list[LlmDeployment]:
        return [each for own in self._records.values() for each in own.values()]

    def _configured(self) -> list[LlmDeployment]:
        """Every language model of the configuration, of no project."""
        if self._shown is None:
            self._shown = [self._as_deployment(name) for name in self._configuration.language_models()]
        return self._shown

    def _as_deployment(self, name: str) -> LlmDeployment:
        model = self._configuration.get(name)
        args = {flag: True if value is None else value for flag, value in model.engine_args.items()}
        scaling = model.scaling or Scaling(replicas_max=model.workers)
        settings = LlmSettings(name, args, scaling=scaling, needs=model.needs)
        at = self._opened
        return LlmDeployment(f"models.{name}", "", name, settings, None, {}, at, at, model, is_configured=True)

    @staticmethod
    def _is_theirs(caller: Caller, deployment: LlmDeployment) -> bool:
        return caller.models is None or deployment.name in caller.models

    def _may(self, caller: Caller, deployment: LlmDeployment) -> bool:
        if deployment.is_configured:
            return self._configuration.allows(caller, deployment.name)
        return deployment.project == caller.project and self._is_theirs(caller, deployment)

    def _own(self, caller: Caller, name: str) -> LlmDeployment:
        """One that may be changed. Raises: Conflict for one of the configuration."""
        found = self._of(caller.project).get(name)
        if found is not None and self._may(caller, found):
            return found
        if self.get(caller, name).is_configured:
            raise Conflict(
                f"{name!r} is of the configuration: change models.{name} there, and start the server again",
                code="llm_configured",
            )
        raise _unknown(name)

    def _check_name(self, caller: Caller, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InvalidInput(
                f"a deployment is called by letters, digits and . _ -, 100 at most, the first a letter or digit; "
                f"{name[:SHOWN_CHARS]!r} is not",
                code="invalid_name",
            )
        if name in RESERVED_NAMES:
            raise InvalidInput(f"{name!r} is a reserved name: choose another", code="reserved_name")
        if caller.models is not None and name not in caller.models:
            raise Forbidden(f"this key may not use the model {name!r}, and so not deploy it")
        self._directory.refuse_taken(caller.project, name, ModelKind.LLM)

    def _check_preloaded(self, deployment: LlmDeployment) -> None:
        settings = deployment.settings
        model = model_of(self._configuration.get(settings.base_model), settings, name=deployment.name)
        known = self._with_adapters(deployment.project, settings, model)
        for name in settings.preloaded_adapters:
            if name not in known.adapters and name not in known.adapter_names:
                raise UnknownName(
                    f"there is no adapter {name[:SHOWN_CHARS]!r} of {settings.base_model!r} that is ready: register it "
                    "first, or leave it out of preloaded_adapters",
                    code="unknown_adapter",
                )


def _check_description(description: str | None) -> None:
    if description is not None and len(description) > DESCRIPTION_CHARS_MAX:
        raise InvalidInput(
            f"the description has {len(description):,} characters, {DESCRIPTION_CHARS_MAX:,} at most",
            code="invalid_setting",
        )


def _refuse_plain(settings: LlmSettings) -> None:
    if settings.hf_token is not None and not is_reference(settings.hf_token):
        raise InvalidInput("the hf_token of a job is kept before its model is made", code="invalid_secret")


def _unknown(name: str) -> UnknownName:
    return UnknownName(f"there is no deployment {name[:SHOWN_CHARS]!r} that you may use", code="llm_not_found")


def _key(deployment: LlmDeployment) -> Key:
    return ModelKind.LLM, deployment.project, deployment.name


def _row(deployment: LlmDeployment) -> ModelRow:
    name = deployment.name
    refuse = None
    if not deployment.answers:
        why = deployment.problem if deployment.is_broken else "it was stopped: start it"
        refuse = partial(Unavailable, f"the deployment {name!r} answers nothing: {why}", code="llm_stopped")
    return ModelRow(
        name, ModelKind.LLM, deployment.project, deployment.model, base=deployment.settings.base_model,
        listed=(name,), created=deployment.created,
        takes_adapters=deployment.settings.takes_adapters, refuse=refuse,
    )  # fmt: skip
