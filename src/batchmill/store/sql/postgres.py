"""The back end of a PostgreSQL database. Imported only where one is configured.

Writing transactions are READ COMMITTED: only the owner writes, in one thread, and each transaction first locks the
owner's row (`owner_row.py`), so that no writer ever waits for, or reads beside, another one's changes. Reading ones are
REPEATABLE READ: like a reader of SQLite's log, all statements of one see one state.

A commit whose reply was lost is settled by a number that its transaction inserts: it is neither repeated nor forgotten.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg import errors as pg
from psycopg import pq
from psycopg.adapt import Loader
from psycopg.types.string import StrDumper

from batchmill.errors import BatchmillError, DatabaseUnavailable, InvalidConfig, LedgerBroken, StorageFull
from batchmill.owner_term import Term, now_s
from batchmill.store.sql import owner_row, pooler, schema

T = TypeVar("T")

VERSION_MIN = 130_000  # the oldest that this is written for
READERS = 4
APPLICATION = "batchmill"  # the name of our sessions
CONNECT_S = 5
UNACKNOWLEDGED_MS = 5000  # data that the server does not acknowledge for so long ends the connection
IDLE_IN_TRANSACTION_MS = 4000  # the server ends a transaction whose owner has stopped: a successor waits for its lock
LOCK_MS = 10_000
RETRY_S = 60.0  # how long a lost connection is tried again before what waits for it fails
DELAY_MIN_S, DELAY_MAX_S = 0.05, 1.0  # between two attempts
MAY_IDENTIFY = """\
SELECT has_function_privilege(oid, 'execute') FROM pg_proc
WHERE proname = 'pg_control_system' AND pronamespace = 'pg_catalog'::regnamespace
"""
NUL_SHOWN = "\u2400"  # the symbol for NUL: PostgreSQL stores no NUL in text

# The connection is lost, or the server cannot work for now: another attempt may succeed.
PASSING = (
    pg.SerializationFailure, pg.DeadlockDetected, pg.LockNotAvailable, pg.AdminShutdown, pg.CrashShutdown,
    pg.CannotConnectNow, pg.TooManyConnections, pg.ReadOnlySqlTransaction, pg.IdleInTransactionSessionTimeout,
    pg.IdleSessionTimeout, pg.DatabaseDropped,
)  # fmt: skip
FULL = (pg.DiskFull,)
REFUSED = (pg.InsufficientPrivilege, pg.InvalidAuthorizationSpecification, pg.InvalidPassword, pg.InvalidCatalogName)


class _TextDumper(StrDumper):
    """Writes text for PostgreSQL, which stores no NUL."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\x00", NUL_SHOWN) if "\x00" in obj else obj)


class _NumberLoader(Loader):
    """Reads the sums of whole numbers, which PostgreSQL makes `numeric`."""

    def load(self, data: Any) -> int | float:
        text = bytes(data).decode()
        return float(text) if "." in text else int(text)


def read_url(text: str, password: str | None) -> sa.URL:
    """The address of a database. Raises: InvalidConfig."""
    try:
        url = sa.make_url(text).set(drivername="postgresql+psycopg")
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidConfig("database.url cannot be read: write postgresql+psycopg://USER@HOST:PORT/NAME") from None
    return url if password is None else url.set(password=password)


def place_of(url: sa.URL) -> str:
    """The database, for messages; without a password."""
    return f"the database {url.set(query={}).render_as_string(hide_password=True)}"


def identify(db: sa.Connection) -> str:
    """Which database it is, on its server and the standbys of that; not one that was restored elsewhere from a dump.
    Empty where the server does not say it.
    """
    if not db.exec_driver_sql(MAY_IDENTIFY).scalar():
        return ""
    system = db.exec_driver_sql("SELECT system_identifier FROM pg_control_system()").scalar_one()
    number = db.exec_driver_sql("SELECT oid FROM pg_database WHERE datname = current_database()").scalar_one()
    return f"{number} on {system}"


def create_engine(url: sa.URL, **options: Any) -> sa.Engine:
    """An engine whose connections notice a server that is gone."""
    settings = f"-c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS} -c lock_timeout={LOCK_MS}"
    arguments = {
        "connect_timeout": CONNECT_S, "tcp_user_timeout": UNACKNOWLEDGED_MS, "keepalives_idle": 5,
        "keepalives_interval": 2, "keepalives_count": 3, "application_name": APPLICATION,
        "options": f"{url.query.get('options', '')} {settings}".strip(),
    }  # fmt: skip
    plain = url.set(query={name: value for name, value in url.query.items() if name != "options"})
    engine = sa.create_engine(plain, connect_args=arguments, hide_parameters=True, **options)
    sa.event.listen(engine, "connect", _configure)
    return engine


