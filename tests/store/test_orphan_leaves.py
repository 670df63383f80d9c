"""Rows below a damaged inner page of a table, and rows that are there no more."""

from __future__ import annotations

import contextlib
import sqlite3
import struct

import pytest
from fakes.damaged_pages import PAGE, children, overwrite, root

from batchmill.store.sql.damaged_database import DamagedDatabase
from batchmill.store.sql.database import Database
from batchmill.store.sql.orphan_leaves import Leaf, apart
from batchmill.store.sql.tables import job_models, keys, packed_jobs

ROWS = 2400


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a database. Its table of keys has two levels of inner pages; rows of another lie on many pages."""
    path = tmp_path_factory.mktemp("whole") / "a.db"
    Database(path).close()
    row = {"name": "n" * 900, "project": "p", "hash": "0" * 64, "scopes": "read", "created": 1.0}
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for number in range(ROWS):
            values = {"id": f"k{number:05}", **row}
            marks = ", ".join("?" * len(values))
            db.execute(f"INSERT INTO keys ({', '.join(values)}) VALUES ({marks})", [*values.values()])
        db.executemany(
            "INSERT INTO packed_jobs VALUES (?, ?)", [(f"j{n}", bytes([n % 256]) * 9000) for n in range(100)]
        )
        db.executemany("INSERT INTO job_models VALUES (?, ?)", [(f"j{n}", "m" * 300) for n in range(100)])
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


@pytest.fixture
def path(whole, tmp_path):
    (tmp_path / "a.db").write_bytes(whole)
    return tmp_path / "a.db"


def read(path, table) -> list[str]:
    """The first column of the rows that can be read."""
    work = path.parent / "work"
    work.mkdir()
    damaged = DamagedDatabase(path, work)
    try:
        found = damaged.read(table)
        assert found.is_damaged
        return [str(row[0]) for row in found.rows]
    finally:
        damaged.close()
        for each in work.iterdir():
            each.unlink()
        work.rmdir()


def ids(first: int, last: int) -> list[str]:
    return [f"k{number:05}" for number in range(first, last)]


def test_all_rows_below_damaged_inner_pages(path):
    """Whether an inner page is the first of its table or below it, each row below it is found, once."""
    top = root(path, keys.name)
    inner = children(path, top)
    assert len(inner) > 1
    overwrite(path, inner[0])
    assert sorted(read(path, keys)) == ids(0, ROWS)
    overwrite(path, inner[-1])
    assert sorted(read(path, keys)) == ids(0, ROWS)
    overwrite(path, top)
    assert sorted(read(path, keys)) == ids(0, ROWS)


def test_rows_of_many_pages(path):
    """A value that begins on such a leaf and goes on elsewhere is found whole."""
    overwrite(path, root(path, packed_jobs.name))
    assert sorted(read(path, packed_jobs)) == sorted(f"j{n}" for n in range(100))


def test_tables_of_one_shape(path):
    """Two damaged tables that have as many columns: each gets its own rows."""
    for table in (packed_jobs, job_models):
        overwrite(path, root(path, table.name))
    for table in (packed_jobs, job_models):
        assert sorted(read(path, table)) == sorted(f"j{n}" for n in range(100)), table.name


def test_what_was_deleted_stays_deleted(path):
    """Leaves that are free still hold rows as they were: none of these is found, nor an older state of a row."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA secure_delete=OFF")
        db.execute("DELETE FROM keys WHERE id >= 'k00800' AND id < 'k01600'")
        db.execute("UPDATE keys SET name = 'new' WHERE id < 'k00400'")
    with contextlib.closing(sqlite3.connect(path)) as db:
        free = db.execute("PRAGMA freelist_count").fetchone()[0]
        assert free > 100
    assert b"k01200" in path.read_bytes(), "the bytes of a deleted row are still there"
    overwrite(path, root(path, keys.name))
    assert sorted(read(path, keys)) == ids(0, 800) + ids(1600, ROWS)


def test_free_pages_that_are_not_known(path):
    """Where the list of free pages is damaged, no leaf is believed to be in use."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM keys WHERE id >= 'k00800' AND id < 'k01600'")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    overwrite(path, root(path, keys.name))
    overwrite(path, struct.unpack_from(">I", path.read_bytes(), 32)[0])
    assert read(path, keys) == []


def test_newer_pages_in_the_log(path):
    """Rows of a write-ahead log that no checkpoint has moved count as they are there."""
    log = path.with_name("a.db-wal")
    with contextlib.closing(sqlite3.connect(path)) as db:
        with db:
            db.execute("DELETE FROM keys WHERE id >= 'k02000'")
        overwrite(path, children(path, root(path, keys.name))[0])  # none of its rows was deleted, so the log lacks it
        pages = path.read_bytes(), log.read_bytes()
    path.write_bytes(pages[0])
    log.write_bytes(pages[1])
    work = path.parent / "work"
    work.mkdir()
    damaged = DamagedDatabase(path, work)
    found = [row[0] for row in damaged.read(keys).rows]
    damaged.close()
    assert sorted(found) == ids(0, 2000)


def test_the_last_row_before_a_bad_page(path):
    """A bad leaf costs its own rows and none of the leaf before it, however many there are."""
    leaves = [leaf for inner in children(path, root(path, keys.name)) for leaf in children(path, inner)]
    per_leaf = [path.read_bytes().count(b"n" * 900, (leaf - 1) * PAGE, leaf * PAGE) for leaf in leaves]
    bad = range(1, len(leaves), 50)
    for number in bad:
        overwrite(path, leaves[number])
    assert len(read(path, keys)) == ROWS - sum(per_leaf[number] for number in bad)


def test_leaves_that_share_row_ids():
    """Of leaves with common row ids one is older: neither is taken, nor one with the id of a row that can be read."""
    leaves = [Leaf(2, 1, 5, 3), Leaf(3, 5, 9, 3), Leaf(4, 10, 19, 3), Leaf(5, 20, 29, 3), Leaf(6, 30, 39, 3)]
    assert [leaf.page for leaf in apart(leaves, [25])] == [4, 6]
    assert [leaf.page for leaf in apart([*leaves, Leaf(7, 1, 100, 3)], [])] == []
    assert [leaf.page for leaf in apart([*leaves, Leaf(7, 10, 19, 3)], [])] == [5, 6]
