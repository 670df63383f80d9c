"""The row that says which process owns a PostgreSQL database.

A lock that belongs to a connection would last as long as the server believes in the connection: for hours, where the
owner is stopped or its network is cut. The row has an epoch instead, and a heartbeat, a time that only has to change.

Every writing transaction locks the row by its key, the epoch (`FOR KEY SHARE`): a successor, which raises the epoch,
waits until it has ended, and later transactions of the old owner find no row. The heartbeat changes no key, so it waits
for no transaction, and none waits for it.

Each of these transactions also inserts a number of its own (`owner_transactions`). A commit whose reply was lost is
settled by it: to insert the same number again waits until the transaction has ended, and succeeds if it was not
committed. PostgreSQL's own number of a transaction would not do: after a crash it gives out again what never reached
its disk.

An owner that cannot renew for LEASE_S grants nothing, and its workers begin nothing. A successor waits until it has
itself seen the same heartbeat for SILENCE_S, which is longer. No clock of another machine counts: a step of the
database's clock makes no second owner.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import sqlalchemy as sa

from batchmill.errors import DatabaseOwned, InvalidConfig, OwnerReplaced
from batchmill.owner_term import TermFile, now_s

log = logging.getLogger("batchmill.owner")

BEAT_S = 0.5
LEASE_S = 3.0  # of the owner's own clock, since it sent its last renewal
SILENCE_S = 5.0  # of the claimer's own clock, since it saw the last heartbeat; more than LEASE_S
NUMBERS_KEPT = 256  # of transactions, before they are deleted
LOCK_MS = 1000  # that a claimer waits for transactions of the owner before it ends them

metadata = sa.MetaData()

owners = sa.Table(
    "owners",
    metadata,
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),  # one more with every owner
    sa.Column("name", sa.Text(collation="C"), nullable=False),
    sa.Column("address", sa.Text(collation="C"), nullable=False),  # its URL; empty: it serves nothing
    sa.Column("data_dir", sa.Text(collation="C"), nullable=False),  # of every owner; empty: not known yet
    sa.Column("heartbeat", sa.DateTime(timezone=True)),  # None: it has ended in order
)

# The last transactions of the owner: those before a transaction that was committed are deleted, many at a time.
owner_transactions = sa.Table(
    "owner_transactions",
    metadata,
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
)

_WAIT_BRIEFLY = sa.text("SELECT set_config('lock_timeout', :wait, true)")  # in this transaction
# Sessions of batchmill whose transactions have kept a claimer waiting. The server ends a transaction that is idle, but
# not one in the middle of a statement: that of an owner which was stopped, or cut off, between two of its messages.
_END_WRITERS = sa.text(
    "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
    "AND application_name = :application AND usename = current_user "
    "AND xact_start < clock_timestamp() - CAST(:age AS interval) AND pid IN "
    "(SELECT pid FROM pg_locks WHERE relation = 'owners'::regclass AND mode IN ('RowShareLock', 'RowExclusiveLock'))"
)
_CHECK = sa.text("INSERT INTO owner_transactions SELECT epoch, :number FROM owners WHERE epoch = :epoch FOR KEY SHARE")
_REPEAT = sa.text("INSERT INTO owner_transactions VALUES (:epoch, :number) ON CONFLICT DO NOTHING")
_FORGET = sa.text("DELETE FROM owner_transactions WHERE epoch = :epoch AND number >= :first AND number < :end")


def create(db: sa.Connection) -> None:
    """Create the table with its one row."""
    metadata.create_all(db)
    if db.execute(sa.select(owners.c.epoch)).first() is None:
        db.execute(owners.insert().values(epoch=0, name="", address="", data_dir="", heartbeat=None))


class OwnerLease:
    """The ownership of a database by this process, renewed by a thread until it is released or lost."""

    def __init__(self, engine: sa.Engine, epoch: int, claimed: float) -> None:
        """Args:
        engine: for the heartbeat alone.
        claimed: as `now_s`: when the claim began.
        """
        self.epoch = epoch
        self._number = self._first = 0  # of the last transaction; the first that may still be stored
        self.term = TermFile()
        self._engine, self._valid_until = engine, claimed + LEASE_S
        self.term.write(self._valid_until)
        self._ended, self._is_lost = threading.Event(), False
        self._on_lost: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._beat, name="owner-heartbeat", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """How long this process may still begin work without another renewal; 0 or less: it may not."""
        return -1.0 if self._is_lost else self._valid_until - now_s()

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called, in another thread, once another process is the owner."""
        self._on_lost = call
        if self._is_lost:
            call()

    def check(self, db: sa.Connection) -> int:
        """Lock the owner's row until the transaction ends, and insert its number, which is returned.

        Raises: OwnerReplaced where another process has become the owner.
        """
        self._number += 1
        if db.execute(_CHECK, {"epoch": self.epoch, "number": self._number}).rowcount == 0:
            self._lose()
            raise OwnerReplaced(
                "another process has become the owner of the database: this one writes nothing any more"
            )
        if self._number - self._first >= NUMBERS_KEPT:
            db.execute(_FORGET, {"epoch": self.epoch, "first": self._first, "end": self._number})
        return self._number

    def committed(self, number: int) -> None:
        """Note that a transaction was committed: it has deleted earlier numbers, if there were many."""
        if number - self._first >= NUMBERS_KEPT:
            self._first = number

    def has_committed(self, db: sa.Connection, number: int) -> bool:
        """Whether a transaction was committed. Waits until it has ended.

        Args: db: a transaction, which is to be rolled back.
        """
        return db.execute(_REPEAT, {"epoch": self.epoch, "number": number}).rowcount == 0

    def release(self) -> None:
        """Let another process become the owner at once."""
        self._ended.set()
        self._thread.join()
        self._valid_until = 0.0
        self.term.write(0.0)
        if not self._is_lost:
            try:
                with self._engine.begin() as db:
                    db.execute(owners.update().where(owners.c.epoch == self.epoch).values(heartbeat=None))
            except sa.exc.DBAPIError as error:
                log.warning("the end of this owner could not be stored in the database: %s", error.orig)
        self._engine.dispose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.term.write(0.0)
            self._on_lost()

    def _beat(self) -> None:
        renewal = owners.update().where(owners.c.epoch == self.epoch).values(heartbeat=sa.func.clock_timestamp())
        while not self._ended.wait(BEAT_S) and not self._is_lost:
            began = now_s()
            try:
                with self._engine.begin() as db:
                    renewed = db.execute(renewal).rowcount
            except sa.exc.DBAPIError:
                continue  # the next round connects again
            if renewed:
                self._valid_until = began + LEASE_S
                self.term.write(self._valid_until)
            else:
                self._lose()


