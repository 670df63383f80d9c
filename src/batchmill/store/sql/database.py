"""A database: opened once, written by one thread, read by others. The reader never waits for the writer.

A file (`sqlite.py`) or a PostgreSQL database (`postgres.py`); everything else sees only `Database`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa

from batchmill.errors import BatchmillError, LedgerBroken
from batchmill.owner_term import Term
from batchmill.store.sql import tables as connector_tables
from batchmill.store.sql import tables as dataset_tables
from batchmill.store.sql import tables as llm_tables
from batchmill.store.sql import tables as service_tables
from batchmill.store.sql.loop_transactions import LoopTransactions
from batchmill.store.sql.shared_transactions import SharedTransactions
from batchmill.store.sql.sqlite import SqliteBackend
from batchmill.store.sql.transactions import JoiningTransactions, Transactions

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Backend", "Database", "connector_tables", "dataset_tables", "llm_tables", "service_tables"]


class Backend(Protocol):
    """What a kind of database does in its own way."""

    reader_threads: int

    @property
    def writer(self) -> Transactions: ...

    @property
    def at_once(self) -> Transactions | None:
        """As `writer`, but begins a transaction only where nothing has to be waited for, and raises otherwise; so its
        statements may run on the event loop. None: they may not.
        """
        ...

    @property
    def reader(self) -> sa.Engine: ...

    def run(self, call: Callable[[], T]) -> T:
        """Call a function whose transactions may be repeated, until it succeeds or its failure is final."""
        ...

    def translate(self, error: sa.exc.SQLAlchemyError) -> BatchmillError:
        """The error for people."""
        ...

    @property
    def term(self) -> Term:
        """How long this process may begin what only the owner of the database may do. Always the same object."""
        ...

    def stop_waiting(self) -> None:
        """Fail what waits for another attempt."""
        ...

    def close(self) -> None: ...


class Database:
    """An open database.

    Concurrency: its methods are called on one event loop; another one may use it once that has ended.
    """

    def __init__(self, at: Path | Backend) -> None:
        """Args: at: an SQLite file, or an opened back end.

        Raises: InvalidConfig for a file of another version, or one that cannot be opened.
        """
        self._backend: Backend = SqliteBackend(at) if isinstance(at, Path) else at
        self.writer, self.reader = JoiningTransactions(self._backend.writer), self._backend.reader
        self.term = self._backend.term
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="database-write")
        readers = self._backend.reader_threads
        self._reading = ThreadPoolExecutor(readers, thread_name_prefix="database-read")
        self._writes: SharedTransactions
        if (at_once := self._backend.at_once) is None:
            self._writes = SharedTransactions(self.writer.share, self._translated, self._writing)
        else:
            self._writes = LoopTransactions(self.writer, at_once, self._translated, self._writing)
        self._reads = SharedTransactions(self.reader.begin, self._translated, self._reading, readers, only_read=True)
        self._closed = False

    async def write(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(db, ...)` in a transaction, which it may share with others that wait, and may be called again.

        Raises: StorageFull when the disk is full, LedgerBroken.
        """
        self._refuse_closed()
        return await self._writes.call(lambda db: function(db, *args, **kwargs))

    async def write_short(
        self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `write`, for a function of few statements on few rows, each found by an index, and of short files. That of
        a database in a file may run on the event loop.
        """
        self._refuse_closed()
        return await self._writes.call(lambda db: function(db, *args, **kwargs), is_short=True)

    def write_soon(
        self, function: Callable[Concatenate[sa.Connection, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """As `write_short` for what nobody waits for: with the next transaction, or within `DEFERRED_S`. Later writes
        see it. A kill may lose it; an error is logged.
        """
        self._refuse_closed()
        self._writes.defer(lambda db: function(db, *args, **kwargs))

    async def read(self, function: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(db, ...)` on the last committed state. It must not write."""
        self._refuse_closed()
        return await self._reads.call(lambda db: function(db, *args, **kwargs))

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that opens its own transactions on `writer`, in the writer thread.

        Where its connection is lost, the function is called again: each of its transactions can be repeated.
        """
        self._refuse_closed()
        return await self._writes.run(lambda: function(*args, **kwargs))

    async def call_reader(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a reading function on `reader`, in a reader thread."""
        self._refuse_closed()
        return await self._reads.run(lambda: function(*args, **kwargs))

    def _translated(self, call: Callable[[], T]) -> T:
        try:
            return self._backend.run(call)
        except sa.exc.SQLAlchemyError as error:
            raise self._backend.translate(error) from error

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LedgerBroken("the database is closed")

    def close(self) -> None:
        """Wait for running work, and close."""
        self._closed = True
        self._writes.flush()
        self._backend.stop_waiting()
        self._writing.shutdown(wait=True)
        self._reading.shutdown(wait=True)
        self._backend.close()
