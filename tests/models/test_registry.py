"""Models by name: from the configuration, in place, and with flags."""

from pathlib import Path

import pytest

from batchmill.config import Config, ModelEntry
from batchmill.errors import InvalidInput, UnknownName
from batchmill.models.registry import KINDS, ModelFlags, checked_budget, resolve
from batchmill.types import Limits, ModelSpec, Price


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a function, a model, two adapters and an interpreter."""
    (tmp_path / "app.py").write_text("def classify(): ...")
    (tmp_path / "tiny").mkdir()
    for name in ("upper", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "upper/adapter_config.json").write_text("{}")
    (tmp_path / "python").write_text("")
    return tmp_path


def configured(base: Path, **models: ModelEntry) -> Config:
    return Config(data_dir=base / "data", base=base, models=models)


def test_sources_in_place(place):
    """ENGINE:SOURCE makes a model named after what it is, its paths absolute."""
    config = configured(place)
    assert resolve("function:app.py:classify", config, cwd=place) == ModelSpec(
        "classify", "function", f"{place}/app.py:classify"
    )
    assert resolve("vllm:tiny", config, cwd=place) == ModelSpec("tiny", "llm", f"{place}/tiny")
    assert resolve("vllm:org/name", config, cwd=place) == ModelSpec("name", "llm", "org/name")
    assert resolve("openai:gpt-4.1-mini", config, cwd=place) == ModelSpec("gpt-4.1-mini", "http", "gpt-4.1-mini")


def test_a_configured_model_keeps_its_name_and_base(place):
    """A model of the configuration has the name it is given there, and paths relative to the file."""
    entry = ModelEntry(
        engine="vllm",
        source="tiny",
        adapters={"up": "upper"},
        python="python",
        workers=2,
        price=Price(input=1),
        engine_args={"max-model-len": 8},
    )
    spec = resolve("mine", configured(place, mine=entry), cwd=Path("/"))
    assert spec == ModelSpec(
        "mine",
        "llm",
        f"{place}/tiny",
        adapters={"up": f"{place}/upper"},
        adapter_rank=16,
        engine_args={"max-model-len": 8},
        python=f"{place}/python",
        workers=2,
        price=Price(input=1),
    )
    key = ModelEntry(engine="openai", source="m", api_key="file:key.txt")
    assert resolve("remote", configured(place, remote=key), cwd=Path("/")).api_key == f"file:{place}/key.txt"
    header = ModelEntry(engine="openai", source="m", engine_args={"header.X-Key": "file:key.txt", "idle_timeout_s": 9})
    spec = resolve("remote", configured(place, remote=header), cwd=Path("/"))
    assert spec.engine_args == {"header.X-Key": f"file:{place}/key.txt", "idle_timeout_s": 9}


def test_flags_win_over_the_configuration(place):
    """What the command line says replaces the entry's value; adapters, engine flags and limits are merged."""
    entry = ModelEntry(
        engine="vllm", source="tiny", engine_args={"a": 1, "b": 1}, workers=2, limits=Limits(in_flight_max=5)
    )
    flags = ModelFlags(
        adapters={"upper": "upper"}, engine_args={"b": 2}, workers=3, python="python", attempt_timeout_s=9.0
    )
    spec = resolve("mine", configured(place, mine=entry), cwd=place, flags=flags)
    assert spec.engine_args == {"a": 1, "b": 2} and spec.workers == 3
    assert spec.adapters == {"upper": f"{place}/upper"}
    assert spec.limits == Limits(in_flight_max=5, attempt_timeout_s=9.0)
    remote = ModelFlags(base_url="http://h/v1", api_key="env:K", requests_per_minute=60, tokens_per_minute=9)
    spec = resolve("openai:m", configured(place), cwd=place, flags=remote)
    assert (spec.base_url, spec.api_key) == ("http://h/v1", "env:K")
    assert (spec.limits.requests_per_minute, spec.limits.tokens_per_minute) == (60, 9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vlm:tiny", "no engine is called 'vlm'; did you mean 'vllm'"),
        ("zzz:tiny", "there are .*function, .*vllm"),
        ("mini", "did you mean 'mine'"),
        ("tiny", "write --model vllm:tiny"),
        ("app.py:classify", "write --model function:app.py:classify"),
        ("qqqq", "known are mine"),
    ],
)
def test_unknown_names_get_the_nearest(place, name, expected):
    """A model or engine nobody knows is refused with the likely one."""
    with pytest.raises(UnknownName, match=expected):
        resolve(name, configured(place, mine=ModelEntry(engine="vllm", source="tiny")), cwd=place)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("function:gone.py:f", {}, "gone.py"),
        ("function:gone.module:f", {}, "gone.module"),
        ("function:app.py", {}, "FILE.py:NAME"),
        ("vllm:", {}, "needs a model"),
        ("vllm:./gone", {}, "there is no model at"),
        ("vllm:a b", {}, "there is no model at"),
        ("vllm:tiny", {"adapters": {"x": "./gone"}}, "there is no adapter at"),
        ("vllm:tiny", {"adapters": {"x": "bare"}}, "no adapter_config.json"),
        ("vllm:tiny", {"adapters": {"tiny": "upper"}}, "the name of its model"),
        ("vllm:tiny", {"python": "gone"}, "no Python interpreter"),
        ("vllm:tiny", {"base_url": "http://x"}, "'vllm' does not use base_url"),
        ("vllm:tiny", {"workers": 0}, "workers must be 1 to"),
        ("vllm:tiny", {"workers": 1025}, "workers must be 1 to"),
        ("vllm:tiny", {"in_flight_max": 0}, "in_flight_max must be more than 0"),
        ("vllm:tiny", {"requests_per_minute": 5}, "does not use limits.requests_per_minute"),
        ("function:app.py:classify", {"adapters": {"x": "upper"}}, "does not use adapters"),
        ("function:app.py:classify", {"engine_args": {"x": 1}}, "does not use engine_args"),
        ("function:app.py:classify", {"python": "python"}, "`batchmill deploy` gives it its own"),
        ("openai:m", {"workers": 2}, "one worker calls the service"),
        ("openai:m", {"adapters": {"x": "upper"}}, "write x=x"),
        ("openai:m", {"base_url": "ftp://x"}, "http:// or https://"),
    ],
)
def test_what_does_not_fit_is_refused(place, name, flags, expected):
    """A path that is not there and a setting the engine does not use are refused by name."""
    with pytest.raises(InvalidInput, match=expected):
        resolve(name, configured(place), cwd=place, flags=ModelFlags(**flags))


