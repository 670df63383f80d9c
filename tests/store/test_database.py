"""A data directory's database: other versions are refused, and looking never waits for writing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import open_database

from batchmill.errors import InvalidConfig, LedgerBroken, StorageFailed
from batchmill.store.sql import schema as schema_version
from batchmill.store.sql.database import Database
from batchmill.store.sql.sqlite import SqliteBackend
from batchmill.store.sql.tables import schema


@pytest.fixture
def database(tmp_path: Path):
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path):
    """A database that another version has written is left alone, and the message says what to do."""
    open_database(tmp_path / "batchmill.db").close()
    for version in (1, 999):
        with sqlite3.connect(tmp_path / "batchmill.db") as db:
            db.execute("UPDATE schema SET version = ?", [version])
        db.close()
        with pytest.raises(
            InvalidConfig, match=rf"batchmill.db has schema version {version},.*use the batchmill that wrote it"
        ):
            open_database(tmp_path / "batchmill.db")


def test_a_database_that_the_disk_keeps_closed_is_no_bad_input(tmp_path: Path):
    """Where the kernel refuses further files, or SQLite gets none, that is said, and not that the database is wrong."""
    path = tmp_path / "batchmill.db"
    open_database(path).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))  # the first number that a file would get
    for more in (0, 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
        try:
            with pytest.raises(StorageFailed, match=r"Too many open files|unable to open database file"):
                open_database(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_no_database_is_refused(tmp_path: Path):
    """A file that is something else is named with the way out, not written over."""
    (tmp_path / "batchmill.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(InvalidConfig, match="ledger salvage"):
        open_database(tmp_path / "batchmill.db")


async def test_reading_does_not_wait_for_writing(database: Database):
    """While a transaction is open, a reader sees the last commit, at once."""
    begun, may_end = threading.Event(), threading.Event()

    def slow(db: sa.Connection) -> None:
        db.execute(schema.update().values(version=7))
        begun.set()
        assert may_end.wait(30)

    writing = asyncio.create_task(database.write(slow))
    await asyncio.to_thread(begun.wait, 30)
    version = sa.select(schema.c.version)
    assert await database.read(lambda db: db.execute(version).scalar()) == schema_version.VERSION
    may_end.set()
    await writing
    assert await database.read(lambda db: db.execute(version).scalar()) == 7


async def test_the_reader_cannot_write(database: Database):
    """What is called as a look and writes fails, and says so."""
    with pytest.raises(LedgerBroken, match="readonly"):
        await database.read(lambda db: db.execute(schema.update().values(version=7)))


async def test_a_failed_transaction_leaves_nothing(database: Database):
    """An exception in a transaction undoes all of it."""

    def fail(db: sa.Connection) -> None:
        db.execute(schema.update().values(version=7))
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        await database.write(fail)
    version = await database.read(lambda db: db.execute(sa.select(schema.c.version)).scalar())
    assert version == schema_version.VERSION


async def test_a_closed_database_says_so(tmp_path: Path):
    """Asked after its end, it raises instead of waiting for ever."""
    database = open_database(tmp_path / "batchmill.db")
    database.close()
    with pytest.raises(LedgerBroken, match="closed"):
        await database.write(lambda db: None)


def test_writing_transactions_have_one_connection(tmp_path):
    """One transaction begins after another on the same connection; after an error nothing of it is left."""
    backend = SqliteBackend(tmp_path / "a.db")
    seen = []
    for _ in range(3):
        with backend.writer.begin() as db:
            seen.append(db.connection.driver_connection)
    assert seen[0] is seen[1] is seen[2]
    with pytest.raises(ZeroDivisionError), backend.writer.begin() as db:
        db.execute(schema.insert().values(version=1000))
        raise ZeroDivisionError
    with backend.writer.begin() as db:
        assert db.execute(sa.select(schema.c.version).where(schema.c.version == 1000)).first() is None
    backend.close()


def test_a_thread_waits_for_the_transaction_of_another(tmp_path):
    """Two threads that write do so one after the other."""
    backend, seen = SqliteBackend(tmp_path / "a.db"), []

    def write(version: int) -> None:
        with backend.writer.begin() as db:
            seen.append(f"begin {version}")
            db.execute(schema.insert().values(version=version))
            seen.append(f"end {version}")

    with backend.writer.begin() as db:
        other = threading.Thread(target=write, args=(1001,))
        other.start()
        db.execute(schema.insert().values(version=1000))
        seen.append("end 1000")
    other.join()
    assert seen == ["end 1000", "begin 1001", "end 1001"]
    backend.close()


def test_a_transaction_that_cannot_begin_fails_as_any_statement(tmp_path):
    """Where another process holds the lock of the file, SQLAlchemy's error says so, and the next transaction begins."""
    backend = SqliteBackend(tmp_path / "a.db")
    with backend.writer.begin() as db:
        db.connection.driver_connection.execute("PRAGMA busy_timeout=0")
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sa.exc.OperationalError, match="locked"), backend.writer.begin():
            pass
    with backend.writer.begin() as db:
        assert db.in_transaction()
    backend.close()
