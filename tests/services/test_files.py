"""Files of projects, from their first byte to their removal."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from file_room import FileRoom

from batchmill.errors import Conflict, InvalidInput, StorageFull, TooLarge, UnknownName
from batchmill.faults import FILE_POINTS
from batchmill.jobs.ledger import records as job_records
from batchmill.services.files import files
from batchmill.services.files.files import FILENAME_CHARS_MAX, READ_BYTES, WRITE_THREADS
from batchmill.services.files.incoming import HELD_BYTES_MAX, PIECE_BYTES, PIECE_BYTES_MIN, piece_bytes
from batchmill.states import ENDED, JobState
from batchmill.store.file_log import FILE_BYTES_MAX


@pytest.fixture
def room(tmp_path):
    room = FileRoom(tmp_path, file_bytes_max=4 * PIECE_BYTES)
    yield room
    room.close()


@contextmanager
def file_size_limit(size_bytes: int):
    """The kernel refuses to let any file of this process grow beyond the limit, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# In


@pytest.mark.parametrize("sizes", [[], [0], [1], [PIECE_BYTES], [PIECE_BYTES - 1, 2], [7] * 1000, [300_000] * 9])
async def test_what_is_written_is_what_is_kept(room, sizes):
    """A file holds the bytes written, in order, however they were cut."""
    pieces = [os.urandom(size) for size in sizes]
    writer = await room.files.writer("one")
    for piece in pieces:
        await writer.write(piece)
    record = await writer.commit(purpose="batch", filename="rows.jsonl")
    assert room.files.path(record).read_bytes() == b"".join(pieces)
    assert (record.bytes, record.project, record.created) == (sum(sizes), "one", room.clock.now())
    assert await room.files.get("one", record.id) == record
    assert room.left() == [record.id]


async def test_nothing_is_seen_of_a_file_that_is_not_whole(room):
    """Until it is committed a file is in no list; dropped, it leaves nothing."""
    writer = await room.files.writer("one")
    await writer.write(b"x" * (2 * PIECE_BYTES))
    assert await room.files.list("one") == ([], False)
    await writer.discard()
    await writer.discard()
    assert room.left() == []


async def test_a_file_has_a_largest_size(room):
    """A file of exactly the limit is taken; one byte more is refused as it comes and leaves nothing."""
    assert (await room.upload(b"x" * (4 * PIECE_BYTES))).bytes == 4 * PIECE_BYTES
    writer = await room.files.writer("one")
    await writer.write(b"x" * (4 * PIECE_BYTES))
    with pytest.raises(TooLarge) as caught:
        await writer.write(b"x")
    assert caught.value.code == "file_too_large"
    await writer.discard()
    assert len(room.left()) == 1


async def test_a_full_disk_leaves_nothing(room):
    """When the disk takes no more, the upload ends as storage_full and its bytes are gone."""
    writer = await room.files.writer("one")
    with file_size_limit(PIECE_BYTES), pytest.raises(StorageFull):
        for _ in range(4):
            await writer.write(b"x" * PIECE_BYTES)
        await writer.commit(purpose="batch", filename="rows.jsonl")
    await writer.discard()
    assert room.left() == [] and await room.files.list("one") == ([], False)


async def test_the_last_room_on_the_disk_is_not_for_uploads(tmp_path):
    """An upload stops before it takes the room that running jobs need."""
    room = FileRoom(tmp_path)
    room.files.free_bytes_min = 2**60
    writer = await room.files.writer("one")
    with pytest.raises(StorageFull, match="disk is full: .* and the last 1,152,921,504,606,846,976 are"):
        for _ in range(20):
            await writer.write(b"x" * PIECE_BYTES)
    await writer.discard()
    with pytest.raises(StorageFull, match="disk is full"):
        await room.upload(b"small")
    assert room.left() == []
    room.close()


