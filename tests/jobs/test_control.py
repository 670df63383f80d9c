"""The control socket: what a guest gets is what the owner has."""

from __future__ import annotations

import pytest

from batchmill.engines.clock import SystemClock
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import control
from batchmill.jobs.control import ControlClient, ControlServer
from batchmill.jobs.ledger import open_ledger
from batchmill.jobs.service import JobService
from batchmill.types import DatasetSpec, JobQuery, Policy
from batchmill.wire.forms import OpenAIForm
from batchmill.wire.job_spec import JobSpec


@pytest.mark.parametrize(("limit", "wanted"), [(None, 7), (1, 1), (3, 3), (5, 5), (100, 7)])
async def test_a_long_list_comes_in_pages(tmp_path, monkeypatch, limit, wanted):
    """However many jobs there are, a guest gets all it asked for, in the owner's order, no page larger than it may."""
    monkeypatch.setattr(control, "PAGE_JOBS", 3)
    ledger = open_ledger(tmp_path / "batchmill.db")
    for n in range(7):
        ledger.create(_spec(n))
    service = JobService(tmp_path, ledger, LocalExecutor(tmp_path / "workers"), SystemClock())
    server = ControlServer(service, tmp_path / "control.sock")
    await server.open()
    try:
        query = JobQuery(limit=limit)
        found = await ControlClient(tmp_path / "control.sock").list(query)
        assert [view.id for view in found] == [view.id for view in await service.list(query)]
        assert [view.id for view in found] == [f"job_{n}" for n in range(6, 6 - wanted, -1)]
    finally:
        await server.close()
        await service.close()


def _spec(n: int) -> JobSpec:
    return JobSpec(
        id=f"job_{n}", dataset=DatasetSpec(["/x"]), models=[], form=OpenAIForm(), policy=Policy(), output=None,
        identity="i", code={}, created=float(n),
    )  # fmt: skip
