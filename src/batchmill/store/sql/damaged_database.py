"""Reads what SQLite can still read of a damaged database: every table row by row, around bad pages, and below them.

Works on copies and writes nothing beside them. A row counts only where each of its values fits its column: of a page
that was overwritten with another one nothing is taken.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects import sqlite

from batchmill.store.sql.database import Database
from batchmill.store.sql.orphan_leaves import INNER, Leaf, Pages, apart
from batchmill.store.sql.tables import metadata

FAILURES_MAX = 50_000  # failed reads of one table: each finds one end of a gap, or one row of it
GAP_ROWS = 2000  # this many failed rows in a row are a gap, which is skipped in growing steps
ROWID_MAX = 2**63 - 1
HEADER = struct.Struct(">16sHBBBBBBII")
HEADER_BYTES, PAGES_AT = 100, 28  # of the file's header: its size, and the offset of the number of pages
FREELIST = slice(32, 40)
Row = tuple[Any, ...]


class ReadableTable(Struct):
    """The readable rows of a table, in the order of its columns."""

    rows: list[Row]
    is_damaged: bool  # some of it could not be read
    from_leaves: int = 0  # rows below damaged pages


def is_sound(path: Path) -> bool:
    """Whether SQLite finds no error in a database and its write-ahead log. Changes nothing."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            if db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                return False
            names = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
            return names >= set(metadata.tables)
    except sqlite3.DatabaseError:
        return False


