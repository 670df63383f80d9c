"""The databases of a test: files of SQLite, or databases of a real PostgreSQL server, by the same paths.

Creating a database of PostgreSQL takes longer than most tests, so an emptied one is used again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
from pathlib import Path

import psycopg
import sqlalchemy as sa
from fakes.postgres_server import PostgresServer

from batchmill.errors import DatabaseOwned
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.store.sql import owner_row, postgres
from batchmill.store.sql.database import Database
from batchmill.store.sql.postgres import PostgresBackend
from batchmill.store.sql.schema import VERSION
from batchmill.store.sql.tables import metadata, schema

SQLITE, POSTGRESQL = "sqlite", "postgresql"
URL = "BATCHMILL_TEST_DATABASE"  # the variable of a process of a test: the address of what it opens
TEMPLATE = "test_template"  # a database as batchmill creates it

# All that a test can have changed of a database, but for rows.
SHAPE = """\
SELECT (SELECT string_agg(format('%s %s %s %s', relname, attname, atttypid, attnotnull), ',' ORDER BY relname, attnum)
    FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
    WHERE relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
    AND relkind <> 't' AND attnum > 0 AND NOT attisdropped),
    (SELECT string_agg(nspname, ',' ORDER BY nspname) FROM pg_namespace WHERE nspname !~ '^pg_'),
    (SELECT count(*) FROM pg_trigger), (SELECT count(*) FROM pg_proc), (SELECT count(*) FROM pg_constraint)
"""
# To delete from a table takes a tenth of the time that truncating it takes, where it has few rows.
EMPTY = f"""\
DO $$ DECLARE name text; has_rows boolean; BEGIN
    FOR name IN SELECT quote_ident(relname) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
    LOOP
        EXECUTE 'SELECT EXISTS (SELECT FROM ' || name || ')' INTO has_rows;
        IF has_rows THEN EXECUTE 'DELETE FROM ' || name; END IF;
    END LOOP;
    INSERT INTO schema VALUES ({VERSION});
    INSERT INTO owners VALUES (0, '', '', '', NULL);
