"""One owner of a PostgreSQL database: who becomes it, and who writes nothing any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases, server

from batchmill.errors import DatabaseOwned, DatabaseUnavailable, InvalidConfig, OwnerReplaced
from batchmill.owner_term import term_at
from batchmill.store.sql import owner_row
from batchmill.store.sql.portable import insert_missing
from batchmill.store.sql.postgres import PostgresBackend
from batchmill.store.sql.tables import used_links

LINK = {"id": "link", "expires": 1.0, "project": "p"}


@pytest.fixture
def url(tmp_path: Path):
    databases.begin(POSTGRESQL)
    yield databases.url(tmp_path / "batchmill.db")
    databases.end()


@pytest.fixture
def clock() -> list[float]:
    """The time by the clock of every process that waits for a silent owner, the last one of the list."""
    return [1000.0]


@pytest.fixture
def backends(url: str, clock: list[float]):
    """Opens back ends of one database."""
    opened: list[PostgresBackend] = []

    def open_backend() -> PostgresBackend:
        opened.append(PostgresBackend(sa.make_url(url), clock=lambda: clock[-1]))
        return opened[-1]

    yield open_backend
    for each in opened:
        each.close()


def stop(lease: owner_row.OwnerLease) -> None:
    """The owner renews nothing any more."""
    lease._ended.set()
    lease._thread.join()


def refuse(backend: PostgresBackend) -> None:
    """The process sees the owner's heartbeat, and may not follow it."""
    with pytest.raises(DatabaseOwned):
        backend.claim("two", "", "/data")


def test_a_database_has_one_owner(backends):
    """While the owner lives, no other process becomes it; the error names the server to use."""
    first, second = backends(), backends()
    first.claim("one", "http://one:8000", "/data")
    with pytest.raises(DatabaseOwned, match="owned by one: name it with --server http://one:8000"):
        second.claim("two", "", "/data")


def test_an_owner_that_ends_in_order_is_followed_at_once(backends):
    """A released database has a new owner without waiting."""
    first, second = backends(), backends()
    epoch = (lease := first.claim("one", "", "/data")).epoch
    lease.release()
    assert second.claim("two", "", "/data").epoch == epoch + 1


def test_only_its_own_wait_makes_a_successor(backends, url: str, clock: list[float]):
    """A heartbeat that is old by the database's clock, which may have been set, makes no owner: the process itself must
    have seen it unchanged for the whole wait. One that changes, forward or back, is a living owner's.
    """
    first, second = backends(), backends()
    stop(first.claim("one", "", "/data"))
    for step in ("-1 hour", "1 hour", "1 second"):
        statement = f"UPDATE owners SET heartbeat = clock_timestamp() + interval '{step}'"
        server().execute(statement, url.rpartition("/")[2])
        refuse(second)
        clock.append(clock[-1] + owner_row.SILENCE_S - 0.01)
        refuse(second)
    late = backends()
    clock.append(clock[-1] + 0.02)
    refuse(late)  # it has just come
    assert second.claim("two", "", "/data").epoch


def test_a_heartbeat_in_the_last_moment_counts(backends, clock: list[float]):
    """An owner that renews between the look of a successor and its claim stays the owner."""
    first, second = backends(), backends()
    lease = first.claim("one", "", "/data")
    stop(lease)
    refuse(second)
    clock.append(clock[-1] + owner_row.SILENCE_S)

    def renew(connection, cursor, statement, *_):
        if statement.startswith("UPDATE owners"):
            with first._engine.begin() as db:
                db.execute(owner_row.owners.update().values(heartbeat=sa.func.clock_timestamp()))

    sa.event.listen(second._engine, "before_cursor_execute", renew)
    refuse(second)
    with first.writer.begin() as db:
        assert insert_missing(db, used_links, LINK) == 1


def test_the_children_of_an_owner_read_its_term(backends):
    """What a child process may still write, it reads from its owner; after a release, and after its end, nothing."""
    lease = backends().claim("one", "", "/data")
    term_at(lease.term.path).check()
    term_at("").check()
    lease.release()
    assert lease.left_s <= 0
    for path in (lease.term.path, "/proc/self/fd/1000000"):
        with pytest.raises(DatabaseUnavailable, match="may have another owner"):
            term_at(path).check()


def test_a_replaced_owner_writes_no_row(backends, clock: list[float]):
    """An owner that was silent for too long is replaced; then every transaction of its own fails, and it is told."""
    first, second = backends(), backends()
    lost = threading.Event()
    lease = first.claim("one", "", "/data")
    stop(lease)
    lease.on_lost(lost.set)
    refuse(second)
    clock.append(clock[-1] + owner_row.SILENCE_S)
    second.claim("two", "", "/data")
    with pytest.raises(OwnerReplaced), first.writer.begin() as db:
        insert_missing(db, used_links, LINK)
    assert lost.is_set()
    assert lease.left_s < 0
    with second.writer.begin() as db:
        assert insert_missing(db, used_links, LINK) == 1


def test_a_successor_waits_for_a_transaction_under_way(backends, clock: list[float]):
    """A transaction that the old owner began is committed before the new one is the owner, never after."""
    first, second = backends(), backends()
    lease = first.claim("one", "", "/data")
    stop(lease)
    refuse(second)
    clock.append(clock[-1] + owner_row.SILENCE_S)
    claimed: list[int] = []
    with first.writer.begin() as db:
        insert_missing(db, used_links, LINK)
        taking = threading.Thread(target=lambda: claimed.append(second.claim("two", "", "/data").epoch))
        taking.start()
        while not server().execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            assert taking.is_alive()
        assert claimed == []
    taking.join(30)
    assert claimed == [lease.epoch + 1]
    with second.reader.begin() as db:
        assert db.execute(sa.select(used_links.c.id)).scalars().all() == ["link"]


def test_the_heartbeat_waits_for_no_transaction(backends):
    """A long transaction of the owner does not cost it the ownership."""
    first = backends()
    lease = first.claim("one", "", "/data")
    with first.writer.begin():
        before = lease._valid_until
        while lease._valid_until == before:
            assert lease._thread.is_alive()
            time.sleep(0.01)


def test_every_owner_has_its_data_directory_at_one_path(backends):
    """Records of jobs name files by their paths, so an owner with another path would find none of them."""
    first, second = backends(), backends()
    first.claim("one", "", "/data").release()
    with pytest.raises(InvalidConfig, match="--data-dir /data") as refused:
        second.claim("two", "", "/elsewhere")
    assert refused.value.code == "other_data_dir"
    second.claim("two", "", "/data")


def test_an_owner_stopped_in_the_middle_of_a_statement_is_followed(backends, clock: list[float]):
    """The server ends no transaction that waits for the rest of a statement: its owner may have been stopped, or cut
    off, between two messages of one. The successor ends it.
    """
    first, second = backends(), backends()
    lease = first.claim("one", "", "/data")
    stop(lease)
    refuse(second)
    clock.append(clock[-1] + owner_row.SILENCE_S)
    with first._engine.connect() as db:
        lease.check(db)
        wire = db.connection.driver_connection.pgconn
        wire.enter_pipeline_mode()
        wire.send_prepare(b"begun", b"SELECT 1")  # and no Sync
        wire.flush()
        assert second.claim("two", "", "/data").epoch == lease.epoch + 1
        db.invalidate()
