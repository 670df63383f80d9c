"""An owner that another process may have replaced, and what it leaves as it is of the files that both see.

It was stopped, or its network was cut, and goes on: it knows nothing of what its successor has stored meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_room import US, AdapterRoom
from fakes.lora_files import write_lora
from fakes.manual_clock import ManualClock, settled
from fakes.terms import SetTerm
from file_room import FileRoom

from batchmill import serving
from batchmill.errors import DatabaseUnavailable, OverQuota
from batchmill.services.adapters.records import FETCHING, READY
from batchmill.store.disk_room import RESERVE_BYTES, DiskReserve
from batchmill.store.stored_files import LocalFiles


@pytest.fixture
def room(tmp_path):
    room = FileRoom(tmp_path)
    yield room
    room.close()


@pytest.fixture
def unanswered(room: FileRoom, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have every later transaction be committed, and its answer lost until nobody waits for it any more."""
    write = room.database.write

    async def lose(function: Callable[..., Any], *args: Any) -> None:
        await write(function, *args)
        raise DatabaseUnavailable("no answer")

    def lose_all() -> None:
        monkeypatch.setattr(room.database, "write", lose)
        monkeypatch.setattr(room.database, "write_short", lose)

    return lose_all


async def test_a_replaced_owner_sweeps_nothing(room: FileRoom):
    """What arrives at its successor would look like what a crash has left. Of one that was stopped, sweeps are due."""
    arriving = room.data_dir / "files" / ".incoming" / "file-of-the-successor"
    arriving.write_text("half of it")
    clock, left_s = ManualClock(), -1.0
    sweeping = asyncio.create_task(serving._sweep_regularly(clock, SetTerm(lambda: left_s), [room.files.sweep]))
    try:
        await settled()
        await clock.go_on(3 * serving.SWEEP_S, serving.SWEEP_S)
        await asyncio.sleep(0.05)
        assert arriving.exists()
        left_s = 1.0
        await clock.go_on(serving.SWEEP_S)
        async with asyncio.timeout(60):
            while arriving.exists():
                await asyncio.sleep(0.01)
    finally:
        sweeping.cancel()


async def test_a_replaced_owner_removes_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that its successor has registered looks like one without a record."""
    room = AdapterRoom(tmp_path)
    adapters = await room.again()
    assert room.database is not None
    (room.home / "adapter_of_the_successor").mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(DatabaseUnavailable):
        patch.setattr(room.database.term, "left_s", lambda: -1.0)
        await adapters.sweep()
    assert room.folders() == ["adapter_of_the_successor"]
    await adapters.sweep()
    assert room.folders() == []
    await room._shut()


async def test_a_replaced_owner_removes_no_adapter_that_it_has_no_room_for(tmp_path: Path, monkeypatch):
    """Its successor may have found room for it, in the same folder. This one, if it is the owner, fetches it again."""
    room = AdapterRoom(tmp_path)
    adapters = await room.again()
    assert room.database is not None
    source = write_lora(tmp_path / "source")

    async def refuse(project: str, adding: int = 1) -> None:
        if adding > 1:
            monkeypatch.setattr(room.database.term, "left_s", lambda: -1.0)
            raise OverQuota("full")

    with monkeypatch.context() as patch:
        patch.setattr(adapters._disk_quota, "check", refuse)
        record = await adapters.register(US, "tiny", "new", str(source), is_trusted=True)
        with pytest.raises(DatabaseUnavailable):
            await adapters.wait(record)
    assert room.folders() == [record.id] and adapters.get("default", "new").state == FETCHING
    monkeypatch.undo()
    await adapters.sweep()
    assert (await adapters.wait(record)).state == READY
    await room.close()


def test_a_replaced_owner_leaves_the_disk_reserve(tmp_path: Path):
    """It neither frees its successor's, nor makes one where that has needed it."""
    left_s = 1.0
    reserve = DiskReserve(tmp_path / "reserve", SetTerm(lambda: left_s))
    reserve.reserve()
    left_s = -1.0
    reserve.release()
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    (tmp_path / "reserve").unlink()
    reserve.reserve()
    assert not (tmp_path / "reserve").exists()


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_file_whose_record_may_be_stored_keeps_its_bytes(room: FileRoom, unanswered, size: int):
    """Whether a transaction was committed may stay unknown. The next owner knows, and reads the file."""
    unanswered()
    with pytest.raises(DatabaseUnavailable):
        await room.upload(b"x" * size)
    room.reopen()
    await room.files.sweep()
    (record,), _ = await room.files.list("one")
    assert await room.read(record) == b"x" * size


