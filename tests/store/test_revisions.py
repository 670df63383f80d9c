"""The schema's versions: a new database equals an upgraded one, and what cannot be upgraded is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from fakes.databases import POSTGRESQL, databases

from batchmill.errors import InvalidConfig
from batchmill.store.sql import schema
from batchmill.store.sql.revisions import version_4
from batchmill.store.sql.tables import metadata
from batchmill.store.sql.upgrading import REVISIONS, upgrade

NEXT = """\
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{version}", "{before}"


def upgrade():
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("note_{version}", sa.Text()))
"""


@pytest.fixture
def engine(tmp_path: Path, database_kind: str):
    """An engine of an empty database."""
    if database_kind == POSTGRESQL:
        url = sa.make_url(databases.url(tmp_path))
        made = sa.create_engine(url)
        with made.begin() as db:
            db.execute(sa.text("CREATE SCHEMA empty_one"))
        made.dispose()
        made = sa.create_engine(url, connect_args={"options": "-c search_path=empty_one"})
    else:
        made = sa.create_engine(f"sqlite:///{tmp_path / 'revisions.db'}")
    yield made
    if database_kind == POSTGRESQL:
        with made.begin() as db:
            db.execute(sa.text("DROP SCHEMA empty_one CASCADE"))
    made.dispose()


def test_the_first_revision_is_what_the_tables_say(engine: sa.Engine):
    """A database that the revision creates has the tables, columns and indexes of `tables.py`. Where this fails,
    tools/make_revision.py writes the revision again, until a version is released.
    """
    with engine.begin() as db:
        context = MigrationContext.configure(db, opts={"compare_type": True, "compare_server_default": False})
        with Operations.context(context):
            version_4.upgrade()
        assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize("existing", ["", "others", "files"])
def test_a_new_database_has_the_tables(engine: sa.Engine, existing: str):
    """`prepare` creates what `tables.py` says, in an empty database and beside other tables; one that has the name of
    a table of batchmill stays.
    """
    with engine.begin() as db:
        if existing:
            db.execute(sa.text(f"CREATE TABLE {existing} (own INTEGER)"))
        schema.prepare(db)
        context = MigrationContext.configure(db, opts={"compare_type": True, "compare_server_default": False})
        differences = str(compare_metadata(context, metadata))
        assert (differences == "[]") == (not existing) and (f"'{existing}'" in differences) == bool(existing)
        assert db.execute(sa.text("SELECT version FROM schema")).scalar_one() == schema.VERSION


def test_a_database_is_upgraded_step_by_step(engine: sa.Engine, tmp_path: Path):
    """Every later revision is applied once, in order, and the stamp is the last one."""
    revisions = tmp_path / "revisions"
    revisions.mkdir()
    (revisions / "version_4.py").write_text((REVISIONS / "version_4.py").read_text())
    for version in (5, 6):
        (revisions / f"version_{version}.py").write_text(NEXT.format(version=version, before=version - 1))
    with engine.begin() as db:
        schema.prepare(db)
        upgrade(db, 4, 6, revisions)
    with engine.begin() as db:
        columns = [each["name"] for each in sa.inspect(db).get_columns("jobs")]
        assert columns[-2:] == ["note_5", "note_6"]
        assert db.execute(sa.text("SELECT version FROM schema")).scalar_one() == 6


def test_another_version_is_refused(engine: sa.Engine):
    """A later version, and one from before the first revision, are named with the way out; nothing changes."""
    with engine.begin() as db:
        schema.prepare(db)
    for version, way_out in ((schema.VERSION + 1, "use the batchmill that wrote it"), (1, "upgrades from version 4")):
        with engine.begin() as db:
            db.execute(sa.text("UPDATE schema SET version = :v"), {"v": version})
        with pytest.raises(InvalidConfig, match=rf"has schema version {version}.*{way_out}"), engine.begin() as db:
            schema.prepare(db)
