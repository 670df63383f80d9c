"""One owner of a PostgreSQL database: who becomes it, and who writes nothing any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import POSTGRESQL, databases, server

from batchmill.errors import DatabaseOwned, InvalidConfig, OwnerReplaced
from batchmill.store import owner_row
from batchmill.store.portable import insert_missing
from batchmill.store.postgres import PostgresBackend
from batchmill.store.tables import used_links

LINK = {"id": "link", "expires": 1.0, "project": "p"}


@pytest.fixture
def url(tmp_path: Path):
    databases.begin(POSTGRESQL)
    yield databases.url(tmp_path / "batchmill.db")
    databases.end()


@pytest.fixture
def backends(url: str):
    """Opens back ends of one database."""
    opened: list[PostgresBackend] = []

    def open_backend() -> PostgresBackend:
        opened.append(PostgresBackend(sa.make_url(url)))
        return opened[-1]

    yield open_backend
    for each in opened:
        each.close()


def age(url: str, seconds: float) -> None:
    """As if the owner had been silent for so long."""
    statement = f"UPDATE owners SET heartbeat = clock_timestamp() - interval '{seconds} seconds'"
    server().execute(statement, url.rpartition("/")[2])


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


def test_a_replaced_owner_writes_no_row(backends, url: str):
    """An owner that was silent for too long is replaced; then every transaction of its own fails, and it is told."""
    first, second = backends(), backends()
    lost = threading.Event()
    lease = first.claim("one", "", "/data")
    lease._ended.set()  # it is stopped: it renews nothing
    lease.on_lost(lost.set)
    age(url, owner_row.SILENCE_S + 1)
    second.claim("two", "", "/data")
    with pytest.raises(OwnerReplaced), first.writer.begin() as db:
        insert_missing(db, used_links, LINK)
    assert lost.is_set()
    assert lease.left_s < 0
    with second.writer.begin() as db:
        assert insert_missing(db, used_links, LINK) == 1


def test_a_successor_waits_for_a_transaction_under_way(backends, url: str):
    """A transaction that the old owner began is committed before the new one is the owner, never after."""
    first, second = backends(), backends()
    lease = first.claim("one", "", "/data")
    lease._ended.set()
    claimed: list[int] = []
    with first.writer.begin() as db:
        insert_missing(db, used_links, LINK)
        age(url, owner_row.SILENCE_S + 1)  # does not wait: the heartbeat is no part of the key
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
