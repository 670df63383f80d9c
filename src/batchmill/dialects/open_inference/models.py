"""What there is to call: the metadata, states and statistics of the server and its models, and Triton's repository.

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
from batchmill.services.functions.names import locate
from batchmill.services.services import Services
from batchmill.types import BatchTimes, Caller, CallStats, Scope, Tensor
from batchmill.wire.json_bytes import decode

BRANCH = "main"


def targets_of(
    functions: FunctionCalls, caller: Caller, name: str | None = None, branch: str = BRANCH
) -> list[VersionTarget]:
    """Every version that can be called, of every function or of one, by name and number."""
    found = [each for each in functions.targets(caller) if each.branch == branch and name in (None, each.name)]
    return sorted(found, key=lambda each: (each.name, each.number))


UNLOADED = "unloaded"


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """`ready` true: only those that can be called now."""

    ready: bool = False


class IndexEntry(Struct, frozen=True):
    name: str
    version: str
    state: str  # READY, UNAVAILABLE
    reason: str


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` may hold nothing: a version's code and settings never change."""

    parameters: dict[str, Any] = {}


class UnloadParameters(Struct, frozen=True, forbid_unknown_fields=True):
    unload_dependents: bool = False  # clients always send it; no function depends on another, so it has no effect


class Unload(Struct, frozen=True, forbid_unknown_fields=True):
    parameters: UnloadParameters = UnloadParameters()


class Repository:
    def __init__(self, services: Services) -> None:
        self._functions, self._versions = services.functions, services.versions

    def operations(self) -> Sequence[Operation]:
        path = "/v2/repository/models/{model}"
        return [
            Operation(
                "getModelRepository", "POST", "/v2/repository/index", "Which functions there are", Scope.READ,
                self.index, body=Index, reply=list[IndexEntry], body_is_optional=True, is_raw=True,
            ),
            Operation(
                "loadModel", "POST", f"{path}/load", "Start the workers of a function", Scope.ADMIN,
                self.load, body=Load, errors=(404, 504), body_is_optional=True, is_raw=True,
            ),
            Operation(
                "unloadModel", "POST", f"{path}/unload", "End the workers of a function", Scope.ADMIN,
                self.unload, body=Unload, errors=(404,), body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    async def index(self, call: Call) -> Response:
        """Every version of branch main that can be called, or could be once it is loaded."""
        asked, found = await json_of(call, Index), []
        for target in targets_of(self._functions, call.caller):
            is_ready = self._functions.is_ready(target)
            if is_ready or not asked.ready:
                state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", UNLOADED)
                found.append(IndexEntry(target.name, target.version, state, reason))
        return json_reply(found)

    async def load(self, call: Call) -> Response:
        """Returns once a worker can answer. Raises: ModelFailed where none can be started."""
        asked = await json_of(call, Load)
        if asked.parameters:
            name = next(iter(asked.parameters))
            raise InvalidInput(
                f"the parameter {name[:80]!r} is not taken: a version's code and settings never change; deploy a new "
                "one with `batchmill deploy`",
                code="parameter_not_allowed",
            )
        await self._functions.load(locate(self._functions, call.caller, call.path["model"]))
        return Response(status_code=200)

    async def unload(self, call: Call) -> Response:
        """All versions of a name, or the one that its label means. They are called again once they are loaded."""
        await json_of(call, Unload)
        name = call.path["model"]
        target = locate(self._functions, call.caller, name)
        self._versions.own(target.name, call.caller)  # nobody stops another project's calls
        alone = [target] if "@" in name else targets_of(self._functions, call.caller, target.name)
        for each in alone:
            await self._functions.unload(each)
        return Response(status_code=200)


MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"
MODEL_PATHS = (("", MODEL), ("Version", VERSION))  # what an operation's name ends with, and where it is


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


class MetadataHandlers:
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

    def _target(self, call: Call) -> VersionTarget:
        return locate(self._functions, call.caller, call.path["model"], call.path.get("version"))


def metadata_of(target: VersionTarget, versions: list[str]) -> ModelMetadata:
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


def batch_size_of(target: VersionTarget) -> int:
    """Rows that go together in one call; 0 where each goes alone."""
    function = target.model.function
    size = (function.batch_size if function is not None else 0) or target.interface.batch_size
    return size if size > 1 else 0


def config_of(target: VersionTarget) -> dict[str, Any]:
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


class Duration(Struct, frozen=True):
    """How often, and how long all of them together."""

    count: int = 0
    ns: int = 0


class InferenceStats(Struct, frozen=True):
    success: Duration
    fail: Duration
    queue: Duration  # from a request's arrival until its rows were called
    compute_input: Duration  # of all calls of user code: making its arguments
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration = Duration()  # there is no cache of answers
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
                "getInferenceStatistics", "GET", "/v2/models/stats", "What became of the calls of every function",
                Scope.READ, self.all, reply=Statistics,
            ),
            Operation(
                "getInferenceModelStatistics", "GET", f"{MODEL}/stats", "What became of the calls of a function",
                Scope.READ, self.model, reply=Statistics, errors=(404,),
            ),
            Operation(
                "getInferenceModelStatisticsVersion", "GET", f"{VERSION}/stats", "The same of one version",
                Scope.READ, self.version, reply=Statistics, errors=(404,),
            ),
        ]  # fmt: skip

    async def all(self, call: Call) -> Response:
        return self._reply(targets_of(self._functions, call.caller))

    async def model(self, call: Call) -> Response:
        target = locate(self._functions, call.caller, call.path["model"])
        if "@" in call.path["model"]:
            return self._reply([target])
        return self._reply(targets_of(self._functions, call.caller, target.name))

    async def version(self, call: Call) -> Response:
        return self._reply([locate(self._functions, call.caller, call.path["model"], call.path["version"])])

    def _reply(self, targets: Sequence[VersionTarget]) -> Response:
        found = [
            stats_of(each.name, each.version, self._functions.stats(each.name, each.version, each.branch))
            for each in targets
        ]
        return json_reply(Statistics(found))


