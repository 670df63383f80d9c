"""The /metrics page for Prometheus: requests, live calls, jobs, workers, functions and webhook deliveries."""

from __future__ import annotations

import asyncio
import platform
import shutil
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import prometheus_client as prometheus
import sqlalchemy as sa
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp

import batchmill
from batchmill.errors import InvalidConfig
from batchmill.jobs.pools.dispatcher import Dispatcher
from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.optional import require
from batchmill.ports.clock import Clock
from batchmill.ports.jobs import Jobs
from batchmill.server.access_log import RequestRecord
from batchmill.server.http import HttpRoot
from batchmill.services.live_calls import LiveCall
from batchmill.services.services import Services
from batchmill.services.webhooks.endpoints import EndedJob
from batchmill.services.webhooks.outbox import Outbox
from batchmill.states import ENDED, JobState
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import jobs, notes, shards
from batchmill.types import AdapterStats, BatchTimes, CallStats

if TYPE_CHECKING:
    from batchmill.server.tracing import Tracing


ADAPTERS = b"batchmill_adapter_"  # prefix of the names of all adapter families
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Count = Callable[[ModelGauge], int]
Ratio = Callable[[ModelGauge], float | None]

MODEL_GAUGES: tuple[tuple[str, str, Count], ...] = (
    ("model_workers", "Worker processes of a model.", lambda g: g.workers),
    ("model_replicas", "Replicas of a model that run or start.", lambda g: g.replicas),
    ("model_replicas_wanted", "Desired replicas of a model.", lambda g: g.wanted),
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
        "Share of prompt tokens found in the prefix cache, 0 to 1, if the engine reports it.",
        lambda g: g.cached_share,
    ),
)


class Timings:
    """Counts events and their durations by labels. The durations do not have the last label.

    The client library's own histograms take locks and search buckets from below. At thousands of events a second that
    is more than half of the cost of counting.

    Args:
        bounds: upper bounds in seconds, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._timings: dict[tuple[str, ...], _Timing] = {}

    def add(self, labels: tuple[str, ...], seconds: float) -> None:
        timing = self._timings.get(labels)
        if timing is None:
            timing = self._timings[labels] = _Timing([0] * (len(self._bounds) + 1))
        timing.counts[bisect_left(self._bounds, seconds)] += 1
        timing.seconds += seconds

    def counts(self) -> dict[tuple[str, ...], int]:
        return {labels: sum(timing.counts) for labels, timing in self._timings.items()}

    def family(self, name: str, help_text: str, labels: Sequence[str]) -> HistogramMetricFamily:
        """The durations, by all labels but the last."""
        sums: dict[tuple[str, ...], _Timing] = {}
        for key, timing in self._timings.items():
            whole = sums.setdefault(key[:-1], _Timing([0] * len(timing.counts)))
            whole.counts = [a + b for a, b in zip(whole.counts, timing.counts, strict=True)]
            whole.seconds += timing.seconds
        family = HistogramMetricFamily(f"batchmill_{name}", help_text, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, whole in sorted(sums.items()):
            family.add_metric(key, list(zip(bounds, accumulate(whole.counts), strict=True)), whole.seconds)
        return family


class _Timing(Struct):
    counts: list[int]  # by bucket; the last one has no bound
    seconds: float = 0.0


def counter_family(
    name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    """A counter with these values. They are copied first, since the mapping may grow meanwhile."""
    family = CounterMetricFamily(f"batchmill_{name}", help_text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def gauge_family(
    name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    """A gauge with these values."""
    family = GaugeMetricFamily(f"batchmill_{name}", help_text, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family


def adapters(sums: Mapping[tuple[str, str], AdapterStats]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """The families of adapters. `sums`: (model, adapter) -> its sums."""
    by_adapter, labels = dict(sums), ["model", "adapter"]
    rows = {key: each.rows for key, each in by_adapter.items()}
    yield counter_family("adapter_rows", "Rows and live requests of an adapter that were answered.", labels, rows)
    tokens: dict[tuple[str, ...], float] = {}
    for key, each in by_adapter.items():
        tokens |= {(*key, "input"): each.input_tokens, (*key, "output"): each.output_tokens}
    yield counter_family("adapter_tokens", "Tokens of these rows.", [*labels, "kind"], tokens)
    help_text = "Rows that found their adapter in the engine."
    yield counter_family("adapter_hits", help_text, labels, {key: each.hits for key, each in by_adapter.items()})
    help_text = "Times an adapter was put into an engine."
    yield counter_family("adapter_loads", help_text, labels, {key: each.loads for key, each in by_adapter.items()})
    help_text = "Seconds during which rows of an adapter were in flight: its rows over these are its rate."
    yield counter_family(
        "adapter_busy_seconds", help_text, labels, {key: each.busy_s for key, each in by_adapter.items()}
    )
    help_text = "Share of an adapter's rows that found it in the engine, 0 to 1."
    ratios = {key: each.hits / each.rows for key, each in by_adapter.items() if each.rows}
    yield gauge_family("adapter_hit_ratio", help_text, labels, ratios)


BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # upper bounds
NANOS = 1e9
LABELS = ("model", "version")


class VersionStats(Struct, frozen=True):
    """The statistics of one version's calls."""

    model: str
    version: str  # "main/3"
    stats: CallStats


