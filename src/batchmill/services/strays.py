"""What lies on the disk without a record, after a database lost some: moved aside, so that no sweep removes it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import sqlalchemy as sa

from batchmill.store.damaged_database import in_sql
from batchmill.store.segments import sync_folder
from batchmill.store.tables import metadata

WHERE = "incomplete.json"  # in the folder of a salvage: the tables of which rows were lost
ASIDE = "lost+found"
STAGING = "staging"
_PLACES = {  # table -> what lies below the data directory for each of its records
    "files": "files/*",
    "adapters": "adapters/*",
    "model_versions": "models/*/*/*",
}


def move_aside(data_dir: Path, database: Path, work: Path) -> list[str]:
    """Move what has no record in `database` to `lost+found`, of the tables that lost some; returns what was moved."""
    listed = work / WHERE
    incomplete = set(msgspec.json.decode(listed.read_bytes(), type=list[str])) if listed.exists() else set(_PLACES)
    moved = []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as db:
        for table in _PLACES.keys() & incomplete:
            for path in _strays(data_dir, db, table):
                target = data_dir / ASIDE / path.relative_to(data_dir)
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not target.exists():
                    os.rename(path, target)
                    sync_folder(target.parent)
                    sync_folder(path.parent)
                    moved.append(str(target))
    return sorted(moved)


def _strays(data_dir: Path, db: sqlite3.Connection, table: str) -> Iterator[Path]:
    if table == "model_versions":
        known = {(name, str(number)) for name, number in db.execute("SELECT name, number FROM model_versions")}
        for path in sorted(data_dir.glob(_PLACES[table])):
            if STAGING not in path.parts and (path.parts[-3], path.name) not in known:
                yield path
        return
    query = in_sql(sa.select(metadata.tables[table].c.id))
    names = {name for (name,) in db.execute(query)}
    for path in sorted(data_dir.glob(_PLACES[table])):
        if not path.name.startswith(".") and path.name != STAGING and path.name not in names:
            yield path
