"""Job services on a folder: the fixture `folder` of a test's module says which."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.intake.adapters import NoAdapters
from batchmill.jobs.service import JobService
from batchmill.ports.clock import Clock
from batchmill.ports.jobs import Adapters
from batchmill.types import ProjectQuotas


@pytest.fixture
async def opened(folder: Path) -> AsyncIterator[Callable[..., Awaitable[JobService]]]:
    """Opens the service of `folder / "data"`, as an owner does; those that are open at the end are closed."""
    services = []

    async def open_service(
        *,
        serving: bool = False,
        clock: Clock = SystemClock(),
        quotas: ProjectQuotas = ProjectQuotas(),
        adapters: Adapters = NoAdapters(),
    ) -> JobService:
        data_dir = folder / "data"
        data_dir.mkdir(exist_ok=True)
        executor = LocalExecutor(data_dir / "workers")
        executor.sweep()
        ledger = open_ledger(data_dir / "batchmill.db")
        service = job_service(data_dir, ledger, executor, clock, quotas=quotas, adapters=adapters)
        await service.recover(resume_server_jobs=serving)
        services.append(service)
        return service

    yield open_service
    for service in services:
        await service.close(at_once=True)
