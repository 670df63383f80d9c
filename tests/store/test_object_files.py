"""Published paths: they outlive the data directory, and their objects go when nothing names them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from batchmill.errors import DatabaseUnavailable, StorageFailed, TermOver
from batchmill.owned_files import OwnedFiles
from batchmill.store import catalog, folder_objects
from batchmill.store.object_files import MARKS, WORK, ObjectFiles, _remove_copy
from batchmill.store.objects import StoreObjects
from batchmill.store.sql.database import Database
from batchmill.store.sql.sqlite import SqliteBackend
from batchmill.store.stored_files import using

CACHE_BYTES = 1024 * 1024


class Room:
    """A data directory, its store, and the database beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data_dir = folder, folder / "data"
        self.database = Database(SqliteBackend(folder / "batchmill.db"))
        self.objects = StoreObjects(f"file://{folder}/store")
        self.data_dir.mkdir()

    async def open(self, cache_bytes: int = CACHE_BYTES) -> ObjectFiles:
        files = ObjectFiles(self.database, self.data_dir, self.objects, cache_bytes)
        await files.open()
        return files

    def lose(self) -> None:
        shutil.rmtree(self.data_dir)
        self.data_dir.mkdir()

    def write(self, name: str, data: bytes) -> Path:
        path = self.data_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def names(self) -> list[str]:
        return [name for name, _ in self.objects.list("")]


def names_in(folder: Path) -> set[str]:
    """The files of a data directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    yield room
    room.database.close()


async def test_a_folder_comes_back(room: Room) -> None:
    """A folder with small, large and executable files and an empty folder is the same on another machine."""
    small, large = room.write("models/a/code/run.py", b"x"), room.write("models/a/large", os.urandom(40 * 1024 * 1024))
    small.chmod(0o755)
    (room.data_dir / "models/a/empty").mkdir()
    data, home = large.read_bytes(), room.data_dir / "models/a"
    files = await room.open()
    await files.publish(home)
    await files.close()
    room.lose()
    files = await room.open()
    await files.fetch(home)
    assert large.read_bytes() == data and small.read_bytes() == b"x"
    assert small.stat().st_mode & 0o777 == 0o755 and (home / "empty").is_dir()
    await files.close()


async def test_a_path_that_is_published_again(room: Room) -> None:
    """The last publication counts, also where an older copy lies; the objects of the one before go."""
    files = await room.open()
    path = room.write("jobs/job_1/results.jsonl", b"first")
    await files.publish(path)
    other = Room.__new__(Room)
    other.__dict__ = {**room.__dict__, "data_dir": room.folder / "other"}
    other.data_dir.mkdir()
    elsewhere = await other.open()
    await elsewhere.publish(other.write("jobs/job_1/results.jsonl", b"second"))
    await files.fetch(path)
    assert path.read_bytes() == b"second"
    assert len(room.names()) == 1
    await files.close()
    await elsewhere.close()


async def test_links_share_objects(room: Room) -> None:
    """A link stays when the path it was made of is removed; the last one takes the objects along."""
    files = await room.open()
    source, target = room.write("jobs/job_1/results.jsonl", b"rows"), room.write("files/file-1", b"rows")
    await files.publish(source)
    await files.link(source, target)
    assert await files.same(target, [source]) == [source]
    await files.remove(room.data_dir / "jobs/job_1")
    room.lose()
    await files.fetch(target)
    assert target.read_bytes() == b"rows" and await files.names_in(target.parent) == ["file-1"]
    await files.remove(target)
    assert room.names() == [] and not await files.holds(target)
    await files.close()


async def test_what_nothing_names_is_deleted(room: Room) -> None:
    """Objects that were being written when an owner died go when the next one opens."""
    await room.database.write(catalog.begin, ["files/file-1/half/"])
    room.objects.put("files/file-1/half/0-000000", b"part")
    files = await room.open()
    assert files._deleting is not None
    await files._deleting
    assert room.names() == [] and await room.database.read(catalog.unnamed) == []
    await files.close()


async def test_the_cache_is_bounded(room: Room) -> None:
    """Beyond the bound, the least recently used copies go, but for those that somebody holds; all can come back."""
    files = await room.open(cache_bytes=2500)
    paths = [room.write(f"files/file-{n}", bytes([n]) * 1000) for n in range(4)]
    await files.publish(paths[0])
    await files.fetch(paths[0], holder="a job")
    for path in paths[1:]:
        await files.publish(path)
    assert [path.exists() for path in paths] == [True, False, False, True]
    await files.fetch(paths[1])
    assert paths[1].read_bytes() == bytes([1]) * 1000
    files.release("a job")
    await files.fetch(paths[2])
    assert sum(path.exists() for path in paths) == 2
    await files.close()


async def test_an_object_that_was_changed(room: Room) -> None:
    """Other bytes than those that were published are refused, and nothing takes the place of the file."""
    files = await room.open()
    path = room.write("files/file-1", os.urandom(1024 * 1024))
    await files.publish(path)
    room.lose()
    (part,) = [name for name in room.names() if not name.endswith("manifest")]
    (room.folder / "store" / part).write_bytes(bytes(1024 * 1024))
    with pytest.raises(StorageFailed, match="not what was stored"):
        await (await room.open()).fetch(path)
    assert not path.exists()
    await files.close()


async def test_a_copy_that_was_removed_halfway(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose removal from the cache was cut off is brought again, and not taken for whole."""
    files = await room.open(cache_bytes=1)
    home = room.data_dir / "jobs/job_1/dataset"
    for name in ("a", "b"):
        room.write(f"jobs/job_1/dataset/{name}", name.encode())
    await files.publish(home)

    def cut_off(folder: Path, *_: object, **__: object) -> None:
        next(iter(sorted(Path(folder).iterdir()))).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            _remove_copy(OwnedFiles(), home, room.data_dir / WORK / "one")
    files = await room.open()
    await files.fetch(home)
    assert sorted(path.name for path in home.iterdir()) == ["a", "b"]
    await files.close()


