"""Records of jobs in memory: what polls are answered with is what the last transaction left."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from ledgered_job import LedgeredJob

import batchmill
from batchmill.errors import InvalidTransition
from batchmill.jobs import recent_jobs, views
from batchmill.jobs.intake.preparation import listed
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.jobs.recent_jobs import RecentJobs
from batchmill.states import JobState
from batchmill.types import Problem

SOURCE = Path(batchmill.__file__).parent
# A statement that changes a record of a job, or its errors.
CHANGES = re.compile(r"\b(jobs|error_counts)\.(insert|update|delete)\(\)")
# Functions that change a damaged database while no owner uses it, and those that only build a statement.
NOTED_BY_CALLERS = {"salvage.py", "_changing", "_add_errors"}


@pytest.fixture
def job(tmp_path):
    ledgered = LedgeredJob(tmp_path, 8, 4)
    yield ledgered
    ledgered.ledger.close()


def is_recent(recent: RecentJobs, ledger: Ledger, job_id: str = "job") -> bool:
    """Whether a job is in memory, as the database has it."""
    with ledger.database.reader.connect() as db:
        stored = views.view_of(*records.find_with_errors(db, job_id))
    known = recent.get(job_id)
    assert known is None or known == stored
    return known is not None


async def test_every_change_is_seen(job):
    """Whatever changes a job, memory has its new record or none. A change of state needs no other query."""
    recent, ledger = RecentJobs(job.ledger.database), job.ledger
    assert not is_recent(recent, ledger)
    assert await recent.read("job") == recent.get("job")
    ledger.note("job", message="a note")
    assert is_recent(recent, ledger)
    ledger.spent("job", 2.5)
    assert is_recent(recent, ledger) and recent.get("job").elapsed_s == 2.5
    segment = job.segment()
    job.count(segment.append(job.block([0, 1])), [0, 1])
    assert not is_recent(recent, ledger)
    await recent.read("job")
    job.count(segment.append(job.block([2, 3], failed=True)), [2, 3], failed=True)
    assert (await recent.read("job")).errors == {"went_wrong": 2}
    ledger.move("job", JobState.FINALIZING, finalizing=5.0)
    assert not is_recent(recent, ledger), "its errors lie in another table"
    await recent.read("job")
    ledger.move("job", JobState.COMPLETED, finished=3.0, errors={}, rows_failed=0)
    assert (await recent.read("job")).finished == 5.0, "no time lies before another"
    ledger.open_generation("job", 1, {}, 2)
    assert not is_recent(recent, ledger)
    ledger.move("job", JobState.RUNNING)
    assert is_recent(recent, ledger) and recent.get("job").generation == 1
    another = msgspec.structs.replace(job.spec, id="another")
    await ledger.database.write(records.enter, another, None, None)
    assert is_recent(recent, ledger, "another")


async def test_what_is_rolled_back_is_not_remembered(job):
    """A transaction that fails leaves no record of it, alone and among others that share it."""
    recent, ledger = RecentJobs(job.ledger.database), job.ledger

    def fail(db: sa.Connection) -> None:
        ledger.note("job", message="never")
        raise InvalidTransition("as it must")

    database = ledger.database
    with pytest.raises(InvalidTransition):
        await database.write(fail)
    assert not is_recent(recent, ledger)
    with pytest.raises(InvalidTransition), database.writer.share() as db:
        fail(db)
    assert not is_recent(recent, ledger)
    calls = [database.write(fail) for _ in range(3)] + [database.write(lambda _: ledger.spent("job", 1.0))]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidTransition] * 3 + [type(None)]
    is_recent(recent, ledger)
    assert (await recent.read("job")).elapsed_s == 1.0


async def test_a_read_that_a_change_overtakes_is_not_kept(job, monkeypatch):
    """The record of before a change is shown to who asked before it, and to nobody after it."""
    recent, ledger = RecentJobs(job.ledger.database), job.ledger
    read = ledger.database.read

    async def overtaken(*args):
        found = await read(*args)
        ledger.move("job", JobState.PAUSED, errors={"x": (1, "")}, rows_failed=1)
        return found

    ledger.database.read = overtaken
    assert (await recent.read("job")).state == JobState.RUNNING
    assert recent.get("job") is None


async def test_memory_is_bounded(job, monkeypatch):
    """The jobs that changed longest ago are forgotten; long descriptions and long lists of lines are not kept."""
    monkeypatch.setattr(recent_jobs, "RECENT_MAX", 2)
    recent, ledger = RecentJobs(job.ledger.database), job.ledger
    for name in ("a", "b", "c"):
        ledger.create(msgspec.structs.replace(job.spec, id=name))
    assert [name for name in "abc" if is_recent(recent, ledger, name)] == ["b", "c"]
    ledger.create(msgspec.structs.replace(job.spec, id="long", labels={"x": "x" * recent_jobs.RECORD_BYTES_MAX}))
    assert not is_recent(recent, ledger, "long")
    assert await recent.read("long") and recent.get("long") is None
    problems = [Problem("invalid_json", "the line is JSON but not an object: 1", number) for number in range(1000)]
    ledger.move("c", JobState.FAILED, problems=listed(problems), problems_total=1000, finished=1.0)
    assert not is_recent(recent, ledger, "c")
    assert len((await recent.read("c")).problems) == 1000 and recent.get("c") is None


async def test_an_owner_whose_term_is_over_answers_from_no_memory(job):
    """Another process may own the database by now, and have changed the job."""
    database = job.ledger.database
    recent, terms = RecentJobs(database), [3.0, 0.0]
    await recent.read("job")
    database.term.left_s = lambda: terms.pop(0)
    assert recent.get("job") is not None and recent.get("job") is None


@pytest.mark.once
def test_every_function_that_changes_a_job_notes_it():
    """No function of the sources changes records of jobs, or their errors, without telling those who remember them."""
    silent = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not CHANGES.search(text) or path.name in NOTED_BY_CALLERS:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name not in NOTED_BY_CALLERS:
                body = ast.get_source_segment(text, node) or ""
                if CHANGES.search(body) and "note_change(" not in body:
                    silent.append(f"{path.name}: {node.name}")
    assert not silent
