"""The directory of models: every model name that a request or a row can use, its owner, and what it means now.

Services write a change to the database and then publish the changed rows. Each publication makes one immutable snapshot
with the next revision, so that a reader sees all of a change or none of it. A name means one thing: `claim` refuses a
second use before it is stored. Knows nothing of how models are made.
"""

from __future__ import annotations

import contextlib
import difflib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidInput, UnknownName
from batchmill.models.adapters.reading import RANK_DEFAULT, engine_rank_for
from batchmill.models.paths import answers
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.rows import (
    Key,
    ModelKind,
    ModelRow,
    ModelSnapshot,
    ServedModel,
    by_name,
    is_one_name,
    stem_of,
)
from batchmill.services.functions.function import Function, VersionTarget
from batchmill.services.functions.names import LATEST, is_unnamed, read_reference
from batchmill.types import Caller, ModelSpec
from batchmill.wire.rows.forms import URLS

REMOTE_MAX = 200  # the newest remote models of a project, which rows can name besides the job's own model
CACHE_MAX = 10_000  # lookups that a snapshot caches
SHOWN_CHARS = 256
JOB_MARK = "~"  # in names of models that jobs define in their settings; users cannot choose a name with it


class ModelDirectory:
    def __init__(self, configured: ConfiguredModels, chance: random.Random | None = None) -> None:
        self.configured, self._random = configured, chance or random.Random()
        self._claimed: Counter[tuple[str, ModelKind, str, bool]] = Counter()  # names that are being stored
        self._listeners: list[Callable[[], None]] = []
        rows: dict[str, ModelRow] = {}
        for name in reversed(configured.base_names):
            rows[name] = ModelRow(name, ModelKind.BASE)
        for name in configured.names:
            rows[name] = ModelRow(name, ModelKind.CONFIGURED, base=name, listed=(name,))
            for own in configured.adapters(name):
                rows[own] = ModelRow(own, ModelKind.CONFIGURED_ADAPTER, base=name, listed=(own,), own_name=own)
        self._configured_rows = rows
        self.snapshot = ModelSnapshot(everybody=rows)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each publication that changes the set of adapters. The listener may publish too."""
        self._listeners.append(listener)

    def publish(self, changes: Mapping[Key, Sequence[ModelRow]]) -> None:
        """Replace the rows that were published under the same keys, in one new revision.

        Call it after the change is in the database. A publication that changes nothing makes no revision.
        """
        old = self.snapshot
        self.snapshot = new = old.with_changes(changes)
        for listener in self._listeners if new.adapters is not old.adapters else ():
            listener()

    @contextlib.contextmanager
    def claim(self, project: str, name: str, kind: ModelKind, *, is_shared: bool = False) -> Iterator[None]:
        """Reserve a name while something is stored and published under it.

        Args: is_shared: other projects will see it too.

        Raises: Conflict (`name_taken`) if something else has the name.
        """
        self.refuse_taken(project, name, kind, is_shared=is_shared)
        claimed = (project, kind, name, is_shared)
        self._claimed[claimed] += 1
        try:
            yield
        finally:
            self._claimed[claimed] -= 1
            if not self._claimed[claimed]:
                del self._claimed[claimed]

    def refuse_taken(self, project: str, name: str, kind: ModelKind, *, is_shared: bool = False) -> None:
        """Raises: Conflict (`name_taken`) if something else has the name."""
        if holder := self.holder(project, name, kind, is_shared=is_shared):
            raise Conflict(f"{name[:SHOWN_CHARS]!r} is already the name of {holder}: choose another", code="name_taken")

    def holder(self, project: str, name: str, kind: ModelKind, *, is_shared: bool = False) -> str:
        """Return what else has a name that a project wants for this kind: "a function"; empty if nothing has."""
        snapshot = self.snapshot
        projects = snapshot.projects
        for scope_rows in (snapshot.everybody, *(projects.values() if is_shared else [projects.get(project, {})])):
            rows = (
                scope_rows.values()
                if kind == ModelKind.FUNCTION
                else (scope_rows.get(name), scope_rows.get(stem_of(name)))
            )
            for row in filter(None, rows):
                if is_one_name(row.name, row.kind, name, kind) and self._conflicts(row, project, kind, is_shared):
                    is_visible = row.project in (None, project) or (row.function is not None and row.function.is_shared)
                    return row.kind if is_visible else "something else"
        for its_project, its_kind, its_name, its_sharing in self._claimed:
            if its_kind != kind and is_one_name(its_name, its_kind, name, kind):
                if its_project == project:
                    return its_kind
                if is_shared or its_sharing:
                    return "something else"
        return ""

    @staticmethod
    def _conflicts(row: ModelRow, project: str, kind: ModelKind, is_shared: bool) -> bool:
        if row.kind == kind and kind != ModelKind.LLM:  # another version of the same; its service checks the owner
            return False
        if row.project in (None, project) or is_shared:
            return True
        return row.function is not None and row.function.claims_everybody

    def check(self) -> None:
        """Check that the configuration can be served.

        Raises: InvalidConfig if a model of it cannot be resolved, or its name is already registered.
        """
        self.configured.check()
        for rows in self.snapshot.published.values():
            for row in rows:
                for name in (row.name, *self._configured_rows) if row.kind == ModelKind.FUNCTION else (row.name,):
                    entry = self._configured_rows.get(name)
                    if entry is not None and is_one_name(name, entry.kind, row.name, row.kind):
                        owner = row.project if row.function is None else row.function.project
                        path = f"models.{entry.base}" if entry.base else f"deployments.base_models.{name}"
                        raise self.configured.config_error(
                            path,
                            f"{name!r} is already the name of {row.kind} of the project {owner}: choose another name "
                            "here, or remove that one first",
                        )

    # -- permissions --------------------------------------------------------------------------------------------------

    def _visible(self, caller: Caller, name: str) -> ModelRow | None:
        """Return the row that a name means to a caller. None: no such row, or one that the caller may not use."""
        snapshot = self.snapshot
        row = snapshot.projects.get(caller.project, {}).get(name) or snapshot.everybody.get(name)
        return row if row is not None and self._may_use_row(caller, row) else None

    def _may_use_row(self, caller: Caller, row: ModelRow) -> bool:
        """Tell whether a caller may use a row. This is the only place that decides it.

        A project may use what it registered. Its entry in the configuration decides about the configuration's models. A
        function of another project must be shared. A key may list fewer models.
        """
        if caller.models is not None and caller.models.isdisjoint(row.listed):
            return False
        if row.function is not None:
            return row.function.is_ready and self._may_use_function(caller, row.function)
        if row.kind == ModelKind.ADAPTER:
            return any(self._hosts(caller, row.base))
        return row.project is not None or (
            row.kind != ModelKind.BASE and self.configured.lists(caller.project, row.name)
        )

    def _may_use_function(self, caller: Caller, function: Function) -> bool:
        is_theirs = function.is_shared or function.project == caller.project
        return is_theirs and self.configured.lists(caller.project, function.name, is_function=True)

    def _hosts(self, caller: Caller, base: str) -> Iterator[ModelRow]:
        """Yield the models that serve the adapters of a base: a model of the configuration, or deployments."""
        entry = self._configured_rows.get(base)
        if entry is not None and entry.kind == ModelKind.CONFIGURED:
            if self.configured.lists(caller.project, base):
                yield entry
            return
        for row in self._deployments(caller):
            if base in (row.name, row.base) and row.takes_adapters and row.refuse is None:
                yield row

    def _deployments(self, caller: Caller) -> list[ModelRow]:
        """Return the deployments that the caller may use, oldest first."""
        return sorted(
            (row for row in self._own(caller, ModelKind.LLM) if self._may_use_row(caller, row)),
            key=lambda row: (row.created, row.name),
        )

    def _own(self, caller: Caller, kind: ModelKind) -> Iterator[ModelRow]:
        return (row for row in self.snapshot.projects.get(caller.project, {}).values() if row.kind == kind)

    def may_call(self, caller: Caller, name: str) -> bool:
        """Tell whether the key and its project may use a function of this name, even if there is none."""
        return self.configured.allows(caller, name, is_function=True)

    def sees(self, caller: Caller, name: str) -> bool:
        """Tell whether the caller may know of this model: it may use the model, or what the model was made from."""
        name = name.partition(JOB_MARK)[0]
        row = self._visible(caller, name) or self._visible(caller, stem_of(name))
        return row is not None or self.configured.offers(caller, name)

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, caller: Caller, name: str) -> ServedModel:
        """Return the model that a name means to a caller. For a function, it is the version that `NAME`, `NAME@3`,
        `NAME@prod` or `NAME@branch/3` means now.

        Raises: UnknownName, with the same message for an unknown name and for one that the caller may not use;
        Unavailable for a stopped deployment.
        """
        snapshot = self.snapshot
        key = (caller.project, caller.models, name)
        if (served := snapshot.resolved.get(key)) is not None:
            return served
        row = self._visible(caller, name)
        if row is None and "@" in name and (stem := self._visible(caller, stem_of(name))) is not None:
            row = stem if stem.function is not None else None
        served = None if row is None else self._served(caller, row, name)
        if served is None:
            matches = difflib.get_close_matches(
                name[:SHOWN_CHARS], [each.name for each in self.list(caller)], n=1
            )  # fmt: skip
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise UnknownName(
                f"the model {name[:SHOWN_CHARS]!r} does not exist or you do not have access to it{hint}",
                code="model_not_found",
            )
        if served.kind != ModelKind.FUNCTION:  # an alias with weights is drawn anew for each call
            if len(snapshot.resolved) >= CACHE_MAX:
                snapshot.resolved.clear()
            snapshot.resolved[key] = served
        return served

    def _served(self, caller: Caller, row: ModelRow, name: str) -> ServedModel | None:
        """Raises: the error of its row, if the model cannot serve now."""
        if row.refuse is not None:
            raise row.refuse()
        match row.kind:
            case ModelKind.CONFIGURED:
                return ServedModel(name, self._with_rank(self.configured.get(name)))
            case ModelKind.CONFIGURED_ADAPTER:
                return ServedModel(name, self._with_rank(self.configured.get(row.base)), name, row.kind)
            case ModelKind.FUNCTION:
                assert row.function is not None, "it is a function"
                _, branch, version = read_reference(name)
                return ServedModel(name, row.function.choose(branch, version, self._random).model, kind=row.kind)
            case ModelKind.LLM if row.spec is not None:
                names = [row.name] if caller.models is None or row.name in caller.models else []
                return ServedModel(name, self.limited(caller, row.spec, names), kind=row.kind)
            case ModelKind.ADAPTER:
                host = next(self._hosts(caller, row.base), None)
                return None if host is None else self._adapter_on(caller, self._spec(host), name, ())
            case _:
                return None if row.spec is None else ServedModel(name, row.spec, kind=row.kind)

    def _spec(self, row: ModelRow) -> ModelSpec:
        return self.configured.get(row.name) if row.spec is None else row.spec

    def find_adapter(self, caller: Caller, model: ModelSpec, name: str, base: str) -> ServedModel | None:
        """Return an adapter of this model or its base, by a name that the caller may use; None if there is none."""
        return self._adapter_on(caller, model, name, (base,))

    def _adapter_on(self, caller: Caller, model: ModelSpec, name: str, bases: Sequence[str]) -> ServedModel | None:
        own = model.adapter_names.get(name, name)
        if own in model.adapters and self.configured.allows(caller, name):
            return ServedModel(name, self._with_rank(model, bases), own, ModelKind.ADAPTER)
        row = by_name(self._adapters_for(caller, model, bases)).get(name)
        if row is None or not _allows_version(caller, row, name):
            return None
        adapted = replace(model, adapters={row.own_name: row.folder}, adapter_names={})
        return ServedModel(name, self._with_rank(adapted, bases), row.own_name, ModelKind.ADAPTER)

    def choose(self, caller: Caller, name: str, branch: str | None = None, version: str = LATEST) -> VersionTarget:
        """Return the version of a function that a call means now. An alias with weights is drawn for each call.

        Raises: UnknownName (`model_not_found`), with the same message for an unknown function and for one that the
        caller may not use.
        """
        function = self.snapshot.functions.get(name)
        if function is None or not self._may_use_row(caller, self.snapshot.everybody[name]):
            matches = difflib.get_close_matches(name[:SHOWN_CHARS], [each.name for each in self.functions(caller)], n=1)
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise UnknownName(
                f"the model {name[:SHOWN_CHARS]!r} does not exist or you do not have access to it{hint}",
                code="model_not_found",
            )
        return self.draw(function, branch, version)

    def draw(self, function: Function, branch: str | None, version: str) -> VersionTarget:
        """Return the version of a function that a reference means now. Raises: UnknownName."""
        return function.choose(branch, version, self._random)

    def functions(self, caller: Caller) -> list[Function]:
        """Return the functions that the caller may call, by name."""
        snapshot = self.snapshot
        return [
            function for name, function in sorted(snapshot.functions.items())
            if self._may_use_row(caller, snapshot.everybody[name])
        ]  # fmt: skip

    def list(self, caller: Caller) -> list[ServedModel]:
        """Return the models that a caller may use: each model of the configuration before its adapters, then
        deployments, functions by name and alias, and remote models."""
        snapshot = self.snapshot
        key = (caller.project, caller.models)
        if (cached := snapshot.listed.get(key)) is not None:
            return cached
        served: list[ServedModel] = []
        for name in self.configured.names:
            names = [name, *self.configured.adapters(name)]
            served += [self.find(caller, each) for each in names if self._visible(caller, each) is not None]
            served += self._adapters_of(caller, name)
        served += [self.find(caller, row.name) for row in self._deployments(caller) if row.refuse is None]
        for function in self.functions(caller):
            for name in function.names():
                _, branch, version = read_reference(name)
                served.append(
                    ServedModel(name, function.choose(branch, version, self._random).model, kind=ModelKind.FUNCTION)
                )
        served += [
            ServedModel(row.name, row.spec, kind=row.kind) for row in self._remotes(caller) if row.spec is not None
        ]
        if sum(map(len, snapshot.listed.values())) + len(served) > CACHE_MAX:
            snapshot.listed.clear()
        snapshot.listed[key] = served
        return served

    def _adapters_of(self, caller: Caller, base: str) -> list[ServedModel]:
        """Return the registered adapters of a model of the configuration that their names resolve to."""
        adapters = by_name(self.snapshot.adapters.get((caller.project, base), ()))
        return [
            self.find(caller, name)
            for name, row in adapters.items()
            if (visible := self._visible(caller, name)) is not None and visible.own_name == row.own_name
        ]

    def _remotes(self, caller: Caller) -> list[ModelRow]:
        """Return the remote models that rows can be sent to, oldest first: each by its id, then by its name."""
        rows = (
            row
            for row in self._own(caller, ModelKind.REMOTE)
            if row.spec is not None and self._may_use_row(caller, row)
        )
        return sorted(rows, key=lambda row: (row.created, row.base, row.name != row.base))

    def serves(self, url: str, caller: Caller) -> bool:
        """Tell whether any model of the caller serves this path."""
        models = self.list(caller)
        return bool(models) if url in URLS else any(answers(served.model, url) for served in models)

    # -- classes that validate answers --------------------------------------------------------------------------------

    def schema_class(self, caller: Caller, reference: str) -> VersionTarget:
        """Return the version of a class that `NAME`, `NAME@3`, `NAME@prod` or `NAME@branch/3` means now.

        A class that was deployed without a name is its project's, whatever models its keys list.

        Raises: UnknownName, with the same message for an unknown name and for one that the caller may not use.
        """
        name, branch, version = read_reference(reference)
        row = self.snapshot.everybody.get(name)
        function = None if row is None else row.function
        if function is not None and function.is_schema:
            is_listed = caller.models is None or name in caller.models
            is_own = is_unnamed(name) and function.project == caller.project
            if is_own or (is_listed and not is_unnamed(name) and self._may_use_function(caller, function)):
                return function.choose(branch, version, self._random)
        is_model = self._visible(caller, name) is not None
        problem = "is a model, not a schema class" if is_model else "does not exist or you do not have access to it"
        raise UnknownName(
            f"the validator {reference[:SHOWN_CHARS]!r} {problem}: deploy the class (`batchmill deploy FILE.py:CLASS "
            "--schema --name NAME`), or give `schema`",
            code="validator_not_found",
        )

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def specs(self, caller: Caller) -> list[ModelSpec]:
        """Return the models for a job: those with a name that the caller may use, each with the names for its rows.

        A model's source is not a name: two models may share a source, and callers must not see it.
        """
        specs = [spec for name in self.configured.names if (spec := self._for_rows(caller, name)).allowed]
        specs += [self.find(caller, row.name).model for row in self._deployments(caller) if row.refuse is None]
        for function in self.functions(caller):
            specs += _versions(function.targets(self._random))
        remotes = [row.spec for row in self._remotes(caller) if row.name == row.base and row.spec is not None]
        return self.each_once(caller, [*specs, *remotes[-REMOTE_MAX:]])

    def for_job(self, caller: Caller, name: str) -> ModelSpec:
        """As `specs`, but only the model with this name. For a function, it is the version that the name means now.

        Raises: as `find`.
        """
        served = self.find(caller, name)
        if served.kind == ModelKind.FUNCTION:
            return replace(served.model, allowed=[name])
        if served.model.name in self.configured.names and served.kind != ModelKind.REMOTE:
            return self._for_rows(caller, served.model.name)
        return served.model

    def _for_rows(self, caller: Caller, name: str) -> ModelSpec:
        names = [name, *self.configured.adapters(name)]
        allowed = [each for each in names if self._visible(caller, each) is not None]
        model = replace(self.configured.get(name), allowed=allowed)
        if not model.traits.loads_adapters:
            return model
        return self._with_adapters(
            model, self._adapters_for(caller, model, ()), (), lambda row, at: _allows_version(caller, row, at)
        )

    def each_once(self, caller: Caller, models: Sequence[ModelSpec]) -> list[ModelSpec]:
        """Return the models of one job, with each name allowed for one model only.

        A model's own name wins over an adapter's. Of the adapters of several bases, the version that the name resolves
        to by itself wins.
        """
        claims: dict[str, list[int]] = {}
        for number, model in enumerate(models):
            for name in model.allowed or ():
                claims.setdefault(name, []).append(number)
        lost_names: dict[int, set[str]] = {}
        for name, numbers in claims.items():
            winner = min(numbers, key=lambda number: self._name_priority(caller, models[number], name))
            for number in numbers:
                if number != winner:
                    lost_names.setdefault(number, set()).add(name)
        return [
            replace(model, allowed=[name for name in model.allowed or () if name not in lost_names[number]])
            if number in lost_names
            else model
            for number, model in enumerate(models)
        ]

    def _name_priority(self, caller: Caller, model: ModelSpec, name: str) -> int:
        own = model.adapter_names.get(name, name)
        if own not in model.adapters:
            return 0
        row = self.snapshot.projects.get(caller.project, {}).get(name)
        return 1 if row is not None and row.own_name == own else 2

    # -- adapters of language models ----------------------------------------------------------------------------------

    def base(self, caller: Caller, name: str) -> ModelSpec:
        """Return a model that adapters can be registered for. Raises: UnknownName; InvalidInput for an adapter."""
        if self.configured.offers(caller, name):
            return self.configured.get(name)
        served = self.find(caller, name)
        if served.adapter is not None:
            raise InvalidInput(
                f"{name[:SHOWN_CHARS]!r} is an adapter: name its model, {served.model.name}", code="no_adapters"
            )
        return served.model

    def adapted(self, project: str, model: ModelSpec, base: str, *, is_own: bool) -> ModelSpec:
        """Return a model with the adapters that a project registered for it or its base.

        Args: is_own: the model is the project's own; otherwise the project must be allowed to use the base.
        """
        if not is_own and not self.configured.lists(project, base):
            return self._with_rank(model, (base,))
        bases = (model.name, base) if is_own else (base,)
        rows = [row for each in dict.fromkeys(bases) for row in self.snapshot.adapters.get((project, each), ())]
        return self._with_adapters(model, rows, bases, lambda row, name: True)

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        """Return a model whose rows may use these names of it and those of its adapters that the caller may use."""
        adapters = [*model.adapters, *model.adapter_names]
        return replace(
            model, allowed=[*names, *(each for each in adapters if self._may_use_adapter(caller, model, each))]
        )

    def _may_use_adapter(self, caller: Caller, model: ModelSpec, name: str) -> bool:
        """Tell whether the caller may use an adapter of a deployment.

        An adapter of the configuration needs permission, even if the project deployed its base. The project's own
        adapters do not. A key that lists a name may use all its versions.
        """
        own = model.adapter_names.get(name, name)
        if own in self._configured_rows:
            return self.configured.allows(caller, name)
        return caller.models is None or name in caller.models or own.rpartition("/")[0] in caller.models

    def _adapters_for(self, caller: Caller, model: ModelSpec, bases: Sequence[str]) -> list[ModelRow]:
        """Return the versions that a project registered for a model that it may use, or for one of its bases."""
        if not model.traits.loads_adapters:
            return []
        if model.name in self.configured.names and not self.configured.lists(caller.project, model.name):
            return []
        adapters = self.snapshot.adapters
        return [row for each in dict.fromkeys((model.name, *bases)) for row in adapters.get((caller.project, each), ())]

    def _with_adapters(
        self, model: ModelSpec, rows: Iterable[ModelRow], bases: Sequence[str], may: Callable[[ModelRow, str], bool]
    ) -> ModelSpec:
        """Return a model whose rows may name these adapters too. The names that it already has keep their meaning."""
        existing = model.targets()
        new_rows = {name: row for name, row in by_name(rows).items() if name not in existing and may(row, name)}
        if new_rows:
            folders = {row.own_name: row.folder for row in new_rows.values()}
            names = {name: row.own_name for name, row in new_rows.items() if name != row.own_name}
            allowed = None if model.allowed is None else [*model.allowed, *new_rows]
            model = replace(
                model, adapters=model.adapters | folders, adapter_names=model.adapter_names | names, allowed=allowed
            )
        return self._with_rank(model, bases)

    def rank_of(self, *bases: str) -> int:
        """Return the adapter rank that an engine of these models needs for all projects; 0 if there are no adapters."""
        highest = max((self.snapshot.ranks.get(each, 0) for each in bases), default=0)
        return engine_rank_for([RANK_DEFAULT, highest]) if highest else 0

    def _with_rank(self, model: ModelSpec, bases: Sequence[str] = ()) -> ModelSpec:
        """Return a model whose engine has a rank for the adapters of all projects, so that they can share it."""
        if not model.traits.loads_adapters:
            return model
        rank = self.rank_of(model.name, *bases)
        return model if rank <= model.adapter_rank else replace(model, adapter_rank=rank)


def _allows_version(caller: Caller, row: ModelRow, name: str) -> bool:
    """Tell whether the caller's key allows an adapter version by this name. A listed name includes its versions."""
    own = row.own_name.rpartition("/")[0]
    return caller.models is None or own in caller.models or (name == row.own_name and name in caller.models)


def _versions(targets: Mapping[str, VersionTarget]) -> list[ModelSpec]:
    """Return the versions of a function that rows may name, each with all its names."""
    names: dict[tuple[str, int], list[str]] = {}
    models: dict[tuple[str, int], ModelSpec] = {}
    for name, target in targets.items():
        version = (target.branch, target.number)
        names.setdefault(version, []).append(name)
        models[version] = target.model
    return [replace(model, allowed=names[version]) for version, model in models.items()]
