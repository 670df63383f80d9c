"""The version of the tables. A database of another version is left alone."""

from __future__ import annotations

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.store.tables import schema

VERSION = 4


def check(db: sa.Connection) -> None:
    """Raises: InvalidConfig for a database that another version of batchmill has written."""
    if not sa.inspect(db).has_table(schema.name):
        return
    version = db.execute(sa.select(schema.c.version)).scalar()
    if version not in (None, VERSION):
        raise InvalidConfig(
            f"has schema version {version}, this batchmill knows {VERSION}: use the batchmill that wrote it, or "
            "another --data-dir"
        )


def write(db: sa.Connection) -> None:
    """Note the version in a database whose tables have just been made."""
    if db.execute(sa.select(schema.c.version)).scalar() is None:
        db.execute(schema.insert().values(version=VERSION))
