"""What Predibase's configs become: each field is applied, or refused by its name with the way out."""

from __future__ import annotations

import msgspec
import pytest

from batchmill.dialects.predibase.server_config import (
    NO_COUNTERPART,
    NO_FLAG_COUNTERPART,
    REFUSED,
    REFUSED_TRUE,
    DeploymentConfig,
    ServerConfig,
    config_of,
    of_deployment_config,
    of_server_config,
)
from batchmill.errors import InvalidInput
from batchmill.types import LlmSettings, Scaling

SENT_BY_CLIENT = (
    b'{"customArgs":null,"hfToken":null,"loraxImageTag":null,"baseModel":"qwen","quantization":null,"backend":null}'
)


def server(**expected) -> LlmSettings:
    return of_server_config(msgspec.convert({"baseModel": "m"} | expected, ServerConfig))


def deployment(had: LlmSettings | None = None, **expected) -> LlmSettings:
    return of_deployment_config(msgspec.convert(({} if had else {"baseModel": "m"}) | expected, DeploymentConfig), had)


def test_a_job_that_says_nothing_gets_the_base_model():
    """All six keys with null, as the client sends them, mean the base model as it is."""
    reply = msgspec.json.decode(SENT_BY_CLIENT, type=ServerConfig)
    assert of_server_config(reply) == LlmSettings("qwen")


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (["--max-total-tokens", "4096"], {"max-model-len": 4096}),
        (["--max-batch-prefill-tokens=8192"], {"max-num-batched-tokens": 8192}),
        (["--max_concurrent_requests", "64"], {"max-num-seqs": 64}),
        (["--cuda-memory-fraction", "0.5"], {"gpu-memory-utilization": 0.5}),
        (["--num-shard", "2"], {"tensor-parallel-size": 2}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--quantize", "fp8"], {"quantization": "fp8"}),
        (["--prefix-caching", "true"], {"enable-prefix-caching": True}),
        (["--chunked-prefill"], {"enable-chunked-prefill": True}),
        (["--no-enable-prefix-caching"], {"enable-prefix-caching": False}),
        (["--compile", "--seed", "7"], {"enforce-eager": False, "seed": 7}),
        (
            ["--task", "classify", "--enforce-eager"],
            {"runner": "pooling", "convert": "classify", "enforce-eager": True},
        ),
        (["--embedding-model"], {"runner": "pooling", "convert": "embed"}),
        (["--kv-cache-dtype=fp8", "--max-num-seqs", "8"], {"kv-cache-dtype": "fp8", "max-num-seqs": 8}),
        (["--seed", "7", "--seed", "7"], {"seed": 7}),
        ([], {}),
    ],
)
def test_flags(flags, arguments):
    """Flags of LoRAX's launcher and of vLLM become engine arguments, however they are written."""
    assert server(customArgs=flags).engine_args == arguments


def test_adapters_of_flags():
    """A list has its values behind its flag, or under commas."""
    result = server(customArgs=["--preloaded-adapter-ids", "a/1", "b", "--seed", "1", "--preloaded-adapter-ids=c,d"])
    assert (result.preloaded_adapters, result.engine_args) == (["a/1", "b", "c", "d"], {"seed": 1})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *(([f"--{name}", "1"], f"--{name} has no counterpart here") for name in NO_FLAG_COUNTERPART),
        (["--trust_remote_code"], "--trust-remote-code has no counterpart"),
        (["--tensor-parallel-typo", "1"], "tensor-parallel-typo"),
        (["--load-format", "pt"], "load-format"),
        (["stray"], "'stray' where a flag is expected"),
        (["--seed", "1", "2"], "'2' where a flag is expected"),
        (["--seed", "1", "--seed", "2"], "seed twice"),
        (["--max-model-len", "many"], "max-model-len"),
        (["--quantize"], "--quantize needs a value"),
        (["--task", "score"], "--task 'score'"),
        (["--seed=1"] * 300, "customArgs has 300 items"),
    ],
)
def test_flags_that_are_refused(flags, words):
    """A flag without a counterpart, or that callers may not set, is refused by its name."""
    with pytest.raises(InvalidInput, match=words.replace("-", ".")):
        server(customArgs=flags)


@pytest.mark.parametrize(("name", "method"), [("none", None), ("fp8", "fp8"), ("awq", "awq"), ("gptq", "gptq")])
def test_quantization(name, method):
    """Predibase's names are vLLM's where it has the same."""
    assert server(quantization=name).engine_args == ({} if method is None else {"quantization": method})


@pytest.mark.parametrize("name", [*NO_COUNTERPART, "int3"])
def test_quantizations_that_are_refused(name):
    with pytest.raises(InvalidInput, match=f"quantization is '{name}'") as refused:
        server(quantization=name)
    assert refused.value.param == "quantization"


