"""What only PostgreSQL does: lost connections, lost replies of a commit, poolers, and what `batchmill doctor` sees."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases, server
from fakes.postgres_server import PostgresServer

from batchmill.errors import DatabaseOwned, DatabaseUnavailable, InvalidConfig, InvalidTransition
from batchmill.store.sql import diagnosis, owner_row, pooler, postgres, schema
from batchmill.store.sql.database import Database
from batchmill.store.sql.diagnosis import diagnose
from batchmill.store.sql.portable import insert_missing
from batchmill.store.sql.postgres import PostgresBackend, read_url
from batchmill.store.sql.tables import used_links

LINK = {"id": "link", "expires": 1.0, "project": "p"}
END_OTHERS = """\
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


@pytest.fixture
def url(tmp_path: Path):
    databases.begin(POSTGRESQL)
    yield sa.make_url(databases.url(tmp_path / "batchmill.db"))
    databases.end()


@pytest.fixture
def database(url: sa.URL):
    backend = PostgresBackend(url)
    backend.claim("the test", "", "")
    opened = Database(backend)
    yield opened
    opened.close()


async def test_a_transaction_whose_connection_is_lost_is_repeated(database: Database, url: sa.URL):
    """Sessions that end in the middle of a transaction cost nothing but another attempt."""
    attempts = []

    def insert(db: sa.Connection) -> int:
        attempts.append(db)
        if len(attempts) == 1:
            server().execute(END_OTHERS, str(url.database))
        return insert_missing(db, used_links, LINK)

    assert await database.write(insert) == 1
    assert len(attempts) == 2


async def test_a_commit_without_a_reply_is_not_repeated(database: Database):
    """Where the connection is lost after the server has committed, the transaction counts as committed."""
    attempts = []

    def lose_reply(connection: sa.Connection) -> None:
        if len(attempts) == 1:
            attempts.append("lost")
            connection.connection.dbapi_connection.commit()
            connection.connection.dbapi_connection.close()

    sa.event.listen(database.writer.own._engine, "commit", lose_reply)

    def insert(db: sa.Connection) -> int:
        attempts.append("begun")
        return insert_missing(db, used_links, LINK)

    assert await database.write(insert) == 1
    assert attempts == ["begun", "lost"]


@pytest.fixture
def crashing():
    """A server of its own, which writes its log to the disk only with a commit. It has no other transaction."""
    own = PostgresServer("wal_writer_delay=10s", "bgwriter_delay=10s", "autovacuum=off", "fsync=off")
    backend = PostgresBackend(sa.make_url(own.create_database("crashing")))
    lease = backend.claim("the test", "", "")
    lease._ended.set()  # no heartbeat
    lease._thread.join()
    database = Database(backend)
    yield own, database
    database.close()
    own.close()


async def test_a_commit_that_the_server_has_lost_is_repeated(crashing):
    """After a crash the server gives the number of a lost transaction to another one: only that one is committed."""
    own, database = crashing
    number = sa.text("SELECT pg_current_xact_id()::text")
    lost, reused = [], []

    def insert(db: sa.Connection) -> int:
        lost.append(db.execute(number).scalar())
        return insert_missing(db, used_links, LINK)

    def crash(_: sa.Connection) -> None:
        if not reused:
            own.stop(signal.SIGQUIT)
            own.start()
            reused.append(own.execute(str(number))[0][0])

    sa.event.listen(database.writer.own._engine, "commit", crash)
    assert await database.write(insert) == 1
    assert reused == lost[:1] and len(lost) == 2
    assert await database.read(lambda db: db.execute(sa.select(used_links.c.id)).scalars().all()) == ["link"]


async def test_a_commit_that_is_under_way_is_waited_for(database: Database):
    """Whether a transaction was committed is known only once it has ended."""
    writer = database.writer.own

    def end(*, commit: bool) -> bool:
        with writer._engine.connect() as db, ThreadPoolExecutor(1) as other:
            number = writer.lease.check(db)
            asked = other.submit(writer._has_committed, number)
            while not server().execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO owner_tr%'"
            ):
                assert not asked.done()
            db.commit() if commit else db.rollback()
            return asked.result()

    assert await database.call(end, commit=True) is True
    assert await database.call(end, commit=False) is False


