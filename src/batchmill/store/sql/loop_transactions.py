"""Short calls run on the event loop, and their transaction is committed in a thread.

A thread waits for the interpreter after each statement of SQLite, and most statements take less time than that wait.
Beside a busy event loop a transaction of six short calls took 7 ms in a thread. Here it takes 3 ms, most of it for the
commit: its sync to the disk, and the wait for the interpreter after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from batchmill.store.sql.shared_transactions import (
    SHARED_MAX,
    Call,
    Ended,
    SharedTransactions,
    post,
    post_last,
    resolve,
)
from batchmill.store.sql.transactions import JoiningTransactions, Transactions

T = TypeVar("T")

ON_LOOP_S = 0.004  # after so long, calls that are left get the next transaction
SLOW_S = 0.05  # a transaction that takes longer, without its commit, waits for the disk
IN_THREAD_S = 0.5  # for so long after such a transaction calls run in the thread
IN_THREAD_MAX_S = 10.0  # twice as long each time that the loop has taken turns again for less than that, but no longer

Loop = asyncio.AbstractEventLoop


class LoopTransactions(SharedTransactions):
    """As `SharedTransactions` with one thread, in which all other calls run, and what a short call fails with is
    found out. Each transaction is left in that thread, so their order is the order in which listeners learn of them.
    """

    def __init__(
        self, writer: JoiningTransactions, at_once: Transactions, run: Callable[[Callable[[], Any]], Any],
        thread: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        """Args: at_once: begins a transaction or raises, and never waits. thread, run: as of `SharedTransactions`."""
        super().__init__(writer.share, run, thread)
        self._writer, self._at_once = writer, at_once
        self._others = 0  # functions in the thread that begin transactions of their own
        self._scheduled: Loop | None = None  # the loop that is to take the turn
        self._in_thread_s, self._in_thread_until = IN_THREAD_S, 0.0
        self._is_closing = False

    async def run(self, function: Callable[[], T]) -> T:
        with self._lock:
            self._others += 1
        future = self._threads.submit(self._run, function)
        future.add_done_callback(self._other_ended)
        return await asyncio.wrap_future(future)

    def _other_ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._others -= 1

    def flush(self) -> None:
        with self._lock:
            self._is_closing = True
        if self._withdraw():
            self._threads.submit(self._turn)
        else:
            super().flush()

    def _begin_turn(self) -> None:
        if (scheduled := self._scheduled) is not None and scheduled.is_closed() and self._withdraw():
            self._threads.submit(self._turn)  # the loop ended before it took its turn
            return
        super()._begin_turn()

    def _withdraw(self) -> bool:
        """Take the turn away from a loop that has not begun it. False: it has, or none is to take it."""
        with self._lock:
            scheduled, self._scheduled = self._scheduled, None
        return scheduled is not None

    def _submit_turn(self) -> None:
        if not self._schedule(self._waiting[0], post):
            super()._submit_turn()

    def _schedule(self, first: Call[Any], post: Callable[..., bool]) -> bool:
        """Have the loop take the turn, if it may run the first call that waits. Args: post: when on the loop."""
        if not first.is_short or self._others or time.monotonic() < self._in_thread_until:
            return False
        with self._lock:
            if self._is_closing:
                return False
            self._scheduled = first.loop
        # If it has ended, who withdraws the turn first takes it.
        return post(first.loop, self._take_on_loop, first.loop) or not self._withdraw()

    def _take_on_loop(self, loop: Loop) -> None:
        with self._lock:
            if self._scheduled is not loop:
                return  # the turn is a thread's now
            self._scheduled = None
        if calls := self._short_calls(loop):
            self._begin_on_loop(calls)
        elif not self._leave_turn():
            super()._submit_turn()

    def _short_calls(self, loop: Loop) -> list[Call[Any]]:
        """The first calls that wait, as long as they are short. None if another transaction may be under way."""
        calls: list[Call[Any]] = []
        while self._waiting and len(calls) < SHARED_MAX and not self._others:
            first = self._waiting[0]
            if not first.is_short or first.loop is not loop:
                break
            self._waiting.popleft()
            if not first.future.cancelled():
                calls.append(first)
        return calls

    def _next_calls(self) -> list[Call[Any]]:
        """In the thread. Short calls behind others are left for the loop, where they take less time."""
        if not self._waiting or self._waiting[0].is_short:
            return super()._next_calls()
        calls: list[Call[Any]] = []
        while self._waiting and not self._waiting[0].is_short and len(calls) < SHARED_MAX:
            if not (call := self._waiting.popleft()).future.cancelled():
                calls.append(call)
        return calls

    def _begin_on_loop(self, calls: list[Call[Any]]) -> None:
        """Run calls in a transaction, and have the thread commit it. If one fails, the thread runs them all."""
        began = time.monotonic()
        results: list[Any] = []
        try:
            with ExitStack() as stack:
                db = stack.enter_context(self._writer.begin_one(self._at_once, is_on_loop=True))
                with self._writer.joined(db):
                    for call in calls:
                        results.append(call.function(db))
                        if time.monotonic() - began > ON_LOOP_S:
                            break
                transaction = stack.pop_all()
        except BaseException as error:
            self._waiting.extendleft(reversed(calls))
            self._note_duration(began)
            super()._submit_turn()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return
        self._note_duration(began)
        self._waiting.extendleft(reversed(calls[len(results) :]))
        self._threads.submit(self._commit, transaction, calls[: len(results)], results)

    def _note_duration(self, began: float) -> None:
        """Have a thread take the next turns if this one had to wait for the disk, or on a busy machine for a core."""
        now = time.monotonic()
        if now - began > SLOW_S:
            is_again = now < self._in_thread_until + self._in_thread_s
            self._in_thread_s = min(2 * self._in_thread_s, IN_THREAD_MAX_S) if is_again else IN_THREAD_S
            self._in_thread_until = now + self._in_thread_s

    def _commit(self, transaction: ExitStack, calls: Sequence[Call[Any]], results: Sequence[Any]) -> None:
        """In the thread."""
        try:
            self._run(transaction.close)
        except BaseException:  # nothing of it counts: each call finds out its own error
            self._waiting.extendleft(reversed(calls))
            self._turn()
            return
        ended: Ended = [(call, result, None) for call, result in zip(calls, results, strict=True)]
        post(calls[0].loop, resolve, ended)
        # What else is ready comes before another turn: more calls share it, and none waits long for many turns.
        if not self._leave_turn() and not self._schedule(self._waiting[0], post_last):
            self._turn()
