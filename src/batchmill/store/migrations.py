"""What brings an older database up to the tables of today. New tables need nothing here: they are simply made."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from batchmill.errors import InvalidConfig
from batchmill.store.service_tables import model_versions
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


def _add_owners(db: sa.Connection) -> None:
    """2 -> 3: functions have an owner. Those that there are were made by whoever runs the machine, for all projects."""
    there = {each["name"] for each in sa.inspect(db).get_columns(model_versions.name)}
    for name in ("project", "key", "shared"):
        if name not in there:  # a table that has just been made has them
            column = sa.schema.CreateColumn(model_versions.c[name]).compile(dialect=db.dialect)
            db.execute(sa.DDL("ALTER TABLE model_versions ADD COLUMN %(column)s", context={"column": str(column)}))


STEPS: tuple[Callable[[sa.Connection], None], ...] = (_add_projects, _add_owners)
VERSION = len(STEPS) + 1
