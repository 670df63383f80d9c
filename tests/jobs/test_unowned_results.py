"""Results of an owner that cannot know whether it still owns the database."""

from __future__ import annotations

import json

import pytest

from batchmill.jobs import runner
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

ROWS = 20


@pytest.fixture
def folder(tmp_path):
    rows = [{"custom_id": f"r{n}", "url": "/v1/x", "body": {"n": n}} for n in range(ROWS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    return tmp_path


async def test_an_owner_that_is_cut_off_publishes_nothing(folder, opened, monkeypatch):
    """Another process may have taken the database over: the job pauses with every row done, and is finished by whoever
    owns the database.
    """
    service = await opened()
    database, owned_s = service._commit_log.ledger.database, service._commit_log.ledger.database.owned_s

    def cut_off(point: str) -> None:
        if point == "before_publish":
            monkeypatch.setattr(database, "owned_s", lambda: -1.0)

    monkeypatch.setattr(runner.faults, "point", cut_off)
    model = ModelSpec("double", "function", f"{folder / 'app.py'}:double")
    order = JobOrder(DatasetSpec([str(folder / "in.jsonl")]), [model], output=str(folder / "out.jsonl"))
    job = (await service.submit(order)).id
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.reason, view.rows_ok) == ("paused", "database_unavailable", ROWS)
    assert not (folder / "out.jsonl").exists()
    monkeypatch.setattr(runner.faults, "point", lambda _: None)
    monkeypatch.setattr(database, "owned_s", owned_s)
    await service.resume(job)
    view = [view async for view in service.watch(job, 0.05)][-1]
    assert (view.state, view.rows_ok) == ("completed", ROWS)
    assert len((folder / "out.jsonl").read_text().splitlines()) == ROWS
