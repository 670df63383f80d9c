"""When the records of a quota are counted, and where: SQLite's short writes run on the event loop."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from batchmill.errors import Conflict, OverQuota
from batchmill.services.files import records as file_records
from batchmill.services.files.files import IS_UPLOAD
from batchmill.services.files.records import FileRecord
from batchmill.store.quotas import ON_LOOP_MAX, refuse_beyond
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import files


class Counts:
    """The statements with which SQLite counts files, and their threads."""

    def __init__(self) -> None:
        self.all: list[tuple[str, threading.Thread]] = []

    def look(self, statement: str) -> None:
        if statement.startswith("SELECT count(*)"):
            self.all.append((statement, threading.current_thread()))

    def of(self, project: str) -> int:
        return sum(f"'{project}'" in statement for statement, _ in self.all)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "batchmill.db")
    yield database
    database.close()


@pytest.fixture
async def counts(database: Database) -> Counts:
    counts = Counts()
    await database.write(lambda db: _driver(db).set_trace_callback(counts.look))
    return counts


def _driver(db: sa.Connection) -> sqlite3.Connection:
    driver = db.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def add(db: sa.Connection, n: int, project: str, quota: int, *, fails: bool = False) -> None:
    """Add a file of a project that may have `quota` of them."""
    refuse_beyond(
        db, files, quota, quota="files", project=project, way_out="delete some", where=IS_UPLOAD, is_noted=True
    )
    file_records.insert(db, FileRecord(f"file-{n}", project, "batch", "a.jsonl", 1, None, 1.0, None, None))
    if fails:
        raise Conflict("another reason")


async def test_a_refusal_has_nothing_counted_again(database: Database, counts: Counts):
    """What was counted before an order that is refused holds after it, also of other projects."""
    for n, project in enumerate("abbbb"):
        await database.write_short(add, n, project, 4)
    assert (counts.of("a"), counts.of("b")) == (1, 1)
    with pytest.raises(OverQuota):
        await database.write_short(add, 10, "b", 4)
    with pytest.raises(Conflict):
        await database.write_short(add, 10, "a", 4, fails=True)
    assert counts.of("a") == 1 and counts.of("b") > 1
    await database.write_short(add, 11, "a", 4)
    assert counts.of("a") == 1


async def test_many_records_are_not_counted_on_the_event_loop(database: Database, counts: Counts):
    """A large quota is counted in the thread, once for each project."""
    quota = ON_LOOP_MAX + 1
    await asyncio.gather(*(database.write_short(add, n, f"project {n}", quota) for n in range(3)))
    await asyncio.gather(*(database.write_short(add, n + 3, f"project {n}", quota) for n in range(3)))
    assert [counts.of(f"project {n}") for n in range(3)] == [1, 1, 1]
    assert threading.main_thread() not in [thread for _, thread in counts.all]
