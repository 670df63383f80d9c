"""Statements that SQLite and PostgreSQL write differently."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

from batchmill.store.sql.compiled import CompiledStatement


class greatest(GenericFunction):  # noqa: N801
    """The greatest of several values, of which none is NULL."""

    inherit_cache = True


@compiles(greatest, "sqlite")
def _as_max(element: greatest, compiler: Any, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


def put(db: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row, or set these values of the one that has its primary key."""
    _putting(table, tuple(values)).run(db, values)


def insert_missing(db: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> int:
    """Insert a row unless one with a key of it exists. Returns the number of inserted rows."""
    return _inserting_missing(table, tuple(values)).run(db, values)


@lru_cache(maxsize=64)
def _putting(table: sa.Table, names: tuple[str, ...]) -> CompiledStatement:
    keys = [column.name for column in table.primary_key]

    def build(dialect: str) -> sa.Insert:
        insert = _insert(dialect, table)
        others = {name: insert.excluded[name] for name in names if name not in keys}
        return insert.on_conflict_do_update(index_elements=keys, set_=others)

    return CompiledStatement(build, names)


@lru_cache(maxsize=64)
def _inserting_missing(table: sa.Table, names: tuple[str, ...]) -> CompiledStatement:
    return CompiledStatement(lambda dialect: _insert(dialect, table).on_conflict_do_nothing(), names)


def _insert(dialect: str, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)
