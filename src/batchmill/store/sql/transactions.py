"""Calls that wait for the database share a transaction: one begin, one commit and one sync for all of them.

What one call raises is its own. If it had changed nothing, the others go on. If it had, nothing of the transaction
counts, and all are called again, each after a savepoint: an undisturbed transaction pays for none. What the database
itself raises may have ended the transaction: then each call gets one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import sqlalchemy as sa

from batchmill.errors import DatabaseUnavailable, TermOver

T = TypeVar("T")
log = logging.getLogger("batchmill.store")

SHARED_MAX = 64  # calls of one transaction
DEFERRED_S = 0.02

Function = Callable[[sa.Connection], T]
Record = Mapping[str, Any]  # of a job: its columns by name
Changes = Mapping[str, Record | None]  # job -> its new record; None: it is gone, or must be read
ChangesListener = Callable[[Changes], None]
NOTES = "notes"  # the option of a connection that has them


class Notes:
    """What a transaction notes while it runs; its connection carries it."""

    def __init__(self, bounds: dict[tuple[str, str], int]) -> None:
        """Args: bounds: as of `quotas`. They outlive the transaction."""
        self.jobs: dict[str, Record | None] = {}
        self.bounds = bounds
        self.has_changed = False  # whether a statement may have changed something since this was last set

    def forget(self) -> None:
        """Have everything be read again that was noted: a part of the transaction has been rolled back."""
        self.jobs.update(dict.fromkeys(self.jobs))
        self.bounds.clear()


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
        self._bounds: dict[tuple[str, str], int] = {}

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
        with self._begin_own() as db:
            yield db

    @contextlib.contextmanager
    def _begin_own(self) -> Iterator[sa.Connection]:
        notes = Notes(self._bounds)
        try:
            with self.own.begin() as db:
                yield db.execution_options(**{NOTES: notes})
        except BaseException:
            notes.forget()
            self._tell(notes.jobs)
            raise
        self._tell(notes.jobs)

    def _tell(self, changes: Changes) -> None:
        if changes:
            for listener in self._listeners:
                listener(changes)

    @contextlib.contextmanager
    def share(self) -> Iterator[sa.Connection]:
        """Begin a transaction that every `begin` of this thread joins meanwhile."""
        with self._begin_own() as db:
            self._shared.db = db
            try:
                yield db
            finally:
                self._shared.db = None


class _Call(Generic[T]):
    """A function that waits for its transaction, and what became of it."""

    def __init__(self, function: Function[T]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def resolve(self, result: T | None, error: BaseException | None) -> None:
        """On the event loop; the caller may have been cancelled."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)  # type: ignore[arg-type]  # of this very function
        else:
            self.future.set_exception(error)


_Ended = list[tuple[_Call[Any], Any, BaseException | None]]  # (call, its result, or its error)


class _HalfChanged(Exception):
    """A call raised an error after it had changed something, and there is no savepoint before it."""