async def test_which_of_all_copies_it_is(database: Database, url: sa.URL) -> None:
    """The same by any connection; not another database. Empty for a role that may not ask."""
    names = {await database.read(postgres.identify) for _ in range(2)}
    for other in (url, url.set(database="postgres")):
        with postgres.create_engine(other, poolclass=sa.pool.NullPool).connect() as db:
            names.add(postgres.identify(db))
    assert len(names) == 2 and "" not in names
    with postgres.create_engine(url, poolclass=sa.pool.NullPool).connect() as db:
        db.exec_driver_sql("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        db.exec_driver_sql("CREATE ROLE unprivileged")
        db.exec_driver_sql("SET LOCAL ROLE unprivileged")
        assert postgres.identify(db) == ""
        db.rollback()


async def test_numbers_of_transactions_are_deleted(database: Database):
    """The owner stores the numbers of its last transactions alone, also where the one that deletes them fails."""

    def fail(db: sa.Connection) -> None:
        raise InvalidTransition("refused")

    def stored(db: sa.Connection) -> list[int]:
        return sorted(db.execute(sa.select(owner_row.owner_transactions.c.number)).scalars())

    async def write(number: int) -> None:
        await database.write(lambda db: insert_missing(db, used_links, {**LINK, "id": str(number)}))

    begun = (await database.read(stored))[-1]
    for number in range(begun + 1, owner_row.NUMBERS_KEPT):
        await write(number)
    with pytest.raises(InvalidTransition):
        await database.write(fail)
    assert len(await database.read(stored)) == owner_row.NUMBERS_KEPT - 1
    await write(0)
    assert await database.read(stored) == [owner_row.NUMBERS_KEPT + 1]
    await write(1)
    assert len(await database.read(stored)) == 2


async def test_what_cannot_be_reached_is_said(url: sa.URL):
    """A server that does not answer is named, with its reason; a URL that cannot be read is not repeated."""
    with pytest.raises(DatabaseUnavailable, match="cannot be reached.*refused"):
        PostgresBackend(url.set(port=1))
    with pytest.raises(InvalidConfig, match="database.url cannot be read") as raised:
        read_url("nonsense with s3cret", None)
    assert "s3cret" not in str(raised.value)
    with pytest.raises((InvalidConfig, DatabaseUnavailable)) as refused:
        PostgresBackend(url.set(database="nowhere", password="s3cret"))
    assert "s3cret" not in str(refused.value) and "nowhere" in str(refused.value)


def test_a_pooler_is_refused(url: sa.URL):
    """Connections that share a session of the server are refused, with the way out; ordinary ones are not."""
    for pool, is_shared in ((sa.pool.StaticPool, True), (sa.pool.NullPool, False)):
        engine = sa.create_engine(url, poolclass=pool)
        connections = [engine.connect() for _ in range(3)]
        if is_shared:
            with pytest.raises(InvalidConfig, match="pool_mode = session"):
                pooler.refuse("the database", connections)
        else:
            pooler.refuse("the database", connections)
        for each in connections:
            each.close()
        engine.dispose()


def test_the_doctor_sees_a_database(database: Database, url: sa.URL):
    """Every check of a sound database is in order, and names the owner. The server of the tests syncs nothing."""
    found = {name: (ok, note) for name, ok, note in diagnose(url)}
    assert [name for name, (ok, _) in found.items() if not ok] == ["durability"]
    assert found["durability"][1].startswith("fsync is off: a loss of power can lose commits")
    assert found["owner"][1].startswith("the test")
    assert set(found) == {"database", "PostgreSQL", "primary", "durability", "clock", "schema", "owner", "pooler"}


@pytest.mark.parametrize(("pages", "words"), [("on", "commits are synced"), ("off", "full_page_writes is off")])
def test_the_doctor_sees_a_server_that_syncs(pages: str, words: str):
    """Pages that are not written whole are right on some file systems."""

    class Synced:
        def execute(self, statement: sa.TextClause) -> sa.ScalarResult:
            setting = pages if statement.text.endswith("full_page_writes") else "on"
            return engine.connect().execute(sa.select(sa.literal(setting)))

    engine = sa.create_engine("sqlite://")
    _, ok, note = diagnosis._durability(Synced())  # type: ignore[arg-type]
    assert ok and words in note
    engine.dispose()


def test_an_earlier_version_is_upgraded_by_its_owner_only(url: sa.URL, monkeypatch):
    """A server that stands by leaves the tables of a living owner as they are, and upgrades them when it takes over."""
    first = PostgresBackend(url)
    lease = first.claim("old", "", "")
    ran = []

    class Upgrading:
        @staticmethod
        def upgrade(db: sa.Connection, version: int, target: int) -> None:
            ran.append((version, target))

    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    monkeypatch.setattr(schema, "require", lambda *_: Upgrading)
    second = PostgresBackend(url)
    with pytest.raises(DatabaseOwned):
        second.claim("new", "", "")
    assert ran == []
    lease.release()
    second.claim("new", "", "")
    assert ran == [(schema.VERSION - 1, schema.VERSION)]
    first.close()
    second.close()


def failing(call: list[int], failures: int):
    """A function that loses its connection so many times."""

    def lose() -> int:
        call.append(1)
        if len(call) <= failures:
            raise sa.exc.OperationalError("", None, psycopg.OperationalError("lost"), connection_invalidated=True)
        return len(call)

    return lose


def test_a_call_after_a_long_loss_is_tried_twice(url: sa.URL):
    """Connections from before a loss may be broken when the server is back: the first failure is not the last."""
    backend = PostgresBackend(url, retry_s=0.0)
    with pytest.raises(sa.exc.OperationalError):
        backend.run(failing([], 99))
    assert backend.run(failing([], 1)) == 2
    backend.close()


def test_reads_do_not_keep_a_write_waiting(url: sa.URL):
    """A write that can never succeed fails in time, although reads succeed meanwhile."""
    backend = PostgresBackend(url, retry_s=0.0)
    calls: list[int] = []
    lose = failing(calls, 99)

    def write() -> int:
        with ThreadPoolExecutor(1) as reader:  # a read between any two attempts
            assert reader.submit(backend.run, lambda: True).result()
        assert len(calls) < 9, "it is tried again and again"
        return lose()

    with pytest.raises(sa.exc.OperationalError):
        backend.run(write)
    backend.close()
