"""What a function's interface looks like in V2 metadata, Triton's configuration and statistics."""

import msgspec
import pytest

from batchmill.dialects.open_inference.models import config_of, metadata_of, stats_of
from batchmill.services.functions.calls import VersionTarget
from batchmill.types import BatchTimes, CallStats, FunctionSpec, Interface, ModelSpec, Tensor

SCHEMA = Interface(
    inputs=[
        Tensor("prompt", "STRING", [1], example=["There is a fine house in the forest"]),
        Tensor("shape", "INT8", [2], required=False, example=[512, 1]),
        Tensor("words", "STRING", [-1]),
        Tensor("anything"),
    ],
    outputs=[Tensor("y", "FP32", [-1, 4])],
    has_schema=True,
)


def target(interface=SCHEMA, **function):
    spec = FunctionSpec("main/3", "/nowhere", "0", interface, **function)
    return VersionTarget("m", "main", 3, ModelSpec("m", "function_process", "app.py:f", workers=2, function=spec))


def test_metadata_names_every_tensor():
    """Text is BYTES, -1 stays, an input that may be left out says so, and one without a type says that it has none."""
    result = msgspec.to_builtins(metadata_of(target(), ["1", "3"]))
    assert result == {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "batchmill_python",
        "inputs": [
            {"name": "prompt", "datatype": "BYTES", "shape": [1]},
            {"name": "shape", "datatype": "INT8", "shape": [2], "optional": True},
            {"name": "words", "datatype": "BYTES", "shape": [-1]},
            {"name": "anything", "datatype": "BYTES", "shape": [1], "parameters": {"any_datatype": True}},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }


def test_a_function_that_declares_no_outputs_has_none():
    """What a function returns is not guessed."""
    assert metadata_of(target(Interface()), ["1"]).outputs == []


def test_a_batched_function_has_a_batch_axis():
    """Where calls go in batches, metadata begins each shape with the batch and the configuration does not."""
    result = metadata_of(target(batch_size=8, batch_window_s=0.005), ["3"])
    assert [each.shape for each in result.inputs] == [[-1, 1], [-1, 2], [-1, -1], [-1, 1]]
    config = config_of(target(batch_size=8, batch_window_s=0.005))
    assert [each["dims"] for each in config["input"]] == [[1], [2], [-1], [1]]
    assert config["max_batch_size"] == 8
    assert config["dynamic_batching"] == {"preferred_batch_size": [8], "max_queue_delay_microseconds": 5000}


def test_the_configuration_is_tritons():
    """Datatypes have Triton's names; workers are instances; who answers in events is decoupled."""
    config = config_of(target())
    assert [each["data_type"] for each in config["input"]] == ["TYPE_STRING", "TYPE_INT8", "TYPE_STRING", "TYPE_STRING"]
    assert [each["optional"] for each in config["input"]] == [False, True, False, False]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 4]}]
    assert config["instance_group"] == [{"name": "m", "kind": "KIND_CPU", "count": 2}]
    assert (config["max_batch_size"], "dynamic_batching" in config) == (0, False)
    assert config["model_transaction_policy"] == {"decoupled": False}
    streaming = config_of(target(Interface(streams=True), gpus=1))
    assert streaming["model_transaction_policy"] == {"decoupled": True}
    assert streaming["instance_group"][0]["kind"] == "KIND_GPU"


def test_the_window_of_an_app_is_told():
    """I3: where the app itself says how it is batched, that is the configuration's."""
    config = config_of(target(Interface(batch_size=4, batch_window_s=0.5)))
    assert config["dynamic_batching"] == {"preferred_batch_size": [4], "max_queue_delay_microseconds": 500000}


@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_of_one_is_none(size):
    """A batch size that lets no rows meet is not dynamic batching."""
    assert config_of(target(batch_size=size))["max_batch_size"] == 0


def test_statistics_have_every_member():
    """Every member that Triton has is there; durations are a count and nanoseconds."""
    stats = CallStats(
        rows=12, executions=3, succeeded=10, succeeded_ns=1000, failed=2, failed_ns=30, queue_ns=500,
        batches=[BatchTimes(2, 1, 1, 2, 3), BatchTimes(5, 2, 10, 20, 30)], last_at=1700000000.5,
    )  # fmt: skip
    result = msgspec.to_builtins(stats_of("m", "3", stats))
    assert result == {
        "name": "m",
        "version": "3",
        "last_inference": 1700000000500,
        "inference_count": 12,
        "execution_count": 3,
        "inference_stats": {
            "success": {"count": 10, "ns": 1000},
            "fail": {"count": 2, "ns": 30},
            "queue": {"count": 12, "ns": 500},
            "compute_input": {"count": 3, "ns": 11},
            "compute_infer": {"count": 3, "ns": 22},
            "compute_output": {"count": 3, "ns": 33},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": {"count": count, "ns": a},
                "compute_infer": {"count": count, "ns": b},
                "compute_output": {"count": count, "ns": c},
            }
            for size, count, a, b, c in [(2, 1, 1, 2, 3), (5, 2, 10, 20, 30)]
        ],
        "memory_usage": [],
    }
