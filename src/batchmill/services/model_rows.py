"""Every name that a request or a row may be sent to at one moment: rows, and what is looked up in them.

Immutable: a publication makes the next snapshot of the last one and shares all that did not change with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from batchmill.errors import BatchmillError
from batchmill.services.functions.function import Function
from batchmill.types import ModelSpec

Key = tuple[str, ...]  # of what published rows: its kind, its project, its name


class ModelKind(StrEnum):
    CONFIGURED = "a model of the configuration"
    BASE = "a base model"
    CONFIGURED_ADAPTER = "an adapter of the configuration"
    FUNCTION = "a function"  # its versions, branches and aliases are its own names: NAME@3, NAME@feat/x/3, NAME@prod
    REMOTE = "a connector's model"
    LLM = "a deployment"
    ADAPTER = "an adapter"


class ModelRow(Struct, frozen=True):
    """A name, and what it stands for. One without `spec`, `function` and `refuse` only holds its name."""

    name: str
    kind: ModelKind
    project: str | None = None  # whose it is; None: of everybody whom the configuration lets use it
    spec: ModelSpec | None = None  # what answers; of an adapter, the models of `base` do
    function: Function | None = None
    base: str = ""  # the model that it is made for, or of
    listed: tuple[str, ...] = ()  # a key that lists one of these may use it
    created: float = 0.0
    number: int = 0  # of an adapter's version
    own_name: str = ""  # of an adapter: what engines and results call it
    folder: str = ""
    rank: int = 0
    takes_adapters: bool = True
    refuse: Callable[[], BatchmillError] | None = None  # why it answers nothing now

    @property
    def is_version(self) -> bool:
        """A version of an adapter, by its own name."""
        return self.kind == ModelKind.ADAPTER and self.name == self.own_name


class ServedModel(Struct, frozen=True):
    """A name that a request may be sent to."""

    name: str
    model: ModelSpec
    adapter: str | None = None  # None: the model itself
    kind: ModelKind = ModelKind.CONFIGURED


class ModelSnapshot(Struct, frozen=True):
    """All rows at one revision, and the answers that were made of them so far."""

    revision: int = 0
    published: dict[Key, tuple[ModelRow, ...]] = {}
    everybody: dict[str, ModelRow] = {}  # of the configuration, and functions
    projects: dict[str, dict[str, ModelRow]] = {}
    functions: dict[str, Function] = {}  # those that can be called, by name
    adapters: dict[tuple[str, str], tuple[ModelRow, ...]] = {}  # (project, base) -> versions, by name and number
    ranks: dict[str, int] = {}  # base -> the highest rank of everybody's adapters for it
    found: dict[tuple[str, frozenset[str] | None, str], ServedModel] = {}
    listed: dict[tuple[str, frozenset[str] | None], list[ServedModel]] = {}

    def changed(self, changes: Mapping[Key, Sequence[ModelRow]]) -> ModelSnapshot:
        """The next revision, with these rows in the place of those that were published under the same keys; the same
        snapshot, where that changes nothing."""
        put = {key: tuple(rows) for key, rows in changes.items()}
        put = {key: rows for key, rows in put.items() if self.published.get(key, ()) != rows}
        if not put:
            return self
        gone = [row for key in put for row in self.published.get(key, ())]
        come = [row for rows in put.values() for row in rows]
        everybody, projects = self.everybody, dict(self.projects)
        for project in {_scope(row) for row in (*gone, *come)}:
            here = dict(everybody if project is None else projects.get(project, {}))
            for row in gone:
                if _scope(row) == project and here.get(row.name) is row:
                    del here[row.name]
            for row in come:
                if _scope(row) == project:
                    here.setdefault(row.name, row)  # what the configuration calls so stays
            if project is None:
                everybody = here
            else:
                projects[project] = here
        functions = self.functions
        if any(row.kind == ModelKind.FUNCTION for row in (*gone, *come)):
            found = (row.function for row in everybody.values() if row.function is not None)
            functions = {function.name: function for function in found if function.is_ready}
        versions = [row for row in (*gone, *come) if row.is_version]
        adapters, ranks = _adapters(self, gone, come) if versions else (self.adapters, self.ranks)
        published = {key: rows for key, rows in (self.published | put).items() if rows}
        return ModelSnapshot(self.revision + 1, published, everybody, projects, functions, adapters, ranks, {}, {})


def stem_of(name: str) -> str:
    return name.partition("@")[0]


def _scope(row: ModelRow) -> str | None:
    """Where a row's name is looked up: a function's is nobody else's, whoever may know of it."""
    return None if row.kind == ModelKind.FUNCTION else row.project


def is_one_name(name: str, kind: ModelKind, other: str, other_kind: ModelKind) -> bool:
    """Two names are the same text. A function has all those that begin with its own and an @."""
    if kind == ModelKind.FUNCTION:
        other = stem_of(other)
    if other_kind == ModelKind.FUNCTION:
        name = stem_of(name)
    return name == other


def named(rows: Iterable[ModelRow]) -> dict[str, ModelRow]:
    """What versions of adapters are called: "NAME" is the newest."""
    found: dict[str, ModelRow] = {}
    for row in rows:  # the oldest of a name first
        found[row.own_name.rpartition("/")[0]] = row
        found[row.own_name] = row
    return found


def _adapters(
    old: ModelSnapshot, gone: Sequence[ModelRow], come: Sequence[ModelRow]
) -> tuple[dict[tuple[str, str], tuple[ModelRow, ...]], dict[str, int]]:
    """The versions of adapters by project and base, and the highest ranks, after a change."""
    adapters, ranks = dict(old.adapters), dict(old.ranks)
    changed = [row for row in (*gone, *come) if row.is_version]
    for project, base in {(row.project or "", row.base) for row in changed}:
        lost = {row.name for row in gone if row.is_version and (row.project, row.base) == (project, base)}
        kept = [row for row in adapters.get((project, base), ()) if row.name not in lost]
        kept += [row for row in come if row.is_version and (row.project, row.base) == (project, base)]
        adapters[project, base] = tuple(sorted(kept, key=lambda row: (row.own_name.rpartition("/")[0], row.number)))
        if not kept:
            del adapters[project, base]
    for base in {row.base for row in changed}:
        ranks[base] = max((row.rank for (_, at), rows in adapters.items() if at == base for row in rows), default=0)
    return adapters, ranks
