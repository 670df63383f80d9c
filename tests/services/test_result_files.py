"""Results of jobs that have ended, as files of their project."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
import sqlalchemy as sa
from file_room import JOB, FileRoom

from batchmill.errors import Gone, LedgerBroken, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.services.files import files as files_module
from batchmill.services.files.files import FileService
from batchmill.services.files.job_results import result_id
from batchmill.states import JobState
from batchmill.store.removals import Removal
from batchmill.store.sql.transactions import note_change


@pytest.fixture
def room(tmp_path):
    room = FileRoom(tmp_path)
    yield room
    room.close()


async def test_results_are_linked_not_copied(room):
    """A job's result files become files of its project, under ids that anybody would find, sharing their bytes."""
    view = await room.ended_job(origin={"frontend": "openai", "output_expires_s": 3600})
    output, errors = await room.files.adopt_results(view)
    assert output and errors
    assert (output.id, errors.id) == (result_id(JOB, 0, "output"), result_id(JOB, 0, "errors"))
    assert (output.filename, errors.filename) == (f"{JOB}_output.jsonl", f"{JOB}_errors.jsonl")
    assert output.purpose == "batch_output" and output.expires == view.finished + 3600
    assert await room.read(output) == b"results.jsonl 0\n"
    assert os.path.samefile(room.files.path(output), view.output)
    assert await room.files.adopt_results(view) == (output, errors)
    assert await room.files.get("one", output.id) == output
    room.reopen()
    await room.files.sweep()
    assert await room.files.adopt_results(view) == (output, errors)


async def test_results_are_adopted_once(room):
    """Many who look at an ended job at once find the same files."""
    view = await room.ended_job()
    found = await asyncio.gather(*(room.files.adopt_results(view) for _ in range(10)))
    assert len({(output.id, errors.id) for output, errors in found}) == 1
    assert len(room.left()) == 2


async def test_a_job_without_successes_has_no_output(room):
    """A job of which every row failed has an error file alone."""
    output, errors = await room.files.adopt_results(await room.ended_job(rows_ok=0))
    assert output is None and errors is not None
    assert await room.files.adopt_results(await room.put_job(JobState.FAILED, job_id=f"job_{1:020}")) == (None, None)


async def test_a_table_without_successes_has_its_output(room):
    """Where results hold the rows that failed too, the output is there even if every row did."""
    output, errors = await room.files.adopt_results(await room.ended_job(rows_ok=0, errors_output=None))
    assert output is not None and errors is None


async def test_results_of_a_job_that_goes_on_are_not_adopted(room):
    """Nothing is adopted before a job has ended, nor from one that a retry has opened again meanwhile."""
    view = await room.ended_job(JobState.RUNNING)
    assert await room.files.adopt_results(view) == (None, None)
    ended = await room.ended_job()
    await room.put_job(JobState.QUEUED, generation=1)
    assert await room.files.adopt_results(ended) == (None, None)
    assert room.left() == []


async def test_a_retry_leaves_older_results_as_they_were(room):
    """Each generation has files of its own, and those of an earlier one never change."""
    first, _ = await room.files.adopt_results(await room.ended_job())
    second, _ = await room.files.adopt_results(await room.ended_job(generation=1))
    assert first.id != second.id
    assert (await room.read(first), await room.read(second)) == (b"results.jsonl 0\n", b"results.jsonl 1\n")


async def test_results_that_a_caller_keeps_elsewhere_stay_theirs(room, tmp_path):
    """Only files that lie with the job become files of the project."""
    own = tmp_path / "out.jsonl"
    own.write_text("mine")
    view = await room.ended_job(output=str(own), errors_output=None)
    assert await room.files.adopt_results(view) == (None, None)


async def test_a_deleted_result_stays_deleted(room):
    """Deleting a result removes the job's own copy too, so that the next look at the job does not bring it back."""
    view = await room.ended_job()
    output, errors = await room.files.adopt_results(view)
    await room.files.delete("one", output.id, "ada")
    assert not os.path.exists(view.output) and os.path.exists(view.errors_output)
    gone, other = await room.files.adopt_results(view)
    assert other == errors and (gone.id, gone.by, gone.at) == (output.id, "ada", room.clock.now())
    with pytest.raises(Gone, match=r"deleted by ada at 2023-\d\d-\d\d"):
        await room.files.get("one", output.id)
    with pytest.raises(UnknownName, match="No such File"):
        await room.files.get("two", output.id)


async def test_a_result_that_somebody_removed(room):
    """A result file that is gone from the disk reads as deleted, never as one without rows."""
    view = await room.ended_job()
    os.unlink(view.output)
    gone, errors = await room.files.adopt_results(view)
    assert gone.by == "somebody outside of batchmill" and errors.bytes
    with pytest.raises(Gone):
        await room.files.get("one", gone.id)


async def test_a_deleted_result_of_an_earlier_generation(room):
    """The copy that lies with the job is removed only where it is the very file that was deleted."""
    first, _ = await room.files.adopt_results(await room.ended_job())
    second = await room.ended_job(generation=1)
    await room.files.delete("one", first.id, "ada")
    assert os.path.exists(second.output)
    output, _ = await room.files.adopt_results(second)
    await room.put_job(JobState.RUNNING, generation=2, output=second.output)
    await room.files.delete("one", output.id, "ada")
    assert os.path.exists(second.output)  # its job is not at rest: it may be reading it


