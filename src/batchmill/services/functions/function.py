"""A deployed function as it is now: its versions, what `latest` of each branch and each alias stand for. It never
changes: a change makes another one, which its service publishes."""

from __future__ import annotations

import random
from collections.abc import Iterable

from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.services.functions.names import LATEST, MAIN, SHOWN_CHARS
from batchmill.services.functions.records import BUILDING, READY
from batchmill.types import Interface, ModelSpec
from batchmill.wire.bundles import Backend, ModelVersion, Route

VERSIONS_MAX = 10  # the newest, which rows of a job may name
SHOWN_MAX = 5  # versions that an error names
Place = tuple[str, int]  # branch and number of a version


class VersionTarget(Struct, frozen=True):
    """The version that a call goes to; `mirrors` get copies."""

    name: str
    branch: str
    number: int
    model: ModelSpec
    mirrors: tuple[ModelSpec, ...] = ()

    @property
    def version(self) -> str:
        return str(self.number)

    @property
    def interface(self) -> Interface:
        assert self.model.function is not None, "only deployed functions are versions"
        return self.model.function.interface


class _Split(Struct, frozen=True):
    """What an alias stands for: one of these, drawn by weight at each call."""

    targets: list[VersionTarget]
    weights: list[float]


class Function:
    """Args: `versions`, in every state, by branch and number; `routes`, by label."""

    __slots__ = ("_aliases", "_named", "all", "is_shared", "name", "project", "routes", "versions")

    def __init__(self, name: str, versions: dict[Place, ModelVersion], routes: dict[str, Route]) -> None:
        self.name, self.routes = name, dict(sorted(routes.items()))
        self.versions = versions
        self.all = [each for _, each in sorted(versions.items())]  # failed and removed ones too
        live = [each for each in self.all if each.state in (BUILDING, READY)]
        newest = max(live, key=lambda each: (each.state == READY, each.created, each.number), default=None)
        self.project = None if newest is None else newest.project  # None: the name is free, whoever had it before
        self.is_shared = newest is not None and newest.is_shared  # other projects may call it
        self._named: dict[tuple[str, str], _Split] = {
            (each.branch, str(each.number)): _Split([_target(each)], [1.0]) for each in self.all if each.state == READY
        }
        self._aliases: dict[str, _Split] = {}
        for label, route in self.routes.items():
            if (split := self._split(route)) is None:
                continue
            if label.startswith("@"):
                self._aliases[label[1:]] = split
            else:
                self._named[label, LATEST] = split

    def _split(self, route: Route) -> _Split | None:
        """None: nothing is ready that the route stands for."""
        backends = [each for each in route.backends if self._is_ready(each)]
        mirrors = tuple([_spec(self.versions[_place(each)]) for each in route.mirrors if self._is_ready(each)])
        targets = [_target(self.versions[_place(each)], mirrors) for each in backends]
        return _Split(targets, [each.weight for each in backends]) if targets else None

    def _is_ready(self, backend: Backend) -> bool:
        found = self.versions.get(_place(backend))
        return found is not None and found.state == READY

    def changed(
        self, versions: Iterable[ModelVersion] = (), routes: Iterable[Route] = (), dropped: Iterable[Route] = ()
    ) -> Function:
        """The function with these versions and routes, and without those that are dropped."""
        gone = {each.label for each in dropped}
        kept = {label: route for label, route in self.routes.items() if label not in gone}
        return Function(
            self.name,
            self.versions | {(each.branch, each.number): each for each in versions},
            kept | {each.label: each for each in routes},
        )

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Some version of it can be called."""
        return bool(self._named)

    @property
    def claims_everybody(self) -> bool:
        """Its name is nobody else's: a version that may become the newest again is shared."""
        return any(each.is_shared for each in self.all if each.state in (BUILDING, READY))

    def choose(self, branch: str | None, version: str, chance: random.Random) -> VersionTarget:
        """The version that a number, `latest` or an alias means. Raises: UnknownName (`model_not_found`)."""
        split = self._named.get((branch or MAIN, version)) or self._aliases.get(version)
        if split is None:
            raise self.unknown(branch, version)
        if len(split.targets) == 1:
            return split.targets[0]
        return chance.choices(split.targets, split.weights)[0]

    def ready_targets(self) -> list[VersionTarget]:
        """Every version that is ready, by branch and number."""
        return [_target(each) for each in self.all if each.state == READY]

    def ready_target(self, branch: str, version: str) -> VersionTarget | None:
        found = self._named.get((branch, version))
        return None if found is None else found.targets[0]

    def ready(self, branch: str, number: int) -> ModelVersion:
        """Raises: UnknownName for a version that is not there, is being built, failed or was removed."""
        found = self.versions.get((branch, number))
        if found is None or found.state != READY:
            raise self.unknown(branch, str(number))
        return found

    def latest(self, branch: str) -> ModelVersion | None:
        route = self.routes.get(branch)
        return None if route is None else self.ready(*_place(route.backends[0]))

    def names(self) -> list[str]:
        """The function's own, and its aliases'."""
        own = [self.name] if (MAIN, LATEST) in self._named else []
        return own + [f"{self.name}@{alias}" for alias in self._aliases]

    def targets(self, chance: random.Random) -> dict[str, VersionTarget]:
        """What rows may call it, and which version that means now: an alias with weights is drawn."""
        found: dict[str, VersionTarget] = {}
        for alias in self._aliases:
            found[f"{self.name}@{alias}"] = self.choose(None, alias, chance)
        for label in self.routes:
            if (label, LATEST) in self._named:
                found[f"{self.name}@{label}/{LATEST}"] = target = self.choose(label, LATEST, chance)
                if label == MAIN:
                    found |= {self.name: target, f"{self.name}@{LATEST}": target}
        ready = [each for each in self.all if each.state == READY]
        for version in sorted(ready, key=lambda each: -each.created)[:VERSIONS_MAX]:
            found[version.reference] = target = _target(version)
            if version.branch == MAIN:
                found[f"{self.name}@{version.number}"] = target
        return found

    def unknown(self, branch: str | None, version: str) -> UnknownName:
        """Why a text means no version, with those that there are."""
        found = self.versions.get((branch or MAIN, int(version))) if version.isdecimal() else None
        place = f"{self.name}@{(branch or MAIN)[:SHOWN_CHARS]}/{version[:SHOWN_CHARS]}"
        what = f"is {found.state}" if found is not None else "does not exist"
        known = [f"{each.branch}/{each.number}" for each in self.all if each.state == READY][-SHOWN_MAX:]
        known += [label for label in self.routes if label.startswith("@")]
        return UnknownName(
            f"the version {place} {what}; of {self.name} there are {', '.join(known) or 'none'}", code="model_not_found"
        )


def _place(backend: Backend) -> Place:
    return backend.branch, backend.number


def _spec(version: ModelVersion) -> ModelSpec:
    assert version.spec is not None, "it is ready"
    return version.spec


def _target(version: ModelVersion, mirrors: tuple[ModelSpec, ...] = ()) -> VersionTarget:
    return VersionTarget(version.name, version.branch, version.number, _spec(version), mirrors)