async def test_copies_that_are_used(room: Room) -> None:
    """What `using` has brought stays, also where all of it together is larger than the cache."""
    files = await room.open(cache_bytes=1500)
    paths = [room.write(f"files/.parts/part-{n}", bytes(1000)) for n in range(4)]
    await files.publish(*paths)
    room.lose()
    files = await room.open(cache_bytes=1500)
    async with using(files, *paths):
        await files.publish(room.write("files/file-1", bytes(1000)))
        assert all(path.exists() for path in paths)
    await files.publish(room.write("files/file-2", bytes(1000)))
    assert not any(path.exists() for path in paths)
    await files.close()


async def test_a_holder_that_comes_while_room_is_made(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that a job begins to need while another copy is being removed stays."""
    files = await room.open()
    first, second, last = (room.write(f"files/file-{n}", bytes(1000)) for n in range(3))
    await files.publish(first, second, last)
    files._cache_bytes = 500
    unmark = files._unmark

    async def hold_then_unmark(key: str) -> None:
        await files.fetch(second, holder="a job")
        await unmark(key)

    monkeypatch.setattr(files, "_unmark", hold_then_unmark)
    await files._trim()
    assert not first.exists() and second.exists()
    await files.close()


async def test_files_of_users(room: Room) -> None:
    """The files of a function's code all come back, whatever their names; its log of calls stays behind."""
    home = room.data_dir / "models/versions/one"
    names = {"code/weights.part", "code/calls.log", "code/calls.logic.py", "code/x.tmp", "order.json"}
    for name in (*names, "calls.log", "calls.log.1"):
        room.write(f"models/versions/one/{name}", name.encode())
    files = await room.open()
    await files.publish(home)
    room.lose()
    files = await room.open()
    await files.fetch(home)
    assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} == names
    await files.close()


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/../../b", "", "a//b", "a/./b", "a\0b"])
async def test_a_manifest_that_somebody_else_wrote(room: Room, name: str) -> None:
    """Whoever can write to the store cannot write elsewhere on the owner's machine."""
    home = room.data_dir / "adapters/one"
    room.write("adapters/one/x", b"x")
    room.write("adapters/one/y", b"y")
    files = await room.open()
    await files.publish(home)
    room.lose()
    (stored,) = [each for each in room.names() if each.endswith("manifest")]
    entries = [folder_objects.FileEntry(each, 1, sha256(b"x").digest(), 0o4777, b"x") for each in (name, "x")]
    (room.folder / "store" / stored).write_bytes(msgspec.msgpack.encode(folder_objects.Manifest(entries, [])))
    with pytest.raises(StorageFailed, match="not what was stored"):
        await files.fetch(home)
    (room.folder / "store" / stored).write_bytes(b"\xff")
    with pytest.raises(StorageFailed, match="not what was stored"):
        await files.fetch(home)
    assert not home.exists()
    await files.close()