def _owned(owner: sa.Row) -> DatabaseOwned:
    way_out = f"name it with --server {owner.address}" if owner.address else "wait until it has ended, or stop it"
    error = DatabaseOwned(f"the database is owned by {owner.name}: {way_out}")
    error.data_dir = owner.data_dir
    error.address, error.heartbeat = owner.address, (owner.epoch, owner.heartbeat)
    return error


def check_data_dir(known: str, own: str) -> None:
    """Raises: InvalidConfig where the database names files of another data directory; `known` is empty at first."""
    if known not in ("", own):
        raise InvalidConfig(
            f"jobs and functions in the database name files below {known}, and the data directory of this process is "
            f"{own}: use that path (--data-dir {known}); it may be empty with [storage], else it is a shared folder",
            code="other_data_dir",
        )


class Silence:
    """What one process has seen of the owner's heartbeat: for how long it has not changed."""

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self._clock = clock
        self._seen: tuple[object, float] | None = None  # the epoch with its heartbeat, and when it was first seen

    def is_over(self, owner: sa.Row) -> bool:
        """Whether another process may become the owner. Args: owner: as it was just read."""
        seen, now = (owner.epoch, owner.heartbeat), self._clock()
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, now
        return owner.heartbeat is None or now - self._seen[1] >= SILENCE_S


def claim(engine: sa.Engine, silence: Silence, name: str, address: str, data_dir: str) -> int:
    """Become the owner. Returns the new epoch.

    Raises: DatabaseOwned by a process whose heartbeat was not silent for long enough; InvalidConfig for another path of
        the data directory: records of jobs and functions name files by their absolute paths.
    """
    with engine.begin() as db:
        db.execute(_WAIT_BRIEFLY, {"wait": f"{LOCK_MS} ms"})
        current = db.execute(sa.select(owners)).one()
        if not silence.is_over(current):
            raise _owned(current)
        check_data_dir(current.data_dir, data_dir)
        taken = (
            owners.update()
            .where(owners.c.epoch == current.epoch, owners.c.heartbeat.is_not_distinct_from(current.heartbeat))
            .values(
                epoch=owners.c.epoch + 1,
                name=name,
                address=address,
                data_dir=data_dir,
                heartbeat=sa.func.clock_timestamp(),
            )
            .returning(owners.c.epoch)
        )
        epoch = db.execute(taken).scalar()
        if epoch is None:  # it was renewed, or claimed, since it was read
            raise _owned(db.execute(sa.select(owners)).one())
        db.execute(owner_transactions.delete())  # of earlier owners
    return epoch


def end_writers(engine: sa.Engine, application: str) -> None:
    """End the transactions of a silent owner that have kept `claim` from its row.

    Args: application: the name of its sessions. Those of others, such as a backup, stay.
    """
    with engine.begin() as db:
        for pid, _ in db.execute(_END_WRITERS, {"application": application, "age": f"{LOCK_MS} ms"}):
            log.warning("ended the database session %d of the silent owner: it held the lock of its row", pid)