def test_two_quantizations():
    """The field and the flag may agree, not differ."""
    assert server(quantization="fp8", customArgs=["--quantize", "fp8"]).engine_args == {"quantization": "fp8"}
    with pytest.raises(InvalidInput, match="different quantizations"):
        server(quantization="fp8", customArgs=["--quantize", "awq"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 1 if "Size" in name else {} if name == "computeSpec" else "v2") for name in REFUSED),
        *((name, True) for name in REFUSED_TRUE),
        ("speculator", "turbo/1"),
    ],
)
def test_fields_without_a_counterpart(field, value):
    """Each is refused by its name, in a job where it has it too; false changes nothing."""
    with pytest.raises(InvalidInput, match=f"{field} is ") as refused:
        deployment(**{field: value})
    assert refused.value.param == field
    if field in ServerConfig.__struct_encode_fields__:
        with pytest.raises(InvalidInput, match=f"{field} is "):
            server(**{field: value})
    if value is True:
        assert deployment(**{field: False}) == deployment()


def test_a_whole_deployment_config():
    """Every field that has a counterpart is applied."""
    result = deployment(
        customArgs=["--seed", "3"], cooldownTime=60, hfToken="hf_x", minReplicas=1, maxReplicas=3,
        scaleUpRequestThreshold=16, maxTotalTokens=1024, preloadedAdapters=["a/1", "a/1"], prefixCaching=False,
        chunkedPrefill=True, maxNumBatchedTokens=2048, quantization="fp8", speculator="disabled", cacheModel=True,
        disableAdapters=False,
    )  # fmt: skip
    assert result == LlmSettings(
        "m",
        {
            "seed": 3, "max-model-len": 1024, "max-num-batched-tokens": 2048, "enable-prefix-caching": False,
            "enable-chunked-prefill": True, "quantization": "fp8",
        },
        "hf_x",
        Scaling(1, 3, 60.0, 16),
        preloaded_adapters=["a/1"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"minReplicas": 2, "maxReplicas": 1}, "not a range"),
        ({"minReplicas": -1}, "not a range"),
        ({"cooldownTime": 0}, "cooldownTime"),
        ({"maxTotalTokens": 0}, "maxTotalTokens"),
        ({"scaleUpRequestThreshold": -5}, "scaleUpRequestThreshold"),
        ({"disableAdapters": True, "preloadedAdapters": ["a"]}, "disableAdapters"),
        ({"hfToken": "two words"}, "hfToken"),
        ({"hfToken": "x" * 2000}, "hfToken"),
        ({"preloadedAdapters": ["a"] * 300}, "300 items"),
        ({"baseModel": ""}, "baseModel"),
    ],
)
def test_values_that_cannot_be(expected, words):
    with pytest.raises(InvalidInput, match=words):
        deployment(**expected)


def test_a_token_is_not_repeated_in_a_refusal():
    with pytest.raises(InvalidInput) as refused:
        deployment(hfToken="hf secret")
    assert "secret" not in refused.value.message


def test_an_update_says_what_changes():
    """What it does not say stays; a quantization of none takes it away, an empty list of adapters too."""
    had = LlmSettings("m", {"seed": 1, "quantization": "fp8"}, "secret:x", Scaling(1, 2, 9.0), preloaded_adapters=["a"])
    assert deployment(had) == had
    changed = deployment(had, quantization="none", maxTotalTokens=64, maxReplicas=4, preloadedAdapters=[])
    assert changed.engine_args == {"seed": 1, "max-model-len": 64}
    assert (changed.base_model, changed.hf_token, changed.scaling) == ("m", "secret:x", Scaling(1, 4, 9.0))
    assert changed.preloaded_adapters == []


def test_flags_of_an_update_replace_those_before():
    """A flag that is not among them is gone, an empty list takes all away; what a field said stays."""
    had = LlmSettings("m", {"seed": 1, "enforce-eager": True, "max-model-len": 64, "quantization": "fp8"})
    assert deployment(had, customArgs=["--seed=2"]).engine_args == {
        "seed": 2, "max-model-len": 64, "quantization": "fp8"
    }  # fmt: skip
    assert deployment(had, customArgs=[]).engine_args == {"max-model-len": 64, "quantization": "fp8"}
    assert deployment(had, customArgs=config_of(had).custom_args) == had
    assert deployment(had, maxTotalTokens=32).engine_args == had.engine_args | {"max-model-len": 32}


def test_a_config_comes_back():
    """What is shown of a deployment, never a token, is taken again and means the same, also as a job's."""
    had = deployment(
        maxTotalTokens=1024, prefixCaching=True, quantization="fp8", customArgs=["--dtype", "half"], hfToken="hf_x"
    )
    result = config_of(had)
    assert result.hf_token is None
    again = of_deployment_config(result)
    assert msgspec.structs.replace(again, hf_token="hf_x") == had
    job = ServerConfig(
        result.base_model, result.custom_args, None, result.lorax_image_tag, result.quantization, result.backend
    )
    assert of_server_config(job).engine_args == had.engine_args


def test_what_callers_may_not_set_is_not_shown():
    """Engine arguments of the configuration are the base model's own."""
    result = config_of(LlmSettings("m", {"allowed-media-domains": "x", "max_model_len": 8}))
    assert (result.custom_args, result.max_total_tokens) == (["--max-model-len=8"], 8)