def _configure(connection: psycopg.Connection, _: Any) -> None:
    connection.adapters.register_dumper(str, _TextDumper)
    connection.adapters.register_loader("numeric", _NumberLoader)
    if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):  # an acknowledged commit could be lost
        connection.execute("SET synchronous_commit = on")
    connection.commit()


class PostgresBackend:
    """An open PostgreSQL database. It is written only after `claim`.

    Raises: InvalidConfig if it cannot be used, with the way out; DatabaseUnavailable if nothing answers.
    """

    reader_threads = READERS

    def __init__(self, url: sa.URL, *, retry_s: float = RETRY_S, clock: Callable[[], float] = now_s) -> None:
        """Args: retry_s: how long a lost connection is tried again; clock: of the wait for a silent owner."""
        self._url, self._retry_s = url, retry_s
        self.place = place_of(url)
        self._engine = create_engine(url, isolation_level="READ COMMITTED", pool_size=2, max_overflow=0)
        self.reader = create_engine(url, isolation_level="REPEATABLE READ", pool_size=READERS, max_overflow=0)
        sa.event.listen(self.reader, "connect", _make_read_only)
        sa.event.listen(self.reader, "handle_error", self._refuse_write)
        self.writer, self.at_once = PostgresWriter(self._engine), None  # each statement waits for the server
        self.term = _WritersTerm(self.writer)
        self._silence = owner_row.Silence(clock)
        self._closing = threading.Event()
        self._losing = threading.local()  # .since, monotonic: since when no attempt of this thread has succeeded
        try:
            self._check()
        except sa.exc.SQLAlchemyError as error:
            self.close()
            raise self.translate(error) from error
        except InvalidConfig:
            self.close()
            raise

    def _check(self) -> None:
        with self._engine.connect() as db:
            version = db.execute(sa.text("SHOW server_version_num")).scalar_one()
            if int(version) < VERSION_MIN:
                raise InvalidConfig(f"{self.place} is PostgreSQL {version}: batchmill needs PostgreSQL 13 or newer")
            if db.execute(sa.text("SELECT pg_is_in_recovery()")).scalar_one():
                raise InvalidConfig(f"{self.place} is a standby, which cannot be written: name its primary")
        with contextlib.ExitStack() as stack:
            engines = (self._engine, self._engine, self.reader, self.reader)
            pooler.refuse(self.place, [stack.enter_context(each.connect()) for each in engines])
        try:
            self._create()
        except (sa.exc.IntegrityError, sa.exc.ProgrammingError) as error:
            if not isinstance(error.orig, pg.UniqueViolation | pg.DuplicateTable | pg.DuplicateObject):
                raise
            self._create()  # another process has just created the tables
        except InvalidConfig as error:
            raise InvalidConfig(f"{self.place} {error.message}") from None

    def _create(self) -> None:
        with self._engine.begin() as db:
            schema.prepare(db, upgrades=False)
            owner_row.create(db)

    # -- ownership ----------------------------------------------------------------------------------------------------

    def claim(self, name: str, address: str, data_dir: str) -> owner_row.OwnerLease:
        """Become the owner. Raises: DatabaseOwned, InvalidConfig: see `owner_row.claim`."""
        began = now_s()
        try:
            try:
                epoch = owner_row.claim(self._engine, self._silence, name, address, data_dir)
            except sa.exc.OperationalError as error:
                if not isinstance(error.orig, pg.LockNotAvailable):
                    raise
                owner_row.end_writers(self._engine, APPLICATION)
                epoch = owner_row.claim(self._engine, self._silence, name, address, data_dir)
        except sa.exc.SQLAlchemyError as error:
            raise self.translate(error) from error
        engine = create_engine(self._url, isolation_level="READ COMMITTED", pool_size=1, max_overflow=0)
        self.writer.lease = owner_row.OwnerLease(engine, epoch, began)
        try:
            with self.writer.begin() as db:  # only now: an earlier version may have owned the database until now
                schema.prepare(db)
        except sa.exc.SQLAlchemyError as error:
            self._give_up()
            raise self.translate(error) from error
        except BatchmillError:
            self._give_up()
            raise
        return self.writer.lease

    def _give_up(self) -> None:
        lease, self.writer.lease = self.writer.lease, None
        if lease is not None:
            lease.release()

    # -- errors -------------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], T]) -> T:
        """Call a function, again where its connection was lost, with growing delays."""
        delay_s, attempts = DELAY_MIN_S, 0
        while True:
            attempts += 1
            try:
                found = call()
            except sa.exc.DBAPIError as error:
                if not is_passing(error):
                    raise
                now = time.monotonic()
                since = self._losing.since = getattr(self._losing, "since", now)
                # A connection that was kept from before the loss may be broken although the server is back: the first
                # failure of a call is never its last.
                is_over = attempts > 1 and now - since > self._retry_s
                if is_over or self._closing.wait(delay_s * random.uniform(0.5, 1.0)):
                    raise
                delay_s = min(2 * delay_s, DELAY_MAX_S)
            else:
                self._losing.__dict__.clear()
                return found

    def translate(self, error: sa.exc.SQLAlchemyError) -> BatchmillError:
        """The error for people."""
        return translate(self.place, error)

    def _refuse_write(self, context: sa.engine.ExceptionContext) -> None:
        """A reader that writes is our bug, and fails at once. For a writer the same error passes: its server has become
        a standby.
        """
        if isinstance(context.original_exception, pg.ReadOnlySqlTransaction):
            raise LedgerBroken(f"{self.place} failed: {context.original_exception}", code="database_failed")

    def stop_waiting(self) -> None:
        """Fail what waits for another attempt."""
        self._closing.set()

    def close(self) -> None:
        if self.writer.lease is not None:
            self.writer.lease.release()
        self.reader.dispose()
        self._engine.dispose()


