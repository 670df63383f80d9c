"""What every kind of database does alike: on SQLite and on a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import open_database

from batchmill.errors import BatchmillError, LedgerBroken
from batchmill.store import removals
from batchmill.store.sql.database import Database
from batchmill.store.sql.portable import greatest, insert_missing, put
from batchmill.store.sql.tables import error_counts, files, used_links


@pytest.fixture
def database(tmp_path: Path):
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


def test_the_database_is_of_the_kind_that_is_tested(database: Database, database_kind: str):
    """The tests of this file, and of all that run twice, really use both kinds."""
    assert database.reader.dialect.name == database_kind


async def test_text_is_ordered_and_found_by_its_bytes(database: Database):
    """Names in any script and case come in one order, and one is never found by another."""
    ids = ["B", "a", "Ä", "ß", "ss", "z", "_", "é", "日本", "𝄞", "\ue000"]

    def insert(db: sa.Connection) -> None:
        db.execute(used_links.insert(), [{"id": each, "expires": 1.0, "project": "p"} for each in ids])

    await database.write(insert)
    listed = await database.read(lambda db: list(db.execute(sa.select(used_links.c.id).order_by("id")).scalars()))
    assert listed == sorted(ids, key=str.encode)
    for wanted in ids:
        found = sa.select(used_links.c.id).where(used_links.c.id == wanted)
        assert await database.read(lambda db, q=found: db.execute(q).scalars().all()) == [wanted]


async def test_values_come_back_as_they_went_in(database: Database):
    """Large numbers, exact floats, NULL and long text are kept; sums of whole numbers are whole numbers."""
    row = {
        "project": "p",
        "purpose": "x",
        "created": 0.1 + 0.2,
        "expires": None,
        "bytes": 2**62,
        "filename": "n" * 5000,
    }

    def insert(db: sa.Connection) -> None:
        db.execute(files.insert().values(id="one", **row))
        db.execute(files.insert().values(id="two", **row | {"bytes": 2**61}))

    await database.write(insert)
    stored = await database.read(lambda db: db.execute(sa.select(files).where(files.c.id == "one")).mappings().one())
    assert {name: stored[name] for name in row} == row
    total = await database.read(lambda db: db.execute(sa.select(sa.func.sum(files.c.bytes))).scalar_one())
    assert (total, type(total)) == (2**62 + 2**61, int)


async def test_text_with_nul_is_stored(database: Database, database_kind: str):
    """An error message of user code may hold NUL: it is shown as a symbol where the database has none."""

    def insert(db: sa.Connection) -> None:
        db.execute(error_counts.insert().values(job="j", code="c", rows=1, sample="a\x00b"))

    await database.write(insert)
    sample = await database.read(lambda db: db.execute(sa.select(error_counts.c.sample)).scalar_one())
    assert sample == ("a\x00b" if database_kind == "sqlite" else "a\u2400b")


async def test_a_row_is_inserted_once(database: Database):
    """A repeated insert has no effect, and says so."""
    values = {"id": "link", "expires": 1.0, "project": "p"}
    assert await database.write(insert_missing, used_links, values) == 1
    assert await database.write(insert_missing, used_links, values | {"expires": 2.0}) == 0
    assert await database.read(lambda db: db.execute(sa.select(used_links.c.expires)).scalar_one()) == 1.0
    removal = removals.Removal("file", "p", "job", "the owner", 1.0, False)
    await database.write(removals.insert, removal)
    await database.write(removals.insert, removal)
    assert await database.read(removals.find, "file") == removal


async def test_a_row_is_put_in_the_place_of_another(database: Database):
    """`put` inserts a row, or sets its values in the row with its key; other rows and columns stay."""
    values = {"id": "link", "expires": 1.0, "project": "p"}
    await database.write(put, used_links, values)
    await database.write(put, used_links, values | {"id": "other"})
    await database.write(put, used_links, {"id": "link", "expires": 2.0, "project": "q"})
    found = await database.read(lambda db: db.execute(sa.select(used_links).order_by(used_links.c.id)).mappings().all())
    assert [(row["id"], row["expires"], row["project"]) for row in found] == [("link", 2.0, "q"), ("other", 1.0, "p")]


async def test_the_greatest_of_several_values(database: Database):
    """`greatest` compares columns and values."""
    query = sa.select(greatest(sa.literal(1.5), sa.literal(4.0), sa.literal(2.0)))
    assert await database.read(lambda db: db.execute(query).scalar_one()) == 4.0


async def test_a_reader_cannot_write(database: Database):
    """What is called as a reader and writes fails."""
    with pytest.raises(LedgerBroken, match="read-?only"):
        await database.read(lambda db: db.execute(used_links.delete()))


async def test_a_failed_transaction_leaves_nothing(database: Database):
    """An error in a transaction undoes all of it, and the next one works."""

    def insert_twice(db: sa.Connection) -> None:
        for _ in range(2):
            db.execute(used_links.insert().values(id="link", expires=1.0, project="p"))

    with pytest.raises(BatchmillError, match="(?i)unique"):
        await database.write(insert_twice)
    count = sa.select(sa.func.count()).select_from(used_links)
    assert await database.read(lambda db: db.execute(count).scalar_one()) == 0
    assert await database.write(insert_missing, used_links, {"id": "link", "expires": 1.0, "project": "p"}) == 1


def test_a_database_is_opened_again(tmp_path: Path):
    """What was committed is there for the next owner."""
    path = tmp_path / "batchmill.db"
    for times in (1, 0):
        database = open_database(path)
        with database.writer.begin() as db:
            assert insert_missing(db, used_links, {"id": "link", "expires": 1.0, "project": "p"}) == times
        database.close()
