"""What /metrics says of deployed functions: their rows, calls and times, by model and version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from batchmill.server.metric_families import Family, counted
from batchmill.types import BatchTimes, CallStats

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # upper bounds
NANOS = 1e9
LABELS = ("model", "version")


class Counted(Struct, frozen=True):
    """One version, and what became of its calls."""

    model: str
    version: str  # "main/3"
    stats: CallStats


def functions(
    found: Iterable[Counted], copies: Mapping[tuple[str, str], int]
) -> Iterable[Family | HistogramMetricFamily]:
    """Families of the versions that were ever called. `copies`: (name of a mirror, what became of a copy) -> calls."""
    called = [each for each in found if each.stats.rows or each.stats.succeeded or each.stats.failed]
    yield _of_each(called, "rows", "Rows that functions were called with, of requests and of jobs.", lambda s: s.rows)
    yield _of_each(called, "executions", "Calls of functions, each with a batch of rows.", lambda s: s.executions)
    yield _by_result(
        called, "requests", "Requests and rows of jobs that functions answered.", lambda s: (s.succeeded, s.failed)
    )
    yield _by_result(
        called, "request_seconds", "Seconds that these took in the worker, summed.",
        lambda s: (s.succeeded_ns / NANOS, s.failed_ns / NANOS),
    )  # fmt: skip
    yield _of_each(
        called, "queue_seconds", "Seconds that requests waited for their rows to be called, summed.",
        lambda s: s.queue_ns / NANOS,
    )  # fmt: skip
    yield counted(
        "function_compute_seconds", "Seconds of calls of functions, by part, summed.", [*LABELS, "part"],
        {(e.model, e.version, part): value for e in called for part, value in _parts(e.stats.batches)},
    )  # fmt: skip
    yield _batch_sizes(called)
    yield counted("function_copies", "Copies of calls that went to mirrors.", ["model", "result"], copies)


def _of_each(
    called: Iterable[Counted], name: str, told: str, read: Callable[[CallStats], float]
) -> CounterMetricFamily:
    values = {(each.model, each.version): read(each.stats) for each in called}
    return counted(f"function_{name}", told, LABELS, values)


def _by_result(
    called: Iterable[Counted], name: str, told: str, read: Callable[[CallStats], tuple[float, float]]
) -> CounterMetricFamily:
    values = {
        (each.model, each.version, result): value
        for each in called
        for result, value in zip(("ok", "failed"), read(each.stats), strict=True)
    }
    return counted(f"function_{name}", told, [*LABELS, "result"], values)


def _parts(batches: Iterable[BatchTimes]) -> Iterable[tuple[str, float]]:
    sums = [(each.input_ns, each.infer_ns, each.output_ns) for each in batches]
    totals = [sum(column) for column in zip(*sums, strict=True)] or [0, 0, 0]
    return zip(("input", "infer", "output"), [total / NANOS for total in totals], strict=True)


def _batch_sizes(called: Iterable[Counted]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "batchmill_function_batch_size", "Rows of each call of a function.", labels=LABELS
    )  # fmt: skip
    for each in called:
        batches = each.stats.batches
        buckets = [
            (floatToGoString(bound), sum(b.executions for b in batches if b.batch_size <= bound))
            for bound in (*BATCH_SIZES, float("inf"))
        ]
        rows = sum(b.batch_size * b.executions for b in batches)
        family.add_metric((each.model, each.version), buckets, rows)
    return family
