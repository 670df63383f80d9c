"""A data directory's database: versions are brought up to date, and looking never waits for writing."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from batchmill.errors import InvalidConfig, LedgerBroken
from batchmill.store import migrations
from batchmill.store.database import Database
from batchmill.store.tables import jobs, metadata, schema

# The `jobs` table as version 1 had it.
VERSION_1 = """
CREATE TABLE schema (version INTEGER NOT NULL PRIMARY KEY);
INSERT INTO schema VALUES (1);
CREATE TABLE jobs (
    id VARCHAR(64) NOT NULL PRIMARY KEY, identity VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL,
    reason VARCHAR(64), message TEXT NOT NULL, spec BLOB NOT NULL, created FLOAT NOT NULL, started FLOAT,
    finished FLOAT, elapsed_s FLOAT NOT NULL, generation INTEGER NOT NULL, rows BIGINT NOT NULL,
    rows_ok BIGINT NOT NULL, rows_failed BIGINT NOT NULL, rows_folded BIGINT NOT NULL, rows_rejected BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, cost FLOAT,
    output TEXT, errors_output TEXT, problems BLOB, problems_total BIGINT NOT NULL
);
INSERT INTO jobs VALUES ('job_old', 'i', 'completed', NULL, '', '{}', 1.0, 2.0, 3.0, 1.0, 0, 5, 5, 0, 0, 0, 0, 0, 0,
    NULL, NULL, NULL, NULL, 0);
"""


@pytest.fixture
def database(tmp_path: Path):
    opened = Database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


def _old(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
    db.close()


async def test_older_database_is_brought_up_to_date(tmp_path: Path):
    """Jobs of the first version are there afterwards, in the default project, with every column of today."""
    _old(tmp_path / "batchmill.db")
    for _ in range(2):  # the second time there is nothing to do
        database = Database(tmp_path / "batchmill.db")
        (job,) = await database.read(lambda db: db.execute(sa.select(jobs)).mappings().all())
        assert (job["id"], job["rows_ok"], job["project"], job["priority"]) == ("job_old", 5, "default", 0)
        assert job["deadline"] is None
        assert await database.read(lambda db: db.execute(sa.select(schema.c.version)).scalar()) == migrations.VERSION
        database.close()


async def test_migrated_tables_are_those_of_a_new_database(tmp_path: Path):
    """Whatever way a database came to this version, it has the same columns and indexes."""
    _old(tmp_path / "old.db")
    shapes = []
    for name in ("old.db", "new.db"):
        database = Database(tmp_path / name)
        seen = sa.inspect(database.reader)
        columns = {table: {c["name"] for c in seen.get_columns(table)} for table in metadata.tables}
        indexes = {i["name"] for i in seen.get_indexes("jobs")} - {"ix_jobs_identity"}
        shapes.append((columns, indexes))
        database.close()
    assert shapes[0] == shapes[1]


def test_newer_database_is_refused(tmp_path: Path):
    """A database that a newer batchmill has written is left alone, and the message says what to do."""
    Database(tmp_path / "batchmill.db").close()
    with sqlite3.connect(tmp_path / "batchmill.db") as db:
        db.execute("UPDATE schema SET version = 999")
    db.close()
    with pytest.raises(InvalidConfig, match=r"batchmill.db has schema version 999.*another --data-dir"):
        Database(tmp_path / "batchmill.db")


def test_what_is_no_database_is_refused(tmp_path: Path):
    """A file that is something else is named, not written over."""
    (tmp_path / "batchmill.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(InvalidConfig, match="cannot be opened"):
        Database(tmp_path / "batchmill.db")


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
    assert await database.read(lambda db: db.execute(version).scalar()) == migrations.VERSION
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
    assert version == migrations.VERSION


async def test_a_closed_database_says_so(tmp_path: Path):
    """Asked after its end, it raises instead of waiting for ever."""
    database = Database(tmp_path / "batchmill.db")
    database.close()
    with pytest.raises(LedgerBroken, match="closed"):
        await database.write(lambda db: None)