async def test_an_upload_that_may_be_complete_keeps_its_bytes(room: FileRoom, unanswered, monkeypatch):
    """Repeated, its completion answers with a file that can be read."""
    upload = await room.begin(9)
    parts = [await room.part(upload, data) for data in (b"1st", b"second")]
    unanswered()
    with pytest.raises(DatabaseUnavailable):
        await room.uploads.complete("one", upload, part_ids=parts)
    monkeypatch.undo()
    _, file = await room.uploads.complete("one", upload, part_ids=parts)
    assert await room.read(file) == b"1stsecond"


async def test_a_part_that_may_be_stored_keeps_its_bytes(room: FileRoom, unanswered, monkeypatch):
    """It counts as one of its upload."""
    upload = await room.begin(3)
    unanswered()
    with pytest.raises(DatabaseUnavailable):
        await room.part(upload, b"1st")
    monkeypatch.undo()
    (part,) = [path.name for path in room.uploads.home.iterdir()]
    _, file = await room.uploads.complete("one", upload, part_ids=[part])
    assert await room.read(file) == b"1st"


async def test_a_sweep_that_outlasts_the_term_removes_nothing(room: FileRoom, monkeypatch: pytest.MonkeyPatch):
    """An owner may be stopped in the middle of a sweep: what it looked at before says nothing of its successor's."""
    upload = await room.begin(3)
    part = await room.part(upload, b"1st")
    home = room.data_dir / "files"
    theirs = [home / ".incoming" / "file-theirs", home / "file-theirs", home / ".parts" / "part-theirs"]
    for path in theirs:
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(room.database.term, "left_s", lambda: 0.0)
        for sweep in (room.files.sweep, room.uploads.sweep):
            with pytest.raises(DatabaseUnavailable):
                await sweep()
    assert all(path.exists() for path in theirs)
    await room.files.sweep()
    await room.uploads.sweep()
    assert not any(path.exists() for path in theirs) and (home / ".parts" / part).exists()


async def test_a_replaced_owner_removes_no_copy_of_a_result(room: FileRoom, monkeypatch: pytest.MonkeyPatch):
    """Where no log is written first, nothing else says that the job, which a successor may have retried, is its own."""
    view = await room.ended_job()
    monkeypatch.setattr(room.files, "stored", LocalFiles())
    output, _ = await room.files.adopt_results(view)
    assert output is not None
    with monkeypatch.context() as patch:
        patch.setattr(room.database.term, "left_s", lambda: 0.0)
        with pytest.raises(DatabaseUnavailable):
            await room.files.delete("one", output.id, "test")
    assert Path(view.output).exists() and await room.read(output)
    await room.files.delete("one", output.id, "test")
    assert not Path(view.output).exists()


async def test_an_owner_that_was_replaced_while_it_started_removes_no_arriving_adapter(tmp_path: Path, monkeypatch):
    """Its successor is fetching it."""
    room = AdapterRoom(tmp_path)
    adapters = await room.again()
    assert room.database is not None
    (theirs := room.home / "staging" / "theirs").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(room.database.term, "left_s", lambda: 0.0)
        await adapters.load()
    assert theirs.exists()
    await adapters.load()
    assert not theirs.exists()
    await room._shut()
