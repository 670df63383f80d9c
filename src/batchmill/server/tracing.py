"""OpenTelemetry: spans of requests, live calls and jobs. Imported only where traces are wanted.

A request goes on with the caller's trace (W3C traceparent). A job outlives the request that submitted it: its span
stands alone and is linked to it. No rows, prompts, keys or query values in attributes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import batchmill
from batchmill.ports import Clock
from batchmill.server.access_log import Served
from batchmill.server.metrics import Application
from batchmill.services.live_calls import LiveCall
from batchmill.services.trace_context import traceparent
from batchmill.services.webhooks import Ended

NANOS = 1_000_000_000
UNTRACED = frozenset({"/health", "/metrics"})  # asked every few seconds, by machines
SERVICE = "batchmill"

Scope = MutableMapping[str, Any]


class Tracing:
    """`served`, `live` and `ended` are told of what happens; `around` begins the span of a request."""

    def __init__(self, processor: SpanProcessor, clock: Clock) -> None:
        resource = Resource.create({SERVICE_VERSION: batchmill.__version__})
        if resource.attributes.get(SERVICE_NAME, "").startswith("unknown_service"):  # OTEL_SERVICE_NAME says nothing
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("batchmill", batchmill.__version__)
        self._w3c = TraceContextTextMapPropagator()
        self._clock = clock

    def around(self, app: Application) -> Application:
        """The same ASGI application with a span around each request."""

        async def traced(scope: Scope, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] in UNTRACED:
                await app(scope, receive, send)
                return
            parent = self._w3c.extract(_trace_headers(scope))
            with self._tracer.start_as_current_span(
                scope["method"][:16], parent, kind=SpanKind.SERVER, record_exception=False
            ) as span:
                token = traceparent.set(self._written(span.get_span_context()))
                try:
                    await app(scope, receive, send)
                finally:
                    traceparent.reset(token)

        return traced

    @staticmethod
    def _written(context: SpanContext) -> str:
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def served(self, served: Served) -> None:
        """A request has ended: what its span is called, and what came of it."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        if served.route:
            span.update_name(f"{served.method[:16]} {served.route}")
        fields = {
            "http.request.method": served.method[:16], "http.route": served.route or None,
            "http.response.status_code": served.status, "batchmill.request.id": served.id,
            "batchmill.project": served.project, "error.type": served.code,
        }  # fmt: skip
        span.set_attributes({name: value for name, value in fields.items() if value is not None})
        if served.status >= 500:
            span.set_status(StatusCode.ERROR, served.code)

    def live(self, call: LiveCall) -> None:
        """A live request has ended: a span inside of its HTTP request's."""
        end = self._clock.now()
        fields = {
            "gen_ai.operation.name": call.url, "gen_ai.request.model": call.model, "batchmill.project": call.project,
            "http.response.status_code": call.status or None, "error.type": call.error,
        }  # fmt: skip
        if call.usage is not None:
            fields["gen_ai.usage.input_tokens"] = call.usage.input_tokens
            fields["gen_ai.usage.output_tokens"] = call.usage.output_tokens
        span = self._tracer.start_span(
            f"live {call.model}", kind=SpanKind.CLIENT, start_time=_nanos(end - call.seconds), attributes=_given(fields)
        )
        if call.error is not None:
            span.set_status(StatusCode.ERROR, call.error)
        span.end(_nanos(end))

    def ended(self, ended: Ended) -> None:
        """A job has come to rest: a trace of its own, linked to the request that submitted it."""
        context = None
        if ended.traceparent is not None:
            found = self._w3c.extract({"traceparent": ended.traceparent})
            context = trace.get_current_span(found).get_span_context()
        fields = {
            "batchmill.job.id": ended.job, "batchmill.job.state": ended.state, "batchmill.project": ended.project,
            "batchmill.job.generation": ended.generation, "batchmill.job.frontend": ended.frontend,
        }  # fmt: skip
        span = self._tracer.start_span(
            "job", trace.set_span_in_context(trace.INVALID_SPAN), kind=SpanKind.INTERNAL,
            links=[Link(context)] if context is not None and context.is_valid else [],
            start_time=_nanos(ended.created), attributes=_given(fields),
        )  # fmt: skip
        if ended.state == "failed":
            span.set_status(StatusCode.ERROR)
        span.end(_nanos(ended.finished))

    def close(self) -> None:
        """Send what is left, for as long as the exporter allows. It blocks."""
        self._provider.shutdown()


def _trace_headers(scope: Scope) -> dict[str, str]:
    wanted = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _nanos(seconds: float) -> int:
    return int(seconds * NANOS)
