"""The models of a server, and whose they are."""

import pytest

from batchmill.config import load
from batchmill.errors import InvalidConfig, UnknownName
from batchmill.services.catalogue import Catalogue
from batchmill.types import Caller, Scope

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
def catalogue(tmp_path):
    return make(tmp_path, CONFIG)


def make(folder, text):
    (folder / "app.py").write_text("def classify(n): return n\n")
    (folder / "batchmill.toml").write_text(text)
    config = load(environ={"HOME": str(folder)}, cwd=folder)
    return Catalogue(config, config.base)


def names(catalogue, who):
    return [served.name for served in catalogue.names(who)]


def test_every_name(catalogue):
    """A model stands before its adapters; an adapter knows its model."""
    assert names(catalogue, caller()) == ["tiny", "upper", "lower", "classify"]
    served = catalogue.find(caller(), "upper")
    assert (served.model.name, served.adapter) == ("tiny", "upper")


def test_keys_and_projects_narrow_it(catalogue):
    """A name is a caller's when its key and its project both allow that very name."""
    assert names(catalogue, caller(models=["tiny", "classify"])) == ["tiny", "classify"]
    assert names(catalogue, caller("small")) == ["upper"]
    assert names(catalogue, caller("small", ["tiny"])) == []


@pytest.mark.parametrize("name", ["tiny", "nobody", "x" * 10_000])
def test_a_name_of_another_is_as_an_unknown_one(catalogue, name):
    """Whoever may not use a model is told the same as of one that does not exist."""
    with pytest.raises(UnknownName) as caught:
        catalogue.find(caller("small"), name)
    assert caught.value.code == "model_not_found"
    assert caught.value.message.startswith(f"the model {name[:256]!r} does not exist or you do not have access to it")


def test_the_models_of_a_job(catalogue):
    """A job's models let its rows use the caller's names, and no others of the same model."""
    [model] = catalogue.specs(caller("small"))
    assert list(model.targets()) == ["upper"]
    assert set(model.adapters) == {"upper", "lower"}  # the same workers serve everybody
    assert [spec.name for spec in catalogue.specs(caller())] == ["tiny", "classify"]
    assert set(catalogue.specs(caller())[0].targets()) == {"tiny", "upper", "lower"}  # a source is no name


@pytest.mark.parametrize(
    ("url", "who", "expected"),
    [
        ("/v1/chat/completions", caller(), True),
        ("/v1/my/own", caller(models=["classify"]), True),
        ("/v2/my/own", caller(), False),
        ("/v1/chat/completions", caller(models=["none"]), False),
    ],
)
def test_paths(catalogue, url, who, expected):
    """A path is served when a model of the caller's may answer it."""
    assert catalogue.serves(url, who) is expected


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
    catalogue = make(tmp_path, f'[models.m]\nengine = "vllm"\nsource = "model"\n{told}\n')
    [model] = catalogue.models()
    assert model.engine_args == flags
    assert catalogue.find(caller(), "m").model == model
