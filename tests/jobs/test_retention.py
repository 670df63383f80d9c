"""Jobs that have ended: what they need no more goes, and so do they when they are removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fakes.databases import databases
from fakes.ended_job import JOB, service_of
from fakes.held_clock import HeldClock
from fakes.terms import SetTerm
from ledgered_job import LedgeredJob

from batchmill.config import BackupsEntry
from batchmill.datasets import spooled_inputs
from batchmill.errors import Conflict, Gone, InvalidTransition, TermOver, UnknownName
from batchmill.faults import RETENTION_POINTS
from batchmill.jobs.ledger import records
from batchmill.jobs.retention import BY_AGE
from batchmill.owned_files import OwnedFiles
from batchmill.services.data_dirs import salvage
from batchmill.services.data_dirs.backups import Backups
from batchmill.states import JobState
from batchmill.store import media_copies
from batchmill.store.sql.tables import commits, files, shards
from batchmill.types import DatasetSpec

ROWS = 100
LEFT = {"job.json", "ending.json", "dataset/seal.json", "results.jsonl"}


@pytest.fixture
def data_dir(tmp_path):
    """A data directory with a job that completed 10 s ago, and whose result is a file of its project."""
    job = LedgeredJob(tmp_path, ROWS, 50, JOB)
    job.files.write_spec(job.spec, OwnedFiles())
    segment = job.segment()
    job.run(segment, range(50))
    job.run(segment, range(50, ROWS))
    segment.close()
    output = job.files.home / "results.jsonl"
    output.write_text("{}\n" * ROWS)
    job.ledger.move(JOB, JobState.FINALIZING)
    job.ledger.move(JOB, JobState.COMPLETED, finished=HeldClock().now() - 10, output=str(output))
    (job.data_dir / "files").mkdir()
    os.link(output, job.data_dir / "files" / "file-r")
    with job.ledger.database.writer.begin() as db:
        db.execute(files.insert().values(
            id="file-r", project="default", purpose="batch_output", filename="r.jsonl", bytes=300, created=1.0, job=JOB
        ))  # fmt: skip
    job.ledger.close()
    return job.data_dir


def copy_of(data_dir, name):
    """A copy of the data directory; the result lies where the original has it."""
    copy = data_dir.parent / name
    shutil.copytree(data_dir, copy, ignore=shutil.ignore_patterns("batchmill.db*"))
    databases.copy(data_dir / "batchmill.db", copy / "batchmill.db")
    return copy


def spec_of(data_dir, job_id):
    """The description of another job, which is of nothing else."""
    folder = data_dir.parent / job_id
    folder.mkdir()
    job = LedgeredJob(folder, 10, 10, job_id)
    job.ledger.close()
    return job.spec


def left_of(data_dir):
    home = data_dir / "jobs" / JOB
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


async def test_a_finished_job_keeps_its_results(data_dir):
    """Once nothing can be retried, segments, plans and indexes go; the job is shown, known again and not run again."""
    clock = HeldClock()
    service = service_of(data_dir, clock, intermediate_s=60)
    try:
        await service.recover()
        whole = left_of(data_dir)
        await service.retention.sweep()
        assert left_of(data_dir) == whole  # 10 s are not enough
        clock.at += 51
        await service.retention.sweep()
        assert left_of(data_dir) == LEFT
        view = await service.show(JOB)
        assert (view.state, view.rows_ok) == ("completed", ROWS)
        with service._ledger.database.reader.connect() as db:
            assert not db.execute(shards.select()).all() and not db.execute(commits.select()).all()
        for call in (service.retry, service.verify, service.rebuild, service.partial):
            with pytest.raises(InvalidTransition, match="keeps only its results"):
                await call(JOB)
    finally:
        await service.close()


async def test_what_a_retry_needs_stays_longer(data_dir):
    """A job with failed rows, or whose results were taken away, keeps its segments for retention.retry_s."""
    clock = HeldClock()
    service = service_of(data_dir, clock, intermediate_s=0, retry_s=100)
    try:
        whole = left_of(data_dir)
        await service._commit_log.call(service._ledger.note, JOB, rows_failed=1)
        await service.retention.sweep()
        assert left_of(data_dir) == whole
        await service._commit_log.call(service._ledger.note, JOB, rows_failed=0, output="/nonexistent")
        await service.retention.sweep()
        assert left_of(data_dir) == whole
        clock.at += 91
        await service.retention.sweep()
        assert left_of(data_dir) == LEFT
    finally:
        await service.close()


async def test_a_removed_job_leaves_nothing_but_word_of_it(data_dir):
    """`remove` takes the job, its folder and its result files; who asks for it is told who did that, and when."""
    service = service_of(data_dir)
    try:
        await service._commit_log.call(service._ledger.note, JOB, state=JobState.RUNNING)
        with pytest.raises(InvalidTransition, match="cancel it"):
            await service.remove(JOB)
        await service._commit_log.call(service._ledger.note, JOB, state=JobState.COMPLETED)
        assert (await service.remove(JOB[:8], "the key k1")).id == JOB
        assert not list((data_dir / "jobs").iterdir()) and not list((data_dir / "files").iterdir())
        with pytest.raises(Gone, match="deleted by the key k1 at 2023"):
            await service.show(JOB)
        assert await service.list() == []
    finally:
        await service.close()


async def test_jobs_go_by_age(data_dir):
    """With retention.jobs_s jobs are removed so long after their end."""
    clock = HeldClock()
    service = service_of(data_dir, clock, jobs_s=20)
    try:
        await service.retention.sweep()
        assert await service.list()
        clock.at += 11
        await service.retention.sweep()
        with pytest.raises(Gone, match=BY_AGE):
            await service.show(JOB)
    finally:
        await service.close()


@pytest.mark.once
async def test_a_compacted_job_survives_its_database(data_dir):
    """A job of which only the results are left has its record again where the file of the database was lost."""
    service = service_of(data_dir, intermediate_s=0)
    await service.retention.sweep()
    before = await service.show(JOB)
    await service.close()
    for path in data_dir.glob("batchmill.db*"):
        path.unlink()
    assert salvage.salvage(data_dir, lambda _: None).failed == []
    service = service_of(data_dir)
    try:
        assert await service.show(JOB) == before
    finally:
        await service.close()


async def test_a_result_that_another_job_reads_stays(data_dir):
    """A job whose result another one reads is neither removed nor cleared away by its age, which others still are; and
    no job begins that would read a removed result."""
    clock = HeldClock()
    service = service_of(data_dir, clock, jobs_s=5)
    now = clock.now()
    reader, other = (msgspec.structs.replace(spec_of(data_dir, f"job_{name * 20}"), created=now) for name in "34")
    reader = msgspec.structs.replace(
        reader, dataset=DatasetSpec([str(data_dir / "files" / "file-r")]), origin={"frontend": "openai"}
    )
    try:
        for spec in (reader, other):
            await service._ledger.database.write(records.enter, spec, None, None)
        await service._commit_log.call(
            service._ledger.note, other.id, state=JobState.COMPLETED, finished=clock.now() - 6
        )
        with pytest.raises(Conflict, match=f"file-r is in use: .* {JOB}"):
            await service.remove(JOB)
        await service.retention.sweep()
        assert {view.id for view in await service.list()} == {JOB, reader.id}
        assert (data_dir / "files" / "file-r").exists()
        await service._commit_log.call(service._ledger.note, reader.id, state=JobState.CANCELLED)
        await service.remove(JOB)
        late = msgspec.structs.replace(reader, id="job_" + "5" * 20)
        with pytest.raises(UnknownName, match="file-r"):
            await service._ledger.database.write(records.enter, late, None, None)
    finally:
        await service.close()


async def test_paid_rows_without_results_stay(data_dir):
    """The segments of a job that failed before its results were written are kept, however old it is."""
    service = service_of(data_dir, intermediate_s=0, retry_s=0)
    try:
        whole = left_of(data_dir)
        await service._commit_log.call(service._ledger.note, JOB, state=JobState.FAILED, output=None)
        await service.retention.sweep()
        await service._commit_log.call(service._ledger.note, JOB, output="/nonexistent")
        await service.retention.sweep()
        assert left_of(data_dir) == whole
    finally:
        await service.close()


def kill_at(point, data_dir, what):
    """Remove the job or sweep, in a process that dies at a point, if it passes that."""
    fired = data_dir.parent / f"fired-{what}-{point}"
    environ = os.environ | {"BATCHMILL_FAULT": f"{point}:1:{fired}", "PYTHONPATH": str(Path(__file__).parents[1])}
    environ |= databases.environment(data_dir / "batchmill.db")
    done = subprocess.run([sys.executable, "-P", "-m", "fakes.ended_job", str(data_dir), what], env=environ)
    assert done.returncode == (-9 if fired.exists() else 0)
    return fired.exists()


@pytest.mark.once
async def test_a_salvage_after_a_kill(data_dir):
    """A salvage between a kill and the next start brings no removed job back, and has no row of a compacted one run
    again."""
    backup = Backups(data_dir, HeldClock(), BackupsEntry())._sweep()
    for what, point in (("remove", "after_remove"), ("sweep", "after_plan_dropped")):
        copy = copy_of(data_dir, what)
        assert await asyncio.to_thread(kill_at, point, copy, what)
        if what == "remove":
            assert salvage.salvage(copy, lambda _: None).is_sound
            with contextlib.closing(sqlite3.connect(copy / "batchmill.db")) as db, db:
                (place,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'jobs'").fetchone()
            with open(copy / "batchmill.db", "r+b") as file:
                file.seek((place - 1) * 4096)
                file.write(b"\xa5" * 4096)
        else:
            for path in copy.glob("batchmill.db*"):
                path.unlink()
        report = salvage.salvage(copy, lambda _: None)
        assert report.failed == [] and report.backup == str(copy / "backups" / backup.name)
        service = service_of(copy)
        try:
            await service.recover()
            if what == "remove":
                assert await service.list() == [] and not list((copy / "jobs").iterdir())
            else:
                assert (await service.show(JOB)).state == "completed"
                with pytest.raises(InvalidTransition, match="keeps only its results"):
                    await service.retry(JOB)
        finally:
            await service.close()


async def test_killed_at_any_point(data_dir):
    """A removal that is killed is finished at the next start, or was never begun; nothing else is lost."""
    whole = left_of(data_dir)
    for what in ("remove", "sweep"):
        for point in RETENTION_POINTS:
            copy = copy_of(data_dir, f"{what}-{point}")
            if not await asyncio.to_thread(kill_at, point, copy, what):
                continue  # the point is one of the other way
            service = service_of(copy)
            try:
                await service.recover()
                if what == "remove":
                    assert not list((copy / "jobs").iterdir()) and not list((copy / "files").iterdir()), point
                elif point == "after_ending":
                    assert left_of(copy) == whole | {"ending.json"}
                    assert (await service.verify(JOB)).rows_done == ROWS
                else:
                    assert left_of(copy) == LEFT, point
            finally:
                await service.close()


class CutTerm(SetTerm):
    """A term that is over at one of its checks, and never goes on. It says what was in a folder then."""

    def __init__(self, checks: int, folder: Path) -> None:
        super().__init__(self._left)
        self.checks, self.folder, self.seen = checks, folder, None

    def _left(self) -> float:
        self.checks -= 1
        if self.checks < 0 and self.seen is None:
            self.seen = names_in(self.folder)
        return 1.0 if self.checks >= 0 else -1.0


def names_in(folder: Path) -> dict[str, int]:
    """All that is in a data directory but the database and parts: the name, and the number of names of that file."""
    return {
        str(path.relative_to(folder)): path.stat().st_nlink
        for path in folder.rglob("*")
        if not path.name.startswith("batchmill.db") and path.suffix != ".part" and not path.is_dir()
    }


def add_shared(data_dir: Path) -> None:
    """Add what a job shares with others: a copy of a file that a cell names, an input, and what others have left."""
    (copy := data_dir / "jobs" / JOB / "media" / "ab" / "abc").parent.mkdir(parents=True)
    copy.write_bytes(b"picture")
    (shared := media_copies.shared_home(data_dir, "default") / "ab").mkdir(parents=True)
    os.link(copy, shared / "abc")
    (shared / "abd").touch()
    for name in ("read.jsonl", "left.jsonl"):
        (path := data_dir / spooled_inputs.FOLDER / name).parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (1.0, 1.0))
    spooled_inputs.keep(data_dir, [str(data_dir / spooled_inputs.FOLDER / "read.jsonl")], JOB)


@pytest.mark.once
@pytest.mark.parametrize(("what", "checks_min"), [("remove", 14), ("sweep", 8)])
async def test_a_replaced_owner_removes_nothing(data_dir: Path, what: str, checks_min: int):
    """Wherever its term ends, an owner leaves the files as they are then: its successor removes the rest, or needs it.

    The successor finishes what was written down.
    """
    checks, is_cut = 0, True
    while is_cut:
        copy = copy_of(data_dir, f"{what}-{checks}")
        add_shared(copy)
        term = CutTerm(checks, copy)
        service = service_of(copy, term=term, intermediate_s=0)
        try:
            with contextlib.suppress(TermOver):
                await (service.remove(JOB) if what == "remove" else service.retention.sweep())
        finally:
            await service.close()
        is_cut = term.seen is not None
        assert not is_cut or names_in(copy) == term.seen, checks
        successor = service_of(copy, intermediate_s=0)
        try:
            await successor.recover()
            await (successor.retention.sweep() if is_cut else asyncio.sleep(0))
            left = left_of(copy) if (copy / "jobs" / JOB).exists() else set()
            if what == "sweep":
                assert left == LEFT
                assert names_in(copy / spooled_inputs.FOLDER).keys() == {"read.jsonl", f"read.jsonl.{JOB}"}
            elif not (await successor.list()):
                assert not list((copy / "jobs").iterdir()) and not list((copy / "files").iterdir()), checks
                assert names_in(copy / spooled_inputs.FOLDER).keys() <= {"left.jsonl"}, checks
            if is_cut:
                assert not names_in(copy / "media"), checks
        finally:
            await successor.close()
        checks += 1
    assert checks > checks_min


async def test_a_sweep_finishes_removals(data_dir: Path):
    """What an owner could not remove while its term was over, it removes once it surely is the owner again."""
    left_s = 1.0
    service = service_of(data_dir, term=SetTerm(lambda: left_s))
    try:
        left_s = -1.0
        with pytest.raises(TermOver):
            await service.remove(JOB)
        assert await service.list() == [] and (data_dir / "jobs" / JOB).exists()
        left_s = 1.0
        await service.retention.sweep()
        assert not list((data_dir / "jobs").iterdir())
    finally:
        await service.close()


async def test_inputs_of_jobs_that_were_never_stored_go(data_dir: Path):
    """A kill between the two steps leaves word that a job reads an input. That of jobs that there are stays, also where
    the ledger knows nothing of one whose folder has work in it.
    """
    path = data_dir / spooled_inputs.FOLDER / "read.jsonl"
    path.parent.mkdir()
    path.touch()
    (lost := data_dir / "jobs" / f"job_{'4' * 20}" / "segments" / "w-0001.seg").parent.mkdir(parents=True)
    lost.write_bytes(b"outcomes")
    for job_id in (JOB, f"job_{'3' * 20}", f"job_{'4' * 20}"):
        spooled_inputs.keep(data_dir, [str(path)], job_id)
    service = service_of(data_dir)
    try:
        await service.recover()
        left = {f"read.jsonl.{job_id}" for job_id in (JOB, f"job_{'4' * 20}")}
        assert {each.name for each in path.parent.iterdir()} == {"read.jsonl"} | left
    finally:
        await service.close()
