"""The request that is being answered, for whoever stores something that outlives it. Knows nothing of tracing."""

from __future__ import annotations

from contextvars import ContextVar

# W3C `traceparent` of the request that is being answered; None where nobody traces.
traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
# Its id, as the reply's x-request-id has it; empty where nobody asked.
request_id: ContextVar[str] = ContextVar("request_id", default="")
