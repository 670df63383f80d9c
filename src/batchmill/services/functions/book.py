"""Every deployed function with its versions, branches and aliases, in memory: which version a name means now."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterable

from msgspec import Struct

from batchmill.errors import UnknownName
from batchmill.services.functions.names import LATEST, MAIN, SHOWN_CHARS, read_version
from batchmill.services.functions.records import BUILDING, READY
from batchmill.wire.deploys import Backend, ModelVersion, Route

Key = tuple[str, str, int]


class Chosen(Struct, frozen=True):
    """The version that a call goes to, and those that get a copy of it."""

    version: ModelVersion
    mirrors: tuple[ModelVersion, ...] = ()


class Owner(Struct, frozen=True):
    """Whose a function is: of the project that has versions of it which are ready or being made."""

    project: str
    is_shared: bool  # other projects may call it; the newest version says so


class ModelBook:
    """`revision` rises with every change: whoever remembers what a name means asks for it first."""

    def __init__(self, versions: Iterable[ModelVersion], routes: Iterable[Route], chance: random.Random) -> None:
        self._chance = chance
        self._versions: dict[str, dict[Key, ModelVersion]] = {}  # name -> its versions
        self._routes: dict[str, dict[str, Route]] = {}  # name -> label -> route
        self._settled: dict[tuple[str, str | None, str], Chosen] = {}  # names that mean one version alone
        self._owners: dict[str, Owner | None] = {}  # of names that were asked for
        self.revision = 0
        for version in versions:
            self._versions.setdefault(version.name, {})[_key(version)] = version
        for route in routes:
            self._routes.setdefault(route.name, {})[route.label] = route

    # -- changing -----------------------------------------------------------------------------------------------------

    def put(self, version: ModelVersion) -> None:
        self._versions.setdefault(version.name, {})[_key(version)] = version
        self._changed()

    def put_route(self, route: Route) -> None:
        self._routes.setdefault(route.name, {})[route.label] = route
        self._changed()

    def drop_route(self, route: Route) -> None:
        self._routes.get(route.name, {}).pop(route.label, None)
        self._changed()

    def _changed(self) -> None:
        self._settled.clear()
        self._owners.clear()
        self.revision += 1

    # -- looking ------------------------------------------------------------------------------------------------------

    def choose(self, name: str, branch: str | None = None, version: str = LATEST) -> Chosen:
        """The version of `name` that a text means: `latest` of a branch, a number, or an alias.

        Of several backends one is drawn by weight, at each call. Raises: UnknownName (`model_not_found`).
        """
        key = (name, branch, version)
        settled = self._settled.get(key)
        if settled is not None:
            return settled
        number = read_version(version)
        if number is not None:
            found = Chosen(self.ready(name, branch or MAIN, number))
        else:
            route = self._route(name, branch, version)
            mirrors = tuple(self.ready(name, each.branch, each.number) for each in route.mirrors)
            backend = self._draw(route.backends)
            found = Chosen(self.ready(name, backend.branch, backend.number), mirrors)
            if len(route.backends) > 1:
                return found
        self._settled[key] = found
        return found

    def _draw(self, backends: list[Backend]) -> Backend:
        if len(backends) == 1:
            return backends[0]
        return self._chance.choices(backends, [each.weight for each in backends])[0]

    def _route(self, name: str, branch: str | None, version: str) -> Route:
        routes = self._routes.get(name, {})
        route = routes.get(branch or MAIN) if version == LATEST else routes.get(f"@{version}")
        if route is None:
            raise self.unknown(name, branch, version)
        return route

    def ready(self, name: str, branch: str, number: int) -> ModelVersion:
        """Raises: UnknownName for a version that is not there, is being built, failed or was removed."""
        found = self._versions.get(name, {}).get((name, branch, number))
        if found is None or found.state != READY:
            raise self.unknown(name, branch, str(number), found)
        return found

    def unknown(self, name: str, branch: str | None, version: str, found: ModelVersion | None = None) -> UnknownName:
        """Why a name means nothing, with the nearest that does."""
        shown = name[:SHOWN_CHARS]
        if not self.has(name):
            near = difflib.get_close_matches(shown, self.names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return UnknownName(f"no model is called {shown!r}{hint}", code="model_not_found")
        place = f"{shown}@{(branch or MAIN)[:SHOWN_CHARS]}/{version[:SHOWN_CHARS]}"
        told = f"is {found.state}" if found is not None else "does not exist"
        known = [f"{each.branch}/{each.number}" for each in self.get(name) if each.state == READY][-5:]
        known += [label for label in self._routes.get(name, {}) if label.startswith("@")]
        return UnknownName(
            f"the version {place} {told}; of {shown} there are {', '.join(known) or 'none'}", code="model_not_found"
        )

    def owner(self, name: str) -> Owner | None:
        """None: the name is free, whoever had it before."""
        if name not in self._versions:
            return None
        if name not in self._owners:
            live = [each for each in self._versions[name].values() if each.state in (BUILDING, READY)]
            last = max(live, key=lambda each: (each.state == READY, each.created, each.number), default=None)
            self._owners[name] = None if last is None else Owner(last.project, last.is_shared)
        return self._owners[name]

    def is_hidden(self, name: str, project: str) -> bool:
        """It is another project's, which does not share it."""
        owner = self.owner(name)
        return owner is not None and not owner.is_shared and owner.project != project

    def has(self, name: str) -> bool:
        """Some version of it is ready, or was and can be asked for."""
        return any(each.state == READY for each in self._versions.get(name, {}).values())

    def names(self) -> list[str]:
        """Functions of which a version is ready."""
        return sorted(name for name in self._versions if self.has(name))

    def get(self, name: str) -> list[ModelVersion]:
        """Every version of a function, by branch and number; failed and removed ones too."""
        return [each for _, each in sorted(self._versions.get(name, {}).items())]

    def all(self) -> list[ModelVersion]:
        """Every version that is ready."""
        return [each for name in sorted(self._versions) for each in self.get(name) if each.state == READY]

    def routes(self, name: str) -> list[Route]:
        """What its branches' `latest` and its aliases stand for."""
        return [route for _, route in sorted(self._routes.get(name, {}).items())]

    def route(self, name: str, label: str) -> Route | None:
        return self._routes.get(name, {}).get(label)


def _key(version: ModelVersion) -> Key:
    return version.name, version.branch, version.number
