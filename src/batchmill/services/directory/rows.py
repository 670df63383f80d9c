"""Every model name that a request or a row can use at one moment, as an immutable snapshot of rows.

A publication makes the next snapshot from the last one and shares everything that did not change with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.services.functions.function import Function
from batchmill.types import ModelSpec

Key = tuple[str, ...]  # what published some rows: its kind, its project, its name


class ModelKind(StrEnum):
    CONFIGURED = "a model of the configuration"
    BASE = "a base model"
    CONFIGURED_ADAPTER = "an adapter of the configuration"
    FUNCTION = "a function"  # it owns the names of its versions and aliases too: NAME@3, NAME@feat/x/3, NAME@prod
    REMOTE = "a connector's model"
    LLM = "a deployment"
    ADAPTER = "an adapter"


class ModelRow(Struct, frozen=True):
    """A name and what it means. A row without `spec`, `function` and `refuse` only reserves its name."""

    name: str
    kind: ModelKind
    project: str | None = None  # its owner; None: every project that the configuration allows
    spec: ModelSpec | None = None  # the model; an adapter is served by the models of `base`
    function: Function | None = None
    base: str = ""  # the model that it is made for or from
    listed: tuple[str, ...] = ()  # a key that lists one of these names may use it
    created: float = 0.0
    number: int = 0  # an adapter's version
    own_name: str = ""  # an adapter's name in engines and results
    folder: str = ""
    rank: int = 0
    takes_adapters: bool = True
    refuse: Callable[[], BatchmillError] | None = None  # makes the error, if it cannot serve now

    @property
    def is_version(self) -> bool:
        """Tell whether the row is a version of an adapter under its own name."""
        return self.kind == ModelKind.ADAPTER and self.name == self.own_name


class ServedModel(Struct, frozen=True):
    """A model that a request can be sent to."""

    name: str
    model: ModelSpec
    adapter: str | None = None  # None: the model itself
    kind: ModelKind = ModelKind.CONFIGURED


class ModelSnapshot(Struct, frozen=True):
    """All rows at one revision, and a cache of lookups in them."""

    revision: int = 0
    published: dict[Key, tuple[ModelRow, ...]] = {}
    everybody: dict[str, ModelRow] = {}  # rows of the configuration, and functions
    projects: dict[str, dict[str, ModelRow]] = {}
    functions: dict[str, Function] = {}  # functions that can be called, by name
    adapters: dict[tuple[str, str], tuple[ModelRow, ...]] = {}  # (project, base) -> versions, by name and number
    ranks: dict[str, int] = {}  # base -> the highest rank of all projects' adapters for it
    resolved: dict[tuple[str, frozenset[str] | None, str], ServedModel] = {}
    listed: dict[tuple[str, frozenset[str] | None], list[ServedModel]] = {}

    def with_changes(self, changes: Mapping[Key, Sequence[ModelRow]]) -> ModelSnapshot:
        """Return the next revision, in which these rows replace those published under the same keys.

        Returns this snapshot if nothing changes.
        """
        replacing = {key: tuple(rows) for key, rows in changes.items()}
        replacing = {key: rows for key, rows in replacing.items() if self.published.get(key, ()) != rows}
        if not replacing:
            return self
        removed = [row for key in replacing for row in self.published.get(key, ())]
        added = [row for rows in replacing.values() for row in rows]
        everybody, projects = self.everybody, dict(self.projects)
        for project in {_scope(row) for row in (*removed, *added)}:
            scope_rows = dict(everybody if project is None else projects.get(project, {}))
            for row in removed:
                if _scope(row) == project and scope_rows.get(row.name) is row:
                    del scope_rows[row.name]
            for row in added:
                if _scope(row) == project:
                    scope_rows.setdefault(row.name, row)  # a name of the configuration wins
            if project is None:
                everybody = scope_rows
            else:
                projects[project] = scope_rows
        functions = self.functions
        if any(row.kind == ModelKind.FUNCTION for row in (*removed, *added)):
            named_functions = (row.function for row in everybody.values() if row.function is not None)
            functions = {function.name: function for function in named_functions if function.is_ready}
        versions = [row for row in (*removed, *added) if row.is_version]
        adapters, ranks = _adapters(self, removed, added) if versions else (self.adapters, self.ranks)
        published = {key: rows for key, rows in (self.published | replacing).items() if rows}
        return ModelSnapshot(self.revision + 1, published, everybody, projects, functions, adapters, ranks, {}, {})


def stem_of(name: str) -> str:
    return name.partition("@")[0]


def _scope(row: ModelRow) -> str | None:
    """Return the project in which a row's name is looked up. None: all, which is so for every function."""
    return None if row.kind == ModelKind.FUNCTION else row.project


def is_one_name(name: str, kind: ModelKind, other: str, other_kind: ModelKind) -> bool:
    """Tell whether two names clash. A function owns every name that begins with its own name and an @."""
    if kind == ModelKind.FUNCTION:
        other = stem_of(other)
    if other_kind == ModelKind.FUNCTION:
        name = stem_of(name)
    return name == other


def by_name(rows: Iterable[ModelRow]) -> dict[str, ModelRow]:
    """Map names to versions of adapters. "NAME" without a version is the newest."""
    versions: dict[str, ModelRow] = {}
    for row in rows:  # the oldest version of a name comes first
        versions[row.own_name.rpartition("/")[0]] = row
        versions[row.own_name] = row
    return versions


def _adapters(
    old: ModelSnapshot, removed: Sequence[ModelRow], added: Sequence[ModelRow]
) -> tuple[dict[tuple[str, str], tuple[ModelRow, ...]], dict[str, int]]:
    """Return the adapter versions by project and base, and the highest ranks, after a change."""
    adapters, ranks = dict(old.adapters), dict(old.ranks)
    changed = [row for row in (*removed, *added) if row.is_version]
    for project, base in {(row.project or "", row.base) for row in changed}:
        removed_names = {row.name for row in removed if row.is_version and (row.project, row.base) == (project, base)}
        remaining = [row for row in adapters.get((project, base), ()) if row.name not in removed_names]
        remaining += [row for row in added if row.is_version and (row.project, row.base) == (project, base)]
        adapters[project, base] = tuple(
            sorted(remaining, key=lambda row: (row.own_name.rpartition("/")[0], row.number))
        )
        if not remaining:
            del adapters[project, base]
    for base in {row.base for row in changed}:
        ranks[base] = max((row.rank for (_, at), rows in adapters.items() if at == base for row in rows), default=0)
    return adapters, ranks
