"""The back end of a database in a file: SQLite with a write-ahead log, which shows the reader the last commit."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from batchmill.errors import BatchmillError, InvalidConfig, LedgerBroken, StorageFailed, StorageFull, to_storage_error
from batchmill.owner_term import EndlessTerm
from batchmill.store.sql import schema

T = TypeVar("T")

DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Errors of the disk or file system, which do not indicate a damaged database.
_OF_THE_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


PROBE_BYTES = 64 * 1024
# At how many pages of the log SQLite writes them back into the file, each once: 16 MiB. Its own 1,000 pages are a dozen
# or two of short jobs with all their indexes.
WRITES_BACK = "PRAGMA wal_autocheckpoint=4000"
# How long another process that writes is waited for: milliseconds.
WAITS, WAITS_NOT = "PRAGMA busy_timeout=5000", "PRAGMA busy_timeout=0"


class SqliteBackend:
    """An open database file. The lock of the data directory makes this process its only writer.

    Raises: InvalidConfig for a database of another version, or one that cannot be opened.
    """

    reader_threads = 1

    def __init__(self, path: Path) -> None:
        # SQLite gives its other files the mode of this file, so only this user can ever read them.
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            failure = InvalidConfig(f"the database {path} cannot be opened: {error.strerror}")
            raise to_storage_error(error) or failure from None
        self._folder, self.term = path.parent, EndlessTerm()  # the lock of the data directory ends with this process
        self.writer = SqliteWriter(_open(path, "BEGIN IMMEDIATE"))
        self.at_once = AtOnce(self.writer)
        try:
            with self.writer.begin() as db:
                schema.prepare(db)
        except sa.exc.DatabaseError as error:
            self.writer.close()
            raise _open_error(path, error) from error
        except InvalidConfig as error:
            self.writer.close()
            raise InvalidConfig(f"the database {path} {error.message}") from None
        self.reader = _open(path, "BEGIN", "PRAGMA query_only=ON")

    def run(self, call: Callable[[], T]) -> T:
        """Call a function in this thread. What fails once would fail again."""
        return call()

    def stop_waiting(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.reader.dispose()
        self.writer.close()

    def translate(self, error: sa.exc.SQLAlchemyError) -> BatchmillError:
        """The error for people."""
        text = str(getattr(error, "orig", None) or error)
        if _code(error) == sqlite3.SQLITE_FULL or (_code(error) == sqlite3.SQLITE_IOERR and _is_full(self._folder)):
            return StorageFull(f"the ledger cannot be written: {text}; make room and resume the job")
        if _code(error) in DAMAGED:
            return LedgerBroken(
                f"the database is damaged: {text}; stop what uses it and run `batchmill ledger salvage`",
                code="database_damaged",
            )
        return LedgerBroken(f"the database failed: {text}", code="database_failed")


class SqliteWriter:
    """Begins writing transactions, all on one connection: to take one from a pool and to return it takes longer than
    most statements. Concurrency: any thread; one that begins a transaction waits for that of another thread.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._kept: sa.Connection | None = None
        self._waits: bool | None = None  # whether `_kept` waits for other processes; None: unknown
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def begin(self, *, waits: bool = True) -> Iterator[sa.Connection]:
        """A transaction, which may be left in another thread. After an error the pool takes the connection back, and
        clears what is left of it.

        Args: waits: until this thread, and another process, may write. Raises otherwise: Busy, sa.exc.DatabaseError.
        """
        if not self._turn.acquire(blocking=waits):
            raise Busy("another thread writes")
        try:
            db = self._kept = self._kept or self._engine.connect()
            try:
                if waits != self._waits:  # seldom: one transaction after another begins on the event loop
                    _execute(db, WAITS if waits else WAITS_NOT)
                    self._waits = waits
                with db.begin():
                    yield db
            except BaseException:
                self._release()
                raise
        finally:
            self._turn.release()

    def _release(self) -> None:
        kept, self._kept, self._waits = self._kept, None, None
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """Close the connection, once the transaction that is under way has ended."""
        with self._turn:
            self._release()
        self._engine.dispose()


class AtOnce:
    """Begins the transactions of a writer where it can without waiting. Raises: Busy, sa.exc.DatabaseError."""

    def __init__(self, writer: SqliteWriter) -> None:
        self._writer = writer

    def begin(self) -> AbstractContextManager[sa.Connection]:
        """As `SqliteWriter.begin`."""
        return self._writer.begin(waits=False)


class Busy(Exception):
    """A transaction cannot begin now."""


def _open(path: Path, begin: str, pragma: str = "") -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"check_same_thread": False})

    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # `begin` below starts transactions
        connection.execute(WAITS)
        connection.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;"
            "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;"
        )
        connection.execute(WRITES_BACK)
        if pragma:
            connection.execute(pragma)

    sa.event.listen(engine, "connect", configure)
    sa.event.listen(engine, "begin", lambda db: _execute(db, begin))
    sa.event.listen(engine, "commit", _refuse_ended)
    return engine


def _execute(db: sa.Connection, statement: str) -> None:
    """Execute a statement without parameters or results, as `exec_driver_sql` does in several times as long."""
    try:
        db.connection.driver_connection.execute(statement)  # type: ignore[union-attr]  # it is open
    except sqlite3.Error as error:
        raise sa.exc.DBAPIError.instance(statement, None, error, sqlite3.Error, dialect=db.dialect) from error


def _refuse_ended(db: sa.Connection) -> None:
    """Some errors, such as a full disk, end SQLite's transaction. If a caller ignores one, its COMMIT does nothing."""
    if not db.connection.driver_connection.in_transaction:  # type: ignore[union-attr]  # it is open
        raise LedgerBroken("a failed statement ended the transaction: it is not committed", code="database_failed")


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


def _is_full(folder: Path) -> bool:
    """Whether a write fails for want of room. SQLite says so of a full disk, and not of a quota or a limit of files."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            left = PROBE_BYTES
            while left:
                left -= file.write(bytes(left))
    except OSError as error:
        return isinstance(to_storage_error(error), StorageFull)
    return False


def _code(error: sa.exc.SQLAlchemyError) -> int:
    """SQLite's primary error code; 0 if there is none."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF
