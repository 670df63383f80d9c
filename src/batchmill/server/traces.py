"""Whether traces are wanted, and what makes them: the name table of what needs OpenTelemetry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchmill.errors import InvalidConfig
from batchmill.ports import Clock

if TYPE_CHECKING:
    from batchmill.server.tracing import Tracing

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_PROCESSOR = "opentelemetry.sdk.trace.export"


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
    try:
        exporter = import_module(_EXPORTER).OTLPSpanExporter(endpoint=endpoint)
        processor = import_module(_PROCESSOR).BatchSpanProcessor(exporter)
        tracing = import_module("batchmill.server.tracing")
    except ImportError as error:
        raise InvalidConfig(
            f"traces are to be sent to {endpoint}, but {error.name} is not installed: pip install 'batchmill[otel]'"
        ) from None
    return tracing.Tracing(processor, clock)
