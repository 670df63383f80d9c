"""Metrics, traces, and the outbox that sends events to webhook endpoints. No request waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchmill.errors import InvalidConfig
from batchmill.jobs.dispatcher import Dispatcher
from batchmill.ports import Clock, Jobs
from batchmill.server.http import HttpRoot
from batchmill.server.metrics import Counted, Metrics
from batchmill.services.events import Ended
from batchmill.services.outbox import Outbox
from batchmill.services.services import Services
from batchmill.store.database import Database

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


TRACES_DRAIN_S = 5.0


class Observers:
    """Raises: InvalidConfig when traces are wanted and cannot be made."""

    def __init__(
        self, services: Services, *, database: Database, jobs: Jobs, dispatcher: Dispatcher, environ: Mapping[str, str]
    ) -> None:
        self._services = services
        self._tracing = load_tracing(services.config.server.otlp_endpoint, environ, services.clock)
        self._outbox = Outbox(
            database, services.clock, webhooks=services.webhooks, jobs=jobs, files=services.files, heard=self._ended
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