async def test_an_owner_that_was_replaced(room: Room) -> None:
    """A process that may no longer own the database writes no object, and deletes none."""
    files = await room.open()
    path = room.write("files/file-1", b"x")
    await files.publish(path)
    before = room.names()
    room.database.term.left_s = lambda: -1.0
    late = ObjectFiles(room.database, room.data_dir, room.objects, CACHE_BYTES)
    with pytest.raises(DatabaseUnavailable):
        await late.publish(room.write("files/file-2", b"y"))
    await late._delete([before[0]])
    assert room.names() == before
    await files.close()


async def test_a_replaced_owner_leaves_the_copies_of_its_successor(room: Room) -> None:
    """Its successor on the same machine reads them, and brings others: what nobody here holds may be held there."""
    files = await room.open(cache_bytes=1500)
    first, second = (room.write(f"files/{name}", bytes(1000)) for name in ("first", "second"))
    await files.publish(first)
    await files.publish(second)
    assert not first.exists() and second.exists()
    (work := room.data_dir / WORK / "theirs").mkdir(parents=True)
    room.database.term.left_s = lambda: -1.0 if first.exists() else 1.0  # it ends before there is room for this one
    before = names_in(room.data_dir)
    await files.fetch(first)
    assert first.exists() and names_in(room.data_dir) == before | {"files/first"}
    first.write_bytes(b"published by the successor")
    await files.close()
    room.database.term.left_s = lambda: -1.0
    files = await room.open()
    with pytest.raises(TermOver):
        await files.fetch(first)
    assert first.read_bytes() == b"published by the successor"
    await files.close()
    await (late := ObjectFiles(room.database, room.data_dir, room.objects, CACHE_BYTES)).open()
    assert work.exists()
    await late.close()


async def test_names_that_differ_in_case(room: Room) -> None:
    """Removing a folder leaves one whose name differs in upper and lower case; a repeated transaction is none."""
    files = await room.open()
    other = room.write("models/versions/foo/one", b"x")
    await files.publish(other)
    await files.remove(room.data_dir / "models/versions/Foo")
    assert await files.holds(other)
    for _ in range(2):
        await room.database.write(catalog.begin, ["files/file-1/half/"])
    assert await room.database.read(catalog.unnamed) == ["files/file-1/half/"]
    await files.close()


async def test_a_publication_that_is_cancelled(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the object under way: the other parts of a large file are not put first."""
    monkeypatch.setattr(folder_objects, "PART_BYTES", 300_000)
    put, begun, go_on, loop = room.objects.put, asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    names: list[str] = []

    def slow_put(name: str, data: bytes) -> None:
        names.append(name)
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        put(name, data)

    monkeypatch.setattr(room.objects, "put", slow_put)
    files = await room.open()
    publishing = asyncio.create_task(files.publish(room.write("files/large", os.urandom(300_000 * 20))))
    await begun.wait()
    publishing.cancel()
    await asyncio.sleep(0)  # the cancellation arrives
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert 1 <= len(names) <= folder_objects.PARTS_AT_ONCE
    await files.close()


async def test_marks_leave_no_empty_folders(room: Room) -> None:
    """The folders of marks go with the last one in them."""
    files = await room.open()
    paths = [room.write(f"jobs/job_{n}/results.jsonl", b"x") for n in range(2)]
    await files.publish(*paths)
    await files.remove(paths[0])
    assert [path.name for path in (room.data_dir / MARKS / "jobs").iterdir()] == ["job_1"]
    await files.remove(paths[1])
    assert not list((room.data_dir / MARKS).iterdir())
    await files.publish(paths[1])
    assert len(list((room.data_dir / MARKS).rglob("*.mark"))) == 1
    await files.close()
