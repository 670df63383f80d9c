"""A deployed function: its versions, and the targets of its aliases and of each branch's `latest`.

Immutable: a change makes a new `Function`, which its service publishes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.services.functions.names import LATEST, MAIN, SHOWN_CHARS
from batchmill.services.functions.records import BUILDING
from batchmill.types import Interface, ModelSpec
from batchmill.wire.bundles import READY, Backend, ModelVersion, Route, unknown_version

VERSIONS_MAX = 10  # newest versions that rows of a job may name
VersionKey = tuple[str, int]  # branch and number


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
    """The targets of an alias. Each call goes to one of them, drawn by weight."""

    targets: list[VersionTarget]
    weights: list[float]


class Function:
    """
    Args:
        versions: in every state, by branch and number.
        routes: by label.
    """

    __slots__ = ("_aliases", "_named", "all", "is_schema", "is_shared", "name", "project", "routes", "versions")

    def __init__(self, name: str, versions: dict[VersionKey, ModelVersion], routes: dict[str, Route]) -> None:
        self.name, self.routes = name, dict(sorted(routes.items()))
        self.versions = versions
        self.all = [each for _, each in sorted(versions.items())]  # failed and removed ones too
        live = [each for each in self.all if each.state in (BUILDING, READY)]
        newest = max(live, key=lambda each: (each.state == READY, each.created, each.number), default=None)
        self.project = None if newest is None else newest.project  # None: the name is free
        self.is_shared = newest is not None and newest.is_shared  # other projects may call it
        self.is_schema = any(each.state == READY and _is_schema(each) for each in self.all)  # no model: a class
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
        """The ready targets of a route; None if none of them is ready."""
        backends = [each for each in route.backends if self._is_ready(each)]
        mirrors = tuple([_spec(self.versions[_key(each)]) for each in route.mirrors if self._is_ready(each)])
        targets = [_target(self.versions[_key(each)], mirrors) for each in backends]
        return _Split(targets, [each.weight for each in backends]) if targets else None

    def _is_ready(self, backend: Backend) -> bool:
        version = self.versions.get(_key(backend))
        return version is not None and version.state == READY

    def changed(
        self, versions: Iterable[ModelVersion] = (), routes: Iterable[Route] = (), dropped: Iterable[Route] = ()
    ) -> Function:
        """A copy of the function with these versions and routes, and without the routes in `dropped`."""
        dropped_labels = {each.label for each in dropped}
        routes_left = {label: route for label, route in self.routes.items() if label not in dropped_labels}
        return Function(
            self.name,
            self.versions | {(each.branch, each.number): each for each in versions},
            routes_left | {each.label: each for each in routes},
        )

    # -- lookup -------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether any version can be called."""
        return bool(self._named) and not self.is_schema

    @property
    def claims_everybody(self) -> bool:
        """Whether the name is reserved in every project, because a version that may become the newest is shared."""
        return any(each.is_shared for each in self.all if each.state in (BUILDING, READY))

    def choose(self, branch: str | None, version: str, rng: random.Random) -> VersionTarget:
        """The version for a number, `latest` or an alias. Raises: UnknownName (`model_not_found`)."""
        split = self._named.get((branch or MAIN, version)) or self._aliases.get(version)
        if split is None:
            raise self.unknown(branch, version)
        if len(split.targets) == 1:
            return split.targets[0]
        return rng.choices(split.targets, split.weights)[0]

    def ready_targets(self) -> list[VersionTarget]:
        """Every ready version, sorted by branch and number."""
        return [_target(each) for each in self.all if each.state == READY]

    def ready_target(self, branch: str, version: str) -> VersionTarget | None:
        split = self._named.get((branch, version))
        return None if split is None else split.targets[0]

    def ready(self, branch: str, number: int) -> ModelVersion:
        """The version, if it is ready. Raises: UnknownName for one that does not exist or is in another state."""
        version = self.versions.get((branch, number))
        if version is None or version.state != READY:
            raise self.unknown(branch, str(number))
        return version

    def latest(self, branch: str) -> ModelVersion | None:
        route = self.routes.get(branch)
        return None if route is None else self.ready(*_key(route.backends[0]))

    def names(self) -> list[str]:
        """The name of the function, if main's latest is ready, and `NAME@ALIAS` for each alias."""
        base_names = [self.name] if (MAIN, LATEST) in self._named else []
        return base_names + [f"{self.name}@{alias}" for alias in self._aliases]

    def targets(self, rng: random.Random) -> dict[str, VersionTarget]:
        """Each name that rows may use -> the version for it now. An alias with weights is drawn."""
        targets_by_name: dict[str, VersionTarget] = {}
        for alias in self._aliases:
            targets_by_name[f"{self.name}@{alias}"] = self.choose(None, alias, rng)
        for label in self.routes:
            if (label, LATEST) in self._named:
                targets_by_name[f"{self.name}@{label}/{LATEST}"] = target = self.choose(label, LATEST, rng)
                if label == MAIN:
                    targets_by_name |= {self.name: target, f"{self.name}@{LATEST}": target}
        ready = [each for each in self.all if each.state == READY]
        for version in sorted(ready, key=lambda each: -each.created)[:VERSIONS_MAX]:
            targets_by_name[version.reference] = target = _target(version)
            if version.branch == MAIN:
                targets_by_name[f"{self.name}@{version.number}"] = target
        return targets_by_name

    def unknown(self, branch: str | None, version: str) -> UnknownName:
        """The error for a version that does not exist or is not ready. Its message lists the ready ones."""
        record = self.versions.get((branch or MAIN, int(version))) if version.isdecimal() else None
        ready = [f"{each.branch}/{each.number}" for each in self.all if each.state == READY]
        aliases = [label for label in self.routes if label.startswith("@")]
        shown = f"{(branch or MAIN)[:SHOWN_CHARS]}/{version[:SHOWN_CHARS]}"
        message = unknown_version(self.name, shown, None if record is None else record.state, ready, aliases)
        return UnknownName(message, code="model_not_found")


def _key(backend: Backend) -> VersionKey:
    return backend.branch, backend.number


def _is_schema(version: ModelVersion) -> bool:
    spec = version.spec
    return spec is not None and spec.function is not None and spec.function.schema is not None


def _spec(version: ModelVersion) -> ModelSpec:
    assert version.spec is not None, "it is ready"
    return version.spec


def _target(version: ModelVersion, mirrors: tuple[ModelSpec, ...] = ()) -> VersionTarget:
    return VersionTarget(version.name, version.branch, version.number, _spec(version), mirrors)
