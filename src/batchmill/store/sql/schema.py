"""The stamp of a database: which version of its tables it has.

A new database is created whole. `revisions/` has the changes between versions.
"""

from __future__ import annotations

from functools import cache

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.optional import require
from batchmill.store.sql.tables import metadata, schema

VERSION = 4


def prepare(db: sa.Connection, *, upgrades: bool = True) -> None:
    """Create the tables of a new database, or upgrade those of an earlier version, in the caller's transaction.

    Args: upgrades: False: an earlier version is left as it is; another process may own the database.

    Raises: InvalidConfig for a database of a later version, or of one that cannot be upgraded.
    """
    version = None
    if sa.inspect(db).has_table(schema.name):
        version = db.execute(sa.select(schema.c.version)).scalar()
    if version == VERSION:
        return
    if version is None:
        _create(db)
        db.execute(schema.insert().values(version=VERSION))
        return
    if version > VERSION:
        raise InvalidConfig(
            f"has schema version {version}, and this batchmill requires {VERSION}: use the batchmill that wrote it, or "
            "another database (--data-dir, database.url)"
        )
    if not upgrades:
        return
    require("batchmill.store.sql.upgrading", "an upgrade of the database").upgrade(db, version, VERSION)


def _create(db: sa.Connection) -> None:
    """Create the tables. Where others are, those of the same names are kept."""
    if sa.inspect(db).get_table_names():
        metadata.create_all(db)
        return
    for statement in _statements(f"{db.dialect.name}+{db.dialect.driver}"):
        db.exec_driver_sql(statement)


@cache
def _statements(dialect: str) -> tuple[str, ...]:
    """What creates the tables and their indexes. SQLAlchemy takes five times as long to compile it as to run it."""
    texts: list[str] = []

    def compile_statement(statement: sa.sql.ddl.ExecutableDDLElement, *_: object) -> None:
        texts.append(str(statement.compile(dialect=engine.dialect)))

    engine = sa.create_mock_engine(f"{dialect}://", compile_statement)
    metadata.create_all(engine, checkfirst=False)
    return tuple(texts)
