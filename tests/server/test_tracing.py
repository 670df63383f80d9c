"""Spans of requests, live calls and jobs; and nothing of the kind where nobody wants them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.held_clock import HeldClock
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from batchmill.errors import InvalidConfig
from batchmill.server.access_log import RequestRecord
from batchmill.server.metrics import load_tracing
from batchmill.server.tracing import NANOS, Tracing
from batchmill.services.live_calls import LiveCall
from batchmill.services.trace_context import traceparent
from batchmill.services.webhooks.endpoints import EndedJob
from batchmill.types import Usage

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    made = Tracing(SimpleSpanProcessor(exporter), HeldClock())
    yield made
    made.close()


class Root:
    """Stands where the HTTP root stands: answers a request and tells those who watch."""

    def __init__(self, tracing: Tracing, served: RequestRecord, call: LiveCall | None = None) -> None:
        self._tracing, self._served, self._call = tracing, served, call
        self.seen: str | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen = traceparent.get()
        if self._call is not None:
            self._tracing.on_live_call(self._call)
        self._tracing.on_request(self._served)


async def ask(tracing: Tracing, root: Root, path: str = "/v1/files", *headers: tuple[bytes, bytes]) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await tracing.wrap(root)(scope, None, None)


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_goes_on_with_its_callers_trace(tracing: Tracing, exporter: InMemorySpanExporter):
    """A request's span has the caller's trace and parent, the route as its name, and no word of the path itself."""
    root = Root(
        tracing, RequestRecord("req_1", "POST", "/v1/files/{file_id}", 404, project="p", key="k", code="unknown_file")
    )
    await ask(tracing, root, "/v1/files/secret-id", (b"traceparent", SENT.encode()))
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/files/{file_id}"
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.attributes == {
        "http.request.method": "POST", "http.route": "/v1/files/{file_id}", "http.response.status_code": 404,
        "batchmill.request.id": "req_1", "batchmill.project": "p", "error.type": "unknown_file",
    }  # fmt: skip
    assert root.seen == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert traceparent.get() is None


@pytest.mark.parametrize("sent", ["", "00-zz-11-01", f"ff-{TRACE}-{PARENT}-01", "x" * 10_000])
async def test_a_trace_that_cannot_be_read_is_none(tracing: Tracing, exporter: InMemorySpanExporter, sent: str):
    """A malformed traceparent begins a new trace."""
    await ask(tracing, Root(tracing, RequestRecord("r", "POST", "/x", 200)), "/x", (b"traceparent", sent.encode()))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and f"{span.context.trace_id:032x}" != TRACE


async def test_a_live_call_is_inside_its_request(tracing: Tracing, exporter: InMemorySpanExporter):
    """A live call has a span of its own below its request's, with its model and tokens."""
    call = LiveCall("m", "/v1/chat/completions", 200, 2.0, "p", Usage(5, 2, 3))
    await ask(tracing, Root(tracing, RequestRecord("r", "POST", "/v1/chat/completions", 200), call))
    found = spans(exporter)
    live, request = found["live m"], found["POST /v1/chat/completions"]
    assert live.parent is not None and live.parent.span_id == request.context.span_id
    assert live.end_time - live.start_time == 2 * NANOS
    assert live.attributes["gen_ai.request.model"] == "m"
    assert (live.attributes["gen_ai.usage.input_tokens"], live.attributes["gen_ai.usage.output_tokens"]) == (5, 3)


async def test_what_fails_is_marked(tracing: Tracing, exporter: InMemorySpanExporter):
    """A 5xx and a live call without an answer are errors, a 4xx is not."""
    call = LiveCall("m", "/v1/chat/completions", 0, 1.0, "p", error="model_failed")
    await ask(tracing, Root(tracing, RequestRecord("r", "POST", "/a", 503, code="unavailable"), call))
    await ask(tracing, Root(tracing, RequestRecord("r", "POST", "/b", 400)))
    found = spans(exporter)
    assert found["live m"].status.status_code is StatusCode.ERROR
    assert found["POST /a"].status.status_code is StatusCode.ERROR
    assert found["POST /b"].status.status_code is StatusCode.UNSET


def test_a_job_is_linked_to_its_request(tracing: Tracing, exporter: InMemorySpanExporter):
    """A job's span is a trace of its own, from its creation to its end, linked to the request that submitted it."""
    tracing.on_job_ended(EndedJob("job_1", 1, "failed", 100.0, 160.0, "p", "openai", SENT))
    tracing.on_job_ended(EndedJob("job_2", 0, "completed", 100.0, 160.0, "p", None, "nonsense"))
    first, second = exporter.get_finished_spans()
    (link,) = first.links
    assert f"{link.context.trace_id:032x}" == TRACE != f"{first.context.trace_id:032x}"
    assert (first.start_time, first.end_time, first.parent) == (100 * NANOS, 160 * NANOS, None)
    assert first.attributes["batchmill.job.id"] == "job_1" and first.status.status_code is StatusCode.ERROR
    assert list(second.links) == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_what_machines_ask_all_the_time_is_not_traced(
    tracing: Tracing, exporter: InMemorySpanExporter, path: str
):
    """Health and metrics make no spans."""
    await ask(tracing, Root(tracing, RequestRecord("r", "GET", path, 200)), path)
    assert exporter.get_finished_spans() == ()


def test_nobody_who_wants_no_traces_loads_opentelemetry():
    """Without a collector there is no tracing, and the packages are not even imported."""
    assert load_tracing(None, {}, HeldClock()) is None
    assert load_tracing("http://127.0.0.1:1", {"OTEL_SDK_DISABLED": "true"}, HeldClock()) is None
    code = "import sys, batchmill.serving; assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("environ", [{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, {}])
def test_missing_packages_are_told_at_start(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]):
    """A collector that is named while the packages are missing stops the start, with the command that mends it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'batchmill\[otel\]'"):
        load_tracing("http://127.0.0.1:1", environ, HeldClock())


def test_a_protocol_nobody_speaks_is_refused():
    """Traces are not sent by gRPC, and the message says so."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(InvalidConfig, match="http/protobuf"):
        load_tracing(None, environ, HeldClock())
