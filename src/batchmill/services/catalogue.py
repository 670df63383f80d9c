"""The models of the configuration, resolved once, and the deployed functions; which of them a caller may use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import Config
from batchmill.errors import BatchmillError, InvalidConfig, InvalidInput, Unavailable, UnknownName
from batchmill.models import registry
from batchmill.models.paths import answers
from batchmill.services.adapters import merging
from batchmill.services.adapters.names import read_reference as read_version
from batchmill.services.adapters.records import AdapterRecord
from batchmill.services.adapters.service import AdapterService
from batchmill.services.functions.names import LATEST, MAIN, read_reference
from batchmill.services.functions.records import READY
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.llms.bases import served_here
from batchmill.services.llms.service import LlmDeployment, LlmService
from batchmill.services.llms.settings import MARK
from batchmill.services.remote.models import RemoteModel, RemoteModels
from batchmill.types import Caller, ModelSpec, Scope
from batchmill.wire.deploys import ModelVersion
from batchmill.wire.forms import URLS

VERSIONS_MAX = 10  # of a deployed function: the newest, which rows of a job may name
REMOTE_MAX = 200  # of a project's models that are connectors: the newest, which rows may name beside the job's own


class Served(Struct, frozen=True):
    """A name that a request may be sent to."""

    name: str
    model: ModelSpec
    adapter: str | None = None  # None: the model itself


class Catalogue:
    """Raises: InvalidConfig, naming the model and the file, when one cannot be resolved or a name stands for two."""

    def __init__(self, config: Config, cwd: Path) -> None:
        self._projects = config.projects
        self._versions: ModelVersions | None = None
        self._remote: RemoteModels | None = None
        self._adapters: AdapterService | None = None
        self._llms: LlmService | None = None
        self._models: dict[str, ModelSpec] = {}
        self._served: dict[str, Served] = {}
        place = f"{config.file}: " if config.file is not None else ""
        for name in config.models:
            try:
                model = registry.resolve(name, config, cwd=cwd)
            except BatchmillError as error:
                raise InvalidConfig(f"{place}models.{name}: {error.message}", code=error.code) from None
            model = self._models[name] = served_here(model, config)
            for served in (Served(name, model), *(Served(adapter, model, adapter) for adapter in model.adapters)):
                if served.name in self._served:
                    other = self._served[served.name].model.name
                    raise InvalidConfig(f"{place}models.{name}: the name {served.name!r} is taken by models.{other}")
                self._served[served.name] = served

    def attach(self, versions: ModelVersions | None, remote: RemoteModels | None = None) -> None:
        """From now on what is deployed, and registered as a connector, can be found here too."""
        self._versions, self._remote = versions, remote

    def attach_adapters(self, adapters: AdapterService) -> None:
        """And what is registered as an adapter of a language model."""
        self._adapters = adapters

    def attach_llms(self, llms: LlmService) -> None:
        """And language models that were deployed over an API, which learn here what else there is."""
        self.know_llms(llms)
        llms.around = self

    def know_llms(self, llms: LlmService) -> None:
        """As `attach_llms`; they learn elsewhere."""
        self._llms = llms

    def names(self, caller: Caller) -> list[Served]:
        """What a caller may use: each model before its adapters, deployments, functions by name and alias, then remote
        models."""
        own: list[Served] = []
        for model in self._models.values():
            own += [
                served
                for served in map(self._served.get, (model.name, *model.adapters))
                if self.may(caller, served.name)
            ]
            own += self._adapters_of(caller, model)
        own += [Served(each.name, self._limited(caller, each)) for each in self._answering(caller)]
        for name in self._deployed(caller):
            found = self._names_of(name)
            own += [Served(text, _spec(found[text])) for text in sorted(found) if text == name or _is_alias(text)]
        for model in self._registered(caller):
            spec = self._remote_spec(model)
            own += [Served(text, spec) for text in spec.allowed or [model.id] if self._may_name(caller, model, text)]
        return own

    def find(self, caller: Caller, name: str) -> Served:
        """Of a function: the version that `NAME`, `NAME@3`, `NAME@prod` or `NAME@branch/3` means now.

        Raises: UnknownName, in the same words for a name that is unknown and for one that is not the caller's.
        """
        served = self._served.get(name)
        if served is not None and self.may(caller, name):
            return replace(served, model=self.with_room(served.model))
        if (deployment := self._deployment(caller, name)) is not None:
            return Served(name, self._limited(caller, deployment))
        function, branch, version = read_reference(name)
        if self._versions is not None and function in self._deployed(caller):
            return Served(name, _spec(self._versions.choose(function, branch, version).version))
        if (remote := self._found_remote(caller, name)) is not None:
            return Served(name, self._remote_spec(remote))
        if (adapter := self._found_adapter(caller, name)) is not None:
            return adapter
        near = difflib.get_close_matches(name[:256], [each.name for each in self.names(caller)], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownName(
            f"the model {name[:256]!r} does not exist or you do not have access to it{hint}", code="model_not_found"
        )

    def specs(self, caller: Caller) -> list[ModelSpec]:
        """The models for a job: those of which the caller may use a name, each with the names that its rows may use.

        A source is no name here: two models may share one, and where they lie is nobody's business.
        """
        found = [spec for model in self._models.values() if (spec := self._spec_of(caller, model)).allowed]
        found += [self._limited(caller, each) for each in self._answering(caller)]
        found += [spec for name in self._deployed(caller) for spec in self._specs_of(name)]
        found += [self._remote_spec(model) for model in self._registered(caller)[-REMOTE_MAX:]]
        return self.each_once(caller, found)

    def each_once(self, caller: Caller, models: Sequence[ModelSpec]) -> list[ModelSpec]:
        """Models that one job has together: no name stands for two of them."""
        return merging.each_once(models, lambda name: self._meant(caller, name))

    def _meant(self, caller: Caller, name: str) -> str | None:
        found = None if self._adapters is None else self._adapters.find_ready(caller.project, name)
        return None if found is None else found.own_name

    def _spec_of(self, caller: Caller, model: ModelSpec) -> ModelSpec:
        allowed = [name for name in (model.name, *model.adapters) if self.may(caller, name)]
        return self.with_adapters(caller, replace(model, allowed=allowed))

    def for_job(self, caller: Caller, name: str) -> ModelSpec:
        """As one of `specs`: the model with this name alone. Of a function, the version that it means now.

        Raises: UnknownName.
        """
        served = self.find(caller, name)
        if served.model.function is not None:
            return replace(served.model, allowed=[name])
        if served.model.name in self._models:
            return self._spec_of(caller, self._models[served.model.name])
        return served.model

    # -- deployed language models -------------------------------------------------------------------------------------

    revision = property(lambda self: 0 if self._adapters is None else self._adapters.revision)  # see llms' `Around`

    def holder(self, project: str, name: str) -> str:
        """Who has this name; empty: nobody that the project could mean by it."""
        if name in self._served:
            return "a model of the configuration"
        if self._is_function(project, name):
            return "a function"
        if self._remote is not None and self._remote.find(name, project) is not None:
            return "a connector's model"
        found = None if self._adapters is None else self._adapters.find_ready(project, name)
        return "" if found is None else "an adapter"

    def sees(self, caller: Caller, name: str) -> bool:
        """The caller may know that there is a model of this name: it may use it, or what it was made of."""
        name = name.partition(MARK)[0]
        if name in self._models or (self._llms is not None and self._llms.is_deployed(caller.project, name)):
            return self.may(caller, name)
        if self._llms is not None and self._llms.bases.offers(caller, name):
            return True
        is_function = self._versions is not None and read_reference(name)[0] in self._versions.names()
        return (is_function and self.may(caller, read_reference(name)[0])) or self._found_remote(
            caller, name
        ) is not None

    def adapted(self, project: str, base: str, model: ModelSpec) -> ModelSpec:
        """A deployment's model with the adapters that a project registered for it or its base."""
        everything = Caller(project, Scope.ADMIN)
        if model.name == base or self._llms is None or not self._llms.is_deployed(project, model.name):
            found = self.with_adapters(everything, replace(model, name=base))
            return replace(found, name=model.name)
        return self.with_adapters(everything, model, (base,))

    def _answering(self, caller: Caller) -> list[LlmDeployment]:
        return [] if self._llms is None else [each for each in self._llms.deployed(caller) if each.answers]

    def _deployment(self, caller: Caller, name: str) -> LlmDeployment | None:
        """Raises: Unavailable for one that was stopped."""
        found = None if self._llms is None else self._llms.find(caller, name)
        if found is not None and not found.answers:
            why = found.problem if found.is_broken else "it was stopped: start it"
            raise Unavailable(f"the deployment {name!r} answers nothing: {why}", code="llm_stopped")
        return found

    def _limited(self, caller: Caller, deployment: LlmDeployment) -> ModelSpec:
        """A deployment's model, with those names that the caller may use."""
        is_theirs = caller.models is None or deployment.name in caller.models
        return self.limited(caller, deployment.model, [deployment.name] if is_theirs else [])

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        """A model whose rows may use these names of its own, and those of its adapters that the caller may."""
        told = [*model.adapters, *model.adapter_names]
        return replace(model, allowed=[*names, *(name for name in told if self._may_use(caller, model, name))])

    def _may_use(self, caller: Caller, model: ModelSpec, name: str) -> bool:
        """An adapter of a deployment. One of the configuration is not the project's own because it deployed its base;
        what the project registered is, and a key that has a name has its versions."""
        adapter = model.adapter_names.get(name, name)
        if adapter in self._served:
            return self.may(caller, name)
        return caller.models is None or name in caller.models or read_version(adapter)[0] in caller.models

    def _llm_for(self, caller: Caller, base: str) -> ModelSpec | None:
        """What serves the adapters of a base: a model of the configuration, or a deployment."""
        if base in self._models:
            return self._models[base]
        for each in self._answering(caller):
            if base in (each.name, each.settings.base_model) and each.settings.takes_adapters:
                return each.model
        return None

    # -- adapters of language models ----------------------------------------------------------------------------------

    def base(self, caller: Caller, name: str) -> ModelSpec:
        """The model that adapters may be registered for. Raises: UnknownName; InvalidInput for one of its adapters."""
        if self._llms is not None and self._llms.bases.offers(caller, name):
            return self._llms.bases.find(caller, name)
        found = self.find(caller, name)
        if found.adapter is not None:
            raise InvalidInput(
                f"{name[:256]!r} is an adapter itself: name its model, {found.model.name}", code="no_adapters"
            )
        return found.model

    def is_taken(self, project: str, name: str) -> bool:
        """Something that is no registered adapter is called so."""
        remote = None if self._remote is None else self._remote.find(name, project)
        deployed = self._llms is not None and self._llms.is_deployed(project, name)
        return name in self._served or self._is_function(project, name) or remote is not None or deployed

    def _is_function(self, project: str, name: str) -> bool:
        """A function goes by this name, and the project may know of it."""
        versions = self._versions
        return versions is not None and name in versions.names() and not versions.is_hidden(name, project)

    def with_room(self, model: ModelSpec, bases: Sequence[str] = ()) -> ModelSpec:
        """A model whose engine has room for the adapters registered for it, or for one of `bases`."""
        if self._adapters is None or model.engine != "llm":
            return model
        return merging.with_room(model, self._adapters.rank_of((model.name, *bases)))

    def with_adapters(self, caller: Caller, model: ModelSpec, bases: Sequence[str] = ()) -> ModelSpec:
        """As `with_room`, for a job: with those adapters that the caller's rows may name."""
        if self._adapters is None or model.engine != "llm":
            return model
        found = merging.with_all(model, self._ready(caller, (model.name, *bases)), self._may_adapter(caller, model))
        return self.with_room(found, bases)

    def with_adapter(self, caller: Caller, model: ModelSpec, name: str, bases: Sequence[str] = ()) -> Served | None:
        """An adapter of this very model, by a name that the caller may use; None: it has none that is called so."""
        own = model.adapter_names.get(name, name)
        if own in model.adapters and self.may(caller, name):
            return Served(name, self.with_room(model, bases), own)
        ready = self._ready(caller, (model.name, *bases))
        found = merging.names_of(ready, self._may_adapter(caller, model)).get(name)
        if found is None:
            return None
        return Served(name, self.with_room(merging.with_one(model, found), bases), found.own_name)

    def _may_adapter(self, caller: Caller, model: ModelSpec) -> Callable[[str], bool]:
        """What was registered is its project's own, as long as that may use the base; a key may name fewer."""
        is_ours = self.may(replace(caller, models=None), model.name)
        return lambda name: is_ours and (caller.models is None or name in caller.models)

    def _ready(self, caller: Caller, bases: Sequence[str]) -> list[AdapterRecord]:
        if self._adapters is None:
            return []
        return [record for base in dict.fromkeys(bases) for record in self._adapters.ready(caller.project, base)]

    def _adapters_of(self, caller: Caller, model: ModelSpec, bases: Sequence[str] = ()) -> list[Served]:
        """Every name of the registered adapters of a model that the caller may use."""
        if self._adapters is None or model.engine != "llm":
            return []
        found = merging.names_of(self._ready(caller, (model.name, *bases)), self._may_adapter(caller, model))
        return [
            Served(name, self.with_room(merging.with_one(model, record), bases), record.own_name)
            for name, record in found.items()
            if name not in self._served and self._meant(caller, name) == record.own_name  # as `find` has it
        ]

    def _found_adapter(self, caller: Caller, name: str) -> Served | None:
        found = None if self._adapters is None else self._adapters.find_ready(caller.project, name)
        model = None if found is None else self._llm_for(caller, found.base)
        return None if model is None else self.with_adapter(caller, model, name)

    def _registered(self, caller: Caller) -> list[RemoteModel]:
        """The caller's models that are connectors and have somewhere for rows to go."""
        if self._remote is None:
            return []
        return [model for model in self._remote.callable(caller.project) if self._may_remote(caller, model)]

    def _found_remote(self, caller: Caller, name: str) -> RemoteModel | None:
        found = None if self._remote is None else self._remote.find(name, caller.project)
        return found if found is not None and self._may_remote(caller, found) else None

    def admit(self, caller: Caller, served: Served) -> bool:
        """Count a call, where the model was registered with a rate; whether it was. Raises: RateLimited."""
        model = served.model
        is_remote = model.connector is not None or bool(model.routes)
        remote = self._found_remote(caller, served.name) if is_remote else None
        if remote is None or served.name not in (remote.id, remote.name) or served.name in self._served:
            return False
        assert self._remote is not None, "it was found there"
        self._remote.admit(remote)
        return True

    def _remote_spec(self, model: RemoteModel) -> ModelSpec:
        assert self._remote is not None, "it was found there"
        taken = model.name in self._served or (
            self._versions is not None
            and self._versions.get(model.name)
            and not self._versions.is_hidden(model.name, model.project)
        )
        spec = self._remote.for_job(model)
        return replace(spec, allowed=[model.id]) if taken else spec

    @staticmethod
    def _may_name(caller: Caller, model: RemoteModel, text: str) -> bool:
        """A remote model goes by its id always, and by its name where the key has that."""
        return text == model.id or caller.models is None or text in caller.models

    @staticmethod
    def _may_remote(caller: Caller, model: RemoteModel) -> bool:
        """It belongs to its project; a key may name fewer."""
        is_ours = caller.project == model.project
        return is_ours and (caller.models is None or model.id in caller.models or model.name in caller.models)

    def _deployed(self, caller: Caller) -> list[str]:
        if self._versions is None:
            return []
        return [name for name in self._versions.names() if name not in self._served and self.may(caller, name)]

    def _specs_of(self, name: str) -> list[ModelSpec]:
        """The versions of a function that rows may name, each with all names that it goes by."""
        names: dict[str, list[str]] = {}
        versions: dict[str, ModelVersion] = {}
        for text, version in self._names_of(name).items():
            names.setdefault(version.reference, []).append(text)
            versions[version.reference] = version
        return [replace(_spec(version), allowed=names[told]) for told, version in versions.items()]

    def _names_of(self, name: str) -> dict[str, ModelVersion]:
        """What a function may be called, and which version that means now: an alias with weights is drawn."""
        assert self._versions is not None, "it is deployed"
        found: dict[str, ModelVersion] = {}
        for route in self._versions.routes(name):
            if route.label.startswith("@"):
                found[f"{name}{route.label}"] = self._versions.choose(name, None, route.label[1:]).version
                continue
            version = self._versions.choose(name, route.label).version
            found[f"{name}@{route.label}/{LATEST}"] = version
            if route.label == MAIN:
                found |= {name: version, f"{name}@{LATEST}": version}
        ready = [each for each in self._versions.get(name) if each.state == READY]
        for version in sorted(ready, key=_age)[:VERSIONS_MAX]:
            found[version.reference] = version
            if version.branch == MAIN:
                found[f"{name}@{version.number}"] = version
        return found

    def serves(self, url: str, caller: Caller) -> bool:
        """Some model of the caller's answers this path."""
        models = [served.model for served in self.names(caller)]
        return bool(models) if url in URLS else any(answers(model, url) for model in models)

    def models(self) -> list[ModelSpec]:
        """Those of the configuration, for who looks after the server."""
        return list(self._models.values())

    def may(self, caller: Caller, name: str) -> bool:
        """Both the key and its project allow the very name: a model's does not stand for its adapters'. A function of
        another project has to be shared."""
        remote = self._found_remote(caller, name)
        if remote is not None and remote.id == name:  # what was registered is its project's own, whatever others list
            return True
        if name not in self._served and self._llms is not None and self._llms.is_deployed(caller.project, name):
            return caller.models is None or name in caller.models
        if self._versions is not None and name not in self._served and self._versions.is_hidden(name, caller.project):
            return False
        project = self._projects.get(caller.project)
        allowed = None if project is None else project.models
        is_llm = name in self._served or (self._llms is not None and self._llms.bases.is_base(name))
        if project is not None and project.functions is not None and not is_llm:
            allowed = project.functions
        return (caller.models is None or name in caller.models) and (allowed is None or name in allowed)


def _spec(version: ModelVersion) -> ModelSpec:
    assert version.spec is not None, "it is ready"
    return version.spec


def _age(version: ModelVersion) -> float:
    """The newest first."""
    return -version.created


def _is_alias(text: str) -> bool:
    label = text.partition("@")[2]
    return bool(label) and "/" not in label and label != LATEST and not label.isdigit()