END $$
"""


@functools.cache
def server() -> PostgresServer:
    """The server of this process, which the first test that needs it starts."""
    return PostgresServer()


class Databases:
    """The databases of one test at a time."""

    def __init__(self) -> None:
        self.kind = SQLITE
        self._opened: list[Database] = []
        self._connected: set[str] = set()
        self._used: dict[Path, str] = {}
        self._empty: list[str] = []
        self._created = 0
        self._shape: object = None
        self._sessions: dict[str, psycopg.Connection] = {}  # of this class, by the names of databases

    def open(self, path: Path) -> Database:
        """The database of a path, as its owner. The test closes it."""
        self._opened.append(self._open(path))
        return self._opened[-1]

    def _open(self, path: Path) -> Database:
        url = self.url(path) if self.kind == POSTGRESQL else os.environ.get(URL)
        if url is None:
            return Database(path)
        waited_s = itertools.count(0.0, owner_row.SILENCE_S)
        backend = PostgresBackend(sa.make_url(url), clock=lambda: next(waited_s))
        try:
            _claim(backend, path.parent)
        except BaseException:
            backend.close()
            raise
        return Database(backend)

    def url(self, path: Path) -> str:
        """The address of the database of a path, which has its tables."""
        if path not in self._used:
            self._used[path] = self._empty.pop() if self._empty else self._create()
        return server().url(self._used[path])

    def environment(self, path: Path) -> dict[str, str]:
        """The variables of a process that opens the database of a path with `open_database`."""
        return {URL: self.url(path)} if self.kind == POSTGRESQL else {}

    def settings(self, path: Path) -> str:
        """The lines of a configuration whose data directory has the database of a path."""
        return f'[database]\nurl = "{self.url(path)}"\n' if self.kind == POSTGRESQL else ""

    def copy(self, source: Path, target: Path) -> None:
        """Copy the rows of a database that is closed to the one of another path, which is new."""
        if self.kind == SQLITE:
            shutil.copyfile(source, target)
            return
        self.url(target)
        for table, rows in self._rows(source).items():
            with self._session(self._used[target]).cursor().copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copied:
                copied.write(rows)

    def data(self, path: Path) -> bytes:
        """All bytes that the database of a path has stored."""
        if self.kind == SQLITE:
            return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
        return b"".join(self._rows(path).values())

    def _rows(self, path: Path) -> dict[str, bytes]:
        rows: dict[str, bytes] = {}
        for table in metadata.tables:
            if table != schema.name:
                copying = self._session(self._used[path]).cursor().copy(f"COPY {table} TO STDOUT (FORMAT BINARY)")
                with copying as stored:
                    rows[table] = b"".join(stored)
        return rows

    def lose(self, path: Path) -> None:
        """As if somebody had deleted the database."""
        if self.kind == SQLITE:
            for file in path.parent.glob(f"{path.name}*"):
                file.unlink()
        else:
            self._execute(EMPTY, self._used[path])

    def begin(self, kind: str) -> None:
        """Begin a test with databases of this kind."""
        self.kind = kind
        self._opened.clear()
        self._connected.clear()

    def end(self) -> set[str]:
        """Empty what the test has used. Returns the kinds of the databases that it has opened."""
        left_open = [each for each in self._opened if not each._closed]
        for database in left_open:
            database.close()
        used, self._used, self.kind = list(self._used.values()), {}, SQLITE
        for name in used:
            if self._execute(SHAPE, name).fetchone() == self._shape:
                self._execute(EMPTY, name)
                self._empty.append(name)
            else:
                self._drop(name)
        assert not left_open, f"the test has left {len(left_open)} of its databases open"
        return set(self._connected)

    def connected(self, connection: object, _: object) -> None:
        """Note that SQLAlchemy has opened a connection."""
        self._connected.add(POSTGRESQL if isinstance(connection, psycopg.Connection) else SQLITE)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _create(self) -> str:
        if self._shape is None:
            PostgresBackend(sa.make_url(server().create_database(TEMPLATE))).close()
            self._shape = server().execute(SHAPE, TEMPLATE)[0]
        self._created += 1
        name = f"test_{self._created}"
        server().execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return name

    def _execute(self, statement: str, name: str) -> psycopg.Cursor:
        """Run a statement in a database."""
        try:
            return self._session(name).execute(statement)
        except psycopg.OperationalError:  # a test has ended all sessions
            self._sessions.pop(name).close()
        return self._session(name).execute(statement)

    def _session(self, name: str) -> psycopg.Connection:
        """The session of a database. It stays: to connect takes as long as to empty a database."""
        if name not in self._sessions:
            self._sessions[name] = server().connect(name)
        return self._sessions[name]

    def _drop(self, name: str) -> None:
        self._sessions.pop(name).close()
        server().execute(f"DROP DATABASE {name} WITH (FORCE)")


def _claim(backend: PostgresBackend, data_dir: Path) -> None:
    """Become the owner. Where a process of the test was killed, it is as if this one had waited long enough."""
    with contextlib.suppress(DatabaseOwned):
        backend.claim("the test", "", str(data_dir))
        return
    backend.claim("the test", "", str(data_dir))


# A process of tests may stand still for seconds in the middle of a transaction; no other owner waits for its locks.
postgres.IDLE_IN_TRANSACTION_MS = 60_000
databases = Databases()
atexit.register(databases.close)
sa.event.listen(sa.Engine, "connect", databases.connected)


def open_database(path: Path) -> Database:
    """The database of a path, of the kind that the running test wants."""
    return databases.open(path)


def open_ledger(path: Path) -> Ledger:
    """The ledger in the database of a path."""
    return Ledger(open_database(path))
