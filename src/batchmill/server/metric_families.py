"""Families of metrics made from what is counted elsewhere, and what is measured of every model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from batchmill.jobs.tallies import ModelGauge
from batchmill.types import AdapterStats

ADAPTERS = b"batchmill_adapter_"  # how the names of all families of adapters begin
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Count = Callable[[ModelGauge], int]
Ratio = Callable[[ModelGauge], float | None]

MODEL_GAUGES: tuple[tuple[str, str, Count], ...] = (
    ("model_workers", "Worker processes of a model.", lambda g: g.workers),
    ("model_replicas", "Replicas of a model that run or start.", lambda g: g.replicas),
    ("model_replicas_wanted", "Replicas of a model that there are to be.", lambda g: g.wanted),
    ("model_waiting", "1 while a replica waits for room on the machine, else 0.", lambda g: int(bool(g.waits))),
    ("model_workers_ready", "Worker processes of a model that take work.", lambda g: g.ready),
    ("model_rows_in_flight", "Rows given to a model's engines and not yet answered.", lambda g: g.in_flight),
    ("model_rows_in_flight_limit", "Rows a model's engines take at once as they are now.", lambda g: g.limit),
    ("model_live_in_flight", "Live requests that a model is answering.", lambda g: g.live),
    ("model_live_waiting", "Live requests that wait for a model to start.", lambda g: g.live_waiting),
    ("model_jobs", "Jobs with rows left for a model.", lambda g: g.jobs),
    ("model_jobs_waiting", "Of these, jobs of which no worker has a row.", lambda g: g.jobs_waiting),
    ("model_rows_waiting", "Rows of these jobs without an outcome.", lambda g: g.rows_waiting),
    ("model_adapters_loaded", "Adapters that a model's engines hold now, summed.", lambda g: g.adapters_loaded),
    ("model_failed", "1 when a model could not be started, else 0.", lambda g: int(bool(g.failure))),
)
MODEL_RATIOS: tuple[tuple[str, str, Ratio], ...] = (
    (
        "model_kv_cache_usage_ratio",
        "Share of the KV cache in use, 0 to 1, the mean of the workers.",
        lambda g: g.kv_usage,
    ),
    (
        "model_prefix_cache_hit_ratio",
        "Share of prompt tokens found in the prefix cache, 0 to 1, where the engine tells.",
        lambda g: g.cached_share,
    ),
)


class Timings:
    """How many things ended and how long they took, by labels of which the last one is no label of the durations.

    The client library's own counters take locks and look for a bucket from below: for thousands a second that is more
    than half of what telling costs.

    Args:
        bounds: upper bounds in seconds, rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._found: dict[tuple[str, ...], _Timing] = {}

    def add(self, labels: tuple[str, ...], seconds: float) -> None:
        timing = self._found.get(labels)
        if timing is None:
            timing = self._found[labels] = _Timing([0] * (len(self._bounds) + 1))
        timing.counts[bisect_left(self._bounds, seconds)] += 1
        timing.seconds += seconds

    def counts(self) -> dict[tuple[str, ...], int]:
        return {labels: sum(timing.counts) for labels, timing in self._found.items()}

    def family(self, name: str, told: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """The durations, under all labels but the last."""
        sums: dict[tuple[str, ...], _Timing] = {}
        for key, timing in self._found.items():
            whole = sums.setdefault(key[:-1], _Timing([0] * len(timing.counts)))
            whole.counts = [a + b for a, b in zip(whole.counts, timing.counts, strict=True)]
            whole.seconds += timing.seconds
        family = HistogramMetricFamily(f"batchmill_{name}", told, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, whole in sorted(sums.items()):
            family.add_metric(key, list(zip(bounds, accumulate(whole.counts), strict=True)), whole.seconds)
        return family


class _Timing(Struct):
    counts: list[int]  # by bucket, the last one without a bound
    seconds: float = 0.0


def counted(
    name: str, told: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    """A counter with these values. Copied first: it may grow meanwhile."""
    family = CounterMetricFamily(f"batchmill_{name}", told, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def measured(name: str, told: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    """A gauge with these values."""
    family = GaugeMetricFamily(f"batchmill_{name}", told, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def adapters(sums: Mapping[tuple[str, str], AdapterStats]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What became of the rows of each adapter: (model, adapter) -> its sums."""
    found, labels = dict(sums), ["model", "adapter"]
    rows = {key: each.rows for key, each in found.items()}
    yield counted("adapter_rows", "Rows and live requests of an adapter that were answered.", labels, rows)
    tokens: dict[tuple[str, ...], float] = {}
    for key, each in found.items():
        tokens |= {(*key, "input"): each.input_tokens, (*key, "output"): each.output_tokens}
    yield counted("adapter_tokens", "Tokens of these rows.", [*labels, "kind"], tokens)
    told = "Rows that found their adapter in the engine."
    yield counted("adapter_hits", told, labels, {key: each.hits for key, each in found.items()})
    told = "Times an adapter was put into an engine."
    yield counted("adapter_loads", told, labels, {key: each.loads for key, each in found.items()})
    told = "Seconds during which rows of an adapter were in flight: its rows over these are its rate."
    yield counted("adapter_busy_seconds", told, labels, {key: each.busy_s for key, each in found.items()})
    told = "Share of an adapter's rows that found it in the engine, 0 to 1."
    ratios = {key: each.hits / each.rows for key, each in found.items() if each.rows}
    yield measured("adapter_hit_ratio", told, labels, ratios)