def test_a_key_itself_is_refused_and_not_repeated(place):
    """A pasted key is refused, and the message does not show it."""
    with pytest.raises(InvalidInput) as refused:
        resolve("openai:m", configured(place), cwd=place, flags=ModelFlags(api_key="sk-secret"))
    assert "sk-secret" not in refused.value.message


def test_a_time_limit_of_a_function(place):
    """Every function takes a time limit."""
    flags = ModelFlags(attempt_timeout_s=9.0)
    assert resolve("function:app.py:classify", configured(place), cwd=place, flags=flags).limits.attempt_timeout_s == 9


def test_what_a_worker_reserves_in_a_cluster(place):
    """Workers of every engine may run there, so each takes cores and custom resources."""
    for name, kind in KINDS.items():
        assert {"cpus", "resources"} <= kind.settings or name == "routes", name
    entry = ModelEntry("function", "app.py:classify", cpus=2.0, resources={"spot": 1.0})
    needs = resolve("m", configured(place, m=entry), cwd=place).needs
    assert (needs.cpus, needs.resources) == (2.0, {"spot": 1.0})


def test_limits_belong_to_the_engine_that_reads_them(place):
    """The bounds of schemas are vLLM's, which reads them; a service that would ignore them refuses them."""
    entry = Limits(schema_nodes_max=5)
    for engine, is_known in (("vllm", True), ("openai", False), ("connector", False)):
        assert ("schema_nodes_max" in KINDS[engine].traits.limits) is is_known
    config = configured(place, m=ModelEntry("openai", "m", limits=entry), n=ModelEntry("vllm", "tiny", limits=entry))
    assert resolve("n", config, cwd=place).limits == entry
    with pytest.raises(InvalidInput, match=r"does not use limits\.schema_nodes_max"):
        resolve("m", config, cwd=place)


