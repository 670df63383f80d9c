"""The stamp of a database: which version of its tables it has."""

from __future__ import annotations

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.store.tables import metadata, schema

VERSION = 4


def check(db: sa.Connection) -> None:
    """Raises: InvalidConfig for a database of another version of batchmill."""
    if not sa.inspect(db).has_table(schema.name):
        return
    version = db.execute(sa.select(schema.c.version)).scalar()
    if version not in (None, VERSION):
        raise InvalidConfig(
            f"has schema version {version}, and this batchmill requires {VERSION}: use the batchmill that wrote it, or "
            "another --data-dir"
        )


def create(db: sa.Connection) -> None:
    """Create the tables of a new database, and stamp it."""
    if sa.inspect(db).has_table(schema.name) and db.execute(sa.select(schema.c.version)).scalar() is not None:
        return
    metadata.create_all(db)
    db.execute(schema.insert().values(version=VERSION))
