"""Writes that wait for a database share a transaction; each gets its own result or error."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa
from fakes.databases import databases

from batchmill.errors import DatabaseUnavailable, InvalidTransition
from batchmill.store.tables import schema


def _add(db, version):
    db.execute(schema.insert().values(version=version))
    return db.execute(sa.text("SELECT count(*) FROM schema")).scalar_one()


def _versions(db):
    return set(db.execute(sa.select(schema.c.version).where(schema.c.version >= 1000)).scalars())


@asynccontextmanager
async def _held(database):
    """The writer's thread is held meanwhile, so that writes wait."""
    release = threading.Event()
    holding = asyncio.create_task(database.call(release.wait))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        release.set()
        await holding


async def _write_all(database, *functions):
    """The results and errors of writes that wait together."""
    async with _held(database):
        tasks = [asyncio.create_task(database.write(function)) for function in functions]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def opened(tmp_path):
    database = databases.open(tmp_path / "a.db")
    yield database
    database.close()


@pytest.fixture
def transactions(opened, monkeypatch):
    """Counts the transactions that a database begins."""
    began = []
    begin = opened.writer.own.begin
    monkeypatch.setattr(opened.writer.own, "begin", lambda: began.append(1) or begin(), raising=True)
    return began


def test_waiting_writes_share_a_transaction(opened, transactions):
    counts = asyncio.run(_write_all(opened, *(lambda db, n=n: _add(db, 1000 + n) for n in range(5))))
    assert [count - counts[0] for count in counts] == [0, 1, 2, 3, 4]  # in order, each sees those before it
    assert len(transactions) == 1
    assert asyncio.run(opened.read(_versions)) == {1000, 1001, 1002, 1003, 1004}


def test_a_write_that_fails_leaves_the_others(opened, transactions):
    def refuse(db):
        _add(db, 1001)
        raise InvalidTransition("refused")

    first, refused, clash, last = asyncio.run(
        _write_all(opened, lambda db: _add(db, 1000), refuse, lambda db: _add(db, 1000), lambda db: _add(db, 1002))
    )
    assert isinstance(refused, InvalidTransition)
    assert "UNIQUE" in str(clash).upper()
    assert last == first + 1
    assert len(transactions) == 5  # the shared one, then one each
    assert asyncio.run(opened.read(_versions)) == {1000, 1002}


def test_a_transaction_that_may_have_been_committed_is_not_repeated(opened, transactions):
    def lose(db):
        raise DatabaseUnavailable("nobody can say whether it was committed")

    answers = asyncio.run(_write_all(opened, lambda db: _add(db, 1000), lose))
    assert [type(answer) for answer in answers] == [DatabaseUnavailable, DatabaseUnavailable]
    assert len(transactions) == 1


def test_a_cancelled_write_is_not_run(opened):
    async def run():
        async with _held(opened):
            given_up = asyncio.create_task(opened.write(_add, 1000))
            kept = asyncio.create_task(opened.write(_add, 1001))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
        await kept
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return await opened.read(_versions)

    assert asyncio.run(run()) == {1001}


def test_what_begins_its_own_transaction_joins_the_shared_one(opened, transactions):
    def join(_):
        with opened.writer.begin() as db:
            return _add(db, 1000)

    asyncio.run(_write_all(opened, join, lambda db: _add(db, 1001)))
    assert len(transactions) == 1
    assert asyncio.run(opened.read(_versions)) == {1000, 1001}