def test_kinds_name_real_limits():
    """Every limit an engine is said to know is a field of Limits."""
    known = {each for kind in KINDS.values() for each in kind.traits.limits}
    assert known == set(Limits.__struct_fields__)


CONNECTOR = """{
  "name": "embedder", "version": "1", "protocol": "http", "credential": {"key": "env:EMBEDDER_KEY"},
  "actions": [{"action_type": "predict", "method": "POST", "url": "http://127.0.0.1:9/embed",
               "headers": {"Authorization": "Bearer ${credential.key}"},
               "request_body": "{\\"input\\": \\"${parameters.text}\\"}"}]
}"""


def test_a_connector_is_read_from_its_file(place):
    """`connector:FILE` is the connector in that file, trusted, its credentials by reference."""
    (place / "embedder.json").write_text(CONNECTOR)
    spec = resolve("connector:embedder.json", configured(place), cwd=place)
    assert (spec.name, spec.engine) == ("embedder", "connector")
    assert spec.connector is not None and spec.connector.is_trusted
    assert spec.connector.credential == {"key": "env:EMBEDDER_KEY"}
    assert spec.takes_columns and spec.answers_live
    with pytest.raises(InvalidInput, match="no connector file"):
        resolve("connector:other.json", configured(place), cwd=place)


@pytest.mark.parametrize("provider", ["openai", "azure", "anthropic", "cohere", "gemini", "sagemaker", "bedrock"])
def test_a_batch_api_is_named_after_its_provider(place, provider):
    """`PROVIDER-batch:MODEL` hands rows to that provider's batch API, which answers no live request."""
    spec = resolve(f"{provider}-batch:m", configured(place), cwd=place)
    assert (spec.name, spec.engine, spec.provider, spec.source) == ("m", "provider_batch", provider, "m")
    assert not spec.answers_live and not spec.takes_columns


WAYS = {
    "local": ModelEntry("openai", "m", base_url="http://127.0.0.1:9/v1"),
    "batch": ModelEntry("openai-batch", "m", price=Price(1.0)),
    "columns": ModelEntry("connector", "embedder.json"),
}


def test_routes_are_models_of_the_configuration(place):
    """A model with routes has each of them as it stands by itself; live requests take the first that answers them."""
    models = {**WAYS, "big": ModelEntry("routes", routes=["batch", "local"])}
    (place / "embedder.json").write_text(CONNECTOR)
    spec = resolve("big", configured(place, **models), cwd=place)
    assert [route.name for route in spec.routes] == ["batch", "local"]
    assert spec.live().engine == "http" and spec.live().name == "big"
    assert spec.answers_live and not spec.takes_columns
    with pytest.raises(InvalidInput, match="models.local.price"):
        checked_budget(5.0, [spec])


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (ModelEntry("routes", routes=["batch"]), "two models or more"),
        (ModelEntry("routes", routes=["batch", "batch"]), "two models or more"),
        (ModelEntry("routes", routes=["batch", "nobody"]), "'nobody'"),
        (ModelEntry("routes", routes=["batch", "nested"]), "has routes itself"),
        (ModelEntry("routes", routes=["batch", "columns"]), "read rows differently"),
        (ModelEntry("routes", source="m", routes=["batch", "local"]), "no source of its own"),
        (ModelEntry("routes", routes=["batch", "local"], price=Price(1.0)), "does not use price"),
        (ModelEntry("openai", "m", routes=["batch", "local"]), "does not use routes"),
    ],
)
def test_routes_that_lead_nowhere_are_refused(place, entry, expected):
    """What cannot be a way to the model is refused by name."""
    (place / "embedder.json").write_text(CONNECTOR)
    models = {**WAYS, "nested": ModelEntry("routes", routes=["batch", "local"]), "big": entry}
    with pytest.raises(InvalidInput, match=expected):
        resolve("big", configured(place, **models), cwd=place)