async def test_a_slow_disk_holds_up_who_writes_and_nobody_else(room):
    """While the disk is behind, an upload holds two pieces and waits; files are found and read meanwhile."""
    record = await room.upload(b"data")
    gate, taken = threading.Event(), []
    stuck = [asyncio.create_task(room.files.disk.run(gate.wait)) for _ in range(WRITE_THREADS)]
    writer = await room.files.writer("one")

    async def send() -> None:
        for number in range(4):
            await writer.write(bytes([number]) * PIECE_BYTES)
            taken.append(number)

    sending = asyncio.create_task(send())
    assert await room.read(await room.files.get("one", record.id)) == b"data"
    for _ in range(1000):
        await asyncio.sleep(0)
    assert taken == [0]  # the first is on its way to the disk, the second waits for it
    gate.set()
    await asyncio.gather(sending, *stuck)
    assert (await writer.commit(purpose="batch", filename="b")).bytes == 4 * PIECE_BYTES


async def test_a_failed_record_leaves_no_bytes(room):
    """When the record is refused in its transaction, the bytes go too."""

    def refuse(db, record):
        raise Conflict("no")

    writer = await room.files.writer("one")
    await writer.write(b"x")
    with pytest.raises(Conflict):
        await writer.commit(purpose="batch", filename="rows.jsonl", within=refuse)
    await writer.discard()
    assert room.left() == [] and await room.files.list("one") == ([], False)