def functions(
    versions: Iterable[VersionStats], copies: Mapping[tuple[str, str], int]
) -> Iterable[Family | HistogramMetricFamily]:
    """The families of all versions that were ever called. `copies`: (mirror's name, result) -> copied calls."""
    called = [each for each in versions if each.stats.rows or each.stats.succeeded or each.stats.failed]
    yield _counter_of_versions(
        called, "rows", "Rows that functions were called with, of requests and of jobs.", lambda s: s.rows
    )
    yield _counter_of_versions(
        called, "executions", "Calls of functions, each with a batch of rows.", lambda s: s.executions
    )
    yield _counter_by_result(
        called, "requests", "Requests and rows of jobs that functions answered.", lambda s: (s.succeeded, s.failed)
    )
    yield _counter_by_result(
        called, "request_seconds", "Seconds that these took in the worker, summed.",
        lambda s: (s.succeeded_ns / NANOS, s.failed_ns / NANOS),
    )  # fmt: skip
    yield _counter_of_versions(
        called, "queue_seconds", "Seconds that requests waited for their rows to be called, summed.",
        lambda s: s.queue_ns / NANOS,
    )  # fmt: skip
    yield counter_family(
        "function_compute_seconds", "Seconds of calls of functions, by part, summed.", [*LABELS, "part"],
        {(e.model, e.version, part): value for e in called for part, value in _parts(e.stats.batches)},
    )  # fmt: skip
    yield _batch_sizes(called)
    yield counter_family("function_copies", "Copies of calls that went to mirrors.", ["model", "result"], copies)


def _counter_of_versions(
    called: Iterable[VersionStats], name: str, help_text: str, read: Callable[[CallStats], float]
) -> CounterMetricFamily:
    values = {(each.model, each.version): read(each.stats) for each in called}
    return counter_family(f"function_{name}", help_text, LABELS, values)


def _counter_by_result(
    called: Iterable[VersionStats], name: str, help_text: str, read: Callable[[CallStats], tuple[float, float]]
) -> CounterMetricFamily:
    values = {
        (each.model, each.version, result): value
        for each in called
        for result, value in zip(("ok", "failed"), read(each.stats), strict=True)
    }
    return counter_family(f"function_{name}", help_text, [*LABELS, "result"], values)


def _parts(batches: Iterable[BatchTimes]) -> Iterable[tuple[str, float]]:
    sums = [(each.input_ns, each.infer_ns, each.output_ns) for each in batches]
    totals = [sum(column) for column in zip(*sums, strict=True)] or [0, 0, 0]
    return zip(("input", "infer", "output"), [total / NANOS for total in totals], strict=True)


def _batch_sizes(called: Iterable[VersionStats]) -> HistogramMetricFamily:
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
COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "GRPC"})