def translate(place: str, error: sa.exc.SQLAlchemyError) -> BatchmillError:
    """The error for people."""
    cause = getattr(error, "orig", None)
    text = " ".join(str(cause or error).split())
    if isinstance(cause, FULL):
        return StorageFull(f"{place} cannot be written: {text}; make room on its server and resume the job")
    if isinstance(cause, REFUSED) or "authentication failed" in text or "no password supplied" in text:
        return InvalidConfig(
            f"{place} refuses this user: {text}; check the name, the password and the user's rights "
            "(it creates tables and writes to them)",
            code="database_refused",
        )
    if "connection failed" in text and "does not exist" in text:
        return InvalidConfig(f"{place} cannot be used: {text}; create it, or correct database.url")
    if "unsupported startup parameter" in text:
        return pooler.refusal(place)
    if isinstance(error, sa.exc.DBAPIError) and is_passing(error):
        return DatabaseUnavailable(f"{place} cannot be reached: {text}; what waits for it goes on when it is back")
    return LedgerBroken(f"{place} failed: {text}", code="database_failed")


def is_passing(error: sa.exc.DBAPIError) -> bool:
    """Whether another attempt may succeed."""
    cause = error.orig
    if isinstance(cause, PASSING) or error.connection_invalidated:
        return True
    # Failed connections have no SQLSTATE, whatever the reason: a wrong password is not passing.
    has_no_state = isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError) and cause.sqlstate is None
    is_refused = "authentication failed" in str(cause) or "unsupported startup parameter" in str(cause)
    is_of_connection = isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith("08")
    return (has_no_state and not is_refused and "does not exist" not in str(cause)) or is_of_connection


def _make_read_only(connection: psycopg.Connection, _: Any) -> None:
    connection.read_only = True


class _WritersTerm(Term):
    """That of the lease of a writer, which has none before `claim`: an endless one then."""

    def __init__(self, writer: PostgresWriter) -> None:
        self._writer = writer

    @property
    def path(self) -> str:
        return "" if self._writer.lease is None else self._writer.lease.term.path

    def left_s(self) -> float:
        return math.inf if self._writer.lease is None else self._writer.lease.left_s


class PostgresWriter:
    """Begins the owner's transactions."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.lease: owner_row.OwnerLease | None = None

    @contextlib.contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """A transaction of the owner. Raises: OwnerReplaced where another process has become the owner."""
        assert self.lease is not None, "a database is written only by its owner"
        with self._engine.connect() as db:
            transaction = db.begin()
            try:
                number = self.lease.check(db)
                yield db
                if db.connection.driver_connection.info.transaction_status is pq.TransactionStatus.INERROR:
                    # The server answers COMMIT with a rollback, which psycopg takes for a commit.
                    raise LedgerBroken(
                        "a failed statement ended the transaction: it is not committed", code="database_failed"
                    )
            except BaseException:
                with contextlib.suppress(sa.exc.DBAPIError):  # the connection may be lost
                    transaction.rollback()
                raise
            try:
                transaction.commit()
            except sa.exc.DBAPIError as error:
                if not is_passing(error) or not self._has_committed(number):
                    raise
            self.lease.committed(number)

    def _has_committed(self, number: int) -> bool:
        """Whether a transaction whose commit was not answered was committed. Waits until the server knows it.

        A server that crashed, or a standby that was promoted, may have lost it: then it was not committed.
        """
        assert self.lease is not None, "its transaction had a number"
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                with self._engine.connect() as db:
                    return self.lease.has_committed(db, number)
            except sa.exc.DBAPIError as error:
                if not is_passing(error):
                    raise
            if time.monotonic() > deadline:
                raise UnknownCommit(
                    f"transaction {number} of this owner of the database got no answer, and the server cannot say "
                    "whether it was committed"
                )
            time.sleep(DELAY_MIN_S)


class UnknownCommit(DatabaseUnavailable):
    """Nobody can say whether a transaction was committed."""

    code = "commit_unknown"
