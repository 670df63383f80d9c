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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from batchmill.errors import DatabaseUnavailable, TermOver
from batchmill.run_next import post_next, run_next
from batchmill.store.sql.transactions import Notes, note_statement, notes_of

T = TypeVar("T")
log = logging.getLogger("batchmill.store")

SHARED_MAX = 64  # calls of one transaction
DEFERRED_S = 0.02

Function = Callable[[sa.Connection], T]


class Call(Generic[T]):
    """A function that waits for its transaction, and what became of it."""

    def __init__(self, function: Function[T], *, is_short: bool) -> None:
        self.function, self.is_short = function, is_short
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


Ended = list[tuple[Call[Any], Any, BaseException | None]]  # (call, its result, or its error)


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
        self._waiting: deque[Call[Any]] = deque()
        self._turns_max, self._turns = threads_max, 0  # that are taken, or about to be
        self._lock = threading.Lock()

    async def call(self, function: Function[T], *, is_short: bool = False) -> T:
        """Run a function of a transaction, which may be called again. Raises: what it raises.

        Args: is_short: it is of few statements, on few rows, which have an index.
        """
        call = Call(function, is_short=is_short)
        self._waiting.append(call)
        self._begin_turn()
        return await call.future

    def defer(self, function: Function[object]) -> None:
        """Run a short function within DEFERRED_S, before whatever is called after this. What it raises is logged.

        It shares the transaction of the next call, or gets one of its own.
        """
        call = Call(function, is_short=True)
        call.future.add_done_callback(_log_failure)
        self._waiting.append(call)
        call.loop.call_later(DEFERRED_S, self._run_deferred)

    def _run_deferred(self) -> None:
        if self._waiting:
            with contextlib.suppress(RuntimeError):  # the database was closed, which has run it
                self._begin_turn()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function in a thread, which begins its own transactions."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, function)

    def flush(self) -> None:
        """Run what waits, before the threads are closed."""
        if self._waiting:
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Have a thread run what waits, unless as many as there are do so: one that ends its turn looks again."""
        if self._enter_turn():
            self._submit_turn()

    def _enter_turn(self) -> bool:
        """False: as many turns as there may be are taken, or another one has just run what waited."""
        with self._lock:
            if self._turns == self._turns_max or not self._waiting:
                return False
            self._turns += 1
            return True

    def _leave_turn(self) -> bool:
        """False: more calls wait, and the turn goes on."""
        with self._lock:
            if self._waiting:
                return False
            self._turns -= 1
            return True

    def _submit_turn(self) -> None:
        """Raises: RuntimeError if the threads are closed."""
        self._threads.submit(self._turn)

    def _turn(self) -> None:
        while True:
            try:
                self._take()
            except BaseException:  # a bug: the next call begins another turn
                with self._lock:
                    self._turns -= 1
                raise
            if self._leave_turn():
                return
            try:
                self._submit_turn()  # after others that use the thread
                return
            except RuntimeError:  # it is being closed
                continue

    def _take(self) -> None:
        calls = self._next_calls()
        if len(calls) > 1 and (ended := self._run_together(calls)) is not None:
            _resolve(ended)
            return
        for call in calls:
            _resolve([self._run_alone(call)])

    def _next_calls(self) -> list[Call[Any]]:
        """The calls of the next transaction, which wait no more."""
        calls: list[Call[Any]] = []
        with contextlib.suppress(IndexError):  # another turn has taken them
            while len(calls) < SHARED_MAX:
                if not (call := self._waiting.popleft()).future.cancelled():
                    calls.append(call)
        return calls

    def _run_together(self, calls: list[Call[Any]]) -> Ended | None:
        """None: they cannot share a transaction, and nothing has been written."""
        try:
            try:
                return self._run(lambda: self._share_one(calls, savepoints=False))
            except _HalfChanged:
                return self._run(lambda: self._share_one(calls, savepoints=True))
        except DatabaseUnavailable as error:  # it may even have been committed: nothing is to be repeated
            return [(call, None, error) for call in calls]
        except BaseException:  # of one of them, which gets it when it runs alone
            return None

    def _share_one(self, calls: list[Call[Any]], *, savepoints: bool) -> Ended:
        """Run all calls in one transaction. Raises: _HalfChanged, and what the database raises."""
        ended: Ended = []
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

    def _run_alone(self, call: Call[Any]) -> tuple[Call[Any], Any, BaseException | None]:
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


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Have a loop, which may be that of this thread, call back next. False: it has ended, and its tasks with it."""
    try:
        if _runs_here(loop):  # it need not be woken through its socket
            run_next(loop, lambda: loop.call_soon(callback, *args))
        else:
            post_next(loop, callback, *args)
    except RuntimeError:
        return False
    return True


def post_last(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """As `post`, after what is ready."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _resolve(ended: Ended) -> None:
    """Have callers learn their results, from a thread."""
    for loop in {call.loop for call, _, _ in ended}:
        post(loop, resolve, [each for each in ended if each[0].loop is loop])


def resolve(ended: Ended) -> None:
    """Have callers learn their results. On the event loop."""

    def resolve_all() -> None:
        for call, result, error in ended:
            call.resolve(result, error)

    run_next(ended[0][0].loop, resolve_all)
