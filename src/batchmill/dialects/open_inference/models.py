"""Metadata, readiness and statistics of the server and its models, Triton's repository and its settings.

Source: the Open Inference Protocol; Triton's extensions for model repositories and statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

import batchmill
from batchmill.errors import InvalidInput
from batchmill.server.bodies import InvalidField
from batchmill.server.function_replies import body_of, json_of
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.services.functions.calls import FunctionCalls, VersionTarget
from batchmill.services.services import Services
from batchmill.types import BatchTimes, Caller, CallStats, Scope, Tensor
from batchmill.wire.json_bytes import decode

BRANCH = "main"


def targets_of(
    functions: FunctionCalls, caller: Caller, name: str | None = None, branch: str = BRANCH
) -> list[VersionTarget]:
    """Return the versions that can be called, of all functions or of one, sorted by name and number."""
    targets = [each for each in functions.targets(caller) if each.branch == branch and name in (None, each.name)]
    return sorted(targets, key=lambda each: (each.name, each.number))


UNLOADED = "unloaded"


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """`ready` true: list only models that can be called now."""

    ready: bool = False


class IndexEntry(Struct, frozen=True):
    name: str
    version: str
    state: str  # READY, UNAVAILABLE
    reason: str


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a load. `parameters` must be empty, because a version's code and settings never change."""

    parameters: dict[str, Any] = {}


class UnloadParameters(Struct, frozen=True, forbid_unknown_fields=True):
    unload_dependents: bool = False  # clients always send it; it has no effect, as functions have no dependents


class Unload(Struct, frozen=True, forbid_unknown_fields=True):
    parameters: UnloadParameters = UnloadParameters()


