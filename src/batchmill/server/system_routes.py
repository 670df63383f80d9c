"""Operations outside of all dialects: /health, /ready, /openapi.json and /metrics."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from starlette.responses import Response

import batchmill
from batchmill.errors import BatchmillError
from batchmill.jobs.pools.tallies import ModelGauge
from batchmill.jobs.service import JobService
from batchmill.ports.clock import Clock
from batchmill.server.auth import Gate
from batchmill.server.metrics import CONTENT_TYPE
from batchmill.server.operations import Call, Content, Operation, json_reply
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import schema
from batchmill.types import Caller, Scope

FRESH_S = 1.0  # a health report is reused for this long: a check costs a commit, and the route needs no key
ANSWER_S = 5.0
ROOM_BYTES_MIN = 64 * 1024 * 1024
FAILED = "its engine failed; see the model's events, or the jobs that wait for it"
WAITS = "it waits for room on the machine; see the jobs that wait for it"


class Component(Struct, frozen=True):
    """One component that the server depends on. `note` says what is wrong, or what it is doing."""

    name: str
    ok: bool
    note: str = ""


class Report(Struct, frozen=True):
    """The health report. A client without a key gets only `status`."""

    status: str  # ok, failing, stopping
    version: str | UnsetType = UNSET
    parts: list[Component] | UnsetType = UNSET
    models: list[Component] | UnsetType = UNSET  # models with workers that the caller may see


class Health:
    def __init__(
        self, database: Database, data_dir: Path, clock: Clock, jobs: JobService, stopping: asyncio.Event
    ) -> None:
        self._database, self._data_dir, self._clock, self._jobs = database, data_dir, clock, jobs
        self._stopping = stopping
        self._check_lock = asyncio.Lock()
        self._report: tuple[float, Report] | None = None

    async def report(self) -> Report:
        async with self._check_lock:
            now = self._clock.monotonic()
            if self._report is None or now - self._report[0] >= FRESH_S:
                self._report = (now, await self._check())
        report = self._report[1]
        return replace(report, status="stopping") if self._stopping.is_set() else report

    async def _check(self) -> Report:
        parts = [await self._check_database(), self._check_disk(), *self._check_jobs()]
        is_ok = all(part.ok for part in parts)
        return Report("ok" if is_ok else "failing", batchmill.__version__, parts, self._check_models())

    async def _check_database(self) -> Component:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._database.write(_touch)
        except BatchmillError as error:
            return Component(
                "database", False, "the disk is full" if error.code == "storage_full" else "it cannot be written"
            )
        except TimeoutError:
            return Component("database", False, f"a commit takes longer than {ANSWER_S:.0f} s")
        return Component("database", True)

    def _check_disk(self) -> Component:
        try:
            free = shutil.disk_usage(self._data_dir).free
        except OSError:
            return Component("disk", False, "the data directory cannot be read")
        return Component("disk", free >= ROOM_BYTES_MIN, f"{free // 2**20:,} MiB are free")

    def _check_jobs(self) -> list[Component]:
        """The dispatcher, which gives out rows, and the ledger, which counts them."""
        alive, counts = self._jobs.dispatcher.dispatching.is_alive, self._jobs.counts
        return [
            Component("dispatcher", alive, "" if alive else "it has failed: the server ends"),
            Component("ledger", counts, "" if counts else "it has failed, and counts no more commits: the server ends"),
        ]

    def _check_models(self) -> list[Component]:
        """The models with workers. A failed model does not make the server unhealthy."""
        return [
            Component(each.name, not each.failure, FAILED if each.failure else each.note or _worker_note(each))
            for each in self._jobs.dispatcher.gauges()
        ]


def _worker_note(model: ModelGauge) -> str:
    if model.waits and not model.ready:
        return WAITS
    return f"{model.ready} of {model.workers} workers are ready"


def _touch(db: sa.Connection) -> Any:
    """Commit a change of nothing; SQLite still writes the page."""
    return db.execute(schema.update().values(version=schema.c.version)).rowcount


DOCUMENT = Content("application/json", {"type": "object", "required": ["openapi", "paths"]})
METRICS = "text/plain"


class SystemRoutes:
    def __init__(
        self,
        health: Health,
        gate: Gate,
        render: Callable[[str | None], Awaitable[bytes]],
        sees: Callable[[Caller, str], bool],
        document: Callable[[], dict[str, object]],
    ) -> None:
        """Args:
        render: makes the text of /metrics.
        sees: whether a caller may see the model of a name.
        document: makes the OpenAPI document; called after all operations are mounted.
        """
        self._health, self._gate, self._render, self._sees = health, gate, render, sees
        self._document = document
        self._encoded = b""

    def operations(self) -> Sequence[Operation]:
        text = Content(METRICS, {"type": "string"})
        return [
            Operation(
                "getHealth", "GET", "/health", "Say whether the server can take work", None, self.health,
                reply=Report, also={503: Report}, is_vital=True,
            ),
            Operation(
                "getReady", "GET", "/ready", "Say whether to send requests here", None, self.health,
                reply=Report, also={503: Report}, is_vital=True,
            ),
            Operation(
                "getOpenApi", "GET", "/openapi.json", "Describe every operation", None, self.openapi, reply=DOCUMENT
            ),
            Operation(
                "getMetrics", "GET", "/metrics", "Count and measure, for Prometheus", Scope.READ, self.metrics,
                reply=text,
            ),
        ]  # fmt: skip

    async def health(self, call: Call) -> Response:
        report = await self._health.report()
        scope = call.request.scope
        caller = await self._gate.identify(scope["headers"], (scope.get("client") or ("",))[0])
        if caller is None:  # without a key: only whether the server takes work
            return json_reply(Report(report.status), 200 if report.status == "ok" else 503)
        report = replace(report, models=[each for each in report.models or () if self._shows(caller, each.name)])
        return json_reply(report, 200 if report.status == "ok" else 503)

    def _shows(self, caller: Caller, name: str) -> bool:
        """Whether to show a model. As for /metrics, a key with the admin scope sees the models of all projects."""
        return caller.may(Scope.ADMIN) or self._sees(caller, name)

    async def openapi(self, call: Call) -> Response:
        if not self._encoded:
            self._encoded = msgspec.json.encode(self._document())
        return Response(self._encoded, media_type="application/json")

    async def metrics(self, call: Call) -> Response:
        """A key without the admin scope gets only its own project's lines, besides those of the whole server."""
        caller = call.caller
        page = await self._render(None if caller.may(Scope.ADMIN) else caller.project)
        return Response(page, headers={"content-type": CONTENT_TYPE})
