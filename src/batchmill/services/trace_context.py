"""The current request's ids, for code that stores something that outlives the request. Knows nothing of tracing."""

from __future__ import annotations

from contextvars import ContextVar

# W3C `traceparent` of the current request; None without tracing.
traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
# The request's id, as in the reply's x-request-id header; empty outside a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")
