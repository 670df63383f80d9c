"""A data directory's database: opened once, written by one thread, read by another.

One process owns it. The reader never waits for the writer: SQLite's write-ahead log shows it the last commit.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from batchmill.errors import BatchmillError, InvalidConfig, LedgerBroken, StorageFailed, StorageFull, to_storage_error
from batchmill.store import tables
from batchmill.store import tables as connector_tables
from batchmill.store import tables as dataset_tables
from batchmill.store import tables as llm_tables
from batchmill.store import tables as service_tables
from batchmill.store.tables import schema

VERSION = 4


def check(db: sa.Connection) -> None:
    """Raises: InvalidConfig for a database of another version of batchmill."""
    if not sa.inspect(db).has_table(schema.name):
        return
    version = db.execute(sa.select(schema.c.version)).scalar()
    if version not in (None, VERSION):
        raise InvalidConfig(
            f"has schema version {version}, and this batchmill requires {VERSION}: use the batchmill that wrote it, or "
            "another --data-dir"
        )


def write(db: sa.Connection) -> None:
    """Store the version in a new database."""
    if db.execute(sa.select(schema.c.version)).scalar() is None:
        db.execute(schema.insert().values(version=VERSION))


P = ParamSpec("P")
T = TypeVar("T")

DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

__all__ = ["Database", "connector_tables", "dataset_tables", "llm_tables", "service_tables"]

# Errors of the disk or file system, which do not indicate a damaged database.
_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


class Database:
    """An open database.

    Raises: InvalidConfig for a database of another version, or one that cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        # SQLite gives its other files the mode of this file, so only this user can ever read them.
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            failure = InvalidConfig(f"the database {path} cannot be opened: {error.strerror}")
            raise to_storage_error(error) or failure from None
        self.writer = _open(path, "BEGIN IMMEDIATE")
        try:
            with self.writer.begin() as db:
                check(db)
            tables.metadata.create_all(self.writer)
            with self.writer.begin() as db:
                write(db)
        except sa.exc.DatabaseError as error:
            self.writer.dispose()
            raise _open_error(path, error) from error
        except InvalidConfig as error:
            self.writer.dispose()
            raise InvalidConfig(f"the database {path} {error.message}") from None
        self.reader = _open(path, "BEGIN", "PRAGMA query_only=ON")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="database-write")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="database-read")
        self._closed = False

    async def write(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(db, ...)` in one transaction. Raises: StorageFull when the disk is full, LedgerBroken."""
        return await self.call(_within, self.writer, function, *args, **kwargs)

    async def read(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(db, ...)` on the last committed state. It must not write."""
        return await self.call_reader(_within, self.reader, function, *args, **kwargs)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that opens its own transactions on `writer`, in the writer thread."""
        return await self._run(self._writing, lambda: function(*args, **kwargs))

    async def call_reader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a reading function on `reader`, in the reader thread."""
        return await self._run(self._reading, lambda: function(*args, **kwargs))

    async def _run(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        if self._closed:
            raise LedgerBroken("the database is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, call)
        except sa.exc.SQLAlchemyError as error:
            raise _translate(error) from error

    def close(self) -> None:
        """Wait for running work, and close."""
        self._closed = True
        self._writing.shutdown(wait=True)
        self._reading.shutdown(wait=True)
        self.reader.dispose()
        self.writer.dispose()


def _within(engine: sa.Engine, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    with engine.begin() as db:
        return function(db, *args, **kwargs)


def _open(path: Path, begin: str, pragma: str = "") -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False, "timeout": 5.0})

    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # `begin` below starts transactions
        connection.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=5000; PRAGMA foreign_keys=ON;"
            "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;"
        )
        if pragma:
            connection.execute(pragma)

    sa.event.listen(engine, "connect", configure)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _translate(error: sa.exc.SQLAlchemyError) -> BatchmillError:
    cause = getattr(error, "orig", None)
    text = str(cause or error)
    if _code(error) == sqlite3.SQLITE_FULL:
        return StorageFull(f"the ledger cannot be written: {text}; make room and resume the job")
    if _code(error) in DAMAGED:
        return LedgerBroken(
            f"the database is damaged: {text}; stop what uses it and run `batchmill ledger salvage`",
            code="database_damaged",
        )
    return LedgerBroken(f"the database failed: {text}", code="database_failed")


def _open_error(path: Path, error: sa.exc.DatabaseError) -> BatchmillError:
    """Why a database cannot be opened, and what to do."""
    code, message = _code(error), f"the database {path} cannot be opened: {error.orig}"
    if code in _OF_THE_DISK:
        return (StorageFull if code == sqlite3.SQLITE_FULL else StorageFailed)(message)
    if code in DAMAGED:
        return InvalidConfig(
            f"the database {path} is damaged: {error.orig}; run `batchmill ledger salvage`, which creates a new one "
            "from what can be read, from backups and from the jobs' files",
            code="database_damaged",
        )
    return InvalidConfig(message)


def _code(error: sa.exc.SQLAlchemyError) -> int:
    """SQLite's primary error code; 0 if there is none."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF
