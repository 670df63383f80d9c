"""Where the rows of damaged tables come from: the damaged file, the backup, or what jobs have left."""

from __future__ import annotations

import sqlalchemy as sa
from msgspec import Struct

from batchmill.store.sql.damaged_database import ReadableTable
from batchmill.store.sql.database import Database
from batchmill.types import SalvagedTable

Keys = set[tuple[object, ...]]  # primary keys


class _Sources(Struct):
    read: int  # rows
    from_leaves: int  # of those
    is_damaged: bool
    read_keys: Keys = set()  # of a damaged table
    copied_keys: Keys = set()  # with those of the backup


class SalvagedTables:
    """The tables of a new database. Of a damaged one the keys of its rows are in memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sources: dict[sa.Table, _Sources] = {}

    def note_read(self, table: sa.Table, found: ReadableTable, inserted: int) -> Keys:
        """Call it when the rows that could be read are in the new database. Returns their keys if some are lost."""
        sources = _Sources(inserted, min(found.from_leaves, inserted), found.is_damaged)
        if found.is_damaged:
            sources.read_keys = self._keys(table)
        self._sources[table] = sources
        return sources.read_keys

    def note_copied(self) -> None:
        """Call it when the rows of the backup are in the new database, and nothing is rebuilt."""
        for table, sources in self._sources.items():
            if sources.is_damaged:
                sources.copied_keys = self._keys(table)

    def report(self) -> list[SalvagedTable]:
        return [self._report(table, found) for table, found in self._sources.items() if found.read or found.is_damaged]

    def _report(self, table: sa.Table, sources: _Sources) -> SalvagedTable:
        name = str(table.name)
        if not sources.is_damaged:
            return SalvagedTable(name, sources.read)
        keys = self._keys(table)
        from_backup = len(keys & (sources.copied_keys - sources.read_keys))
        rebuilt = len(keys - sources.copied_keys)
        return SalvagedTable(name, sources.read, from_backup, True, sources.from_leaves, rebuilt)

    def _keys(self, table: sa.Table) -> Keys:
        columns = [column for column in table.columns if column.primary_key]
        with self._database.writer.begin() as db:
            return {tuple(values) for values in db.execute(sa.select(*columns))}