class Metrics:
    """Counts events by `served`, `live` and `ended`; `render` returns the page."""

    def __init__(self, database: Database, dispatcher: Dispatcher, outbox: Outbox, data_dir: Path) -> None:
        self._database, self._dispatcher, self._outbox, self._data_dir = database, dispatcher, outbox, data_dir
        self.functions: Callable[[], Iterable[VersionStats]] = tuple  # statistics of deployed functions
        self.copies: Mapping[tuple[str, str], int] = {}  # calls copied to mirrors
        prometheus.disable_created_metrics()  # they would double the number of series
        self._registry = prometheus.CollectorRegistry(auto_describe=True)
        self._ledger = LedgerState()
        self._events_waiting = 0
        self._commits = 0
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._live_tokens: Counter[tuple[str, ...]] = Counter()
        self._build()
        prometheus.ProcessCollector(registry=self._registry)
        self._registry.register(_CollectorAdapter(self))

    def _build(self) -> None:
        options = {"registry": self._registry, "namespace": "batchmill"}
        info = prometheus.Gauge("build_info", "Which batchmill runs; always 1.", ["version", "python"], **options)
        info.labels(batchmill.__version__, platform.python_version()).set(1)
        self._requests = Timings(HTTP_SECONDS)
        self._live = Timings(LIVE_SECONDS)
        self._commit_times = Timings(COMMIT_SECONDS)

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, record: RequestRecord) -> None:
        """Count an ended request. Quick, and never raises."""
        method = record.method if record.method in METHODS else "other"
        self._requests.add((method, record.route or "none", str(record.status)), record.seconds)

    def on_live_call(self, call: LiveCall) -> None:
        """Count an ended live request."""
        self._live.add((call.model, str(call.status) if call.status else "none"), call.seconds)
        if call.usage is not None:
            tokens = call.usage.input_tokens, call.usage.cached_tokens, call.usage.output_tokens
            for kind, count in zip(("input", "cached", "output"), tokens, strict=True):
                self._live_tokens[call.project, call.model, kind] += count

    def on_job_ended(self, job: EndedJob) -> None:
        """Count an ended job."""
        self._ended[job.project, job.state] += 1

    def on_commits(self, commits: int, seconds: float) -> None:
        """Count the commits of one transaction, which took `seconds`."""
        self._commits += commits
        self._commit_times.add(("all",), seconds)

    # -- the page -----------------------------------------------------------------------------------------------------

    async def render(self, project: str | None = None) -> bytes:
        """Render the page in Prometheus' text format, version 0.0.4. `project`: leave out what other projects did."""
        self._ledger = await self._database.read(_read_ledger)
        self._events_waiting = await self._outbox.count_waiting()
        page = prometheus.generate_latest(self._registry)
        return page if project is None else _without_other_projects(page, project)

    def collect(self) -> Iterable[Family]:
        """The families whose values are kept outside of the registry."""
        tallies = self._dispatcher.tallies
        project, model = "project", "model"
        labels = ["method", "route", "status"]
        yield counter_family("http_requests", "HTTP requests that ended.", labels, self._requests.counts())
        help_text = "Seconds from a request's first byte to its reply's last one."
        yield self._requests.family("http_request_duration_seconds", help_text, labels[:2])
        labels = [model, "status"]
        help_text = "Live requests that ended; status none: without an answer."
        yield counter_family("live_requests", help_text, labels, self._live.counts())
        help_text = "Seconds until a live request was answered whole."
        yield self._live.family("live_request_duration_seconds", help_text, labels[:1])
        yield counter_family(
            "rows", "Rows of jobs whose outcome was counted.", [project, model, "result"], tallies.rows
        )
        yield counter_family(
            "tokens", "Tokens of these rows; kind input includes cached.", [project, model, "kind"], tallies.tokens
        )
        yield counter_family("row_errors", "Rows that failed, by cause.", [project, model, "code"], tallies.errors)
        yield counter_family(
            "reply_warnings", "Results whose reply has a flaw.", [project, model, "kind"], tallies.warnings
        )
        help_text = "Rows that took over the result of an earlier job."
        yield counter_family("rows_reused", help_text, [project, model], tallies.reused)
        yield counter_family(
            "live_tokens", "Tokens of live requests; kind input includes cached.", [project, model, "kind"],
            self._live_tokens,
        )  # fmt: skip
        yield counter_family("jobs_ended", "Jobs that ended.", [project, "state"], self._ended)
        spending = "Cost of rows with a committed outcome, in USD, of models with a price."
        yield counter_family("cost_usd", spending, [project, model], tallies.spending)
        yield from _ledger_families(self._ledger)
        yield counter_family("commits", "Commits of workers, including refused ones.", [], {(): self._commits})
        help_text = "Seconds of a transaction that writes commits; it may write many."
        yield self._commit_times.family("commit_duration_seconds", help_text, [])
        yield from _disk_families(self._data_dir)
        deliveries = {(result,): n for result, n in self._outbox.counts.items()}
        yield counter_family("webhook_deliveries", "Attempts to deliver an event, by result.", ["result"], deliveries)
        yield gauge_family(
            "webhook_events_waiting", "Events that are not delivered yet.", [], {(): self._events_waiting}
        )
        yield from models(self._dispatcher.gauges())
        yield from adapters(tallies.adapters.by_adapter)
        yield from functions(self.functions(), self.copies)


