"""Statements that SQLite and PostgreSQL write differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


class greatest(GenericFunction):  # noqa: N801
    """The greatest of several values, of which none is NULL."""

    inherit_cache = True


@compiles(greatest, "sqlite")
def _as_max(element: greatest, compiler: Any, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


def put(db: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row, or set these values of the one that has its primary key."""
    dialect = postgresql if db.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table).values(**values)
    keys = [column.name for column in table.primary_key]
    others = {name: insert.excluded[name] for name in values if name not in keys}
    db.execute(insert.on_conflict_do_update(index_elements=keys, set_=others))


def insert_missing(db: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> int:
    """Insert a row unless one with a key of it exists. Returns the number of inserted rows."""
    dialect = postgresql if db.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table).values(**values).on_conflict_do_nothing()
    return db.execute(insert, execution_options={"preserve_rowcount": True}).rowcount
