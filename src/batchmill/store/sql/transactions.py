"""Transactions: what they note while they run, who learns of it, and how those of one thread join."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import sqlalchemy as sa

Record = Mapping[str, Any]  # of a job: its columns by name
Changes = Mapping[str, Record | None]  # job -> its new record; None: it is gone, or must be read
ChangesListener = Callable[[Changes], None]
NOTES = "notes"  # the option of a connection that has them
BoundKey = tuple[str, str]  # quota, project


class TakesLong(Exception):
    """A call would hold the event loop: it runs again in the thread."""


class Notes:
    """What a transaction notes while it runs; its connection carries it."""

    def __init__(self, bounds: dict[BoundKey, int], *, is_on_loop: bool = False) -> None:
        """Args: bounds: as of `quotas`. They outlive the transaction."""
        self.jobs: dict[str, Record | None] = {}
        self.is_on_loop = is_on_loop
        self.has_changed = False  # whether a statement may have changed something since this was last set
        self._bounds = bounds
        self._earlier: dict[BoundKey, int | None] = {}  # bounds that also hold without this transaction, if it counted

    def bound(self, key: BoundKey) -> int | None:
        """A number that the records of a quota do not exceed, as of `quotas`. None: it is unknown."""
        return self._bounds.get(key)

    def note_count(self, key: BoundKey, count: int) -> None:
        """Note what was counted, perhaps after records were removed that a rollback brings back."""
        self._earlier.setdefault(key, self._bounds.get(key))
        self._bounds[key] = count

    def note_added(self, key: BoundKey) -> None:
        """Note one more record. It counts after a rollback, too: the transaction may be committed all the same."""
        if key in self._bounds:
            self._bounds[key] += 1
        if (earlier := self._earlier.get(key)) is not None:
            self._earlier[key] = earlier + 1

    def forget_bounds(self, quota: str) -> None:
        for key in [key for key in self._bounds if key[0] == quota]:
            del self._bounds[key]
            self._earlier[key] = None

    def forget(self) -> None:
        """Have jobs be read again that were noted, and no count of this transaction count: a part of it has been rolled
        back.
        """
        self.jobs.update(dict.fromkeys(self.jobs))
        for key, earlier in self._earlier.items():
            if earlier is None:
                self._bounds.pop(key, None)
            else:
                self._bounds[key] = earlier


def notes_of(db: sa.Connection) -> Notes | None:
    """None: of a connection that only reads."""
    return db.get_execution_options().get(NOTES)


def note_change(db: sa.Connection, job_id: str, record: Record | None = None) -> None:
    """Have listeners learn, once the transaction is committed, that the record of a job or its errors have changed.

    Every transaction that changes them notes it, with the new record if it has it: None has the record read again.
    """
    if (notes := notes_of(db)) is not None:
        notes.jobs[job_id] = record


def note_statement(db: sa.Connection) -> None:
    """Note that a statement, of which SQLAlchemy sees nothing, may change something."""
    if (notes := notes_of(db)) is not None:
        notes.has_changed = True


class Transactions(Protocol):
    """Begins transactions."""

    def begin(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that is committed where its context is left without an error."""
        ...


class JoiningTransactions:
    """Transactions that join the one which this thread shares between calls, if there is one."""

    def __init__(self, own: Transactions) -> None:
        self.own, self._shared = own, threading.local()
        self._listeners: list[ChangesListener] = []
        self._bounds: dict[BoundKey, int] = {}

    def listen(self, listener: ChangesListener) -> None:
        """Call `listener` after each transaction that noted changes, in its thread and before anybody learns its
        result. Of a transaction that failed, and may have been committed all the same, every job must be read again.
        """
        self._listeners.append(listener)

    @contextlib.contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        db: sa.Connection | None = getattr(self._shared, "db", None)
        if db is not None:
            yield db
            return
        with self.begin_one(self.own) as db:
            yield db

    @contextlib.contextmanager
    def share(self) -> Iterator[sa.Connection]:
        """Begin a transaction that every `begin` of this thread joins meanwhile."""
        with self.begin_one(self.own) as db, self.joined(db):
            yield db

    @contextlib.contextmanager
    def begin_one(self, transactions: Transactions, *, is_on_loop: bool = False) -> Iterator[sa.Connection]:
        """Begin a transaction that may be left in another thread. Who listens learns of its changes there."""
        notes = Notes(self._bounds, is_on_loop=is_on_loop)
        try:
            with transactions.begin() as db:
                yield db.execution_options(**{NOTES: notes})
        except BaseException:
            notes.forget()
            self._tell(notes.jobs)
            raise
        self._tell(notes.jobs)

    @contextlib.contextmanager
    def joined(self, db: sa.Connection) -> Iterator[None]:
        """Have every `begin` of this thread join a transaction meanwhile."""
        self._shared.db = db
        try:
            yield
        finally:
            self._shared.db = None

    def _tell(self, changes: Changes) -> None:
        if changes:
            for listener in self._listeners:
                listener(changes)
