"""Jobs that ended, an outbox over them, and endpoints of a receiver in this process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.job_service import job_service
from fakes.scripted_workers import ScriptedExecutor

from batchmill.config import Config, ServerEntry, WebhookEntry
from batchmill.services.files.files import FileService
from batchmill.services.secrets.box import SecretBox
from batchmill.services.webhooks.endpoints import WebhookService
from batchmill.services.webhooks.outbox import Outbox
from batchmill.states import JobState
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

FILE_SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
ALL = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]


class StridingClock(HeldClock):
    """A held clock that may pass more time than is slept."""

    stride = 0.0

    async def sleep(self, seconds: float) -> None:
        await super().sleep(max(seconds, self.stride))


class EndedJobs:
    """A data directory whose jobs end when a test says so. Use it as an async context manager."""

    def __init__(
        self, folder: Path, *, webhooks: list[WebhookEntry] | None = None, hosts: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.clock = folder, StridingClock()
        self.config = Config(
            folder, folder, server=ServerEntry(private_hosts=["127.0.0.1", *hosts]), webhooks=webhooks or []
        )

    async def __aenter__(self) -> EndedJobs:
        self.ledger = open_ledger(self.folder / "batchmill.db")
        self.database = self.ledger.database
        self.jobs = job_service(self.folder, self.ledger, ScriptedExecutor(), self.clock)
        self.files = FileService(self.database, self.folder, self.clock, self.config.server)
        self.webhooks = WebhookService(self.database, self.clock, self.config, SecretBox(self.config.secrets_key))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.webhooks.close()
        await self.jobs.close()
        self.files.close()

    def outbox(self, **fields: Any) -> Outbox:
        return Outbox(self.database, self.clock, webhooks=self.webhooks, jobs=self.jobs, files=self.files, **fields)

    @asynccontextmanager
    async def running(self, **fields: Any) -> AsyncIterator[Outbox]:
        outbox = self.outbox(**fields)
        task = asyncio.create_task(outbox.run())
        try:
            yield outbox
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def end(
        self,
        number: int,
        *,
        state: JobState = JobState.CANCELLED,
        project: str = "default",
        frontend: str | None = "openai",
        **origin: Any,
    ) -> str:
        """A job that has come to rest; its id."""
        job_id = f"job_{number:020x}"
        spec = JobSpec(
            id=job_id, dataset=DatasetSpec([str(self.folder / "in.jsonl")]), models=[ModelSpec("m", "function", "a:f")],
            form=OpenAIForm(), policy=Policy(), output=None, identity=job_id, code={}, created=self.clock.now(),
            project=project, origin=None if frontend is None else {"frontend": frontend, **origin},
        )  # fmt: skip
        await self.database.call(self.ledger.create, spec)
        await self.database.call(self.ledger.note, job_id, project=project)
        await self.database.call(self.ledger.move, job_id, state, finished=self.clock.now())
        return job_id

    async def register(self, url: str, *, project: str = "default", events: list[str] = ALL) -> str:
        made, _ = await self.webhooks.create(project, name="test", url=url, event_types=events)
        return made.id
