"""The databases of a test: files of SQLite, or databases of a real PostgreSQL server, by the same paths.

Creating a database of PostgreSQL takes longer than most tests, so an emptied one is used again.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import psycopg
import sqlalchemy as sa
from fakes.postgres_server import PostgresServer

from batchmill.jobs.ledger.ledger import Ledger
from batchmill.store.sql.database import Database
from batchmill.store.sql.postgres import PostgresBackend
from batchmill.store.sql.tables import metadata, schema

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@functools.cache
def server() -> PostgresServer:
    """The server of this process, which the first test that needs it starts."""
    return PostgresServer()


class Databases:
    """The databases of one test at a time."""

    def __init__(self) -> None:
        self.kind = SQLITE
        self._used: dict[Path, str] = {}
        self._empty: list[str] = []
        self._created = 0

    def open(self, path: Path) -> Database:
        """The database of a path, as its owner."""
        if self.kind == SQLITE:
            return Database(path)
        backend = PostgresBackend(sa.make_url(self.url(path)))
        backend.claim("the test", "", "")
        return Database(backend)

    def url(self, path: Path) -> str:
        """The address of the database of a path."""
        if path not in self._used:
            self._used[path] = self._empty.pop() if self._empty else self._create()
        return server().url(self._used[path])

    def lose(self, path: Path) -> None:
        """As if somebody had deleted the database."""
        if self.kind == SQLITE:
            for file in path.parent.glob(f"{path.name}*"):
                file.unlink()
        else:
            self._clear(self._used[path])

    def begin(self, kind: str) -> None:
        """Begin a test with databases of this kind."""
        self.kind = kind

    def end(self) -> None:
        """Empty what the test has used."""
        for name in self._used.values():
            self._clear(name)
            self._empty.append(name)
        self._used.clear()
        self.kind = SQLITE

    def _create(self) -> str:
        self._created += 1
        name = f"test_{self._created}"
        server().create_database(name)
        return name

    def _clear(self, name: str) -> None:
        others = [f'DELETE FROM "{table}"' for table in metadata.tables if table != schema.name]
        with contextlib.suppress(psycopg.errors.UndefinedTable):  # the test has not opened it
            server().execute("; ".join(["UPDATE owners SET heartbeat = NULL, data_dir = ''", *others]), name)


databases = Databases()


def open_database(path: Path) -> Database:
    """The database of a path, of the kind that the running test wants."""
    return databases.open(path)


def open_ledger(path: Path) -> Ledger:
    """The ledger in the database of a path."""
    return Ledger(open_database(path))
