"""OpenTelemetry: spans of requests, live calls and jobs. Imported only if tracing is configured.

A request continues the caller's trace (W3C traceparent). A job outlives the request that submitted it: its span has a
trace of its own with a link to the request. Attributes hold no rows, prompts, keys or query values.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp

import batchmill
from batchmill.ports.clock import Clock
from batchmill.server.access_log import RequestRecord
from batchmill.services.live_calls import LiveCall
from batchmill.services.trace_context import traceparent
from batchmill.services.webhooks.endpoints import EndedJob

NANOS = 1_000_000_000
UNTRACED = frozenset({"/health", "/ready", "/metrics"})  # monitoring polls them every few seconds
SERVICE = "batchmill"

Scope = MutableMapping[str, Any]


class Tracing:
    """Makes spans: `wrap` begins the span of a request, and the `on_` methods record events."""

    def __init__(self, processor: SpanProcessor, clock: Clock) -> None:
        resource = Resource.create({SERVICE_VERSION: batchmill.__version__})
        if resource.attributes.get(SERVICE_NAME, "").startswith("unknown_service"):  # OTEL_SERVICE_NAME is unset
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("batchmill", batchmill.__version__)
        self._w3c = TraceContextTextMapPropagator()
        self._clock = clock

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Wrap an ASGI application in a span for each request."""

        async def with_span(scope: Scope, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] in UNTRACED:
                await app(scope, receive, send)
                return
            parent = self._w3c.extract(_trace_headers(scope))
            with self._tracer.start_as_current_span(
                scope["method"][:16], parent, kind=SpanKind.SERVER, record_exception=False
            ) as span:
                token = traceparent.set(self._format_traceparent(span.get_span_context()))
                try:
                    await app(scope, receive, send)
                finally:
                    traceparent.reset(token)

        return with_span

    @staticmethod
    def _format_traceparent(context: SpanContext) -> str:
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def on_request(self, record: RequestRecord) -> None:
        """Name the span of an ended request, and set its attributes."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        if record.route:
            span.update_name(f"{record.method[:16]} {record.route}")
        fields = {
            "http.request.method": record.method[:16], "http.route": record.route or None,
            "http.response.status_code": record.status, "batchmill.request.id": record.id,
            "batchmill.project": record.project, "error.type": record.code,
        }  # fmt: skip
        span.set_attributes({name: value for name, value in fields.items() if value is not None})
        if record.status >= 500:
            span.set_status(StatusCode.ERROR, record.code)

    def on_live_call(self, call: LiveCall) -> None:
        """Add the span of an ended live request, inside the span of its HTTP request."""
        end = self._clock.now()
        fields = {
            "gen_ai.operation.name": call.url, "gen_ai.request.model": call.model, "batchmill.project": call.project,
            "http.response.status_code": call.status or None, "error.type": call.error,
        }  # fmt: skip
        if call.usage is not None:
            fields["gen_ai.usage.input_tokens"] = call.usage.input_tokens
            fields["gen_ai.usage.output_tokens"] = call.usage.output_tokens
        span = self._tracer.start_span(
            f"live {call.model}",
            kind=SpanKind.CLIENT,
            start_time=_nanos(end - call.seconds),
            attributes=_without_none(fields),
        )
        if call.error is not None:
            span.set_status(StatusCode.ERROR, call.error)
        span.end(_nanos(end))

    def on_job_ended(self, job: EndedJob) -> None:
        """Add the trace of an ended job, linked to the request that submitted it."""
        context = None
        if job.traceparent is not None:
            parent = self._w3c.extract({"traceparent": job.traceparent})
            context = trace.get_current_span(parent).get_span_context()
        fields = {
            "batchmill.job.id": job.job, "batchmill.job.state": job.state, "batchmill.project": job.project,
            "batchmill.job.generation": job.generation, "batchmill.job.frontend": job.frontend,
        }  # fmt: skip
        span = self._tracer.start_span(
            "job", trace.set_span_in_context(trace.INVALID_SPAN), kind=SpanKind.INTERNAL,
            links=[Link(context)] if context is not None and context.is_valid else [],
            start_time=_nanos(job.created), attributes=_without_none(fields),
        )  # fmt: skip
        if job.state == "failed":
            span.set_status(StatusCode.ERROR)
        span.end(_nanos(job.finished))

    def close(self) -> None:
        """Send the remaining spans, within the exporter's timeout. It blocks."""
        self._provider.shutdown()


def _trace_headers(scope: Scope) -> dict[str, str]:
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _nanos(seconds: float) -> int:
    return int(seconds * NANOS)
