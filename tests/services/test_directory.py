"""The models of a server, and whose they are."""

import random

import pytest
from msgspec.structs import replace

from batchmill.config import load
from batchmill.errors import InvalidConfig, UnknownName
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.directory.rows import ModelKind, ModelRow
from batchmill.services.functions.function import Function
from batchmill.types import Caller, FunctionSpec, ModelSpec, Scope
from batchmill.wire.bundles import Backend, ModelVersion, Route

CONFIG = """
[models.tiny]
engine = "openai"
source = "remote-tiny"
base_url = "http://127.0.0.1:1/v1"
adapters = { upper = "upper", lower = "lower" }

[models.classify]
engine = "function"
source = "app.py:classify"

[projects.small]
models = ["upper"]
"""


def caller(project="default", models=None):
    return Caller(project, Scope.SUBMIT, "k", None if models is None else frozenset(models))


@pytest.fixture
def directory(tmp_path):
    return make(tmp_path, CONFIG)


def make(folder, text):
    (folder / "app.py").write_text("def classify(n): return n\n")
    (folder / "batchmill.toml").write_text(text)
    config = load(environ={"HOME": str(folder)}, cwd=folder)
    configured = ConfiguredModels(config)
    configured.check()
    return ModelDirectory(configured, random.Random(1))


def names(directory, who):
    return [served.name for served in directory.list(who)]


def test_every_name(directory):
    """A model stands before its adapters; an adapter knows its model."""
    assert names(directory, caller()) == ["tiny", "upper", "lower", "classify"]
    served = directory.find(caller(), "upper")
    assert (served.model.name, served.adapter) == ("tiny", "upper")


def test_keys_and_projects_narrow_it(directory):
    """A name is a caller's when its key and its project both allow that very name."""
    assert names(directory, caller(models=["tiny", "classify"])) == ["tiny", "classify"]
    assert names(directory, caller("small")) == ["upper"]
    assert names(directory, caller("small", ["tiny"])) == []


@pytest.mark.parametrize("name", ["tiny", "nobody", "x" * 10_000])
def test_a_name_of_another_is_as_an_unknown_one(directory, name):
    """Whoever may not use a model is told the same as of one that does not exist."""
    with pytest.raises(UnknownName) as caught:
        directory.find(caller("small"), name)
    assert caught.value.code == "model_not_found"
    assert caught.value.message.startswith(f"the model {name[:256]!r} does not exist or you do not have access to it")


def test_the_models_of_a_job(directory):
    """A job's models let its rows use the caller's names, and no others of the same model."""
    [model] = directory.specs(caller("small"))
    assert list(model.targets()) == ["upper"]
    assert set(model.adapters) == {"upper", "lower"}  # the same workers serve everybody
    assert [spec.name for spec in directory.specs(caller())] == ["tiny", "classify"]
    assert set(directory.specs(caller())[0].targets()) == {"tiny", "upper", "lower"}  # a source is not a name


@pytest.mark.parametrize(
    ("url", "who", "expected"),
    [
        ("/v1/chat/completions", caller(), True),
        ("/v1/my/own", caller(models=["classify"]), True),
        ("/v2/my/own", caller(), False),
        ("/v1/chat/completions", caller(models=["none"]), False),
    ],
)
def test_paths(directory, url, who, expected):
    """A path is served when a model of the caller's may answer it."""
    assert directory.serves(url, who) is expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[models.a]\nengine = "function"\nsource = "none.py:f"\n', "models.a: "),
        ('[models.a]\nengine = "vlm"\nsource = "x"\n', "did you mean 'vllm'?"),
        (
            CONFIG + '[models.upper]\nengine = "function"\nsource = "app.py:classify"\n',
            "'upper' is taken by models.tiny",
        ),
    ],
)
def test_a_model_that_cannot_be(tmp_path, text, words):
    """A model that cannot be resolved is named at the start, with the file it stands in."""
    with pytest.raises(InvalidConfig) as caught:
        make(tmp_path, text)
    assert words in caught.value.message and str(tmp_path / "batchmill.toml") in caught.value.message


@pytest.mark.parametrize(
    ("told", "flags"),
    [
        ("", {"allowed-media-domains": "media.invalid"}),
        ("engine_args = { seed = 1 }", {"seed": 1, "allowed-media-domains": "media.invalid"}),
        ('engine_args = { allowed-media-domains = "a.com" }', {"allowed-media-domains": "a.com"}),
        ('engine_args = { allowed_media_domains = "a.com" }', {"allowed_media_domains": "a.com"}),
    ],
)
def test_an_engine_server_fetches_nothing_for_a_caller(tmp_path, told, flags):
    """Images by URL come from no host that the configuration does not open: it stands where callers may not."""
    (tmp_path / "model").mkdir()
    directory = make(tmp_path, f'[models.m]\nengine = "vllm"\nsource = "model"\n{told}\n')
    model = directory.configured.get("m")
    assert model.engine_args == flags
    assert directory.find(caller(), "m").model == model


