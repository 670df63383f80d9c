"""Upgrades a database of an earlier version, with Alembic. Imported only where the stamp differs."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from batchmill.errors import InvalidConfig
from batchmill.store.sql.tables import schema

REVISIONS = Path(__file__).with_name("revisions")


def upgrade(db: sa.Connection, version: int, target: int, revisions: Path = REVISIONS) -> None:
    """Apply every revision after `version` up to `target`, in the caller's transaction, and stamp the database.

    Raises: InvalidConfig for a version that no revision begins from.
    """
    scripts = ScriptDirectory(str(revisions), version_locations=[str(revisions)])
    known = {script.revision for script in scripts.walk_revisions()}
    if str(version) not in known:
        raise InvalidConfig(
            f"has schema version {version}, and this batchmill upgrades from version {min(map(int, known))} on: use "
            "the batchmill that wrote it"
        )
    context = MigrationContext.configure(db)
    for script in reversed(list(scripts.iterate_revisions(str(target), str(version)))):
        with Operations.context(context):
            script.module.upgrade()
    db.execute(schema.update().values(version=target))
