"""The trace that a request belongs to, for whoever stores something that outlives it. Knows nothing of tracing."""

from __future__ import annotations

from contextvars import ContextVar

# W3C `traceparent` of the request that is being answered; None where nobody traces.
traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
