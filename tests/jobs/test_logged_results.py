"""Results of short jobs that the database makes durable: what their log may not do to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import open_ledger
from fakes.job_service import job_service

from batchmill.engines.clock import SystemClock
from batchmill.errors import StorageFull
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.finishing import Finish
from batchmill.jobs.ledger import packed
from batchmill.jobs.pools.job_run import JobRun
from batchmill.jobs.service import JobService
from batchmill.store.file_log import FileLog
from batchmill.store.sql.tables import logged_files
from batchmill.types import DatasetSpec, JobOrder, JobView, ModelSpec

CODE = """
import os
def fragile(n):
    if os.path.exists(os.environ["BROKEN"]) and n % 2:
        raise ValueError(f"no {n}")
    return n
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "app.py").write_text(CODE)
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    return tmp_path


@pytest.fixture
async def logged(folder):
    """A job service, and its log, which syncs nothing by itself."""
    data = folder / "data"
    ledger = open_ledger(data / "batchmill.db")
    log = FileLog(ledger.database, data)
    service = job_service(data, ledger, LocalExecutor(data / "workers"), SystemClock(), log=log)
    await service.recover(resume_server_jobs=False)
    yield service, log, ledger.database
    await service.close(at_once=True)


async def submit(service: JobService, folder: Path, rows: int) -> str:
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": "m", "n": n}} for n in range(rows)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = ModelSpec("m", "function", f"{folder / 'app.py'}:fragile", allowed=["m"])
    dataset = DatasetSpec([str(folder / "in.jsonl")], format="openai")
    order = JobOrder(dataset, [model], origin={"frontend": "openai"}, default_model=False)
    return (await service.submit(order)).id


async def end_of(service: JobService, job_id: str) -> JobView:
    return [view async for view in service.watch(job_id, 0.02)][-1]


@pytest.mark.parametrize("is_ended_by_commit", [True, False])
async def test_a_job_is_unpacked_only_for_those_who_need_its_files(folder, logged, monkeypatch, is_ended_by_commit):
    """Its dataset and its plan are made in memory, and go from there to the database and to its worker. Its results
    come from memory, too, also if its last rows are in two commits that are counted together: then its runner ends it.
    """
    (service, *_), unpacked, unpack = logged, [], packed.unpack
    monkeypatch.setattr(packed, "unpack", lambda *args: (unpacked.append(args), unpack(*args)))
    if not is_ended_by_commit:
        monkeypatch.setattr(JobRun, "end_with", lambda run, commit: None)
    view = await end_of(service, await submit(service, folder, 4))
    assert (view.state, view.rows_ok, unpacked) == ("completed", 4, [])
    lines = [json.loads(line) for line in Path(view.output).read_bytes().splitlines()]
    assert [line["response"]["body"] for line in lines] == [0, 1, 2, 3]
    assert ((await service.verify(view.id)).broken, len(unpacked)) == ([], 1)


async def test_earlier_results_are_durable_before_a_retry_replaces_them(folder, logged):
    """What a result was linked to is on the disk before another result has its name: a loss of power cannot make the
    link again, of the new bytes."""
    service, log, database = logged
    (folder / "broken").touch()
    view = await end_of(service, await submit(service, folder, 4))
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", 2, 2)
    earlier = folder / "data" / "earlier"
    assert await database.write(log.link, Path(view.output), earlier)
    before = earlier.read_bytes()
    (folder / "broken").unlink()
    await service.retry(view.id)
    assert (await end_of(service, view.id)).rows_ok == 4
    paths = await database.read(lambda db: list(db.execute(sa.select(logged_files.c.path)).scalars()))
    assert "earlier" not in paths and earlier.read_bytes() == before


async def test_an_end_that_is_not_committed_is_none(folder, logged, monkeypatch):
    """If the transaction fails that has the last rows and the end of their job, the job pauses, and is resumed."""
    service, _, _ = logged
    store = Finish.store

    def fail_after(self, db, record):
        store(self, db, record)
        raise StorageFull("no room for the transaction")

    with monkeypatch.context() as patched:
        patched.setattr(Finish, "store", fail_after)
        view = await end_of(service, await submit(service, folder, 1))  # in one commit
    assert (view.state, view.reason) == ("paused", "storage_full")
    await service.resume(view.id)
    view = await end_of(service, view.id)
    assert (view.state, view.rows_ok) == ("completed", 1)
    assert view.output is not None and len(Path(view.output).read_bytes().splitlines()) == 1