class Repository:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions = services.functions, services.versions

    def operations(self) -> Sequence[Operation]:
        path = "/v2/repository/models/{model}"
        return [
            Operation(
                "getModelRepository", "POST", "/v2/repository/index", "List functions", Scope.READ,
                self.index, body=Index, reply=list[IndexEntry], body_is_optional=True, is_raw=True,
            ),
            Operation(
                "loadModel", "POST", f"{path}/load", "Start the workers of a function", Scope.ADMIN,
                self.load, body=Load, errors=(404, 504), body_is_optional=True, is_raw=True,
            ),
            Operation(
                "unloadModel", "POST", f"{path}/unload", "Stop the workers of a function", Scope.ADMIN,
                self.unload, body=Unload, errors=(404,), body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    async def index(self, call: Call) -> Response:
        """List the versions of the branch main that can be called, now or after a load."""
        query, entries = await json_of(call, Index), []
        for target in targets_of(self._functions, call.caller):
            is_ready = self._functions.is_ready(target)
            if is_ready or not query.ready:
                state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", UNLOADED)
                entries.append(IndexEntry(target.name, target.version, state, reason))
        return json_reply(entries)

    async def load(self, call: Call) -> Response:
        """Start a function's workers and wait until one can answer. Raises: ModelFailed if none starts."""
        body = await json_of(call, Load)
        if body.parameters:
            name = next(iter(body.parameters))
            raise InvalidInput(
                f"the parameter {name[:80]!r} is not supported: a version's code and settings never change; deploy a "
                "new version with `batchmill deploy`",
                code="parameter_not_allowed",
            )
        await self._functions.load(self._functions.locate(call.caller, call.path["model"]))
        return Response(status_code=200)

    async def unload(self, call: Call) -> Response:
        """Unload all versions of a name, or only the version of a label. They can be called again after a load."""
        await json_of(call, Unload)
        name = call.path["model"]
        target = self._functions.locate(call.caller, name)
        self._versions.own(target.name, call.caller)  # a project cannot stop the calls of another
        targets = [target] if "@" in name else targets_of(self._functions, call.caller, target.name)
        for each in targets:
            await self._functions.unload(each)
        return Response(status_code=200)


MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"
MODEL_PATHS = (("", MODEL), ("Version", VERSION))  # suffix of the operation's name, path


PLATFORM = "batchmill_python"
EXTENSIONS = (
    "binary_tensor_data", "classification", "model_repository", "model_repository(unload_dependents)",
    "model_configuration", "statistics", "generate", "parameters", "logging", "trace",
)  # fmt: skip
UNTYPED = "BYTES"  # for an input that takes any JSON value, for which metadata has no datatype
_CONFIG = Content("application/json", {"type": "object", "required": ["name"]})


class ServerMetadata(Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, frozen=True):
    """`optional` and `parameters` are left out when they have no information."""

    name: str
    datatype: str
    shape: list[int]
    optional: bool | UnsetType = UNSET
    parameters: dict[str, bool] | UnsetType = UNSET  # any_datatype: the function's code declares no datatype


class ModelMetadata(Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]  # empty: unknown, the function may return anything


class Live(Struct, frozen=True):
    live: bool


class Ready(Struct, frozen=True):
    ready: bool


class ModelReady(Struct, frozen=True):
    name: str
    ready: bool


class NotReady(Struct, frozen=True):
    """A reply that is an error and also answers `ready`."""

    error: str
    ready: bool = False


class MetadataHandlers:
    def __init__(self, services: Services) -> None:
        self._functions, self._stopping = services.functions, services.stopping

    def operations(self) -> Sequence[Operation]:
        operations = [
            Operation(
                "getInferenceServer", "GET", "/v2", "Metadata of the server", Scope.READ, self.server,
                reply=ServerMetadata,
            ),
            Operation(
                "isInferenceLive", "GET", "/v2/health/live", "Whether the server is alive", None, self.live, reply=Live,
                is_vital=True,
            ),
            Operation(
                "isInferenceReady", "GET", "/v2/health/ready", "Whether the server accepts requests", None, self.ready,
                reply=Ready, is_vital=True,
            ),
        ]  # fmt: skip
        for suffix, path in MODEL_PATHS:
            operations += [
                Operation(
                    f"getInferenceModel{suffix}", "GET", path, "The inputs and outputs of a function", Scope.READ,
                    self.model, reply=ModelMetadata, errors=(404,),
                ),
                Operation(
                    f"isInferenceModelReady{suffix}", "GET", f"{path}/ready", "Whether a function can be called",
                    Scope.READ, self.model_ready, reply=ModelReady, errors=(404,),
                ),
                Operation(
                    f"getInferenceModelConfig{suffix}", "GET", f"{path}/config", "Triton's config of a function",
                    Scope.READ, self.model_config, reply=_CONFIG, errors=(404,),
                ),
            ]  # fmt: skip
        return operations

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

    def _target(self, call: Call) -> VersionTarget:
        return self._functions.locate(call.caller, call.path["model"], call.path.get("version"))


def metadata_of(target: VersionTarget, versions: list[str]) -> ModelMetadata:
    """Return names, datatypes and shapes. Like Triton, shapes of a batching function start with the batch dimension."""
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
    """Return the datatype in requests and replies: text is BYTES."""
    return UNTYPED if tensor.datatype in (None, "STRING") else tensor.datatype


def batch_size_of(target: VersionTarget) -> int:
    """Return the most rows of one call of user code; 0 if it does not batch."""
    function = target.model.function
    size = (function.batch_size if function is not None else 0) or target.interface.batch_size
    return size if size > 1 else 0


def config_of(target: VersionTarget) -> dict[str, Any]:
    """Return the fields of Triton's ModelConfig that apply."""
    function, interface, size = target.model.function, target.interface, batch_size_of(target)
    assert function is not None, "only deployed functions are targets"
    kind = "KIND_GPU" if function.gpus else "KIND_CPU"
    config: dict[str, Any] = {
        "name": target.name,
        "platform": PLATFORM,
        "backend": "python",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": size,
        "input": [_tensor_config_of(each) | {"optional": not each.required} for each in interface.inputs],
        "output": [_tensor_config_of(each) for each in interface.outputs or ()],
        "instance_group": [{"name": target.name, "kind": kind, "count": target.model.workers}],
        "parameters": {},
        "model_transaction_policy": {"decoupled": interface.streams},
    }
    if size:
        window_s = interface.batch_window_s if function.batch_window_s is None else function.batch_window_s
        config["dynamic_batching"] = {
            "preferred_batch_size": [size],
            "max_queue_delay_microseconds": round(window_s * 1e6),
        }
    return config


def _tensor_config_of(tensor: Tensor) -> dict[str, Any]:
    datatype = datatype_of(tensor)
    return {
        "name": tensor.name,
        "data_type": "TYPE_" + ("STRING" if datatype == "BYTES" else datatype),
        "dims": tensor.shape,
    }


class Duration(Struct, frozen=True):
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0


class InferenceStats(Struct, frozen=True):
    success: Duration
    fail: Duration
    queue: Duration  # from a request's arrival until the call of its rows
    compute_input: Duration  # over all calls of user code: the time to make the arguments
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration = Duration()  # always 0: answers are not cached
    cache_miss: Duration = Duration()


class BatchStats(Struct, frozen=True):
    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStats(Struct, frozen=True):
    name: str
    version: str
    last_inference: int  # milliseconds since the epoch
    inference_count: int  # rows, of requests and of jobs
    execution_count: int  # calls of user code
    inference_stats: InferenceStats
    response_stats: dict[str, str]
    batch_stats: list[BatchStats]
    memory_usage: list[str]


class Statistics(Struct, frozen=True):
    model_stats: list[ModelStats]


class StatisticsCalls:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions

    def operations(self) -> Sequence[Operation]:
        return [
            Operation(
                "getInferenceStatistics", "GET", "/v2/models/stats", "Statistics of all functions",
                Scope.READ, self.all, reply=Statistics,
            ),
            Operation(
                "getInferenceModelStatistics", "GET", f"{MODEL}/stats", "Statistics of a function",
                Scope.READ, self.model, reply=Statistics, errors=(404,),
            ),
            Operation(
                "getInferenceModelStatisticsVersion", "GET", f"{VERSION}/stats", "Statistics of a version",
                Scope.READ, self.version, reply=Statistics, errors=(404,),
            ),
        ]  # fmt: skip

    async def all(self, call: Call) -> Response:
        return self._reply(targets_of(self._functions, call.caller))

    async def model(self, call: Call) -> Response:
        target = self._functions.locate(call.caller, call.path["model"])
        if "@" in call.path["model"]:
            return self._reply([target])
        return self._reply(targets_of(self._functions, call.caller, target.name))

    async def version(self, call: Call) -> Response:
        return self._reply([self._functions.locate(call.caller, call.path["model"], call.path["version"])])

    def _reply(self, targets: Sequence[VersionTarget]) -> Response:
        stats = [
            stats_of(each.name, each.version, self._functions.stats(each.name, each.version, each.branch))
            for each in targets
        ]
        return json_reply(Statistics(stats))


def stats_of(name: str, version: str, stats: CallStats) -> ModelStats:
    """Return Triton's statistics. `inference_stats` counts requests, and its compute times count calls of user code."""
    return ModelStats(
        name,
        version,
        int(stats.last_at * 1000),
        stats.rows,
        stats.executions,
        InferenceStats(
            success=Duration(stats.succeeded, stats.succeeded_ns),
            fail=Duration(stats.failed, stats.failed_ns),
            queue=Duration(stats.succeeded + stats.failed, stats.queue_ns),
            compute_input=Duration(stats.executions, sum(each.input_ns for each in stats.batches)),
            compute_infer=Duration(stats.executions, sum(each.infer_ns for each in stats.batches)),
            compute_output=Duration(stats.executions, sum(each.output_ns for each in stats.batches)),
        ),
        {},
        [_batch(each) for each in stats.batches],
        [],
    )


def _batch(times: BatchTimes) -> BatchStats:
    return BatchStats(
        times.batch_size,
        Duration(times.executions, times.input_ns),
        Duration(times.executions, times.infer_ns),
        Duration(times.executions, times.output_ns),
    )


BYTES_MAX = 1024 * 1024
LOGGING: dict[str, Any] = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip
TRACE: dict[str, Any] = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip
_SETTINGS = Content("application/json", {"type": "object", "additionalProperties": True})
_KINDS = {"system": "System", "cuda": "Cuda"}
_NO_MEMORY = (
    "shared memory is not supported: send tensors as binary data after the request's JSON, which copies them once"
)


class Region(Struct, frozen=True):
    """A region of shared memory. This server has none."""

    name: str


class EmptyBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A body without fields."""


class SettingsHandlers:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions

    def operations(self) -> Sequence[Operation]:
        operations = [
            *self._pair("InferenceLogging", "/v2/logging", "Settings of the log", self.logging, self.change_logging),
            *self._pair("InferenceTrace", "/v2/trace/setting", "Settings of tracing", self.trace, self.change_trace),
            *self._pair(
                "InferenceModelTrace", "/v2/models/{model}/trace/setting", "Settings of a function's tracing",
                self.trace, self.change_trace,
            ),
        ]  # fmt: skip
        for kind in _KINDS:
            operations += self._memory(kind)
        return operations

    @staticmethod
    def _pair(name: str, path: str, summary: str, show: Any, change: Any) -> list[Operation]:
        errors = (404,) if "{" in path else ()
        return [
            Operation(f"get{name}", "GET", path, summary, Scope.READ, show, reply=_SETTINGS, errors=errors),
            Operation(
                f"update{name}", "POST", path, f"{summary}: they cannot be changed", Scope.ADMIN, change,
                body=_SETTINGS, reply=_SETTINGS, errors=errors, body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    def _memory(self, kind: str) -> list[Operation]:
        path, name = f"/v2/{kind}sharedmemory", f"{_KINDS[kind]}SharedMemory"
        content = Content("application/json", {"type": "object"})
        return [
            Operation(
                f"get{name}", "GET", f"{path}/status", "List regions: always empty", Scope.READ, self.regions,
                reply=list[Region],
            ),
            Operation(
                f"get{name}Region", "GET", f"{path}/region/{{region}}/status", "Show a region: always refused",
                Scope.READ, self.no_region,
            ),
            Operation(
                f"register{name}", "POST", f"{path}/region/{{region}}/register", "Register a region: always refused",
                Scope.SUBMIT, self.no_region, body=content, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}Region", "POST", f"{path}/region/{{region}}/unregister",
                "Unregister a region: no effect",
                Scope.SUBMIT, self.unregister, body=EmptyBody, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}", "POST", f"{path}/unregister", "Unregister all regions: no effect", Scope.SUBMIT,
                self.unregister, body=EmptyBody, body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    async def logging(self, call: Call) -> Response:
        return json_reply(LOGGING)

    async def change_logging(self, call: Call) -> Response:
        return json_reply(await _unchanged(call, LOGGING, "log"))

    async def trace(self, call: Call) -> Response:
        self._find(call)
        return json_reply(TRACE)

    async def change_trace(self, call: Call) -> Response:
        self._find(call)
        return json_reply(await _unchanged(call, TRACE, "trace"))

    def _find(self, call: Call) -> None:
        if "model" in call.path:
            self._functions.locate(call.caller, call.path["model"])

    async def regions(self, call: Call) -> Response:
        return json_reply([])

    async def unregister(self, call: Call) -> Response:
        """Succeed without an effect: clients unregister all regions before they begin."""
        await json_of(call, EmptyBody)
        return Response(status_code=200)

    async def no_region(self, call: Call) -> Response:
        raise InvalidInput(f"{_NO_MEMORY} ({call.path['region'][:80]!r})", code="parameter_not_allowed")


async def _unchanged(call: Call, settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings if the body does not change any; a value of null means the default.

    Raises: InvalidInput, naming the setting that would change or that does not exist.
    """
    raw = await body_of(call, BYTES_MAX)
    try:
        body = decode(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidField("the body must be a JSON object of settings", code="invalid_value")
    for name, value in body.items():
        if name not in settings:
            names = ", ".join(settings)
            raise InvalidField(f"unknown {kind} setting {name[:80]!r}; use one of {names}", code="unknown_parameter")
        if value is not None and value != settings[name]:
            raise InvalidInput(
                f"the {kind} setting {name!r} cannot be changed: the operator sets it when `batchmill serve` starts",
                code="parameter_not_allowed",
            )
    return settings
