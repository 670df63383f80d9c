"""Small jobs in a database that is damaged or gone: they have no folder that could rebuild them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from fakes.damaged_pages import all_pages, overwrite, root
from fakes.databases import open_ledger
from fakes.held_clock import HeldClock
from fakes.job_service import end_of, job_service
from msgspec.structs import replace

from batchmill.config import BackupsEntry
from batchmill.engines.clock import SystemClock
from batchmill.errors import InvalidTransition
from batchmill.executors.local import LocalExecutor
from batchmill.jobs.service import JobService
from batchmill.services.data_dirs import salvage
from batchmill.services.data_dirs.backups import Backups
from batchmill.store.sql.damaged_database import is_sound
from batchmill.store.sql.tables import packed_jobs, submissions
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy, SalvagedTable, SalvageReport

ROWS, FIRST_ROWS = 6, 3  # of a job; those of a job that is cut off that have run by then
ENDED_JOBS, CUT_JOBS = 6, 3
CODE = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent

async def double(job, n):
    while job >= {ended} and n >= {first} and not (HERE / "go").exists():
        await asyncio.sleep(0.01)
    with open(HERE / "calls", "a") as calls:
        calls.write(f"{{job}}-{{n}}\\n")
    if n == 1:
        raise ValueError("told to fail")
    return 2 * n
"""


