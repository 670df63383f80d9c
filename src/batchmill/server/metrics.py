"""What /metrics says, for Prometheus: counters of this process, and what its models, jobs and webhooks do now.

Labels are names an operator chose, codes and routes: never ids, rows or what somebody wrote.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import prometheus_client as prometheus
import sqlalchemy as sa
from prometheus_client.registry import Collector

import batchmill
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.jobs.tallies import ModelGauge
from batchmill.server.access_log import Served
from batchmill.server.function_metrics import Counted, functions
from batchmill.server.metric_families import (
    ADAPTERS,
    MODEL_GAUGES,
    MODEL_RATIOS,
    Family,
    Timings,
    adapters,
    counted,
    measured,
)
from batchmill.services.events import Ended
from batchmill.services.live_calls import LiveCall
from batchmill.services.outbox import Outbox
from batchmill.states import ENDED
from batchmill.store.database import Database
from batchmill.store.tables import jobs

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
        told = {"registry": self._registry, "namespace": "batchmill"}
        info = prometheus.Gauge("build_info", "Which batchmill runs; always 1.", ["version", "python"], **told)
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
            told = call.usage.input_tokens, call.usage.cached_tokens, call.usage.output_tokens
            for kind, tokens in zip(("input", "cached", "output"), told, strict=True):
                self._live_tokens[call.project, call.model, kind] += tokens

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
        told = "Seconds from a request's first byte to its reply's last one."
        yield self._requests.family("http_request_duration_seconds", told, labels[:2])
        labels = [model, "status"]
        told = "Live requests that ended; status none: without an answer."
        yield counted("live_requests", told, labels, self._live.counts())
        told = "Seconds until a live request was answered whole."
        yield self._live.family("live_request_duration_seconds", told, labels[:1])
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
    for name, told, read in MODEL_GAUGES:
        sums: Counter[tuple[str, ...]] = Counter()
        for each in gauges:
            sums[each.name,] += read(each)
        yield measured(name, told, ["model"], sums)
    for name, told, read in MODEL_RATIOS:
        values: dict[str, list[float]] = {}
        for each in gauges:
            if (ratio := read(each)) is not None:
                values.setdefault(each.name, []).append(ratio)
        yield measured(name, told, ["model"], {(model,): sum(found) / len(found) for model, found in values.items()})


def _count_jobs(db: sa.Connection) -> dict[str, int]:
    """Jobs by their state, found without reading those whose end was made known."""
    known = (jobs.c.announced <= jobs.c.generation, jobs.c.state.not_in(ENDED))
    return dict(db.execute(sa.select(jobs.c.state, sa.func.count()).where(*known).group_by(jobs.c.state)).all())
