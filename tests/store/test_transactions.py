"""Writes that wait for a database share a transaction; each gets its own result or error."""

import asyncio
import contextlib
import threading
from contextlib import asynccontextmanager

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, SQLITE, databases
from fakes.terms import SetTerm

from batchmill.errors import DatabaseUnavailable, InvalidTransition, LedgerBroken, TermOver
from batchmill.store.sql.shared_transactions import SHARED_MAX
from batchmill.store.sql.tables import schema


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


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def opened(tmp_path, request):
    databases.begin(request.param)
    database = databases.open(tmp_path / "a.db")
    yield database
    if request.param == POSTGRESQL:  # it is used again, with what is in `schema`
        asyncio.run(database.write(lambda db: db.execute(schema.delete().where(schema.c.version >= 1000)) and None))
    database.close()
    databases.end()


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


def _counted(function, calls):
    return lambda db: calls.append(function) or function(db)


def test_a_write_that_is_refused_costs_the_others_nothing(opened, transactions):
    """What raises before it changes anything leaves the shared transaction as it is."""
    calls = []

    def refuse(db):
        _versions(db)
        raise InvalidTransition("refused")

    functions = [lambda db, n=n: _add(db, 1000 + n) for n in range(4)]
    functions.insert(2, refuse)
    answers = asyncio.run(_write_all(opened, *(_counted(function, calls) for function in functions)))
    assert isinstance(answers.pop(2), InvalidTransition)
    assert answers == list(range(answers[0], answers[0] + 4))
    assert calls == functions and len(transactions) == 1
    assert asyncio.run(opened.read(_versions)) == {1000, 1001, 1002, 1003}


def test_a_write_that_fails_in_the_middle_is_undone_alone(opened, transactions):
    """What raises after it has changed something costs the others one more transaction, however many they are."""

    def refuse(db):
        _add(db, 1999)
        raise InvalidTransition("refused")

    functions = [lambda db, n=n: _add(db, 1000 + n) for n in range(SHARED_MAX - 2)]
    functions[1:1] = [refuse, refuse]
    answers = asyncio.run(_write_all(opened, *functions))
    assert [type(answer) for answer in answers[1:3]] == [InvalidTransition, InvalidTransition]
    assert answers[3:] == list(range(answers[0] + 1, answers[0] + SHARED_MAX - 2))
    assert len(transactions) == 2
    assert asyncio.run(opened.read(_versions)) == set(range(1000, 1000 + SHARED_MAX - 2))


def test_an_error_of_the_database_that_is_passed_over_loses_no_write(opened):
    """It has ended the transaction: PostgreSQL answers the others' COMMIT with a rollback, and SQLite does nothing."""
    statement = "INSERT OR ROLLBACK INTO schema (version) VALUES (1000)"  # no SQL, for PostgreSQL

    def refuse(db):
        try:
            db.execute(sa.text(statement))
        except sa.exc.DBAPIError:
            raise InvalidTransition("refused") from None

    def ignore(db):
        with contextlib.suppress(sa.exc.DBAPIError):
            db.execute(sa.text(statement))

    first, refused, ignored = asyncio.run(_write_all(opened, lambda db: _add(db, 1000), refuse, ignore))
    assert isinstance(refused, InvalidTransition) and isinstance(first, int)
    assert isinstance(ignored, LedgerBroken)
    assert asyncio.run(opened.read(_versions)) == {1000}
    with pytest.raises(LedgerBroken, match="not committed"):
        asyncio.run(opened.write(ignore))


def test_a_read_that_raises_leaves_the_others(opened, monkeypatch):
    """Reads share a transaction too: one that raises is not repeated, nor are the others."""
    calls = []

    def refuse(_):
        raise InvalidTransition("refused")

    async def read_all():
        release = threading.Event()
        holding = [asyncio.create_task(opened.call_reader(release.wait)) for _ in range(opened._backend.reader_threads)]
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(opened.read(_counted(each, calls))) for each in (_versions, refuse, _versions)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*holding)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, refused, last = asyncio.run(read_all())
    assert (first, last) == (set(), set()) and isinstance(refused, InvalidTransition)
    assert sorted(calls, key=str) == sorted([_versions, refuse, _versions], key=str)


def test_a_write_that_the_database_refuses_leaves_the_others(opened, transactions):
    first, clash, last = asyncio.run(
        _write_all(opened, lambda db: _add(db, 1000), lambda db: _add(db, 1000), lambda db: _add(db, 1002))
    )
    assert "UNIQUE" in str(clash).upper()
    assert last == first + 1
    assert len(transactions) == 4  # the shared one, then one each
    assert asyncio.run(opened.read(_versions)) == {1000, 1002}


def test_a_transaction_that_may_have_been_committed_is_not_repeated(opened, transactions):
    def lose(db):
        raise DatabaseUnavailable("nobody can say whether it was committed")

    answers = asyncio.run(_write_all(opened, lambda db: _add(db, 1000), lose))
    assert [type(answer) for answer in answers] == [DatabaseUnavailable, DatabaseUnavailable]
    assert len(transactions) == 1


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_term_that_is_over_fails_only_what_needs_it(opened, has_changed):
    """A file must not be written then. Other calls write the database alone, which knows its owner by itself."""

    def refused(db):
        if has_changed:
            _add(db, 1001)
        SetTerm(lambda: -1.0).check()

    first, over, last = asyncio.run(_write_all(opened, lambda db: _add(db, 1000), refused, lambda db: _add(db, 1002)))
    assert isinstance(over, TermOver) and last == first + 1
    assert asyncio.run(opened.read(_versions)) == {1000, 1002}


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


def test_what_nobody_waits_for_is_seen_by_later_writes(opened, transactions):
    """It joins the transaction of the next write, and is written by itself where there is none, as before the end."""

    async def run():
        opened.write_soon(_add, 1001)
        assert await opened.write(_versions) == {1001}
        joined = len(transactions)
        opened.write_soon(_add, 1002)
        opened._writes.flush()  # as its timer does
        for _ in range(2):  # a turn that is ending looks again, behind what waits for the thread
            await opened.call(lambda: None)
        return joined, await opened.read(_versions)

    assert asyncio.run(run()) == (1, {1001, 1002})
