"""Quotas whose records are not counted each time are as exact as others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from fakes.databases import open_database
from ledgered_job import LedgeredJob

from batchmill.errors import BatchmillError, Conflict, OverQuota
from batchmill.jobs.ledger import records
from batchmill.services.files import records as file_records
from batchmill.services.files.records import FileRecord
from batchmill.states import JobState
from batchmill.store.quotas import refuse_beyond
from batchmill.store.sql.tables import files

MOST = 6


def upload(n: int, project: str) -> FileRecord:
    return FileRecord(f"file-{n}", project, "batch", "a.jsonl", 1, None, 1.0, None, None)


def add(db, record: FileRecord, quota: int, *, fails: bool = False) -> None:
    refuse_beyond(
        db, files, quota, quota="files", project=record.project, way_out="delete some", where=files.c.job.is_(None),
        is_noted=True,
    )  # fmt: skip
    file_records.insert(db, record)
    if fails:
        raise Conflict("another reason")


@pytest.mark.parametrize("seed", range(3))
async def test_a_quota_is_exact(tmp_path: Path, seed: int):
    """Whatever is added, removed, refused and rolled back, in two projects whose quota is raised and lowered."""
    database, draw = open_database(tmp_path / "batchmill.db"), random.Random(seed)
    stored: dict[str, set[int]] = {"a": set(), "b": set()}
    for n in range(200):
        project, quota = draw.choice("ab"), draw.choice([MOST, MOST, MOST - 2])
        mine = stored[project]
        match draw.choice(["add", "add", "add", "fail", "remove", "remove and fail", "add a result"]):
            case "add" | "fail" as how:
                expected = OverQuota if len(mine) >= quota else Conflict if how == "fail" else None
                try:
                    await database.write(add, upload(n, project), quota, fails=how == "fail")
                    ended = None
                except BatchmillError as error:
                    ended = type(error)
                assert ended is expected, f"{how} with {len(mine)} of {quota}"
                mine |= set() if expected else {n}
            case "remove" if mine:
                gone = draw.choice(sorted(mine))
                await database.write(file_records.delete, f"file-{gone}")
                mine.discard(gone)
            case "remove and fail" if mine:
                await _remove_and_fail(database, sorted(mine), project)
            case _:
                result = msgspec.structs.replace(upload(n, project), job="job")
                await database.write(file_records.insert, result)
    database.close()


async def _remove_and_fail(database, gone: list[int], project: str) -> None:
    """What is counted while files are gone does not count once their removal has been undone."""

    def remove(db) -> None:
        for each in gone:
            file_records.delete(db, f"file-{each}")
        add(db, upload(10_000, project), len(gone))  # so low a quota has them counted
        raise Conflict("after all")

    with pytest.raises(Conflict):
        await database.write(remove)


@pytest.mark.parametrize("seed", range(3))
async def test_a_quota_is_exact_for_writes_that_share_transactions(tmp_path: Path, seed: int):
    """Of those that wait together each is decided as if it came alone, whichever of the others fail."""
    database, draw = open_database(tmp_path / "batchmill.db"), random.Random(seed)
    stored: dict[str, list[int]] = {"a": [], "b": []}
    for first in range(0, 400, 8):
        writes, expected = [], []
        for n in range(first, first + draw.randint(1, 8)):
            project, write = draw.choice("ab"), draw.choice([database.write, database.write_short])
            mine, fails = stored[project], draw.random() < 0.2
            if mine and draw.random() < 0.3:
                gone = mine.pop(draw.randrange(len(mine)))
                writes.append(write(file_records.delete, f"file-{gone}"))
                expected.append(None)
                continue
            writes.append(write(add, upload(n, project), MOST, fails=fails))
            expected.append(OverQuota if len(mine) >= MOST else Conflict if fails else None)
            mine += [] if expected[-1] else [n]
        ended = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(each) if isinstance(each, BatchmillError) else None for each in ended] == expected, f"{seed}, {n}"
    database.close()


@pytest.mark.parametrize("reopening", ["retry", "rebuild"])
async def test_a_job_that_had_ended_counts_again(tmp_path: Path, reopening: str):
    """Also where whoever opens it is held to no quota."""
    job = LedgeredJob(tmp_path, 4, 4)
    database, ledger = job.ledger.database, job.ledger
    ledger.move(job.id, JobState.FINALIZING)
    ledger.move(job.id, JobState.COMPLETED, finished=2.0)

    def add_job(db, job_id: str, quota: int | None) -> None:
        records.enter(db, msgspec.structs.replace(job.spec, id=job_id), None, quota)

    await database.write(add_job, "one", 3)
    await database.write(add_job, "two", None)  # of the machine's user, who is held to none
    if reopening == "retry":
        ledger.open_generation(job.id, 1, {}, 0)
    else:
        ledger.move(job.id, JobState.QUEUED)
    with pytest.raises(OverQuota, match="has 3 unfinished jobs"):
        await database.write(add_job, "three", 3)
    ledger.move("one", JobState.FAILED)
    await database.write(add_job, "three", 3)
    job.ledger.close()
