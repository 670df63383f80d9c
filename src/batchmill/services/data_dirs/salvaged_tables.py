"""Where the rows of damaged tables come from: the damaged file, the backup, or what jobs have left."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from batchmill.store.sql.damaged_database import ReadableTable, Row, in_sql
from batchmill.types import SalvagedTable

NEW, BACKUP = "new", "backup"  # as which these databases are attached


class _Sources(Struct):
    read: int  # rows
    from_leaves: int  # of those
    is_damaged: bool


class SalvagedTables:
    """The tables of a new database. The keys of the rows of damaged ones are in a file of its own. Close it."""

    def __init__(self, path: Path, keys: Path, backup: Path | None) -> None:
        """Args: path: of the new database. keys: a new file."""
        self._sources: dict[sa.Table, _Sources] = {}
        self._db = sqlite3.connect(keys.absolute().as_uri(), isolation_level=None, uri=True)
        self._db.execute("PRAGMA journal_mode = OFF").fetchall()  # what a crash leaves is begun anew
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("ATTACH ? AS new", (f"{path.absolute().as_uri()}?mode=ro",))
        self._has_backup = backup is not None
        if backup is not None:
            self._db.execute("ATTACH ? AS backup", (f"{backup.absolute().as_uri()}?mode=ro&immutable=1",))

    def close(self) -> None:
        self._db.close()

    def note_read(self, table: sa.Table, found: ReadableTable, inserted: int) -> None:
        """Call it when the rows that could be read are in the new database."""
        self._sources[table] = _Sources(inserted, min(found.from_leaves, inserted), found.is_damaged)
        if found.is_damaged:
            self._db.execute(str(CreateTable(_keys_of(table)).compile(dialect=sqlite.dialect())))
            self._note_keys(table, is_added=False)

    def missing(self, table: sa.Table) -> Iterator[Row]:
        """The rows of a damaged table that the backup has and that could not be read."""
        if not self._has_backup:
            return
        known, there = _keys_of(table), _attached(table, BACKUP)
        query = sa.select(*there.columns).where(~_is_in(known, there))
        yield from self._db.execute(in_sql(query))

    def note_copied(self) -> None:
        """Call it when the rows of the backup are in the new database, and nothing is rebuilt."""
        for table, sources in self._sources.items():
            if sources.is_damaged:
                self._note_keys(table, is_added=True)

    def _note_keys(self, table: sa.Table, *, is_added: bool) -> None:
        keys, there = _keys_of(table), _attached(table, NEW)
        names = [column.name for column in keys.columns]
        values = [*(there.c[name] for name in names[:-1]), sa.literal_column("1" if is_added else "0")]
        chosen = sa.select(*values).where(~_is_in(keys, there)) if is_added else sa.select(*values)
        self._db.execute(in_sql(sa.insert(keys).from_select(names, chosen)))

    def report(self) -> list[SalvagedTable]:
        return [self._report(table, found) for table, found in self._sources.items() if found.read or found.is_damaged]

    def _report(self, table: sa.Table, sources: _Sources) -> SalvagedTable:
        name = str(table.name)
        if not sources.is_damaged:
            return SalvagedTable(name, sources.read)
        keys, there = _keys_of(table), _attached(table, NEW)
        added = sa.select(sa.func.count()).select_from(keys).where(keys.c.is_added != sa.literal_column("0"))
        rebuilt = sa.select(sa.func.count()).select_from(there).where(~_is_in(keys, there))
        from_backup, from_jobs = (
            self._db.execute(in_sql(query)).fetchone()[0] for query in (added.where(_is_in(there, keys)), rebuilt)
        )
        return SalvagedTable(name, sources.read, from_backup, True, sources.from_leaves, from_jobs)


def _keys_of(table: sa.Table) -> sa.Table:
    """A table for the keys of another one, and whether they came from the backup."""
    columns = [sa.Column(each.name, each.type, primary_key=True) for each in table.columns if each.primary_key]
    return sa.Table(
        f"keys_{table.name}", sa.MetaData(), *columns, sa.Column("is_added", sa.Integer), sqlite_with_rowid=False
    )


def _attached(table: sa.Table, schema: str) -> sa.Table:
    """A table as a database that is attached has it."""
    return sa.Table(
        table.name, sa.MetaData(), *(sa.Column(each.name, each.type, primary_key=each.primary_key) for each in table.c),
        schema=schema,
    )  # fmt: skip


def _is_in(table: sa.Table, other: sa.Table) -> sa.Exists:
    """Whether `table` has the key of a row of `other`. One of the two is a table of keys."""
    names = {column.name for column in table.columns if column.primary_key}
    equal = (table.c[name] == other.c[name] for name in sorted(names & set(other.c.keys())))
    return sa.exists().where(*equal).select_from(table)
