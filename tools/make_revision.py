"""Write the first revision of the database's schema from `store/sql/tables.py`.

No version is released yet, so a change of the tables changes this revision. After a release, add a revision instead:
a module of `store/sql/revisions/` with the next number, and `VERSION` in `store/sql/schema.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import ops

from batchmill.store.sql import schema
from batchmill.store.sql.tables import metadata

OPERATIONS_MAX = 6  # of a table: with more indexes, these have a function of their own
# How Alembic writes the type of a column with text.
TEXT = re.compile(r"sa\.(String\(length=(\d+)\)|Text\(\))\.with_variant\(sa\.Text\(collation='C'\), 'postgresql'\)")
HEAD = '''"""The tables of version {version}. Written by tools/make_revision.py."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "{version}", None


def text(length: int | None = None) -> sa.types.TypeEngine[str]:
    """Text; on PostgreSQL compared by its bytes, and of any length."""
    return (sa.Text() if length is None else sa.String(length)).with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create every table."""
    for create in (
{names}
    ):
        create()
'''


def write() -> str:
    """The text of the revision."""
    with sa.create_engine("sqlite://").connect() as db:
        made = produce_migrations(MigrationContext.configure(db), metadata).upgrade_ops
    assert made is not None
    parts: dict[str, list[ops.MigrateOperation]] = {}
    for each in made.ops:
        found = each.ops if isinstance(each, ops.ModifyTableOps) else [each]
        name = each.table_name
        parts.setdefault(name, []).extend(found)
    for name in [name for name, found in parts.items() if len(found) > OPERATIONS_MAX]:
        parts[name], parts[f"{name}_indexes"] = parts[name][:1], parts[name][1:]
    functions = []
    for name, found in sorted(parts.items()):
        lines = render_python_code(ops.UpgradeOps(found)).splitlines()
        code = TEXT.sub(r"text(\2)", "\n".join(line for line in lines if not line.strip().startswith("#")))
        body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
        functions.append(f"\n\ndef _{name}() -> None:\n{body}\n")
    names = "\n".join(f"        _{name}," for name in sorted(parts))
    return HEAD.format(version=schema.VERSION, names=names) + "".join(functions)


def main() -> None:
    path = Path(schema.__file__).parent / "revisions" / f"version_{schema.VERSION}.py"
    path.write_text(write())
    subprocess.run([Path(sys.executable).with_name("ruff"), "format", "-q", path], check=True)


if __name__ == "__main__":
    main()
