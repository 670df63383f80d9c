"""Compiled statements do what SQLAlchemy does with the same statement, on every kind of database."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import open_database

from batchmill.errors import Conflict, LedgerBroken
from batchmill.store.sql.compiled import CompiledStatement
from batchmill.store.sql.database import Database
from batchmill.store.sql.tables import jobs, model_versions, shards, used_links

OWN = jobs.c.id == sa.bindparam("job")
INSERT_LINK = CompiledStatement(used_links.insert(), ("id", "expires", "project"))
LINK = {"id": "one", "expires": 1.5, "project": "p"}


@pytest.fixture
def database(tmp_path: Path):
    opened = open_database(tmp_path / "batchmill.db")
    yield opened
    opened.close()


def links_of(db: sa.Connection) -> list[str]:
    return list(db.execute(sa.select(used_links.c.id).order_by("id")).scalars())


async def test_a_record_is_what_sqlalchemy_reads(database: Database):
    """Defaults of columns, NULL, bytes and numbers come back as SQLAlchemy has them; so does what RETURNING names."""
    given = {"id": "j", "identity": "i", "state": "running", "spec": b"\x00\xff", "created": 0.1 + 0.2, "bytes": 2**62}
    insert = CompiledStatement(jobs.insert().returning(*jobs.c), tuple(given))
    raised = jobs.update().where(OWN).values(rows=jobs.c.rows + sa.bindparam("more"), output=sa.bindparam("output"))
    change = CompiledStatement(raised.returning(*jobs.c))
    find = CompiledStatement(sa.select(jobs).where(OWN))
    read = sa.select(jobs).where(jobs.c.id == "j")

    def use(db: sa.Connection) -> None:
        assert insert.record(db, given) == dict(db.execute(read).mappings().one())
        changed = change.record(db, {"job": "j", "more": 5, "output": None})
        assert changed == find.record(db, {"job": "j"}) == dict(db.execute(read).mappings().one())
        assert changed is not None and (changed["rows"], changed["message"], changed["bytes"]) == (5, "", 2**62)
        assert change.record(db, {"job": "k", "more": 5, "output": None}) is None
        assert find.row(db, {"job": "k"}) is None and find.rows(db, {"job": "k"}) == []

    await database.write(use)


async def test_types_make_values_of_what_the_driver_returns(database: Database):
    """A truth value is no number, of a parameter neither."""
    columns = ("name", "branch", "number", "state", "created", "source", "shared")
    insert = CompiledStatement(model_versions.insert(), columns)
    shared = CompiledStatement(sa.select(model_versions.c.shared, model_versions.c.number).order_by("number"))

    def use(db: sa.Connection) -> list[tuple[object, ...]]:
        for number in (1, 2):
            insert.run(db, dict(zip(columns, ("f", "main", number, "ready", 1.0, "app.py", number == 2), strict=True)))
        return shared.rows(db, {})

    found = await database.write(use)
    assert found == [(False, 1), (True, 2)] and found[0][0] is False


async def test_an_in_takes_any_number_of_values(database: Database):
    """None, one, and numbers that are no powers of two; of tuples too. Values in the text need no parameter."""
    numbers = CompiledStatement(
        sa.select(shards.c.shard).where(shards.c.shard.in_(sa.bindparam("numbers", expanding=True)))
    )
    key = sa.tuple_(shards.c.job, shards.c.shard)
    keys = CompiledStatement(sa.select(shards.c.shard).where(key.in_(sa.bindparam("keys", expanding=True))))
    of_text = CompiledStatement(sa.select(shards.c.shard).where(shards.c.job == "j", shards.c.shard.in_([2, 4])))

    def use(db: sa.Connection) -> None:
        rows = [
            {"job": "j", "generation": 0, "shard": n, "lo": n, "hi": n + 1, "epoch": 1, "bitmap": b"\0"}
            for n in range(9)
        ]
        assert CompiledStatement(shards.insert(), tuple(rows[0])).run_all(db, rows) == 9
        for wanted in ([], [3], [1, 3, 5], [0, 1, 2, 3], [8, 7, 6, 5, 4], [3, 100]):
            expected = {n for n in wanted if n < 9}
            assert {n for (n,) in numbers.rows(db, {"numbers": wanted})} == expected
            assert {n for (n,) in keys.rows(db, {"keys": [("j", n) for n in wanted]})} == expected
        assert sorted(of_text.rows(db, {})) == [(2,), (4,)]

    await database.write(use)


async def test_changed_rows_are_counted(database: Database):
    """Of one execution, of many, and of none."""
    delete = CompiledStatement(used_links.delete().where(used_links.c.id == sa.bindparam("link")))

    def use(db: sa.Connection) -> None:
        assert INSERT_LINK.run_all(db, [LINK | {"id": each} for each in "abc"]) == 3
        assert (delete.run(db, {"link": "a"}), delete.run(db, {"link": "a"})) == (1, 0)
        assert delete.run_all(db, []) == 0
        assert delete.run_all(db, [{"link": each} for each in "abc"]) == 2

    await database.write(use)


@pytest.mark.parametrize("many", [False, True])
async def test_an_error_is_that_of_sqlalchemy(database: Database, many: bool):
    """Its class, what the driver raised, and what people are shown."""
    await database.write(lambda db: INSERT_LINK.run(db, LINK))

    def repeat(db: sa.Connection) -> None:
        with pytest.raises(sa.exc.IntegrityError) as raised:
            INSERT_LINK.run_all(db, [LINK]) if many else INSERT_LINK.run(db, LINK)
        assert isinstance(raised.value.orig, db.dialect.loaded_dbapi.IntegrityError)
        assert "INSERT INTO used_links" in str(raised.value)
        raise raised.value

    with pytest.raises(LedgerBroken) as shown:
        await database.write(repeat)
    assert shown.value.code == "database_failed" and "used_links" in shown.value.message
    assert await database.read(links_of) == ["one"]


async def test_a_call_that_fails_is_undone_alone(database: Database):
    """What a compiled statement has changed is known to the transaction that calls share."""

    def add(db: sa.Connection, link: str) -> None:
        INSERT_LINK.run(db, LINK | {"id": link})
        if link == "b":
            raise Conflict("this one is refused")

    assert await _outcomes(database, add, "abc") == [None, Conflict, None]
    assert await database.read(links_of) == ["a", "c"]


async def _outcomes(database: Database, function, links: str) -> list[type | None]:
    """Calls that wait together."""

    release = threading.Event()
    holding = asyncio.create_task(database.call(release.wait))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(database.write(function, link)) for link in links]
    await asyncio.sleep(0)
    release.set()
    await holding
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [None if each is None else type(each) for each in ended]


async def test_a_connection_without_a_transaction_begins_one(database: Database):
    """All statements of a reader see one state, the compiled ones too."""
    find = CompiledStatement(sa.select(used_links.c.id).order_by(used_links.c.id))
    await database.write(lambda db: INSERT_LINK.run(db, LINK))
    with database.reader.connect() as db:
        assert find.rows(db, {}) == [("one",)]
        await database.write(lambda db: INSERT_LINK.run(db, LINK | {"id": "two"}))
        assert find.rows(db, {}) == [("one",)] and links_of(db) == ["one"]
    with database.reader.connect() as db:
        assert find.rows(db, {}) == [("one",), ("two",)]
