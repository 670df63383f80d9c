"""The file log: short files are durable in the database before they are on the disk."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial

import pytest
import sqlalchemy as sa
from fakes.databases import open_database
from sqlalchemy.exc import OperationalError

from batchmill.errors import BatchmillError, DatabaseUnavailable
from batchmill.store import file_log
from batchmill.store.file_log import BATCH_MAX, FileLog
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import logged_files


@pytest.fixture
def database(tmp_path):
    database = open_database(tmp_path / "batchmill.db")
    yield database
    database.close()


async def logged(database: Database) -> list[str]:
    """The paths of which the database has the bytes."""
    query = sa.select(logged_files.c.path).order_by(logged_files.c.path)
    return await database.read(lambda db: list(db.execute(query).scalars()))


async def test_a_file_that_was_lost_is_written_again(tmp_path, database):
    """Opened again, every file has its bytes and every link its file, whatever a loss of power left of them."""
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "a" / name for name in ("lost", "empty", "torn", "longer", "whole")]
    link, stale = tmp_path / "a" / "link", tmp_path / "a" / "stale"
    log = FileLog(database, tmp_path)
    for path in paths:
        await database.write(log.write, path, path.name.encode() * 100)
    assert await database.write(log.link, paths[0], link) == 400
    assert await database.write(log.link, paths[1], stale) == 500
    assert await database.write(log.link, tmp_path / "a" / "nothing", tmp_path / "a" / "other") is None
    paths[0].unlink()
    link.unlink()
    paths[1].write_bytes(b"")
    stale.unlink()
    stale.write_bytes(b"")  # its name is on the disk, that of its file was not
    paths[2].write_bytes(b"torn" * 50)
    paths[3].write_bytes(b"longer" * 200)
    async with FileLog(database, tmp_path).open():
        assert [path.read_bytes() for path in paths] == [path.name.encode() * 100 for path in paths]
        assert os.path.samefile(link, paths[0])
        assert os.path.samefile(stale, paths[1])
        assert await logged(database) == []


async def test_synced_files_are_forgotten(tmp_path, database):
    """The database keeps the bytes of no file that is synced, and those of one that is written again."""
    log = FileLog(database, tmp_path)

    def write(db: sa.Connection) -> None:
        for number in range(BATCH_MAX + 1):
            log.write(db, tmp_path / str(number), b"x")

    async with log.open():
        await database.write(write)
        assert len(await logged(database)) == BATCH_MAX + 1
        await log.sync()
        assert await logged(database) == []
        await database.write(log.write, tmp_path / "0", b"y")
        (tmp_path / "1").unlink()  # one that is removed needs no bytes
        await database.write(log.write, tmp_path / "2", b"z")
        await database.write(log.forget, [tmp_path / "2"])
        assert await logged(database) == ["0"]
    assert await logged(database) == []
    assert (tmp_path / "0").read_bytes() == b"y"


async def test_a_file_keeps_its_other_name(tmp_path, database):
    """A file that is written again leaves what its earlier bytes were linked to."""
    log = FileLog(database, tmp_path)
    await database.write(log.write, tmp_path / "a", b"first")
    await database.write(log.link, tmp_path / "a", tmp_path / "b")
    await database.write(log.write, tmp_path / "a", b"second")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"second", b"first")


async def test_a_replaced_owner_writes_over_no_file(tmp_path, database, monkeypatch):
    """A process that was stopped in the middle of a transaction, and goes on after another one has become the owner,
    leaves files and links of the same names as they are: the other one's."""
    log, paths = FileLog(database, tmp_path), (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    await database.write(log.write, paths[0], b"its own")
    await database.write(log.link, paths[0], paths[1])
    await database.write(log.write, paths[2], b"another")
    await log.sync()

    async def all_refused(error: type[Exception]) -> None:
        for refused in (
            partial(log.write, path=paths[0], data=b"stale"),
            partial(log.link, source=paths[2], target=paths[1]),
        ):
            with pytest.raises(error):
                await database.write(refused)
        assert [path.read_bytes() for path in paths] == [b"its own", b"its own", b"another"]
        assert await logged(database) == [] and not list(tmp_path.glob("*.part"))

    with monkeypatch.context() as patch:
        patch.setattr(database.term, "left_s", lambda: -1.0)
        await all_refused(DatabaseUnavailable)

    def ended(*_: object) -> None:
        raise OperationalError("INSERT", None, Exception("terminating connection due to administrator command"))

    with monkeypatch.context() as patch:
        patch.setattr(file_log, "put", ended)
        await all_refused(BatchmillError)


async def test_a_replaced_owner_restores_no_file(tmp_path, database, monkeypatch):
    """What is written again when the log is opened may have been replaced by then."""
    await database.write(FileLog(database, tmp_path).write, tmp_path / "a", b"logged")
    (tmp_path / "a").write_bytes(b"newer")
    monkeypatch.setattr(database.term, "left_s", lambda: -1.0)
    with pytest.raises(DatabaseUnavailable):
        await FileLog(database, tmp_path).sync()
    assert (tmp_path / "a").read_bytes() == b"newer"


@pytest.mark.parametrize("failing", ["replace", "write"])
async def test_a_file_that_cannot_be_replaced_stays(tmp_path, database, monkeypatch, failing):
    """A file is never without its name, nor with half of its new bytes, and the database has none of these."""
    log = FileLog(database, tmp_path)
    await database.write(log.write, tmp_path / "a", b"first")
    await log.sync()

    def refused(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(db: sa.Connection) -> None:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, failing, refused)
            log.write(db, tmp_path / "a", b"second")

    await database.write(write)
    assert (tmp_path / "a").read_bytes() == b"first"
    assert await logged(database) == [] and [path.name for path in tmp_path.glob("a*")] == ["a"]


async def test_a_link_to_the_same_file_leaves_no_other(tmp_path, database):
    """Made again, a link is what it was."""
    log = FileLog(database, tmp_path)
    await database.write(log.write, tmp_path / "a", b"bytes")
    assert [await database.write(log.link, tmp_path / "a", tmp_path / "b") for _ in range(2)] == [5, 5]
    assert os.stat(tmp_path / "a").st_nlink == 2


async def test_after_an_error_files_are_written_anew(tmp_path, database, monkeypatch):
    """When the kernel could not write, the bytes stay in the database, and are written again before the next sync."""
    log = FileLog(database, tmp_path)
    async with log.open():
        await database.write(log.write, tmp_path / "a", b"bytes")
        fsync = os.fsync
        failing = [OSError(5, "Input/output error")]

        def fail_once(fd: int) -> None:
            if failing:
                raise failing.pop()
            fsync(fd)

        monkeypatch.setattr(os, "fsync", fail_once)
        with pytest.raises(OSError, match="Input/output"):
            await log.sync()
        assert await logged(database) == ["a"]
        (tmp_path / "a").write_bytes(b"")  # pages that could not be written are dropped
        await log.sync()
        assert (tmp_path / "a").read_bytes() == b"bytes"
        assert await logged(database) == []


async def test_a_file_is_not_written_again_without_need(tmp_path, database):
    """What was stored after an empty log was opened stays as it is: a job may be reading it."""
    async with FileLog(database, tmp_path).open() as _:
        pass
    log = FileLog(database, tmp_path)
    await log.sync()
    path = tmp_path / "a"
    await database.write(log.write, path, b"rows")
    os.utime(path, ns=(1, 1))
    await log.sync()
    assert path.stat().st_mtime_ns == 1 and await logged(database) == []
    await database.write(log.write, path, b"more")
    os.utime(path, ns=(1, 1))
    await FileLog(database, tmp_path).sync()  # of another process, which cannot know whether the bytes are there
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (b"more", 1)


async def test_a_link_stays_whose_first_name_is_gone(tmp_path, database):
    """Opened again after a kill, a link keeps its bytes although its file was removed meanwhile."""
    log = FileLog(database, tmp_path)
    await database.write(log.write, tmp_path / "a", b"bytes")
    await log.sync()
    await database.write(log.link, tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").unlink()
    async with FileLog(database, tmp_path).open():
        assert (tmp_path / "b").read_bytes() == b"bytes"


async def test_who_syncs_waits_for_a_sync_that_runs(tmp_path, database, monkeypatch):
    """A sync returns once everything that was written before is durable, whoever makes it so."""
    log = FileLog(database, tmp_path)
    await database.write(log.write, tmp_path / "a", b"bytes")
    began, goes_on, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        began.set()
        assert goes_on.wait(30)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    first = asyncio.create_task(log.sync())
    await asyncio.to_thread(began.wait, 30)
    second = asyncio.create_task(log.sync())
    for _ in range(3):
        await database.write(lambda _: None)  # as many steps as a sync takes that finds nothing to do
    assert not second.done()
    goes_on.set()
    await asyncio.gather(first, second)
    assert await logged(database) == []


async def test_after_an_error_newer_bytes_stay(tmp_path, database, monkeypatch):
    """A file that gets other bytes while earlier ones are written again and synced keeps the other ones."""
    log, path, loop = FileLog(database, tmp_path), tmp_path / "a", asyncio.get_running_loop()
    async with log.open():
        await database.write(log.write, path, b"before")
        log._is_uncertain = True
        sync, others = log._sync, [b"after"]

        def sync_after_another_write(*found) -> None:
            if others:
                asyncio.run_coroutine_threadsafe(database.write(log.write, path, others.pop()), loop).result(30)
            sync(*found)

        monkeypatch.setattr(log, "_sync", sync_after_another_write)
        await log.sync()
        assert path.read_bytes() == b"after"
