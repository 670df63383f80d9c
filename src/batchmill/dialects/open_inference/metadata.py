"""What a server and its models say of themselves: metadata, readiness and Triton's model configuration.

Source: the Open Inference Protocol; Triton's model configuration extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

import batchmill
from batchmill.dialects.open_inference.shelf import targets_of
from batchmill.dialects.open_inference.urls import MODEL_PATHS
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.functions.calls import Target
from batchmill.services.functions.paths import locate
from batchmill.services.services import Services
from batchmill.types import Scope, Tensor

PLATFORM = "batchmill_python"
EXTENSIONS = (
    "binary_tensor_data", "classification", "model_repository", "model_repository(unload_dependents)",
    "model_configuration", "statistics", "generate", "parameters", "logging", "trace",
)  # fmt: skip
UNTYPED = "BYTES"  # of an input that takes any JSON value: metadata has no word for it
_CONFIG = Content("application/json", {"type": "object", "required": ["name"]})


class ServerMetadata(Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, frozen=True):
    """`optional` and `parameters` are there only where they say something."""

    name: str
    datatype: str
    shape: list[int]
    optional: bool | UnsetType = UNSET
    parameters: dict[str, bool] | UnsetType = UNSET  # any_datatype: the function's code declares none


class ModelMetadata(Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]  # empty: whatever the function returns


class Live(Struct, frozen=True):
    live: bool


class Ready(Struct, frozen=True):
    ready: bool


class ModelReady(Struct, frozen=True):
    name: str
    ready: bool


class NotReady(Struct, frozen=True):
    """Both an error and an answer."""

    error: str
    ready: bool = False


class Metadata:
    def __init__(self, services: Services) -> None:
        self._functions, self._stopping = services.functions, services.stopping

    def operations(self) -> Sequence[Operation]:
        found = [
            Operation(
                "getInferenceServer", "GET", "/v2", "What this server is", Scope.READ, self.server,
                reply=ServerMetadata,
            ),
            Operation(
                "isInferenceLive", "GET", "/v2/health/live", "Whether it answers", None, self.live, reply=Live,
                is_vital=True,
            ),
            Operation(
                "isInferenceReady", "GET", "/v2/health/ready", "Whether it takes work", None, self.ready, reply=Ready,
                is_vital=True,
            ),
        ]  # fmt: skip
        for suffix, path in MODEL_PATHS:
            found += [
                Operation(
                    f"getInferenceModel{suffix}", "GET", path, "What a function takes and returns", Scope.READ,
                    self.model, reply=ModelMetadata, errors=(404,),
                ),
                Operation(
                    f"isInferenceModelReady{suffix}", "GET", f"{path}/ready", "Whether it can be called", Scope.READ,
                    self.model_ready, reply=ModelReady, errors=(404,),
                ),
                Operation(
                    f"getInferenceModelConfig{suffix}", "GET", f"{path}/config", "How it is called", Scope.READ,
                    self.model_config, reply=_CONFIG, errors=(404,),
                ),
            ]  # fmt: skip
        return found

    async def server(self, call: Call) -> Response:
        return json_reply(ServerMetadata("batchmill", batchmill.__version__, list(EXTENSIONS)))

    async def live(self, call: Call) -> Response:
        return json_reply(Live(True))

    async def ready(self, call: Call) -> Response:
        if self._stopping.is_set():
            return json_reply(NotReady("the server is stopping"), 503)
        return json_reply(Ready(True))

    async def model(self, call: Call) -> Response:
        target = self._target(call)
        siblings = targets_of(self._functions, call.caller, target.name, target.branch)
        return json_reply(metadata_of(target, [each.version for each in siblings]))

    async def model_ready(self, call: Call) -> Response:
        target = self._target(call)
        if not self._functions.is_ready(target):
            return json_reply(NotReady(f"{target.name} version {target.version} is not ready"), 400)
        return json_reply(ModelReady(target.name, True))

    async def model_config(self, call: Call) -> Response:
        return json_reply(config_of(self._target(call)))

    def _target(self, call: Call) -> Target:
        return locate(self._functions, call.caller, call.path["model"], call.path.get("version"))


def metadata_of(target: Target, versions: list[str]) -> ModelMetadata:
    """Names, datatypes and shapes; where calls go in batches a shape begins with the batch, as Triton has it."""
    interface, batch = target.interface, [-1] if batch_size_of(target) else []
    return ModelMetadata(
        target.name,
        versions,
        PLATFORM,
        [tensor_of(each, batch) for each in interface.inputs],
        [tensor_of(each, batch) for each in interface.outputs or ()],
    )


def tensor_of(tensor: Tensor, batch: list[int]) -> TensorMetadata:
    return TensorMetadata(
        tensor.name,
        datatype_of(tensor),
        [*batch, *tensor.shape],
        UNSET if tensor.required else True,
        UNSET if tensor.datatype is not None else {"any_datatype": True},
    )


def datatype_of(tensor: Tensor) -> str:
    """As it is on the wire: text is BYTES."""
    return UNTYPED if tensor.datatype in (None, "STRING") else tensor.datatype


def batch_size_of(target: Target) -> int:
    """Rows that go together in one call; 0 where each goes alone."""
    function = target.model.function
    size = (function.batch_size if function is not None else 0) or target.interface.batch_size
    return size if size > 1 else 0


def config_of(target: Target) -> dict[str, Any]:
    """The parts of Triton's ModelConfig that mean something here."""
    function, interface, size = target.model.function, target.interface, batch_size_of(target)
    assert function is not None, "only deployed functions are targets"
    kind = "KIND_GPU" if function.gpus else "KIND_CPU"
    config: dict[str, Any] = {
        "name": target.name,
        "platform": PLATFORM,
        "backend": "python",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": size,
        "input": [_config_of(each) | {"optional": not each.required} for each in interface.inputs],
        "output": [_config_of(each) for each in interface.outputs or ()],
        "instance_group": [{"name": target.name, "kind": kind, "count": target.model.workers}],
        "parameters": {},
        "model_transaction_policy": {"decoupled": interface.streams},
    }
    if size:
        config["dynamic_batching"] = {
            "preferred_batch_size": [size],
            "max_queue_delay_microseconds": round((function.batch_window_s or interface.batch_window_s) * 1e6),
        }
    return config


def _config_of(tensor: Tensor) -> dict[str, Any]:
    datatype = datatype_of(tensor)
    return {
        "name": tensor.name,
        "data_type": "TYPE_" + ("STRING" if datatype == "BYTES" else datatype),
        "dims": tensor.shape,
    }