class DamagedDatabase:
    """Reads a damaged database: unchanged, else with a new header, else with new pages for its schema."""

    def __init__(self, path: Path, work: Path) -> None:
        """Args: work: an empty folder for copies."""
        self._db: sqlite3.Connection | None = None
        self._orphans: _Orphans | None = None
        if not path.exists() or not path.stat().st_size:
            return
        blank = work / "blank-donor.db"
        Database(blank).close()
        vacuumed = work / "vacuumed-donor.db"
        with contextlib.closing(sqlite3.connect(blank)) as db:
            db.execute("VACUUM INTO ?", (str(vacuumed),))
        page = _page_bytes(blank)
        for name, donor in (("as-it-lies", None), ("header", blank)):
            if self._db is None:
                self._db = _try(path, work / f"{name}.db", donor, page, whole=False)
                if self._db is not None and donor is None:  # with its own header, which says what is free
                    self._orphans = _Orphans(work / f"{name}.db", self._db, page)
        if self._db is None:  # the positions of its tables depend on how it was created
            candidates = [
                _try(path, work / f"{donor.stem}-schema.db", donor, page, whole=True) for donor in (blank, vacuumed)
            ]
            sums = [-1 if candidate is None else _rows_in(candidate) for candidate in candidates]
            self._db = candidates.pop(sums.index(max(sums)))
            if candidates[0] is not None:
                candidates[0].close()

    def read(self, table: sa.Table) -> ReadableTable:
        """The readable rows of a table."""
        if self._db is None:
            return ReadableTable([], True)
        row_ids: list[int] = []
        found = _read(self._db, table, row_ids)
        if found.is_damaged and self._orphans is not None:
            below = self._orphans.rows(table, row_ids)
            found.rows += below
            found.from_leaves = len(below)
        return found

    def version(self) -> int | None:
        """The version of its schema; None if unreadable."""
        rows = self.read(metadata.tables["schema"]).rows
        return rows[0][0] if rows else None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class _Orphans:
    """The rows of leaves that no readable page refers to, and of those between them that are hard to find."""

    def __init__(self, path: Path, db: sqlite3.Connection, page_bytes: int) -> None:
        self._path, self._db, self._page_bytes = path, db, page_bytes
        self._leaves: dict[str, list[tuple[Leaf, list[Row]]]] | None = None
        self._seen: dict[str, list[Leaf]] = {}

    def rows(self, table: sa.Table, row_ids: list[int]) -> list[Row]:
        """Those of a table. Args: row_ids: of the rows that were read."""
        try:
            if self._leaves is None:
                self._leaves = {}
                self._leaves = self._find()
            known = set(row_ids)
            missed = [leaf for leaf in self._seen.pop(table.name, []) if leaf.first not in known]
            leaves = [*self._leaves.pop(table.name, []), *((leaf, self._read_leaf(table, leaf)) for leaf in missed)]
        except (OSError, sqlite3.DatabaseError):
            return []
        finally:
            self._db.rollback()
        whole = set(apart([leaf for leaf, _ in leaves], sorted(row_ids)))
        return [row for leaf, rows in leaves if leaf in whole for row in rows]

    def _find(self) -> dict[str, list[tuple[Leaf, list[Row]]]]:
        """Table -> the leaves without a reference that can only be its own."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # of the copy: its file then has every page
        query = "SELECT name, rootpage FROM sqlite_schema WHERE type = 'table' AND rootpage > 0"
        roots = dict(self._db.execute(query))
        pages = Pages(self._path.read_bytes(), self._page_bytes, list(roots.values()))
        leaves = pages.orphans()
        owners: dict[Leaf, list[tuple[str, list[Row]]]] = {leaf: [] for leaf in leaves}
        for table in metadata.sorted_tables:
            if roots.get(table.name) not in pages.broken:
                continue
            self._seen[table.name] = pages.leaves(roots[table.name])
            for leaf in leaves:
                if leaf.columns == len(table.columns) and (rows := self._read_leaf(table, leaf)):
                    owners[leaf].append((table.name, rows))
        found: dict[str, list[tuple[Leaf, list[Row]]]] = {}
        for leaf, fits in owners.items():
            if len(fits) == 1:
                found.setdefault(fits[0][0], []).append((leaf, fits[0][1]))
        return found

    def _read_leaf(self, table: sa.Table, leaf: Leaf) -> list[Row]:
        """Have SQLite read a leaf as if it was the whole table. None of its rows unless all of them fit."""
        self._point(table.name, leaf.page)
        found = _read(self._db, table, [])
        return [] if found.is_damaged else found.rows

    def _point(self, table: str, page: int) -> None:
        self._db.execute("UPDATE sqlite_schema SET rootpage = ? WHERE type = 'table' AND name = ?", (page, table))
        self._db.execute("PRAGMA writable_schema = RESET")  # so that SQLite reads the schema again
        self._db.execute("PRAGMA writable_schema = ON")


def in_sql(statement: sa.Select | sa.Insert) -> str:
    """A statement for the `sqlite3` module, with positional parameters."""
    return str(statement.compile(dialect=sqlite.dialect()))


def _try(path: Path, copy: Path, donor: Path | None, page: int, *, whole: bool) -> sqlite3.Connection | None:
    """A copy that SQLite can read; None if it cannot."""
    _copy(path, copy)
    if donor is not None:
        _transplant(copy, donor, page, whole=whole)
    try:
        return _open(copy)
    except sqlite3.DatabaseError:
        return None


def _rows_in(db: sqlite3.Connection) -> int:
    return sum(len(_read(db, table, []).rows) for table in metadata.sorted_tables)


def _page_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        return HEADER.unpack(file.read(HEADER.size))[1]


def _copy(path: Path, target: Path) -> None:
    """Copy a database with its write-ahead log, which has the newest pages."""
    shutil.copyfile(path, target)
    log = path.with_name(path.name + "-wal")
    if log.exists():
        shutil.copyfile(log, target.with_name(target.name + "-wal"))


def _transplant(copy: Path, donor: Path, page: int, *, whole: bool) -> None:
    """Put the header of a sound database into a copy. `whole`: also the pages of its schema."""
    data = donor.read_bytes()
    size = copy.stat().st_size
    header = bytearray(data[:HEADER_BYTES])
    header[PAGES_AT : PAGES_AT + 4] = struct.pack(">I", -(-size // page))
    header[FREELIST] = bytes(8)  # the copy is only read, so its list of free pages does not matter
    with open(copy, "r+b") as file:
        file.write(header)
        if not whole:
            return
        for number in _schema_pages(data, page):
            start = HEADER_BYTES if number == 1 else 0
            file.seek((number - 1) * page + start)
            file.write(data[(number - 1) * page + start : number * page])


def _schema_pages(data: bytes, page: int) -> Iterator[int]:
    """The pages of the schema table: the first page, and the pages below it."""
    waiting = [1]
    while waiting:
        number = waiting.pop()
        yield number
        own = data[(number - 1) * page : number * page]
        at = HEADER_BYTES if number == 1 else 0
        if own[at] == INNER:
            cells = struct.unpack_from(">H", own, at + 3)[0]
            offsets = struct.unpack_from(f">{cells}H", own, at + 12)
            waiting += [struct.unpack_from(">I", own, offset)[0] for offset in offsets]
            waiting.append(struct.unpack_from(">I", own, at + 8)[0])


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    try:
        # With a writable schema, SQLite accepts a file that is shorter than its header says.
        db.executescript("PRAGMA writable_schema=ON; PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;")
        db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def _read(db: sqlite3.Connection, table: sa.Table, row_ids: list[int]) -> ReadableTable:
    """Args: row_ids: gets those of the rows."""
    number = sa.literal_column("rowid")
    between = number.between(sa.bindparam("first", 0), sa.bindparam("last", 0))
    chosen = sa.select(number, *table.columns).with_hint(table, "NOT INDEXED")
    query = in_sql(chosen.where(between).order_by(number))
    query_one = in_sql(chosen.where(number == sa.bindparam("first", 0)))  # reads no page but its own
    result, failures, in_a_row = ReadableTable([], False), 0, 0
    waiting = [(1, ROWID_MAX)]
    while waiting:
        first, last = waiting.pop()
        is_one = first == last
        try:
            for rowid, *values in db.execute(query_one, (first,)) if is_one else db.execute(query, (first, last)):
                first, in_a_row = rowid + 1, 0
                if _fits(table, values):
                    result.rows.append(tuple(values))
                    row_ids.append(rowid)
                else:
                    result.is_damaged = True
            continue
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError):
            result.is_damaged, failures, in_a_row = True, failures + 1, in_a_row + 1
        if failures > FAILURES_MAX:
            break
        if in_a_row > GAP_ROWS:
            in_a_row = 0
            gap_end = _find_gap_end(db, query, first)
            waiting = [] if gap_end is None else [(gap_end, ROWID_MAX)]
        elif first < last:
            middle = (first + last) // 2
            waiting += [(middle + 1, last), (first, middle)]  # the lower half is read first
        elif first == last and not is_one:
            waiting.append((first, last))  # the last row of a page before a bad one
    return result


def _find_gap_end(db: sqlite3.Connection, query: str, first: int) -> int | None:
    """The first row id after the gap that contains `first`; None if the gap extends to the end."""

    def can_read(rowid: int) -> bool:
        try:
            db.execute(query, (rowid, ROWID_MAX)).fetchone()
            return True
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError):
            return False

    step = GAP_ROWS
    while not can_read(first + step):
        step *= 2
        if first + step > ROWID_MAX:
            return None
    low, high = first, first + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if can_read(middle) else (middle, high)
    return high


def _fits(table: sa.Table, values: list[Any]) -> bool:
    """Whether every value has a type that its column allows."""
    for column, value in zip(table.columns, values, strict=True):
        if value is None:
            if not column.nullable or column.primary_key:
                return False
            continue
        kinds: tuple[type, ...] = (str,)
        if isinstance(column.type, sa.LargeBinary):
            kinds = (bytes,)
        elif isinstance(column.type, sa.Float):
            kinds = (float, int)
        elif isinstance(column.type, sa.Integer | sa.Boolean):
            kinds = (int,)
        if not isinstance(value, kinds):
            return False
    return True
