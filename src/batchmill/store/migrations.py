"""What brings an older database up to the tables of today. New tables need nothing here: they are simply made."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.store.tables import jobs, schema


def migrate(db: sa.Connection) -> None:
    """Bring the database to VERSION, within the caller's transaction.

    Raises: InvalidConfig for one that a newer batchmill has written.
    """
    version = db.execute(sa.select(schema.c.version)).scalar()
    if version is None:
        db.execute(schema.insert().values(version=VERSION))
        return
    if version > VERSION:
        raise InvalidConfig(
            f"has schema version {version}, this batchmill knows {VERSION}: use the batchmill that wrote it, or "
            "another --data-dir"
        )
    for step in STEPS[version - 1 :]:
        step(db)
    if version < VERSION:
        db.execute(schema.update().values(version=VERSION))


def _add_projects(db: sa.Connection) -> None:
    """1 -> 2: jobs have a project, a door, a priority and a deadline, and say when they began to end."""
    for name in ("project", "door", "priority", "deadline", "finalizing", "cancelling", "announced"):
        column = sa.schema.CreateColumn(jobs.c[name]).compile(dialect=db.dialect)
        db.execute(sa.DDL("ALTER TABLE jobs ADD COLUMN %(column)s", context={"column": str(column)}))
    db.execute(jobs.update().values(announced=jobs.c.generation + 1))  # nobody waits to hear of these
    for index in jobs.indexes:
        index.create(db, checkfirst=True)


STEPS: tuple[Callable[[sa.Connection], None], ...] = (_add_projects,)
VERSION = len(STEPS) + 1
