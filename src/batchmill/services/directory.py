"""The one directory of models: every name that a request or a row may be sent to, whose it is, and what it means now.

Services write their change to the database and then publish the rows of what changed. Each publication makes one
immutable snapshot with the next revision: whoever looks sees all of a change or nothing of it. A name stands for one
thing: `claim` refuses a second one before it is written down. Knows nothing of how models are made.
"""

from __future__ import annotations

import contextlib
import difflib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidInput, UnknownName
from batchmill.models.adapters.reading import RANK_LEAST, room_for
from batchmill.models.paths import answers
from batchmill.services.configured_models import ConfiguredModels
from batchmill.services.functions.function import Function, VersionTarget
from batchmill.services.functions.names import LATEST, read_reference
from batchmill.services.model_rows import (
    Key,
    ModelKind,
    ModelRow,
    ModelSnapshot,
    ServedModel,
    is_one_name,
    named,
    stem_of,
)
from batchmill.types import Caller, ModelSpec
from batchmill.wire.forms import URLS

REMOTE_MAX = 200  # of a project's remote models: the newest, which rows may name beside the job's own
ANSWERS_MAX = 10_000  # that a snapshot remembers
SHOWN_CHARS = 256
JOB_MARK = "~"  # in names of models that jobs bring as settings; no name that anybody chooses has it


