"""What became of the calls of functions, in the shape that Triton's statistics have.

Source: Triton's statistics extension. Counts of calls against counts of rows show how far batching reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from starlette.responses import Response

from batchmill.dialects.open_inference.shelf import targets_of
from batchmill.dialects.open_inference.urls import MODEL, VERSION
from batchmill.server.operations import Call, Operation, json_reply
from batchmill.services.functions.calls import Target
from batchmill.services.functions.paths import locate
from batchmill.services.services import Services
from batchmill.types import BatchTimes, CallStats, Scope


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

    def _reply(self, targets: Sequence[Target]) -> Response:
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
