"""Retries that are refused as they are to be stored, or were not stored when their owner died, leave nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.databases import open_ledger
from fakes.job_service import end_of, job_service
from msgspec.structs import replace

from batchmill.engines.clock import SystemClock
from batchmill.errors import OverQuota, UnknownName
from batchmill.executors.local import LocalExecutor
from batchmill.jobs import resting_job
from batchmill.jobs.ledger import begun_retries, packed
from batchmill.jobs.ledger.files import JobFiles, read_spec
from batchmill.jobs.service import JobService
from batchmill.owned_files import OwnedFiles
from batchmill.store import removals
from batchmill.store.sql.tables import files, model_versions
from batchmill.store.stored_files import LocalFiles
from batchmill.types import DatasetSpec, FunctionSpec, JobOrder, JobView, ModelSpec, ProjectQuotas, Quotas

CODE = """
import os, time
def fragile(n):
    if n % 2 and not os.path.exists(__file__ + ".mended"):
        raise ValueError(f"no {n}")
    return n
def held(n):
    while n == 900 and not os.path.exists(__file__ + ".mended"):
        time.sleep(0.01)
    return n
"""
LINE = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"model":"%s","n":%d}}\n'
INPUTS = ""  # where orders have their files
SMALL, LARGE = 6, packed.ROWS_MAX + 2


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator:
    services: list[JobService] = []
    (tmp_path / "app.py").write_text(CODE)
    data = tmp_path / "data"
    data.mkdir()

    async def open_service(**space: object) -> JobService:
        executor = LocalExecutor(data / "workers")
        service = job_service(data, open_ledger(data / "batchmill.db"), executor, SystemClock(), **space)
        services.append(service)
        await service.recover(resume_server_jobs=True)
        return service

    yield open_service
    await services[-1].close()


def order(folder: Path, name: str, rows: int, **model: object) -> JobOrder:
    path = folder / INPUTS / f"{name}.jsonl"
    path.write_text("".join(LINE % (n, name, n) for n in range(rows)))
    spec = ModelSpec(name, "function", f"{folder / 'app.py'}:{name}", allowed=[name])
    dataset = DatasetSpec([str(path)], format="openai")
    return JobOrder(dataset, [replace(spec, **model)], origin={"frontend": "openai"}, default_model=False)


async def ended(service: JobService, folder: Path, rows: int, **model: object) -> JobView:
    """A job with every other row failed."""
    view = await end_of(service, (await service.submit(order(folder, "fragile", rows, **model))).id)
    assert (view.state, view.rows_failed) == ("completed", rows // 2)
    return view


async def kept(service: JobService, job_id: str) -> dict[str, object]:
    """All that there is of a job beside its results. Nothing is left of a retry that has begun."""
    data_dir = service._data_dir
    assert not list((data_dir / begun_retries.FOLDER).glob("*"))
    found: dict[str, object] = {"packed": await service._read(packed.read, job_id)}
    found |= {str(path): path.read_bytes() for path in (data_dir / "jobs").rglob("*") if path.is_file()}
    description = JobFiles(data_dir, job_id).spec
    if str(description) in found:
        spec = read_spec(description.read_bytes())
        found[str(description)] = replace(spec, used=[])  # which the database alone has after the first run
    return found


@pytest.mark.parametrize("rows", [SMALL, LARGE])
async def test_a_retry_whose_version_was_removed(opened, tmp_path: Path, rows: int):
    """What is refused in the transaction leaves every file of the job as it was; once it may run, it runs."""
    service = await opened()
    database = service._tools.database
    values = {"name": "fragile", "branch": "main", "number": 1, "state": "ready", "created": 0.0, "source": ""}
    await database.write(lambda db: db.execute(model_versions.insert().values(values)))
    function = FunctionSpec("main/1", str(tmp_path), "0")
    view = await ended(service, tmp_path, rows, engine="function_process", source="app.py:fragile", function=function)
    before = await kept(service, view.id)
    await database.write(lambda db: db.execute(model_versions.update().values(state="removed")))
    with pytest.raises(UnknownName, match="the version fragile@main/1 is removed"):
        await service.retry(view.id)
    assert await kept(service, view.id) == before
    await database.write(lambda db: db.execute(model_versions.update().values(state="ready")))
    (tmp_path / "app.py.mended").touch()
    await service.retry(view.id)
    view = await end_of(service, view.id)
    assert (view.state, view.generation, view.rows_ok, view.rows_failed) == ("completed", 1, rows, 0)
    assert (await service.verify(view.id)).broken == []
    await kept(service, view.id)


@pytest.mark.parametrize("rows", [SMALL, LARGE])
async def test_a_retry_beyond_a_quota(opened, tmp_path: Path, rows: int):
    """The same of a quota, which is counted in the transaction."""
    service = await opened()
    view = await ended(service, tmp_path, rows)
    before = await kept(service, view.id)
    await service.close()
    (tmp_path / "app.py").write_text(CODE + "# another\n")  # which the spec of the retry would have
    service = await opened(quotas=ProjectQuotas(Quotas(unfinished_jobs=0)))
    with pytest.raises(OverQuota):
        await service.retry(view.id)
    assert await kept(service, view.id) == before


@pytest.mark.parametrize(
    ("rows", "of"),
    [(SMALL, "the caller"), (LARGE, "an earlier job"), (SMALL, "the server"), (LARGE, "the server")],
)
async def test_a_retry_whose_input_was_deleted(opened, tmp_path: Path, rows: int, of: str, monkeypatch):
    """It is refused, where the job would have paused until somebody restores the file; so it is where the bytes of a
    deleted file are still there, and where it is deleted while the retry is prepared."""
    service = await opened()
    database = service._tools.database
    if of == "the server":
        monkeypatch.setitem(globals(), "INPUTS", "data/files")
        (tmp_path / INPUTS).mkdir()
        record = {"id": "fragile.jsonl", "project": "default", "purpose": "batch", "filename": "", "bytes": 1}
        await database.write(lambda db: db.execute(files.insert().values(**record, created=0.0)))
    view = await ended(service, tmp_path, rows)
    before = await kept(service, view.id)
    if of == "the server":
        plan = resting_job.plan_retry

        async def plan_and_delete(*words: object) -> object:
            planned = await plan(*words)
            await database.write(lambda db: db.execute(files.delete()))
            return planned

        monkeypatch.setattr(resting_job, "plan_retry", plan_and_delete)
    elif of == "an earlier job":
        removal = removals.Removal("fragile.jsonl", "default", "job_earlier", "somebody", 1.0)
        await database.write(removals.insert, removal)
    else:
        (tmp_path / "fragile.jsonl").unlink()
    with pytest.raises(UnknownName, match=r"fragile\.jsonl"):
        await service.retry(view.id)
    assert await kept(service, view.id) == before
    assert (await service.show(view.id)).state == "completed"


@pytest.mark.parametrize("is_stored", [False, True])
async def test_the_next_owner(opened, tmp_path: Path, is_stored: bool):
    """It removes what a killed one has written of a retry that is not stored, and nothing of one that is, nor of a job
    that has been removed meanwhile."""
    service = await opened()
    view = await ended(service, tmp_path, LARGE)
    if is_stored:
        await service.retry(view.id)
        await end_of(service, view.id)
    before = await kept(service, view.id)
    await service.close()
    job, owned = JobFiles(tmp_path / "data", view.id), OwnedFiles()
    begun_retries.begin(job.data_dir, view.id, 1, owned)
    begun_retries.begin(job.data_dir, "job_gone", 1, owned)
    if not is_stored:
        job.write_spec(replace(job.read_spec(), labels={"of": "the retry"}), owned)
        job.plan(1).mkdir()
        (job.plan(1) / "plan.json").write_text("{}")
    service = await opened()
    assert await kept(service, view.id) == before
    assert (await service.show(view.id)).generation == is_stored
    assert (await service.verify(view.id)).broken == []


class HeldFiles(LocalFiles):
    """Knows whose files must stay in the data directory."""

    is_elsewhere = True

    def __init__(self) -> None:
        super().__init__()
        self.holders: set[str] = set()

    async def fetch(self, *paths: Path, holder: str = "") -> None:
        self.holders |= {holder} - {""}

    def release(self, holder: str) -> None:
        self.holders.discard(holder)


async def test_files_that_a_retry_has_brought(opened, tmp_path: Path):
    """Refused or stored, it holds no files once the job has ended; nor does a job that goes on after a pause."""
    stored = HeldFiles()
    service = await opened(stored=stored, quotas=ProjectQuotas(Quotas(unfinished_jobs=1)))
    view = await ended(service, tmp_path, LARGE)
    other = await service.submit(order(tmp_path, "held", LARGE))
    with pytest.raises(OverQuota):
        await service.retry(view.id)
    async for shown in service.watch(other.id, 0.05):
        if shown.rows_ok:
            break
    await service.pause(other.id)
    assert stored.holders == set()
    (tmp_path / "app.py.mended").touch()
    await service.resume(other.id)
    assert (await end_of(service, other.id)).state == "completed"
    await service.retry(view.id)
    assert (await end_of(service, view.id)).rows_ok == LARGE
    assert stored.holders == set()


@pytest.mark.once
def test_names(tmp_path: Path):
    """What is begun is found by its job and its generation; what else lies there is left alone."""
    owned = OwnedFiles()
    assert begun_retries.left_in(tmp_path) == []
    for job_id, generation in (("job_b", 12), ("job_a", 3), ("job_a", 3)):
        begun_retries.begin(tmp_path, job_id, generation, owned)
    (tmp_path / begun_retries.FOLDER / "other").touch()
    assert begun_retries.left_in(tmp_path) == [("job_a", 3), ("job_b", 12)]
    begun_retries.forget(tmp_path, "job_a", 3, owned)
    assert begun_retries.left_in(tmp_path) == [("job_b", 12)]