class Room:
    """A data directory with short jobs: some have ended, some were cut off after their first rows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data_dir, self.whole = folder, folder / "data", folder / "whole"
        self.data_dir.mkdir()
        (folder / "app.py").write_text(CODE.format(ended=ENDED_JOBS, first=FIRST_ROWS))
        self.ids: list[str] = []
        self.results: dict[str, bytes] = {}

    @property
    def database(self) -> Path:
        return self.data_dir / "batchmill.db"

    def open(self) -> JobService:
        return job_service(
            self.data_dir, open_ledger(self.database), LocalExecutor(self.data_dir / "workers"), SystemClock()
        )

    async def fill(self) -> None:
        service = self.open()
        await service.recover(resume_server_jobs=True)
        try:
            for job in range(ENDED_JOBS + CUT_JOBS):
                self.ids.append((await service.submit(self._order(job))).id)
            for job_id in self.ids[:ENDED_JOBS]:
                view = await end_of(service, job_id)
                assert (view.rows_ok, view.rows_failed) == (ROWS - 1, 1)
                self.results[job_id] = Path(view.output or "").read_bytes()
            async with asyncio.timeout(60):
                for job_id in self.ids[ENDED_JOBS:]:
                    while (view := await service.show(job_id)).rows_ok + view.rows_failed < FIRST_ROWS:
                        await asyncio.sleep(0.01)
            shutil.copytree(self.data_dir, self.whole, ignore=shutil.ignore_patterns("workers"))  # nothing writes
            shutil.copyfile(self.folder / "calls", self.folder / "calls-before")
        finally:
            (self.folder / "go").touch()
            await service.close()

    def _order(self, job: int) -> JobOrder:
        path = self.data_dir / "files" / f"file-{job}"
        path.parent.mkdir(exist_ok=True)
        lines = [
            {"custom_id": f"r{n}", "method": "POST", "url": "/v1/x", "body": {"model": "double", "job": job, "n": n}}
            for n in range(ROWS)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = ModelSpec("double", "function", f"{self.folder / 'app.py'}:double", allowed=["double"])
        dataset = DatasetSpec([str(path)], format="openai")
        return JobOrder(dataset, [model], origin={"frontend": "openai"}, default_model=False)

    def restore(self) -> None:
        """As it was when the jobs were cut off."""
        shutil.rmtree(self.data_dir)
        shutil.copytree(self.whole, self.data_dir)
        shutil.copyfile(self.folder / "calls-before", self.folder / "calls")

    def salvage(self) -> SalvageReport:
        report = salvage.salvage(self.data_dir, lambda _: None)
        assert not report.is_sound and report.failed == [] and is_sound(self.database)
        assert [table.name for table in report.tables if not (table.rows or table.is_damaged)] == []
        return report

    def count(self, table: str) -> int:
        with contextlib.closing(sqlite3.connect(self.database)) as db:
            return db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    async def check(self, job_ids: list[str], *, reduced: bool = False) -> Counter[str]:
        """Every job comes to its end with the right results and a sound ledger. Returns how often rows ran.

        Args: reduced: the jobs that had ended keep only their results.
        """
        service = self.open()
        await service.recover(resume_server_jobs=True)
        try:
            for job_id in job_ids:
                async with asyncio.timeout(60):
                    while (view := await end_of(service, job_id)).state == "paused":  # it is resumed soon
                        await asyncio.sleep(0.01)
                assert (view.state, view.rows_ok, view.rows_failed) == ("completed", ROWS - 1, 1), view.message
                assert view.output is not None and view.errors_output is not None
                found = [json.loads(line) for line in Path(view.output).read_text().splitlines()]
                assert [(line["custom_id"], line["response"]["body"]) for line in found] == [
                    (f"r{n}", 2 * n) for n in range(ROWS) if n != 1
                ]
                errors = Path(view.errors_output).read_text().splitlines()
                assert [json.loads(line)["custom_id"] for line in errors] == ["r1"]
                if job_id in self.results:
                    assert Path(view.output).read_bytes() == self.results[job_id]
                if reduced and job_id in self.results:
                    with pytest.raises(InvalidTransition, match="keeps only its results"):
                        await service.retry(job_id)
                else:
                    assert (await service.verify(job_id)).broken == []
        finally:
            await service.close()
        return Counter((self.folder / "calls").read_text().split())


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    room = Room(tmp_path_factory.mktemp("small-jobs"))
    asyncio.run(room.fill())
    return room


@pytest.fixture
def room(filled):
    filled.restore()
    return filled


def damaged(report: SalvageReport) -> dict[str, SalvagedTable]:
    """The tables of which rows are lost, by name."""
    return {table.name: table for table in report.tables if table.is_damaged}


ONCE = Counter(f"{job}-{n}" for job in range(ENDED_JOBS + CUT_JOBS) for n in range(ROWS))


async def test_records_below_a_damaged_page(room):
    """Jobs whose records lie below a damaged page come back as they were; no row runs again."""
    assert len(all_pages(room.database, "jobs")) > 3
    overwrite(room.database, root(room.database, "jobs"))
    report = room.salvage()
    assert damaged(report) == {"jobs": SalvagedTable("jobs", len(room.ids), 0, True, from_leaves=len(room.ids))}
    assert await room.check(room.ids) == ONCE


async def test_lost_leases_and_commits(room):
    """The ledger of each job is made again from its plan and its outcomes; no row runs again."""
    for table in ("shards", "commits", "error_counts"):
        for page in all_pages(room.database, table):
            overwrite(room.database, page)
    report = room.salvage()
    for name, table in damaged(report).items():
        assert (table.rows, table.from_backup, table.rebuilt) == (0, 0, room.count(name)) and table.rebuilt, name
    assert (sorted(report.rebuilt), report.reduced, report.reopened, report.lost) == (sorted(room.ids), [], {}, [])
    assert await room.check(room.ids) == ONCE


@pytest.mark.parametrize("table", ["outcome_blocks", "packed_jobs"])
async def test_lost_outcomes_or_plans(room, table):
    """Jobs that had ended keep their results, and say that nothing else is left; others run again, from their input."""
    for page in all_pages(room.database, table):
        overwrite(room.database, page)
    report = room.salvage()
    assert sorted(report.reduced) == sorted(room.ids[:ENDED_JOBS])
    assert report.reopened == dict.fromkeys(room.ids[ENDED_JOBS:], FIRST_ROWS) and report.rebuilt == [*report.reopened]
    assert (damaged(report)[table].rows, damaged(report)[table].from_backup) == (0, 0)
    again = Counter(f"{job}-{n}" for job in range(ENDED_JOBS, ENDED_JOBS + CUT_JOBS) for n in range(FIRST_ROWS))
    assert await room.check(room.ids, reduced=True) == ONCE + again


async def test_a_backup(room):
    """Of a database that is gone the backup has everything of small jobs: ended ones are as they were then."""
    assert Backups(room.data_dir, HeldClock(), BackupsEntry())._sweep() is not None
    before = {table: room.count(table) for table in ("jobs", "shards", "commits", "error_counts", "packed_jobs")}
    room.database.unlink()
    report = room.salvage()
    assert {name: damaged(report)[name].from_backup for name in before} == before
    assert (report.rebuilt, report.reduced, report.reopened, report.lost) == ([], [], {}, [])
    service = room.open()
    views = [await service.show(job_id) for job_id in room.ids]
    await service.close()
    assert [view.state for view in views] == ["completed"] * ENDED_JOBS + ["running"] * CUT_JOBS
    assert await room.check(room.ids) == ONCE


async def test_lost_uploads(room):
    """Files that small jobs read get their records back, and stay where they are."""
    overwrite(room.database, root(room.database, "files"))
    (table,) = damaged(room.salvage()).values()
    assert table.rows + table.rebuilt == ENDED_JOBS + CUT_JOBS
    with contextlib.closing(sqlite3.connect(room.database)) as db:
        names = [name for (name,) in db.execute("SELECT id FROM files ORDER BY id")]
    assert names == [f"file-{job}" for job in range(ENDED_JOBS + CUT_JOBS)]
    assert await room.check(room.ids) == ONCE


async def test_lost_jobs_leave_nothing(room):
    """Nothing is left of jobs whose records are lost, so that the same order is a new job."""
    for page in all_pages(room.database, "jobs"):
        overwrite(room.database, page)
    report = room.salvage()
    assert report.lost == sorted(room.ids) and damaged(report)["jobs"] == SalvagedTable("jobs", 0, 0, True)
    service = room.open()
    try:
        for table in (packed_jobs, submissions):
            assert await service._ledger.database.read(lambda db, of=table: db.execute(of.select()).all()) == []
    finally:
        await service.close()


@pytest.mark.parametrize("is_small", [True, False])
async def test_rows_that_share_an_outcome(is_small, tmp_path):
    """An ended job counts them, too: that is no loss. Nothing is reduced, and nothing runs again."""
    room = Room(tmp_path)
    (tmp_path / "go").touch()
    order = room._order(0)
    with open(order.dataset.paths[0], "r+b") as file:
        rows = file.read()
        file.write(rows.replace(b'"r', b'"again-r'))
    order = replace(order, policy=Policy(dedupe=True), origin=order.origin if is_small else None)
    service = room.open()
    job_id = (await service.submit(order)).id
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok, view.rows_failed, view.rows_folded) == ("completed", 2 * ROWS - 2, 2, ROWS)
    await service.close()
    for table in ("shards", "commits", "error_counts"):
        for page in all_pages(room.database, table):
            overwrite(room.database, page)
    report = room.salvage()
    assert (report.rebuilt, report.reduced, report.reopened, report.lost) == ([job_id], [], {}, [])
    service = room.open()
    await service.resume(job_id)
    view = await end_of(service, job_id)
    assert (view.state, view.rows_ok, view.rows_failed) == ("completed", 2 * ROWS - 2, 2)
    assert (await service.verify(job_id)).broken == []
    await service.close()
    assert Counter((tmp_path / "calls").read_text().split()) == Counter(f"0-{n}" for n in range(ROWS))