class _Watch:
    """Notes statements of SQLAlchemy that may change something: every one that is no plain SELECT."""

    def __init__(self) -> None:
        self._is_watching = False

    def begin(self, db: sa.Connection) -> None:
        """Look at the statements of a connection, and of all later ones: to watch each anew takes longer."""
        if not self._is_watching:
            self._is_watching = True
            sa.event.listen(db.engine, "before_cursor_execute", self._look)

    def _look(self, db: sa.Connection, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("SELECT"):
            note_statement(db)


class SharedTransactions:
    """Runs functions in threads. Those that wait when a thread is free run in one transaction, in order."""

    def __init__(
        self, share: Callable[[], AbstractContextManager[sa.Connection]], run: Callable[[Callable[[], Any]], Any],
        threads: ThreadPoolExecutor, threads_max: int = 1, *, only_read: bool = False,
    ) -> None:  # fmt: skip
        """Args: share: begins a transaction; run: runs one, again where its connection was lost, and translates what
        the database raises; threads_max: how many threads there are; only_read: no call changes anything."""
        self._share, self._run, self._threads = share, run, threads
        self._only_read, self._watch = only_read, _Watch()
        self._waiting: deque[_Call[Any]] = deque()
        self._turns_max, self._turns = threads_max, 0  # that are taken, or about to be
        self._lock = threading.Lock()

    async def call(self, function: Function[T]) -> T:
        """Run a function of a transaction, which may be called again. Raises: what it raises."""
        call = _Call(function)
        self._waiting.append(call)
        self._begin_turn()
        return await call.future

    def defer(self, function: Function[object]) -> None:
        """Run a function within DEFERRED_S, before whatever is called after this. What it raises is logged.

        It shares the transaction of the next call, or gets one of its own.
        """
        call = _Call(function)
        call.future.add_done_callback(_log_failure)
        self._waiting.append(call)
        call.loop.call_later(DEFERRED_S, self.flush)

    def flush(self) -> None:
        """Run what was deferred. In the event loop, or at the end."""
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # the database was closed, which has run it
                self._begin_turn()

    def _begin_turn(self) -> None:
        """Have a thread run what waits, unless as many as there are do so: one that ends its turn looks again."""
        with self._lock:
            if self._turns == self._turns_max:
                return
            self._turns += 1
        self._threads.submit(self._turn)

    def _turn(self) -> None:
        while True:
            try:
                self._take()
            except BaseException:  # a bug: the next call begins another turn
                with self._lock:
                    self._turns -= 1
                raise
            with self._lock:
                if not self._waiting:
                    self._turns -= 1
                    return
            try:
                self._threads.submit(self._turn)  # after others that use the thread
                return
            except RuntimeError:  # it is being closed
                continue

    def _take(self) -> None:
        calls: list[_Call[Any]] = []
        with contextlib.suppress(IndexError):  # another turn has taken them
            while len(calls) < SHARED_MAX:
                if not (call := self._waiting.popleft()).future.cancelled():
                    calls.append(call)
        if len(calls) > 1 and (ended := self._run_together(calls)) is not None:
            _resolve(ended)
            return
        for call in calls:
            _resolve([self._run_alone(call)])

    def _run_together(self, calls: list[_Call[Any]]) -> _Ended | None:
        """None: they cannot share a transaction, and nothing has been written."""
        try:
            try:
                return self._run(lambda: self._share_one(calls, savepoints=False))
            except _HalfChanged:
                return self._run(lambda: self._share_one(calls, savepoints=True))
        except DatabaseUnavailable as error:  # it may even have been committed: nothing is to be repeated
            return [(call, None, error) for call in calls]
        except Exception:  # of one of them, which gets it when it runs alone
            return None

    def _share_one(self, calls: list[_Call[Any]], *, savepoints: bool) -> _Ended:
        """Run all calls in one transaction. Raises: _HalfChanged, and what the database raises."""
        ended: _Ended = []
        with self._share() as db:
            if not self._only_read:
                self._watch.begin(db)
            notes = notes_of(db) or Notes({})
            for call in calls:
                if savepoints:
                    db.exec_driver_sql("SAVEPOINT before_call")
                notes.has_changed = False
                try:
                    ended.append((call, call.function(db), None))
                except Exception as error:
                    if isinstance(error, sa.exc.SQLAlchemyError | DatabaseUnavailable) and type(error) is not TermOver:
                        raise
                    # Else it is the call's own.
                    if notes.has_changed and not savepoints:
                        raise _HalfChanged from error
                    if notes.has_changed:
                        db.exec_driver_sql("ROLLBACK TO SAVEPOINT before_call")
                        notes.forget()
                    ended.append((call, None, error))
                if savepoints:
                    db.exec_driver_sql("RELEASE SAVEPOINT before_call")
        return ended

    def _run_alone(self, call: _Call[Any]) -> tuple[_Call[Any], Any, BaseException | None]:
        def transaction() -> Any:
            with self._share() as db:
                return call.function(db)

        try:
            return call, self._run(transaction), None
        except BaseException as error:  # the caller's, as a future of the thread would have it
            return call, None, error


def _log_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("what was deferred is not written: %s", error)


def _resolve(ended: _Ended) -> None:
    loops = {call.loop for call, _, _ in ended}
    for loop in loops:
        own = [each for each in ended if each[0].loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its tasks with it
            loop.call_soon_threadsafe(_resolve_on_loop, own)


def _resolve_on_loop(ended: _Ended) -> None:
    for call, result, error in ended:
        call.resolve(result, error)
