"""The directory of models beside a model of it that a reader can check: a list of things, and two rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from batchmill.config import Config, DeploymentsEntry, ModelEntry, ProjectEntry
from batchmill.errors import Conflict, UnknownName
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import Key, ModelKind, ModelRow
from batchmill.services.functions.function import Function
from batchmill.types import Caller, FunctionSpec, ModelSpec, Scope
from batchmill.wire.bundles import Backend, ModelVersion, Route

HERE = Path(__file__).parent
FAR, ITS_ADAPTER, BASE = "far", "legal", "small"  # names of the configuration
PROJECTS = ("open", "listed", "narrow")
NAMES = ("one", "two", "one@prod", FAR, ITS_ADAPTER, BASE)
SERVICE = ModelEntry(engine="openai", source="s", base_url="http://127.0.0.1:9/v1")
CONFIG = Config(
    data_dir=HERE,
    base=HERE,
    models={
        FAR: ModelEntry(
            engine="openai", source="s", base_url="http://127.0.0.1:9/v1", adapters={ITS_ADAPTER: ITS_ADAPTER}
        ),
        "near": SERVICE,
    },
    projects={"listed": ProjectEntry(models=[FAR]), "narrow": ProjectEntry(models=[ITS_ADAPTER], functions=["one"])},
    deployments=DeploymentsEntry(base_models={BASE: "org/small"}),
)
CONFIGURED = {FAR, ITS_ADAPTER, "near"}  # that may be called


class Thing(Struct, frozen=True):
    kind: ModelKind
    project: str
    name: str
    is_shared: bool = False  # a function

    @property
    def key(self) -> Key:
        return (self.kind, self.name) if self.kind == ModelKind.FUNCTION else (self.kind, self.project, self.name)

    def rows(self) -> list[ModelRow]:
        if self.kind != ModelKind.FUNCTION:
            spec = ModelSpec(self.name, "connector", f"of {self.project}")
            return [ModelRow(self.name, self.kind, self.project, spec, listed=(self.name,))]
        spec = ModelSpec(self.name, "function_process", "f", function=FunctionSpec("main/1", "/f", "d"))
        version = ModelVersion(
            self.name, "main", 1, "ready", 0.0, spec=spec, project=self.project, is_shared=self.is_shared
        )
        found = Function(self.name, {}, {}).changed([version], [Route(self.name, "main", [Backend("main", 1)])])
        return [ModelRow(self.name, self.kind, self.project, function=found, listed=(self.name,))]


def is_one_name(a: Thing, b: Thing) -> bool:
    """A function has its own name and every one that goes on with an @."""
    if ModelKind.FUNCTION in (a.kind, b.kind):
        function, other = (a, b) if a.kind == ModelKind.FUNCTION else (b, a)
        return function.name == other.name.partition("@")[0]
    return a.name == b.name


def meet(a: Thing, b: Thing) -> bool:
    """Some project could mean either."""
    return a.project == b.project or a.is_shared or b.is_shared


def is_free(world: list[Thing], new: Thing) -> bool:
    stem = new.name.partition("@")[0] if new.kind == ModelKind.FUNCTION else None
    if any((name.partition("@")[0] == stem if stem else name == new.name) for name in (*CONFIGURED, BASE)):
        return False
    others = [each for each in world if each.key != new.key or new.kind == ModelKind.LLM]
    return not any(is_one_name(each, new) and meet(each, new) for each in others)


def may(caller: Caller, thing: Thing) -> bool:
    if caller.models is not None and thing.name not in caller.models:
        return False
    if thing.kind != ModelKind.FUNCTION:
        return thing.project == caller.project
    listed = {"listed": [FAR], "narrow": ["one"]}.get(caller.project)
    return (thing.is_shared or thing.project == caller.project) and (listed is None or thing.name in listed)


def may_configured(caller: Caller, name: str) -> bool:
    listed = {"listed": [FAR], "narrow": [ITS_ADAPTER]}.get(caller.project)
    return (caller.models is None or name in caller.models) and (listed is None or name in listed)


names = st.sampled_from(NAMES)
things = st.one_of(
    st.builds(
        Thing,
        st.just(ModelKind.FUNCTION),
        st.sampled_from(PROJECTS),
        st.sampled_from(("one", "two", FAR)),
        st.booleans(),
    ),
    st.builds(Thing, st.sampled_from((ModelKind.LLM, ModelKind.REMOTE)), st.sampled_from(PROJECTS), names),
)
steps = st.lists(st.tuples(things, st.booleans()), max_size=25)
callers = st.builds(
    lambda project, models: Caller(project, Scope.SUBMIT, "k", models),
    st.sampled_from((*PROJECTS, "unknown")),
    st.none() | st.frozensets(names, max_size=3),
)


def found(directory: ModelDirectory, caller: Caller, name: str) -> tuple[ModelKind, str] | None:
    try:
        served = directory.find(caller, name)
    except UnknownName:
        return None
    return served.kind, served.model.source


@given(steps, callers)
def test_a_directory_is_its_things(steps: list[tuple[Thing, bool]], caller: Caller) -> None:
    """A name is given where nothing else has it, found by whom it is for, and by nobody else; what was seen before a
    change stays as it was."""
    directory, world = ModelDirectory(ConfiguredModels(CONFIG)), []
    for thing, is_removed in steps:
        before = directory.snapshot
        seen = dict(before.everybody), {name: dict(rows) for name, rows in before.projects.items()}
        owners = {each.project for each in world if (each.kind, each.name) == (thing.kind, thing.name)}
        if thing.kind == ModelKind.FUNCTION and owners - {thing.project}:
            continue  # its service refuses it
        if is_removed:
            directory.publish({thing.key: ()})
            world = [each for each in world if each.key != thing.key]
        elif is_free(world, thing):
            with directory.claim(thing.project, thing.name, thing.kind, is_shared=thing.is_shared):
                directory.publish({thing.key: thing.rows()})
            world = [each for each in world if each.key != thing.key] + [thing]
        else:
            with (
                pytest.raises(Conflict),
                directory.claim(thing.project, thing.name, thing.kind, is_shared=thing.is_shared),
            ):
                raise AssertionError(thing)
        assert (before.everybody, before.projects) == seen
    expected = {each.name for each in world if may(caller, each)}
    expected |= {name for name in CONFIGURED if may_configured(caller, name)}
    for name in (*NAMES, "near"):
        meant = [each for each in world if each.name == name and may(caller, each)]
        if meant:
            [thing] = meant
            source = "f" if thing.kind == ModelKind.FUNCTION else f"of {thing.project}"
            assert found(directory, caller, name) == (thing.kind, source)
        elif name in expected:
            assert found(directory, caller, name) is not None
        elif name.partition("@")[0] not in expected:
            assert found(directory, caller, name) is None
    assert sorted(each.name for each in directory.list(caller)) == sorted(expected)
    of_jobs = [name for spec in directory.specs(caller) for name in spec.allowed or ()]
    assert len(of_jobs) == len(set(of_jobs))


def test_a_name_that_is_being_written_down() -> None:
    """Nobody else gets a name between its check and its publication; it is free again where nothing came of it."""
    directory = ModelDirectory(ConfiguredModels(CONFIG))
    with directory.claim("open", "one", ModelKind.LLM):
        with pytest.raises(Conflict), directory.claim("open", "one", ModelKind.ADAPTER):
            raise AssertionError
        with pytest.raises(Conflict), directory.claim("listed", "one", ModelKind.FUNCTION, is_shared=True):
            raise AssertionError
        with directory.claim("listed", "one", ModelKind.FUNCTION):
            """A function of another project that is not shared is in nobody's way."""
    with directory.claim("open", "one", ModelKind.ADAPTER):
        """It is free."""