async def test_expired_results_are_swept_with_their_copies(room):
    """A result that expires goes like one that is deleted."""
    view = await room.ended_job(origin={"frontend": "openai", "output_expires_s": 3600})
    await room.files.adopt_results(view)
    room.clock.at += 3600
    assert await room.files.sweep() == 2
    assert room.left() == [] and not os.path.exists(view.output)


def _end(db: sa.Connection, files: FileService, record) -> None:
    """What the transaction does that ends a job."""
    note_change(db, record["id"], record)
    files.store_end(db, record)


async def test_results_are_stored_with_the_end_of_their_job(room):
    """The transaction that ends a job stores its results as files; one that fails leaves nothing of them."""
    view = await room.ended_job()
    record = dict(await room.database.read(job_records.find, JOB)) | {"rows_ok": 1}

    def fail(db: sa.Connection) -> None:
        _end(db, room.files, record)
        raise RuntimeError("the job does not end so")

    with pytest.raises(RuntimeError):
        await room.database.write(fail)
    assert await room.files.list("one") == ([], False)
    assert room.files.arrivals.ids == set()
    await room.database.write(_end, room.files, record)
    listed, _ = await room.files.list("one")
    assert len(listed) == 2
    assert room.files.adopted_lately(view) == (results := await room.files.adopt_results(view))
    assert sorted(each.id for each in results) == sorted(each.id for each in listed)
    await room.files.delete("one", results[0].id, "ada")
    assert isinstance((await room.files.adopt_results(view))[0], Removal)


async def test_a_deleted_result_of_a_small_job_is_gone(room):
    """Its bytes are nowhere any more, also not after a crash right behind the deletion."""
    place = room.data_dir / "results" / f"{JOB}.results.jsonl"
    place.parent.mkdir()
    await room.database.write(room.log.write, place, b"secret")
    view = await room.put_job(JobState.COMPLETED, output=str(place), rows_ok=1)
    output, _ = await room.files.adopt_results(view)
    await room.files.delete("one", output.id, "ada")
    assert not place.exists() and room.left() == []
    room.reopen()
    async with room.log.open():
        assert not place.exists() and room.left() == []


async def test_a_result_whose_other_result_is_deleted(room):
    """Its bytes outlive a loss of power right behind the deletion, before any of them was on the disk."""
    home = room.data_dir / "results"
    home.mkdir()
    output, errors = home / f"{JOB}.results.jsonl", home / f"{JOB}.results.errors.jsonl"
    await room.database.write(room.log.write, output, b"secret")
    await room.database.write(room.log.write, errors, b"error")
    view = await room.put_job(JobState.COMPLETED, output=str(output), errors_output=str(errors), rows_ok=1)
    found = await room.files.adopt_results(view)
    await room.files.delete("one", found[0].id, "ada")
    room.reopen()
    os.truncate(errors, 0)
    async with room.log.open():
        assert errors.read_bytes() == room.files.path(found[1]).read_bytes() == b"error"
        assert not output.exists() and room.left() == [found[1].id]


async def test_results_of_many_jobs_that_have_ended(room):
    """What was stored with the end of a job is no longer arriving, also if there is no error file: uploads would be
    written in smaller pieces with every job."""
    await room.ended_job()
    record = dict(await room.database.read(job_records.find, JOB)) | {"rows_ok": 1, "errors_output": None}
    await room.database.write(_end, room.files, record)
    assert room.files.arrivals.ids == set()


async def test_an_end_whose_second_result_cannot_be_linked(room, monkeypatch):
    """It stores no record of the first one, which arrives no more: a sweep may remove it. A request adopts both."""
    view, link, targets = await room.ended_job(), room.log.link, []

    def full(db, source, target):
        targets.append(target)
        if len(targets) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return link(db, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(room.log, "link", full)
        record = dict(await room.database.read(job_records.find, JOB)) | {"rows_ok": 1}
        await room.database.write(room.files.store_end, record)
    assert room.files.arrivals.ids == set() and (await room.files.list("one"))[0] == []
    output, errors = await room.files.adopt_results(view)
    assert (await room.read(output), await room.read(errors)) == (b"results.jsonl 0\n", b"results.errors.jsonl 0\n")


@pytest.mark.parametrize("failing", ["link", "insert"])
async def test_ends_that_fail_leave_no_arrivals(room, monkeypatch, failing):
    """Whatever fails: a long-lived server would remember the results of every such job."""
    await room.ended_job()
    record = dict(await room.database.read(job_records.find, JOB)) | {"rows_ok": 1}

    def fail(*_: object) -> None:
        raise LedgerBroken("the database is not what it was")

    target = (room.log, "link") if failing == "link" else (files_module, "_insert_result")
    monkeypatch.setattr(*target, fail)
    with pytest.raises(LedgerBroken):
        await room.database.write(_end, room.files, record)
    assert room.files.arrivals.ids == set() and room.files._ending == {}


async def test_a_result_that_is_deleted_as_its_job_ends(room):
    """It is committed and listed before its job's runner says so: whoever deletes it then has deleted it."""
    view = await room.ended_job()
    record = dict(await room.database.read(job_records.find, JOB)) | {"rows_ok": 1}
    await room.database.write(_end, room.files, record)
    listed, _ = await room.files.list("one")
    for each in listed:
        await room.files.delete("one", each.id, "ada")
    assert all(isinstance(each, Removal) for each in await room.files.adopt_results(view))