def stats_of(name: str, version: str, stats: CallStats) -> ModelStats:
    """Sums as Triton gives them. `inference_stats` counts requests, and of what is computed calls of user code."""
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
    "shared memory is not supported: send tensors as binary data behind the request's JSON, which copies them once"
)


class Region(Struct, frozen=True):
    """Of memory that a client shares with a server; here there are none."""

    name: str


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    """A body that says nothing."""


class SettingsHandlers:
    def __init__(self, services: Services) -> None:
        self._functions = services.functions

    def operations(self) -> Sequence[Operation]:
        found = [
            *self._pair("InferenceLogging", "/v2/logging", "What is logged", self.logging, self.change_logging),
            *self._pair("InferenceTrace", "/v2/trace/setting", "What is traced", self.trace, self.change_trace),
            *self._pair(
                "InferenceModelTrace", "/v2/models/{model}/trace/setting", "What is traced of a function", self.trace,
                self.change_trace,
            ),
        ]  # fmt: skip
        for kind in _KINDS:
            found += self._memory(kind)
        return found

    @staticmethod
    def _pair(name: str, path: str, summary: str, look: Any, change: Any) -> list[Operation]:
        errors = (404,) if "{" in path else ()
        return [
            Operation(f"get{name}", "GET", path, summary, Scope.READ, look, reply=_SETTINGS, errors=errors),
            Operation(
                f"update{name}", "POST", path, f"{summary}: nothing of it can be changed", Scope.ADMIN, change,
                body=_SETTINGS, reply=_SETTINGS, errors=errors, body_is_optional=True, is_raw=True,
            ),
        ]  # fmt: skip

    def _memory(self, kind: str) -> list[Operation]:
        path, name = f"/v2/{kind}sharedmemory", f"{_KINDS[kind]}SharedMemory"
        content = Content("application/json", {"type": "object"})
        return [
            Operation(
                f"get{name}", "GET", f"{path}/status", "Regions that are shared: none", Scope.READ, self.regions,
                reply=list[Region],
            ),
            Operation(
                f"get{name}Region", "GET", f"{path}/region/{{region}}/status", "A region: there is none", Scope.READ,
                self.no_region,
            ),
            Operation(
                f"register{name}", "POST", f"{path}/region/{{region}}/register", "Always refused", Scope.SUBMIT,
                self.no_region, body=content, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}Region", "POST", f"{path}/region/{{region}}/unregister", "There is none",
                Scope.SUBMIT, self.nothing, body=Nothing, body_is_optional=True, is_raw=True,
            ),
            Operation(
                f"unregister{name}", "POST", f"{path}/unregister", "There are none", Scope.SUBMIT, self.nothing,
                body=Nothing, body_is_optional=True, is_raw=True,
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
            locate(self._functions, call.caller, call.path["model"])

    async def regions(self, call: Call) -> Response:
        return json_reply([])

    async def nothing(self, call: Call) -> Response:
        """To let go of what there is none of is done at once: clients do it before they begin."""
        await json_of(call, Nothing)
        return Response(status_code=200)

    async def no_region(self, call: Call) -> Response:
        raise InvalidInput(f"{_NO_MEMORY} ({call.path['region'][:80]!r})", code="parameter_not_allowed")


async def _unchanged(call: Call, settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """The settings, if the body asks for nothing else: None means what a setting is without being set.

    Raises: InvalidInput, naming the one that would change or that there is not.
    """
    raw = await body_of(call, BYTES_MAX)
    try:
        asked = decode(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise InvalidField("the body must be a JSON object of settings", code="invalid_value")
    for name, value in asked.items():
        if name not in settings:
            known = ", ".join(settings)
            raise InvalidField(f"unknown {kind} setting {name[:80]!r}; known are {known}", code="unknown_parameter")
        if value is not None and value != settings[name]:
            raise InvalidInput(
                f"the {kind} setting {name!r} cannot be changed here; `batchmill serve` is told when it starts",
                code="parameter_not_allowed",
            )
    return settings