class ModelDirectory:
    def __init__(self, configured: ConfiguredModels, chance: random.Random | None = None) -> None:
        self.configured, self._chance = configured, chance or random.Random()
        self._claimed: Counter[tuple[str, ModelKind, str, bool]] = Counter()  # names that are being written down
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
        """Call `listener` after each publication that changes which adapters there are. It may publish too."""
        self._listeners.append(listener)

    def publish(self, changes: Mapping[Key, Sequence[ModelRow]]) -> None:
        """Put these rows in the place of those that were published under the same keys: one revision.

        The change is in the database already. A publication that changes nothing makes no revision.
        """
        old = self.snapshot
        self.snapshot = new = old.changed(changes)
        for listener in self._listeners if new.adapters is not old.adapters else ():
            listener()

    @contextlib.contextmanager
    def claim(self, project: str, name: str, kind: ModelKind, *, is_shared: bool = False) -> Iterator[None]:
        """Hold a name for what is being written down and published meanwhile.

        Args: is_shared: other projects are to find it too.

        Raises: Conflict (`name_taken`) where something else is called so.
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
        """Raises: Conflict (`name_taken`) where something else is called so."""
        if found := self.holder(project, name, kind, is_shared=is_shared):
            raise Conflict(f"{name[:SHOWN_CHARS]!r} is the name of {found} already: choose another", code="name_taken")

    def holder(self, project: str, name: str, kind: ModelKind, *, is_shared: bool = False) -> str:
        """What else has a name that a project wants for one of this kind: "a function"; empty: nothing."""
        snapshot = self.snapshot
        known = snapshot.projects
        for here in (snapshot.everybody, *(known.values() if is_shared else [known.get(project, {})])):
            rows = here.values() if kind == ModelKind.FUNCTION else (here.get(name), here.get(stem_of(name)))
            for row in filter(None, rows):
                if is_one_name(row.name, row.kind, name, kind) and self._is_in_the_way(row, project, kind, is_shared):
                    is_known = row.project in (None, project) or (row.function is not None and row.function.is_shared)
                    return row.kind if is_known else "something else"
        for other, its_kind, its_name, its_sharing in self._claimed:
            if its_kind != kind and is_one_name(its_name, its_kind, name, kind):
                if other == project:
                    return its_kind
                if is_shared or its_sharing:
                    return "something else"
        return ""

    @staticmethod
    def _is_in_the_way(row: ModelRow, project: str, kind: ModelKind, is_shared: bool) -> bool:
        if (
            row.kind == kind and kind != ModelKind.LLM
        ):  # another version of the same; whose it may be, its service knows
            return False
        if row.project in (None, project) or is_shared:
            return True
        return row.function is not None and row.function.claims_everybody

    def check(self) -> None:
        """See that the configuration can be served. Raises: InvalidConfig where a model of it cannot be resolved, or
        has a name that something was registered under."""
        self.configured.check()
        for rows in self.snapshot.published.values():
            for row in rows:
                for name in (row.name, *self._configured_rows) if row.kind == ModelKind.FUNCTION else (row.name,):
                    entry = self._configured_rows.get(name)
                    if entry is not None and is_one_name(name, entry.kind, row.name, row.kind):
                        owner = row.project if row.function is None else row.function.project
                        place = f"models.{entry.base}" if entry.base else f"deployments.base_models.{name}"
                        raise self.configured.flaw(
                            place,
                            f"{name!r} is the name of {row.kind} of the project {owner} already: call it otherwise "
                            "here, or remove that one first",
                        )

    # -- who may see what ---------------------------------------------------------------------------------------------

    def _visible(self, caller: Caller, name: str) -> ModelRow | None:
        """The row that a name means to a caller. None: there is none, or none that it may use."""
        snapshot = self.snapshot
        row = snapshot.projects.get(caller.project, {}).get(name) or snapshot.everybody.get(name)
        return row if row is not None and self._may(caller, row) else None

    def _may(self, caller: Caller, row: ModelRow) -> bool:
        """The one rule. What a project registered is its own; what is everybody's is as its entry in the configuration
        says; a function of another project has to be shared; a key may list fewer."""
        if caller.models is not None and caller.models.isdisjoint(row.listed):
            return False
        if row.function is not None:
            is_theirs = row.function.is_shared or row.function.project == caller.project
            return (
                row.function.is_ready
                and is_theirs
                and self.configured.lists(caller.project, row.name, is_function=True)
            )
        if row.kind == ModelKind.ADAPTER:
            return any(self._hosts(caller, row.base))
        return row.project is not None or (
            row.kind != ModelKind.BASE and self.configured.lists(caller.project, row.name)
        )

    def _hosts(self, caller: Caller, base: str) -> Iterator[ModelRow]:
        """What serves the adapters of a base: a model of the configuration, or deployments."""
        entry = self._configured_rows.get(base)
        if entry is not None and entry.kind == ModelKind.CONFIGURED:
            if self.configured.lists(caller.project, base):
                yield entry
            return
        for row in self._deployments(caller):
            if base in (row.name, row.base) and row.takes_adapters and row.refuse is None:
                yield row

    def _deployments(self, caller: Caller) -> list[ModelRow]:
        """Those that the caller may use, in the order of their making."""
        return sorted(
            (row for row in self._own(caller, ModelKind.LLM) if self._may(caller, row)),
            key=lambda row: (row.created, row.name),
        )

    def _own(self, caller: Caller, kind: ModelKind) -> Iterator[ModelRow]:
        return (row for row in self.snapshot.projects.get(caller.project, {}).values() if row.kind == kind)

    def may_call(self, caller: Caller, name: str) -> bool:
        """The key and its project may use a function of this name, be it there or not."""
        return self.configured.allows(caller, name, is_function=True)

    def sees(self, caller: Caller, name: str) -> bool:
        """The caller may know that there is a model of this name: it may use it, or what it was made of."""
        name = name.partition(JOB_MARK)[0]
        row = self._visible(caller, name) or self._visible(caller, stem_of(name))
        return row is not None or self.configured.offers(caller, name)

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, caller: Caller, name: str) -> ServedModel:
        """What a name means to a caller. Of a function: the version that `NAME`, `NAME@3`, `NAME@prod` or
        `NAME@branch/3` means now.

        Raises: UnknownName, in the same words for a name that is unknown and for one that is not the caller's;
        Unavailable for a deployment that was stopped.
        """
        snapshot = self.snapshot
        key = (caller.project, caller.models, name)
        if (found := snapshot.found.get(key)) is not None:
            return found
        row = self._visible(caller, name)
        if row is None and "@" in name and (stem := self._visible(caller, stem_of(name))) is not None:
            row = stem if stem.function is not None else None
        found = None if row is None else self._served(caller, row, name)
        if found is None:
            near = difflib.get_close_matches(
                name[:SHOWN_CHARS], [each.name for each in self.list(caller)], n=1
            )  # fmt: skip
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownName(
                f"the model {name[:SHOWN_CHARS]!r} does not exist or you do not have access to it{hint}",
                code="model_not_found",
            )
        if found.kind != ModelKind.FUNCTION:  # an alias of weighted versions means another one each time
            if len(snapshot.found) >= ANSWERS_MAX:
                snapshot.found.clear()
            snapshot.found[key] = found
        return found

    def _served(self, caller: Caller, row: ModelRow, name: str) -> ServedModel | None:
        """Raises: what its row says of one that answers nothing."""
        if row.refuse is not None:
            raise row.refuse()
        match row.kind:
            case ModelKind.CONFIGURED:
                return ServedModel(name, self._with_room(self.configured.get(name)))
            case ModelKind.CONFIGURED_ADAPTER:
                return ServedModel(name, self._with_room(self.configured.get(row.base)), name, row.kind)
            case ModelKind.FUNCTION:
                assert row.function is not None, "it is a function"
                _, branch, version = read_reference(name)
                return ServedModel(name, row.function.choose(branch, version, self._chance).model, kind=row.kind)
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
        """An adapter of this very model or its base, by a name that the caller may use; None: it has none of it."""
        return self._adapter_on(caller, model, name, (base,))

    def _adapter_on(self, caller: Caller, model: ModelSpec, name: str, bases: Sequence[str]) -> ServedModel | None:
        own = model.adapter_names.get(name, name)
        if own in model.adapters and self.configured.allows(caller, name):
            return ServedModel(name, self._with_room(model, bases), own, ModelKind.ADAPTER)
        row = named(self._adapters_for(caller, model, bases)).get(name)
        if row is None or not _lists(caller, row, name):
            return None
        found = replace(model, adapters={row.own_name: row.folder}, adapter_names={})
        return ServedModel(name, self._with_room(found, bases), row.own_name, ModelKind.ADAPTER)

    def choose(self, caller: Caller, name: str, branch: str | None = None, version: str = LATEST) -> VersionTarget:
        """The version of a function that a call means now: of an alias with weights, each time another.

        Raises: UnknownName (`model_not_found`), in the same words for what is unknown and for what is not the caller's.
        """
        function = self.snapshot.functions.get(name)
        if function is None or not self._may(caller, self.snapshot.everybody[name]):
            near = difflib.get_close_matches(name[:SHOWN_CHARS], [each.name for each in self.functions(caller)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownName(
                f"the model {name[:SHOWN_CHARS]!r} does not exist or you do not have access to it{hint}",
                code="model_not_found",
            )
        return self.draw(function, branch, version)

    def draw(self, function: Function, branch: str | None, version: str) -> VersionTarget:
        """The version of a function that a text means now. Raises: UnknownName."""
        return function.choose(branch, version, self._chance)

    def functions(self, caller: Caller) -> list[Function]:
        """Those that the caller may call, by name."""
        snapshot = self.snapshot
        return [
            function for name, function in sorted(snapshot.functions.items())
            if self._may(caller, snapshot.everybody[name])
        ]  # fmt: skip

    def list(self, caller: Caller) -> list[ServedModel]:
        """What a caller may use: each model of the configuration before its adapters, deployments, functions by name
        and alias, then remote models."""
        snapshot = self.snapshot
        key = (caller.project, caller.models)
        if (known := snapshot.listed.get(key)) is not None:
            return known
        found: list[ServedModel] = []
        for name in self.configured.names:
            own = [name, *self.configured.adapters(name)]
            found += [self.find(caller, each) for each in own if self._visible(caller, each) is not None]
            found += self._adapters_of(caller, name)
        found += [self.find(caller, row.name) for row in self._deployments(caller) if row.refuse is None]
        for function in self.functions(caller):
            for name in function.names():
                _, branch, version = read_reference(name)
                found.append(
                    ServedModel(name, function.choose(branch, version, self._chance).model, kind=ModelKind.FUNCTION)
                )
        found += [
            ServedModel(row.name, row.spec, kind=row.kind) for row in self._remotes(caller) if row.spec is not None
        ]
        if sum(map(len, snapshot.listed.values())) + len(found) > ANSWERS_MAX:
            snapshot.listed.clear()
        snapshot.listed[key] = found
        return found

    def _adapters_of(self, caller: Caller, base: str) -> list[ServedModel]:
        """Those that were registered for a model of the configuration and whose names mean them."""
        found = named(self.snapshot.adapters.get((caller.project, base), ()))
        return [
            self.find(caller, name)
            for name, row in found.items()
            if (meant := self._visible(caller, name)) is not None and meant.own_name == row.own_name
        ]

    def _remotes(self, caller: Caller) -> list[ModelRow]:
        """Remote models that rows can be sent to, by their making: each by its id, then by its name."""
        rows = (row for row in self._own(caller, ModelKind.REMOTE) if row.spec is not None and self._may(caller, row))
        return sorted(rows, key=lambda row: (row.created, row.base, row.name != row.base))

    def serves(self, url: str, caller: Caller) -> bool:
        """Some model of the caller's answers this path."""
        models = self.list(caller)
        return bool(models) if url in URLS else any(answers(served.model, url) for served in models)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def specs(self, caller: Caller) -> list[ModelSpec]:
        """The models for a job: those of which the caller may use a name, each with the names that its rows may use.

        A source is no name here: two models may share one, and where they lie is nobody's business.
        """
        found = [spec for name in self.configured.names if (spec := self._for_rows(caller, name)).allowed]
        found += [self.find(caller, row.name).model for row in self._deployments(caller) if row.refuse is None]
        for function in self.functions(caller):
            found += _versions(function.targets(self._chance))
        remotes = [row.spec for row in self._remotes(caller) if row.name == row.base and row.spec is not None]
        return self.each_once(caller, [*found, *remotes[-REMOTE_MAX:]])

    def for_job(self, caller: Caller, name: str) -> ModelSpec:
        """As one of `specs`: the model with this name alone. Of a function, the version that it means now.

        Raises: as `find`.
        """
        served = self.find(caller, name)
        if served.kind == ModelKind.FUNCTION:
            return replace(served.model, allowed=[name])
        if served.model.name in self.configured.names and served.kind != ModelKind.REMOTE:
            return self._for_rows(caller, served.model.name)
        return served.model

    def _for_rows(self, caller: Caller, name: str) -> ModelSpec:
        own = [name, *self.configured.adapters(name)]
        allowed = [each for each in own if self._visible(caller, each) is not None]
        model = replace(self.configured.get(name), allowed=allowed)
        if not model.traits.loads_adapters:
            return model
        return self._with_adapters(
            model, self._adapters_for(caller, model, ()), (), lambda row, at: _lists(caller, row, at)
        )

    def each_once(self, caller: Caller, models: Sequence[ModelSpec]) -> list[ModelSpec]:
        """The models of one job, of which each name stands for one: that of a model before that of an adapter, and of
        adapters of several bases the version that the name means alone."""
        claims: dict[str, list[int]] = {}
        for number, model in enumerate(models):
            for name in model.allowed or ():
                claims.setdefault(name, []).append(number)
        lost: dict[int, set[str]] = {}
        for name, numbers in claims.items():
            controller = min(numbers, key=lambda number: self._standing(caller, models[number], name))
            for number in numbers:
                if number != controller:
                    lost.setdefault(number, set()).add(name)
        return [
            replace(model, allowed=[name for name in model.allowed or () if name not in lost[number]])
            if number in lost
            else model
            for number, model in enumerate(models)
        ]

    def _standing(self, caller: Caller, model: ModelSpec, name: str) -> int:
        own = model.adapter_names.get(name, name)
        if own not in model.adapters:
            return 0
        row = self.snapshot.projects.get(caller.project, {}).get(name)
        return 1 if row is not None and row.own_name == own else 2

    # -- adapters of language models ----------------------------------------------------------------------------------

    def base(self, caller: Caller, name: str) -> ModelSpec:
        """The model that adapters may be registered for. Raises: UnknownName; InvalidInput for one of its adapters."""
        if self.configured.offers(caller, name):
            return self.configured.get(name)
        found = self.find(caller, name)
        if found.adapter is not None:
            raise InvalidInput(
                f"{name[:SHOWN_CHARS]!r} is an adapter itself: name its model, {found.model.name}", code="no_adapters"
            )
        return found.model

    def adapted(self, project: str, model: ModelSpec, base: str, *, is_own: bool) -> ModelSpec:
        """A model with the adapters that a project registered for it or its base.

        Args: is_own: the project's own, which it may use; otherwise as far as it may use the base.
        """
        if not is_own and not self.configured.lists(project, base):
            return self._with_room(model, (base,))
        bases = (model.name, base) if is_own else (base,)
        rows = [row for each in dict.fromkeys(bases) for row in self.snapshot.adapters.get((project, each), ())]
        return self._with_adapters(model, rows, bases, lambda row, name: True)

    def limited(self, caller: Caller, model: ModelSpec, names: Sequence[str]) -> ModelSpec:
        """A model whose rows may use these names of its own, and those of its adapters that the caller may."""
        adapters = [*model.adapters, *model.adapter_names]
        return replace(model, allowed=[*names, *(each for each in adapters if self._may_use(caller, model, each))])

    def _may_use(self, caller: Caller, model: ModelSpec, name: str) -> bool:
        """An adapter of a deployment. One of the configuration is not the project's own because it deployed its base;
        what the project registered is, and a key that has a name has its versions."""
        own = model.adapter_names.get(name, name)
        if own in self._configured_rows:
            return self.configured.allows(caller, name)
        return caller.models is None or name in caller.models or own.rpartition("/")[0] in caller.models

    def _adapters_for(self, caller: Caller, model: ModelSpec, bases: Sequence[str]) -> list[ModelRow]:
        """The versions that a project registered for a model, if it may use that, or for one of its bases."""
        if not model.traits.loads_adapters:
            return []
        if model.name in self.configured.names and not self.configured.lists(caller.project, model.name):
            return []
        found = self.snapshot.adapters
        return [row for each in dict.fromkeys((model.name, *bases)) for row in found.get((caller.project, each), ())]

    def _with_adapters(
        self, model: ModelSpec, rows: Iterable[ModelRow], bases: Sequence[str], may: Callable[[ModelRow, str], bool]
    ) -> ModelSpec:
        """A model whose rows may name these adapters too. Names that it has already stay what they are."""
        known = model.targets()
        called = {name: row for name, row in named(rows).items() if name not in known and may(row, name)}
        if called:
            places = {row.own_name: row.folder for row in called.values()}
            names = {name: row.own_name for name, row in called.items() if name != row.own_name}
            allowed = None if model.allowed is None else [*model.allowed, *called]
            model = replace(
                model, adapters=model.adapters | places, adapter_names=model.adapter_names | names, allowed=allowed
            )
        return self._with_room(model, bases)

    def rank_of(self, *bases: str) -> int:
        """The room that an engine of these models needs for the adapters of all projects; 0: there are none."""
        highest = max((self.snapshot.ranks.get(each, 0) for each in bases), default=0)
        return room_for([RANK_LEAST, highest]) if highest else 0

    def _with_room(self, model: ModelSpec, bases: Sequence[str] = ()) -> ModelSpec:
        """A model whose engine has room for the adapters of all projects, so that one engine serves them all."""
        if not model.traits.loads_adapters:
            return model
        rank = self.rank_of(model.name, *bases)
        return model if rank <= model.adapter_rank else replace(model, adapter_rank=rank)


def _lists(caller: Caller, row: ModelRow, name: str) -> bool:
    """The caller's key may use a version of an adapter by this name: one that has a name has its versions."""
    own = row.own_name.rpartition("/")[0]
    return caller.models is None or own in caller.models or (name == row.own_name and name in caller.models)


def _versions(targets: Mapping[str, VersionTarget]) -> list[ModelSpec]:
    """The versions of a function that rows may name, each with all names that it goes by."""
    names: dict[tuple[str, int], list[str]] = {}
    models: dict[tuple[str, int], ModelSpec] = {}
    for name, target in targets.items():
        place = (target.branch, target.number)
        names.setdefault(place, []).append(name)
        models[place] = target.model
    return [replace(model, allowed=names[place]) for place, model in models.items()]