def _without_other_projects(page: bytes, project: str) -> bytes:
    """Drop the lines of other projects."""
    own = f'project="{project}"'.encode()  # a project's name needs no escapes
    lines = page.splitlines(keepends=True)
    return b"".join(line for line in lines if line.startswith(b"#") or own in line or not _is_of_one_project(line))


def _is_of_one_project(line: bytes) -> bool:
    """Whether a line is of one project alone. Adapters are too, but their lines lack the project: engines that serve
    several projects know only an adapter's name.
    """
    return b'project="' in line or line.startswith(ADAPTERS)


class _CollectorAdapter(Collector):
    """Adds the families of `Metrics.collect` to the registry."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        return self._metrics.collect()

    def describe(self) -> Iterable[Family]:
        return self._metrics.collect()


def models(gauges: Sequence[ModelGauge]) -> Iterable[Family]:
    """One family for each measure. A model whose code was edited has two pools for a while; they count as one."""
    for name, help_text, read in MODEL_GAUGES:
        sums: Counter[tuple[str, ...]] = Counter()
        for each in gauges:
            sums[each.name,] += read(each)
        yield gauge_family(name, help_text, ["model"], sums)
    for name, help_text, read in MODEL_RATIOS:
        values: dict[str, list[float]] = {}
        for each in gauges:
            if (ratio := read(each)) is not None:
                values.setdefault(each.name, []).append(ratio)
        yield gauge_family(
            name, help_text, ["model"], {(model,): sum(ratios) / len(ratios) for model, ratios in values.items()}
        )


class LedgerState(Struct, frozen=True):
    """What the database says of unfinished jobs, and its size."""

    jobs: Mapping[str, int] = {}  # by state
    oldest: Mapping[str, float] = {}  # state -> when its oldest job was created, seconds since the epoch
    paused: Mapping[str, int] = {}  # by reason
    provider_batches: int = 0
    size_bytes: int = 0
    owner_epoch: int | None = None  # None: a file has no other owners


def _read_ledger(db: sa.Connection) -> LedgerState:
    """Read the unfinished jobs, without reading ended jobs that are announced."""
    unfinished = (jobs.c.announced <= jobs.c.generation, jobs.c.state.not_in(ENDED))
    columns = (jobs.c.state, jobs.c.reason, sa.func.count(), sa.func.min(jobs.c.created))
    counts: Counter[str] = Counter()
    paused: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for state, reason, count, created in db.execute(
        sa.select(*columns).where(*unfinished).group_by(jobs.c.state, jobs.c.reason)
    ):
        counts[state] += count
        oldest[state] = min(created, oldest.get(state, created))
        if state == JobState.PAUSED:
            paused[reason or "none"] += count
    batches = _count_provider_batches(db, unfinished)
    if db.dialect.name == "sqlite":  # the size is without the write-ahead log
        pages = sa.text("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        return LedgerState(counts, oldest, paused, batches, db.execute(pages).scalar_one())
    size, epoch = db.execute(sa.text("SELECT pg_database_size(current_database()), epoch FROM owners")).one()
    return LedgerState(counts, oldest, paused, batches, size, epoch)


def _count_provider_batches(db: sa.Connection, unfinished: Sequence[sa.ColumnElement[bool]]) -> int:
    """Count the notes of shards with open rows. Only engines of providers write notes, one for each batch."""
    of_job = (jobs.c.id == notes.c.job) & (jobs.c.generation == notes.c.generation)
    of_shard = (shards.c.job == notes.c.job) & (shards.c.generation == notes.c.generation)
    joined = jobs.join(notes, of_job).join(shards, of_shard & (shards.c.shard == notes.c.shard))
    is_open = shards.c.done < shards.c.hi - shards.c.lo
    return db.execute(sa.select(sa.func.count()).select_from(joined).where(*unfinished, is_open)).scalar_one()


def _ledger_families(state: LedgerState) -> Iterable[Family]:
    yield gauge_family("jobs", "Jobs that have not ended.", ["state"], {(k,): n for k, n in state.jobs.items()})
    help_text = "When the oldest job of a state was created, in seconds since the epoch."
    oldest = {(k,): created for k, created in state.oldest.items()}
    yield gauge_family("oldest_job_created_timestamp_seconds", help_text, ["state"], oldest)
    help_text = "Paused jobs by reason."
    yield gauge_family("jobs_paused", help_text, ["reason"], {(k,): n for k, n in state.paused.items()})
    help_text = "Batches of unfinished jobs at providers, without results yet."
    yield gauge_family("provider_batches", help_text, [], {(): state.provider_batches})
    yield gauge_family("database_size_bytes", "Size of the database.", [], {(): state.size_bytes})
    epoch: dict[tuple[str, ...], float] = {} if state.owner_epoch is None else {(): state.owner_epoch}
    yield gauge_family("owner_epoch", "Owners that a PostgreSQL database has had, this one included.", [], epoch)


def _disk_families(data_dir: Path) -> Iterable[Family]:
    """Nothing where the data directory cannot be read: /health says so."""
    try:
        usage = shutil.disk_usage(data_dir)
    except OSError:
        return
    yield gauge_family("disk_size_bytes", "Size of the data directory's file system.", [], {(): usage.total})
    yield gauge_family("disk_free_bytes", "Free bytes of this file system.", [], {(): usage.free})


TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter"
_PROCESSOR = "opentelemetry.sdk.trace.export:BatchSpanProcessor"


def load_tracing(configured: str | None, environ: Mapping[str, str], clock: Clock) -> Tracing | None:
    """Set up tracing to the collector that the environment or `server.otlp_endpoint` names; None: no collector.

    Raises: InvalidConfig when a collector is named and the packages are missing.
    """
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not endpoint:
        base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or configured
        endpoint = base.rstrip("/") + TRACES_PATH if base else None
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOL
    )
    if protocol != PROTOCOL:
        raise InvalidConfig(
            f"traces are sent by {PROTOCOL}, not {protocol}: set OTEL_EXPORTER_OTLP_PROTOCOL={PROTOCOL}"
        )
    purpose = f"sending traces to {endpoint}"
    exporter = require(_EXPORTER, purpose)(endpoint=endpoint)
    processor = require(_PROCESSOR, purpose)(exporter)
    return require("batchmill.server.tracing:Tracing", purpose)(processor, clock)


TRACES_DRAIN_S = 5.0


class Observers:
    """Metrics, traces and webhook events of a server. Raises: InvalidConfig when tracing cannot be set up."""

    def __init__(
        self, services: Services, *, database: Database, jobs: Jobs, dispatcher: Dispatcher, environ: Mapping[str, str]
    ) -> None:
        self._services, self._dispatcher = services, dispatcher
        self._tracing = load_tracing(services.config.server.otlp_endpoint, environ, services.clock)
        self._outbox = Outbox(
            database, services.clock, webhooks=services.webhooks, jobs=jobs, files=services.files, on_ended=self._ended
        )
        self.metrics = Metrics(database, dispatcher, self._outbox, services.config.data_dir)
        self._running: asyncio.Task[None] | None = None

    def _ended(self, job: EndedJob) -> None:
        self.metrics.on_job_ended(job)
        if self._tracing is not None:
            self._tracing.on_job_ended(job)

    def open(self, root: HttpRoot) -> ASGIApp:
        """Start observing. Return the application to serve instead of `root`."""
        root.watch(self.metrics.on_request)
        self._dispatcher.listen(self.metrics.on_commits)
        self._services.live.listen(self.metrics.on_live_call)
        self._services.functions.listen(self.metrics.on_live_call)
        self.metrics.functions, self.metrics.copies = self._version_stats, self._services.functions.copied
        self._running = asyncio.create_task(self._outbox.run())
        if self._tracing is None:
            return root
        root.watch(self._tracing.on_request)
        self._services.live.listen(self._tracing.on_live_call)
        self._services.functions.listen(self._tracing.on_live_call)
        return self._tracing.wrap(root)

    def _version_stats(self) -> Iterable[VersionStats]:
        read = self._services.functions.stats
        for each in self._services.versions.callable():
            yield VersionStats(
                each.name, f"{each.branch}/{each.number}", read(each.name, str(each.number), each.branch)
            )

    async def close(self) -> None:
        """Cancel deliveries under way, which are repeated after the next start. Send the remaining traces."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._services.webhooks.close()
        if self._tracing is not None:
            # A collector that does not answer delays the end of this process by TRACES_DRAIN_S at most.
            sending = threading.Thread(target=self._tracing.close, name="last-traces", daemon=True)
            sending.start()
            await asyncio.to_thread(sending.join, TRACES_DRAIN_S)
