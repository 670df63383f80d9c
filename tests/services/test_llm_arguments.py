"""Which engine arguments callers may set, and what each may be."""

from pathlib import Path

import pytest

from batchmill.errors import InvalidInput
from batchmill.services.llms.arguments import ALLOWED, REFUSED, checked


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({"max-model-len": 4096}, {"max-model-len": 4096}),
        ({"--max_model_len": "4096"}, {"max-model-len": 4096}),
        ({"gpu_memory_utilization": "0.5"}, {"gpu-memory-utilization": 0.5}),
        ({"enable-prefix-caching": None}, {"enable-prefix-caching": True}),
        ({"enable-prefix-caching": "false"}, {"enable-prefix-caching": False}),
        ({"quantization": "awq"}, {"quantization": "awq"}),
        ({"guided-decoding-backend": "outlines"}, {"structured-outputs-config.backend": "outlines"}),
        (
            {"speculative-config": '{"num_speculative_tokens": 3, "method": "ngram"}'},
            {"speculative-config": '{"method":"ngram","num_speculative_tokens":3}'},
        ),
        ({"tensor-parallel-size": 2}, {"tensor-parallel-size": 2}),
    ],
)
def test_what_callers_may_set(args, wanted):
    """Each arrives under vLLM's own name and as its own type, however it was written."""
    assert checked(args, gpus_max=2) == wanted


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"max-model-len": 0}, "a whole number from 1"),
        ({"max-model-len": 1.5}, "a whole number"),
        ({"max-model-len": True}, "a whole number"),
        ({"max-model-len": "4k"}, "not '4k'"),
        ({"gpu-memory-utilization": 1.5}, "from 0.05 to 0.98"),
        ({"gpu-memory-utilization": "nan"}, "a number"),
        ({"dtype": "float8"}, "one of auto, half"),
        ({"quantization": "/etc/passwd"}, "one of awq"),
        ({"enforce-eager": "maybe"}, "true or false"),
        ({"max-model-len": 1, "max_model_len": 2}, "set only once"),
        ({"speculative-config": '{"method": "eagle", "num_speculative_tokens": 3}'}, "load another model"),
        ({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "model": "/x"}'}, "unknown field"),
        ({"speculative-config": '{"method": "ngram", "num_speculative_tokens": 900}'}, "from 1 to 32"),
        ({"speculative-config": "3"}, "a JSON object"),
        ({"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, "4 GPUs for a replica, but this machine has 2"),
    ],
)
def test_what_cannot_be(args, expected):
    """A value out of its bounds is refused, with the argument's name and what it may be."""
    with pytest.raises(InvalidInput, match=expected) as caught:
        checked(args, gpus_max=2)
    assert caught.value.code == "invalid_engine_arg"


@pytest.mark.parametrize("name", [*REFUSED, "no-such-flag", "O3"])
def test_what_is_not_the_callers(name):
    """Files, code, hosts and trust are refused by name, whatever they are set to; so is what nobody knows."""
    for case in (name, f"--{name}", name.replace("-", "_")):
        for value in ("x", 1, True, None):
            with pytest.raises(InvalidInput, match=case) as caught:
                checked({case: value})
            assert caught.value.code == "engine_arg_not_allowed"


def test_no_argument_is_both():
    """What is allowed is not refused."""
    assert not ALLOWED.keys() & REFUSED.keys()


def test_the_page_names_them_all():
    """Who reads the page knows every argument that callers may set."""
    page = (Path(__file__).parents[2] / "docs" / "deploy-a-language-model.md").read_text()
    assert [name for name in ALLOWED if f"`{name}`" not in page] == []
