"""What /metrics shows: requests, live calls, jobs, workers, functions and deliveries, for Prometheus."""

from __future__ import annotations

import asyncio
import platform
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus
import sqlalchemy as sa
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import batchmill
from batchmill.errors import InvalidConfig
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.optional import require
from batchmill.ports import Clock, Jobs
from batchmill.server.access_log import Served
from batchmill.server.http import HttpRoot
from batchmill.services.live_calls import LiveCall
from batchmill.services.outbox import Outbox
from batchmill.services.services import Services
from batchmill.services.webhooks import Ended
from batchmill.states import ENDED
from batchmill.store.database import Database
from batchmill.store.tables import jobs
from batchmill.types import AdapterStats, BatchTimes, CallStats

if TYPE_CHECKING:
    from batchmill.server.tracing import Tracing


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

    def family(self, name: str, help_text: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """The durations, under all labels but the last."""
        sums: dict[tuple[str, ...], _Timing] = {}
        for key, timing in self._found.items():
            whole = sums.setdefault(key[:-1], _Timing([0] * len(timing.counts)))
            whole.counts = [a + b for a, b in zip(whole.counts, timing.counts, strict=True)]
            whole.seconds += timing.seconds
        family = HistogramMetricFamily(f"batchmill_{name}", help_text, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, whole in sorted(sums.items()):
            family.add_metric(key, list(zip(bounds, accumulate(whole.counts), strict=True)), whole.seconds)
        return family


class _Timing(Struct):
    counts: list[int]  # by bucket, the last one without a bound
    seconds: float = 0.0


def counted(
    name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    """A counter with these values. Copied first: it may grow meanwhile."""
    family = CounterMetricFamily(f"batchmill_{name}", help_text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def measured(
    name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    """A gauge with these values."""
    family = GaugeMetricFamily(f"batchmill_{name}", help_text, labels=labels)
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
    help_text = "Rows that found their adapter in the engine."
    yield counted("adapter_hits", help_text, labels, {key: each.hits for key, each in found.items()})
    help_text = "Times an adapter was put into an engine."
    yield counted("adapter_loads", help_text, labels, {key: each.loads for key, each in found.items()})
    help_text = "Seconds during which rows of an adapter were in flight: its rows over these are its rate."
    yield counted("adapter_busy_seconds", help_text, labels, {key: each.busy_s for key, each in found.items()})
    help_text = "Share of an adapter's rows that found it in the engine, 0 to 1."
    ratios = {key: each.hits / each.rows for key, each in found.items() if each.rows}
    yield measured("adapter_hit_ratio", help_text, labels, ratios)


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
    called: Iterable[Counted], name: str, help_text: str, read: Callable[[CallStats], float]
) -> CounterMetricFamily:
    values = {(each.model, each.version): read(each.stats) for each in called}
    return counted(f"function_{name}", help_text, LABELS, values)


def _by_result(
    called: Iterable[Counted], name: str, help_text: str, read: Callable[[CallStats], tuple[float, float]]
) -> CounterMetricFamily:
    values = {
        (each.model, each.version, result): value
        for each in called
        for result, value in zip(("ok", "failed"), read(each.stats), strict=True)
    }
    return counted(f"function_{name}", help_text, [*LABELS, "result"], values)


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


CONTENT_TYPE = prometheus.CONTENT_TYPE_PLAIN_0_0_4
# Upper bounds in seconds: a small GET takes a millisecond, an upload or a long generation minutes.
HTTP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LIVE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 300.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "GRPC"})


class Metrics:
    """`served`, `live` and `ended` are told of what happens; `render` is the page."""

    def __init__(self, database: Database, dispatcher: Dispatcher, outbox: Outbox) -> None:
        self._database, self._dispatcher, self._outbox = database, dispatcher, outbox
        self.functions: Callable[[], Iterable[Counted]] = tuple  # deployed ones, and what became of their calls
        self.copies: Mapping[tuple[str, str], int] = {}  # that went to mirrors
        prometheus.disable_created_metrics()  # a second series for each, which nobody reads
        self._registry = prometheus.CollectorRegistry(auto_describe=True)
        self._jobs: dict[str, int] = {}
        self._events_waiting = 0
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._live_tokens: Counter[tuple[str, ...]] = Counter()
        self._build()
        prometheus.ProcessCollector(registry=self._registry)
        self._registry.register(_Now(self))

    def _build(self) -> None:
        options = {"registry": self._registry, "namespace": "batchmill"}
        info = prometheus.Gauge("build_info", "Which batchmill runs; always 1.", ["version", "python"], **options)
        info.labels(batchmill.__version__, platform.python_version()).set(1)
        self._requests = Timings(HTTP_SECONDS)
        self._live = Timings(LIVE_SECONDS)

    # -- told as it happens -------------------------------------------------------------------------------------------

    def served(self, served: Served) -> None:
        """A request has ended. Quick, and never raises."""
        method = served.method if served.method in METHODS else "other"
        self._requests.add((method, served.route or "none", str(served.status)), served.seconds)

    def live(self, call: LiveCall) -> None:
        """A live request has ended."""
        self._live.add((call.model, str(call.status) if call.status else "none"), call.seconds)
        if call.usage is not None:
            tokens = call.usage.input_tokens, call.usage.cached_tokens, call.usage.output_tokens
            for kind, count in zip(("input", "cached", "output"), tokens, strict=True):
                self._live_tokens[call.project, call.model, kind] += count

    def ended(self, ended: Ended) -> None:
        """A job has come to rest."""
        self._ended[ended.project, ended.state] += 1

    # -- the page -----------------------------------------------------------------------------------------------------

    async def render(self, project: str | None = None) -> bytes:
        """The page in Prometheus' text format, version 0.0.4. `project`: without what other projects did."""
        self._jobs = await self._database.read(_count_jobs)
        self._events_waiting = await self._outbox.count_waiting()
        page = prometheus.generate_latest(self._registry)
        return page if project is None else _without_others(page, project)

    def collect(self) -> Iterable[Family]:
        """What is counted or measured elsewhere."""
        tallies = self._dispatcher.tallies
        project, model = "project", "model"
        labels = ["method", "route", "status"]
        yield counted("http_requests", "HTTP requests that ended.", labels, self._requests.counts())
        help_text = "Seconds from a request's first byte to its reply's last one."
        yield self._requests.family("http_request_duration_seconds", help_text, labels[:2])
        labels = [model, "status"]
        help_text = "Live requests that ended; status none: without an answer."
        yield counted("live_requests", help_text, labels, self._live.counts())
        help_text = "Seconds until a live request was answered whole."
        yield self._live.family("live_request_duration_seconds", help_text, labels[:1])
        yield counted("rows", "Rows of jobs whose outcome was counted.", [project, model, "result"], tallies.rows)
        yield counted(
            "tokens", "Tokens of these rows; kind input includes cached.", [project, model, "kind"], tallies.tokens
        )
        yield counted("row_errors", "Rows that failed, by cause.", [project, model, "code"], tallies.errors)
        yield counted(
            "live_tokens", "Tokens of live requests; kind input includes cached.", [project, model, "kind"],
            self._live_tokens,
        )  # fmt: skip
        yield counted("jobs_ended", "Jobs that came to rest.", [project, "state"], self._ended)
        yield measured("jobs", "Jobs that have not come to rest.", ["state"], {(k,): n for k, n in self._jobs.items()})
        deliveries = {(result,): n for result, n in self._outbox.counts.items()}
        yield counted(
            "webhook_deliveries", "Attempts to deliver an event, by what came of them.", ["result"], deliveries
        )
        yield measured(
            "webhook_events_waiting", "Events that no endpoint has taken yet.", [], {(): self._events_waiting}
        )
        yield from models(self._dispatcher.gauges())
        yield from adapters(tallies.adapters.by_adapter)
        yield from functions(self.functions(), self.copies)


def _without_others(page: bytes, project: str) -> bytes:
    own = f'project="{project}"'.encode()  # a project's name needs no escapes
    lines = page.splitlines(keepends=True)
    return b"".join(line for line in lines if line.startswith(b"#") or own in line or not _is_somebodys(line))


def _is_somebodys(line: bytes) -> bool:
    """It is of one project alone. An adapter is too, and engines that serve several know only its name."""
    return b'project="' in line or line.startswith(ADAPTERS)


class _Now(Collector):
    """What a page holds besides the metrics that the registry counts itself."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        return self._metrics.collect()

    def describe(self) -> Iterable[Family]:
        return self._metrics.collect()


def models(gauges: Sequence[ModelGauge]) -> Iterable[Family]:
    """One family a measure. A model whose code was edited has two pools for a while: they count as one."""
    for name, help_text, read in MODEL_GAUGES:
        sums: Counter[tuple[str, ...]] = Counter()
        for each in gauges:
            sums[each.name,] += read(each)
        yield measured(name, help_text, ["model"], sums)
    for name, help_text, read in MODEL_RATIOS:
        values: dict[str, list[float]] = {}
        for each in gauges:
            if (ratio := read(each)) is not None:
                values.setdefault(each.name, []).append(ratio)
        yield measured(
            name, help_text, ["model"], {(model,): sum(found) / len(found) for model, found in values.items()}
        )


def _count_jobs(db: sa.Connection) -> dict[str, int]:
    """Jobs by their state, found without reading those whose end was made known."""
    known = (jobs.c.announced <= jobs.c.generation, jobs.c.state.not_in(ENDED))
    return dict(db.execute(sa.select(jobs.c.state, sa.func.count()).where(*known).group_by(jobs.c.state)).all())


Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter"
_PROCESSOR = "opentelemetry.sdk.trace.export:BatchSpanProcessor"


def load_tracing(configured: str | None, environ: Mapping[str, str], clock: Clock) -> Tracing | None:
    """What sends spans to the collector that the environment, or `server.otlp_endpoint`, names; None: nobody wants any.

    Raises: InvalidConfig when a collector is named and the packages are missing.
    """
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not endpoint:
        base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or configured
        endpoint = base.rstrip("/") + TRACES_PATH if base else None
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    spoken = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOL
    if spoken != PROTOCOL:
        raise InvalidConfig(f"traces are sent by {PROTOCOL}, not {spoken}: set OTEL_EXPORTER_OTLP_PROTOCOL={PROTOCOL}")
    purpose = f"sending traces to {endpoint}"
    exporter = require(_EXPORTER, purpose)(endpoint=endpoint)
    processor = require(_PROCESSOR, purpose)(exporter)
    return require("batchmill.server.tracing:Tracing", purpose)(processor, clock)


TRACES_DRAIN_S = 5.0


class Observers:
    """Raises: InvalidConfig when traces are wanted and cannot be made."""

    def __init__(
        self, services: Services, *, database: Database, jobs: Jobs, dispatcher: Dispatcher, environ: Mapping[str, str]
    ) -> None:
        self._services = services
        self._tracing = load_tracing(services.config.server.otlp_endpoint, environ, services.clock)
        self._outbox = Outbox(
            database, services.clock, webhooks=services.webhooks, jobs=jobs, files=services.files, on_ended=self._ended
        )
        self.metrics = Metrics(database, dispatcher, self._outbox)
        self._running: asyncio.Task[None] | None = None

    def _ended(self, ended: Ended) -> None:
        self.metrics.ended(ended)
        if self._tracing is not None:
            self._tracing.ended(ended)

    def open(self, root: HttpRoot) -> Application:
        """Begin to look on; what is to be served in the place of `root`."""
        root.watch(self.metrics.served)
        self._services.live.listen(self.metrics.live)
        self._services.functions.listen(self.metrics.live)
        self.metrics.functions, self.metrics.copies = self._counted, self._services.functions.copied
        self._running = asyncio.create_task(self._outbox.run())
        if self._tracing is None:
            return root
        root.watch(self._tracing.served)
        self._services.live.listen(self._tracing.live)
        self._services.functions.listen(self._tracing.live)
        return self._tracing.around(root)

    def _counted(self) -> Iterable[Counted]:
        read = self._services.functions.stats
        for each in self._services.versions.all():
            yield Counted(each.name, f"{each.branch}/{each.number}", read(each.name, str(each.number), each.branch))

    async def close(self) -> None:
        """End the deliveries that are under way: they are made again next time. Send the traces that are left."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._services.webhooks.close()
        if self._tracing is not None:
            # A collector that does not answer holds up the end of this process for so long and no longer.
            sending = threading.Thread(target=self._tracing.close, name="last-traces", daemon=True)
            sending.start()
            await asyncio.to_thread(sending.join, TRACES_DRAIN_S)