def deploy(directory, *versions, routes=()):
    """Publish a function as its service does."""
    found = Function("doubler", {}, {}).changed(versions, routes)
    row = ModelRow("doubler", ModelKind.FUNCTION, found.project, function=found, listed=("doubler",))
    directory.publish({(ModelKind.FUNCTION, "doubler"): [row]})


def version(number, branch="main", state="ready"):
    function = FunctionSpec(version=f"{branch}/{number}", folder=f"/f/{branch}/{number}", digest="d")
    spec = ModelSpec("doubler", "function_process", "app.py:f", function=function)
    return ModelVersion("doubler", branch, number, state, float(number), spec=spec if state == "ready" else None)


@pytest.fixture
def deployed(directory):
    routes = [
        Route("doubler", "main", [Backend("main", 12)]), Route("doubler", "feat/x", [Backend("feat/x", 1)]),
        Route("doubler", "@prod", [Backend("main", 2)]),
    ]  # fmt: skip
    versions = [version(number) for number in range(1, 13)] + [version(13, state="failed"), version(1, "feat/x")]
    deploy(directory, *versions, routes=routes)
    return directory


@pytest.mark.parametrize(
    ("name", "told"),
    [("doubler", "main/12"), ("doubler@latest", "main/12"), ("doubler@1", "main/1"), ("doubler@main/3", "main/3"),
     ("doubler@prod", "main/2"), ("doubler@feat/x/1", "feat/x/1"), ("doubler@feat/x/latest", "feat/x/1")],
)  # fmt: skip
def test_a_deployed_function_is_found_by_all_its_names(deployed, name, told):
    """A name, a version, a branch and an alias each mean one version, for calls and for jobs."""
    assert deployed.find(caller(), name).model.function.version == told
    spec = deployed.for_job(caller(), name)
    assert (spec.function.version, spec.targets()) == (told, {name: None})


@pytest.mark.parametrize(
    "name", ["doubler@13", "doubler@99", "doubler@stage", "doubler@feat/y/1", "doublr", "doubler@"]
)
def test_a_version_that_is_not_there_is_unknown(deployed, name):
    """A failed version, a number, branch or alias nobody made, and a name nobody deployed are unknown."""
    with pytest.raises(UnknownName) as caught:
        deployed.find(caller(), name)
    assert caught.value.code == "model_not_found"


def test_a_job_gets_the_newest_versions_under_all_their_names(deployed):
    """Rows may name the latest of each branch, aliases and the newest ten versions; no name means two of them."""
    specs = [spec for spec in deployed.specs(caller()) if spec.function is not None]
    named = {name: spec.function.version for spec in specs for name in spec.targets()}
    assert sum(len(spec.targets()) for spec in specs) == len(named)
    assert named["doubler"] == named["doubler@12"] == named["doubler@main/latest"] == "main/12"
    assert named["doubler@prod"] == "main/2" and named["doubler@feat/x/latest"] == "feat/x/1"
    assert "doubler@main/5" in named and "doubler@main/1" not in named
    assert [name for name in names(deployed, caller()) if "doubler" in name] == ["doubler", "doubler@prod"]


def test_functions_are_for_whom_they_are_for(tmp_path, deployed):
    """A key or project that names its models has no function besides; one that names functions has these."""
    assert "doubler" not in names(deployed, caller("small"))
    assert "doubler" not in names(deployed, caller(models=["tiny"]))
    assert names(deployed, caller(models=["doubler"])) == ["doubler", "doubler@prod"]
    (tmp_path / "other").mkdir()
    other = make(tmp_path / "other", CONFIG + 'functions = ["doubler"]\n')
    other.publish(deployed.snapshot.published)
    assert names(other, caller("small")) == ["upper", "doubler", "doubler@prod"]
    with pytest.raises(UnknownName):
        deployed.for_job(caller("small"), "doubler@1")


def test_a_function_that_is_not_shared_is_nowhere_for_others(directory):
    """A function of another project that does not share it is neither found, listed, seen, allowed nor in the way."""
    hidden = [replace(version(1), project="one", is_shared=False)]
    deploy(directory, *hidden, routes=[Route("doubler", "main", [Backend("main", 1)])])
    assert directory.find(caller("one"), "doubler").model.function.version == "main/1"
    assert "doubler" in names(directory, caller("one")) and directory.holder("one", "doubler", ModelKind.LLM)
    other = caller("two")
    for name in ("doubler", "doubler@1", "doubler@main/1"):
        with pytest.raises(UnknownName, match="does not exist or you do not have access"):
            directory.find(other, name)
    assert "doubler" not in names(directory, other)
    assert not directory.sees(other, "doubler") and not directory.holder("two", "doubler", ModelKind.LLM)
    assert directory.holder("two", "doubler", ModelKind.FUNCTION) == "" and directory.functions(other) == []
    assert all(model.name != "doubler" for model in directory.specs(other))