async def test_a_caller_that_goes_away_while_its_file_is_stored(room):
    """A commit that is cancelled ends either as a whole file or as none."""
    for turns in range(12):
        writer = await room.files.writer("one")
        await writer.write(b"data")
        task = asyncio.create_task(writer.commit(purpose="batch", filename="rows.jsonl"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await writer.discard()
    found, _ = await room.files.list("one")
    assert room.left() == sorted(record.id for record in found)
    assert [await room.read(record) for record in found] == [b"data"] * len(found)


@pytest.mark.parametrize("name", ["", "a\nb", "\x00", "\x7f", "\ud800", "x" * (FILENAME_CHARS_MAX + 1)])
async def test_names_that_cannot_be_shown(room, name):
    """A name that is empty, too long or holds control characters is refused."""
    with pytest.raises(InvalidInput) as caught:
        await room.upload(filename=name)
    assert caught.value.code == "invalid_filename"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a" * FILENAME_CHARS_MAX, "zwölf 🙂.jsonl"])
async def test_names_are_for_people(room, name):
    """Any other name is kept as it is, and no path is made of it."""
    record = await room.upload(filename=name)
    assert record.filename == name
    assert room.left() == [record.id]


# Crashes

CRASHING = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from file_room import FileRoom

async def main():
    room = FileRoom(Path(sys.argv[1]))
    data = b"x" * int(sys.argv[4])
    await room.files.delete("one", (await room.upload(data)).id, "ada")
    await room.files.adopt_results(await room.ended_job())
    print("survived")

asyncio.run(main())
"""


def crash(data_dir, point: str) -> None:
    """Upload a file, delete it and adopt results, in a process that is killed at the point."""
    tests = os.path.dirname(os.path.dirname(__file__))
    size = FILE_BYTES_MAX + (point == "after_settle")  # a longer file is not in the log
    words = [sys.executable, "-c", CRASHING, str(data_dir), tests, os.path.join(tests, "services"), str(size)]
    environment = {**os.environ, "BATCHMILL_FAULT": f"{point}:1:{data_dir / 'fired'}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-9, ""), done.stderr


async def test_results_that_a_full_disk_cannot_name(room, monkeypatch):
    """A second name for which there is no room is refused as such, and is made once there is."""
    job = await room.ended_job()
    link = os.link

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        with pytest.raises(StorageFull):
            await room.files.adopt_results(job)
    assert os.link is link and (await room.files.adopt_results(job))[0] is not None


@pytest.mark.parametrize("point", [*FILE_POINTS, "in_file_record", "in_adoption"])
async def test_killed_between_two_durable_steps(tmp_path, point):
    """Whatever a kill leaves is not a file of anybody's, and the next start sweeps it."""
    crash(tmp_path, point)
    room = FileRoom(tmp_path)
    assert await room.files.list("one") == ([], False)
    assert len(room.left()) == (2 if point == "in_adoption" else 1)
    async with room.log.open():
        await room.files.sweep()
    assert room.left() == []
    room.close()


async def test_a_sweep_leaves_what_is_arriving(room):
    """Temporaries of a killed process go; those of uploads under way, and files, stay."""
    record = await room.upload()
    (room.data_dir / "files" / ".incoming" / "file-old").write_text("x")
    (room.data_dir / "files" / "file-without-a-record").write_text("x")
    writer = await room.files.writer("one")
    await writer.write(b"x" * PIECE_BYTES)
    await writer.write(b"x" * PIECE_BYTES)
    await room.files.sweep()
    assert room.left() == sorted([f".incoming/{writer.id}", record.id])
    await room.files.sweep()
    second = await writer.commit(purpose="batch", filename="b")
    assert room.left() == sorted([record.id, second.id])


# Out


async def test_projects_do_not_see_each_other(room):
    """Another project's file is unknown in the same words as one that never was, whatever is asked."""
    record = await room.upload(project="one")
    never = "file-" + "0" * 24
    for ask in (
        lambda file_id: room.files.get("two", file_id),
        lambda file_id: room.files.delete("two", file_id, "ada"),
        lambda file_id: room.files.list("two", after=file_id),
        lambda file_id: room.files.hold("two", file_id).__aenter__(),
    ):
        said = []
        for file_id in (record.id, never):
            with pytest.raises(UnknownName) as caught:
                await ask(file_id)
            said.append((caught.value.code, caught.value.message.replace(file_id, "ID")))
        assert said == [("unknown_file", "No such File object: ID")] * 2
    assert await room.files.list("two") == ([], False)
    assert await room.files.get("one", record.id) == record


async def test_an_id_is_no_path(room):
    """Nothing is looked up on the disk by what a caller calls a file."""
    (room.data_dir / "files" / "secret").write_text("x")
    for name in ("secret", "../batchmill.db", ".incoming", "", "x" * 10_000):
        with pytest.raises(UnknownName) as caught:
            await room.files.get("one", name)
        assert len(caught.value.message) < 200


async def test_pages(room):
    """Pages run on from the last id of the one before, in both orders, also where files are of the same moment."""
    records = []
    for n in range(7):
        records.append(await room.upload(project="one", purpose="batch" if n % 2 else "evals"))
        await room.upload(project="two")
        room.clock.at += n % 3
    by_age = sorted(records, key=lambda record: (record.created, record.id))
    for newest_first, expected in ((False, by_age), (True, by_age[::-1])):
        found, after, more = [], None, True
        while more:
            page, more = await room.files.list("one", after=after, limit=3, newest_first=newest_first)
            found += page
            after = page[-1].id
        assert found == expected
    evals, more = await room.files.list("one", purpose="evals")
    assert (evals, more) == ([record for record in by_age[::-1] if record.purpose == "evals"], False)
    assert await room.files.list("one", limit=7) == (by_age[::-1], False)


async def test_expired_files_are_gone(room):
    """A file is there until the moment it expires; then nobody finds it, and a sweep removes its bytes."""
    record = await room.upload(expires_s=3600)
    kept = await room.upload()
    room.clock.at += 3599
    assert (await room.files.get("one", record.id)).expires == record.created + 3600
    room.clock.at += 1
    with pytest.raises(UnknownName):
        await room.files.get("one", record.id)
    assert await room.files.list("one") == ([kept], False)
    assert await room.files.sweep() == 1
    assert room.left() == [kept.id]


async def test_batch_files_expire_by_default_where_the_server_says_so(tmp_path):
    """The server's own time applies to uploads for batches that name none, and to nothing else."""
    room = FileRoom(tmp_path, file_expires_s=7200)
    expires = [
        (await room.upload()).expires,
        (await room.upload(expires_s=3600)).expires,
        (await room.upload(purpose="evals")).expires,
    ]
    assert expires == [room.clock.now() + 7200, room.clock.now() + 3600, None]
    room.close()


async def test_an_open_file_outlives_its_deletion(room):
    """Who reads a file reads it to its end, also when it is deleted meanwhile; then it cannot be opened again."""
    record = await room.upload(b"a" * READ_BYTES + b"b")
    file = await room.files.open(record)
    await room.files.delete("one", record.id, "ada")
    assert await file.read(0, 2 * READ_BYTES) == b"a" * READ_BYTES
    assert await file.read(READ_BYTES, 5) == b"b"
    await file.close()
    await file.close()
    with pytest.raises(UnknownName):
        await room.files.open(record)
    assert room.left() == []


# In use


@pytest.mark.parametrize("state", [state for state in JobState if state not in ENDED])
async def test_a_file_that_a_job_reads_stays(room, state):
    """The input of a job that has not ended cannot be deleted, and does not expire under it."""
    record = await room.upload(expires_s=3600)
    other = await room.upload()
    await room.put_job(state, reads=str(room.files.path(record)))
    with pytest.raises(Conflict) as caught:
        await room.files.delete("one", record.id, "ada")
    assert caught.value.code == "file_in_use"
    room.clock.at += 4000
    assert await room.files.sweep() == 0
    assert record.id in room.left()
    await room.files.delete("one", other.id, "ada")


async def test_a_file_whose_job_is_retried_meanwhile_stays(room, monkeypatch):
    """A job that had ended when a deletion or a sweep looked at the jobs may read its input again."""
    record = await room.upload(expires_s=3600)
    await room.put_job(JobState.QUEUED, reads=str(room.files.path(record)), generation=1)
    look = job_records.in_use
    monkeypatch.setattr(job_records, "in_use", lambda *words, **more: look(*words, **more) if more else set())
    with pytest.raises(Conflict) as caught:
        await room.files.delete("one", record.id, "ada")
    assert caught.value.code == "file_in_use"
    room.clock.at += 4000
    assert await room.files.sweep() == 0 and record.id in room.left()
    await room.put_job(JobState.COMPLETED, reads=str(room.files.path(record)), generation=1)
    assert await room.files.sweep() == 1


@pytest.mark.parametrize("state", sorted(ENDED))
async def test_a_file_goes_when_its_job_has_ended(room, state):
    """The input of a job at rest is a file like any other."""
    record = await room.upload()
    await room.put_job(state, reads=str(room.files.path(record)))
    await room.files.delete("one", record.id, "ada")
    assert room.left() == []


async def test_a_file_that_is_held_stays(room):
    """While a job is being made of it a file cannot be deleted; two may hold it at once."""
    record = await room.upload()
    async with room.files.hold("one", record.id) as held, room.files.hold("one", record.id):
        assert held == record
        with pytest.raises(Conflict, match="being created"):
            await room.files.delete("one", record.id, "ada")
    deleting = asyncio.create_task(room.files.delete("one", record.id, "ada"))
    async with room.files.hold("one", (await room.upload()).id):
        await deleting
    with pytest.raises(UnknownName):
        await room.files.hold("one", record.id).__aenter__()


async def test_a_file_that_expires_while_its_job_is_made_stays(room, monkeypatch):
    """A sweep leaves what was held when it looked at the jobs, though the job is stored before it gets to the file."""
    record = await room.upload(expires_s=10)
    held = room.files.hold("one", record.id)
    await held.__aenter__()
    room.clock.at += 20
    look = job_records.in_use

    def look_and_let_go(db, paths, project=None, **_):
        found = look(db, paths, project)
        room.files._holds.clear()
        return found

    monkeypatch.setattr(job_records, "in_use", look_and_let_go)
    assert await room.files.sweep() == 0 and room.files.path(record).exists()
    assert await room.files.sweep() == 1 and not room.files.path(record).exists()


async def test_a_file_is_deleted_once(room):
    """Of two who delete a file at once, one is told that there is none."""
    record = await room.upload()
    done = await asyncio.gather(*(room.files.delete("one", record.id, "ada") for _ in range(2)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["NoneType", "UnknownName"]


# Many


@pytest.mark.once
def test_many_files_share_what_is_held():
    """The more files arrive together, the less each holds: a few have whole pieces, and thousands a small one."""
    assert piece_bytes(1) == piece_bytes(64) == PIECE_BYTES
    assert 2 * 500 * piece_bytes(500) <= HELD_BYTES_MAX
    assert piece_bytes(100_000) == PIECE_BYTES_MIN


async def test_a_sweep_goes_through_all(room, monkeypatch):
    """Files in use do not hold up the sweep of those behind them, however many there are."""
    monkeypatch.setattr(files, "SWEEP_MAX", 2)
    records = [await room.upload(expires_s=60) for _ in range(9)]
    used = sorted(record.id for record in records)[:5]
    for number, file_id in enumerate(used):
        await room.put_job(JobState.PAUSED, reads=str(room.data_dir / "files" / file_id), job_id=f"job_{number:020}")
    room.clock.at += 60
    assert await room.files.sweep() == 4
    assert room.left() == used
