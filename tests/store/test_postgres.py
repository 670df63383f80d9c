"""What only PostgreSQL does: lost connections, lost replies of a commit, poolers, and what `batchmill doctor` sees."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases, server

from batchmill.errors import DatabaseOwned, DatabaseUnavailable, InvalidConfig
from batchmill.store import pooler, schema
from batchmill.store.database import Database
from batchmill.store.diagnosis import diagnose
from batchmill.store.portable import insert_missing
from batchmill.store.postgres import PostgresBackend, read_url
from batchmill.store.tables import used_links

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


async def test_a_commit_that_the_server_has_lost_is_repeated(database: Database):
    """A promoted standby may not have reached the number of a transaction whose reply was lost: it is not committed."""
    ahead, has_committed = str(2**62), database.writer.own._has_committed
    assert has_committed(ahead) is False
    attempts = []

    def insert(db: sa.Connection) -> int:
        attempts.append(db)
        return insert_missing(db, used_links, LINK)

    def lose_reply(connection: sa.Connection) -> None:
        if len(attempts) == 1:
            connection.connection.dbapi_connection.close()

    sa.event.listen(database.writer.own._engine, "commit", lose_reply)
    database.writer.own._has_committed = lambda _: has_committed(ahead)
    assert await database.write(insert) == 1
    assert len(attempts) == 2


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
    """Every check of a sound database is in order, and names the owner."""
    found = {name: (ok, note) for name, ok, note in diagnose(url)}
    assert all(ok for ok, _ in found.values())
    assert found["owner"][1].startswith("the test")
    assert set(found) == {"database", "PostgreSQL", "primary", "clock", "schema", "owner", "pooler"}


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
