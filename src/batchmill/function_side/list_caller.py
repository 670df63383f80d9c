"""Calls a function of many rows on this thread, in batches in which live asks and rows of jobs meet."""

from __future__ import annotations

import os
import time

from . import list_rows, printing
from .arguments import read_rows
from .asks import Ask
from .batching import Batches, Bisection, halves, singles
from .tracebacks import row_error


class ListCaller:
    """
    Args:
        code: a user_code.UserCode of many rows.
        look: reads the socket and hands over what has come; returns whether something goes before a train.
    """

    def __init__(self, code, replies, progress, link, *, look, memory_bytes=None):
        self._code, self._replies, self._progress, self._link = code, replies, progress, link
        self._look, self._memory_bytes = look, memory_bytes
        self._batches = Batches(code.batch_size, int(code.batch_window_s * 1e9))
        self._bisection = Bisection()
        self._asks = {}
        self._failed = 0  # rows whose own call raised, ever
        self._reading_ns = 0  # of asks whose rows have not been called
        self.met_memory_limit = False

    def add(self, meta, buffers):
        """Take an ask over."""
        began = time.perf_counter_ns()
        ask = Ask(meta, read_rows(meta, buffers, self._code.parameters, as_columns=True))
        if not ask.left:
            self._replies.finish(ask)
            return
        self._asks[ask.id] = ask
        for first, end, key in list_rows.prepare(ask, self._code):
            self._batches.add(ask, first, end, key)
        self._reading_ns += time.perf_counter_ns() - began

    def abandon(self, ask_id):
        """Rows of this ask that have not begun never run; nothing is said of it any more."""
        ask = self._asks.pop(ask_id, None)
        if ask is not None:
            ask.is_abandoned = True
            self._batches.drop(ask)

    @property
    def has_live(self):
        return self._batches.has_live

    def wait_s(self):
        """How long nothing is to be done; None: until something comes."""
        if not self._batches:
            return None
        return self._batches.due_ns(time.perf_counter_ns(), self._size()) / 1e9

    def _size(self):
        return self._bisection.size(self._batches.size)

    def turn(self):
        """Call one batch, if one is due."""
        parts = self._batches.take(time.perf_counter_ns(), self._size())
        if not parts:
            return
        rows = sum(end - first for _, first, end in parts)
        for ask, _, _ in parts:
            ask.begin()
        before = self._failed
        if not self._try(parts, rows):
            self._cut(parts, rows)
        self._bisection.learn(rows, self._failed - before)
        for ask in dict.fromkeys(ask for ask, _, _ in parts):
            self._reply(ask, rows)

    def _reply(self, ask, size):
        if ask.left == 0:
            self._asks.pop(ask.id, None)
            self._replies.finish(ask, size)
        elif ask.is_train:
            upto = ask.done.find(0, ask.sent)
            self._replies.stage(ask, ask.rows if upto < 0 else upto, size)

    def _try(self, parts, rows):
        """Call with these rows; false where it raised, and then nothing is settled."""
        error = self._call(parts, rows)
        if error is None:
            return True
        if rows == 1:
            list_rows.fail(parts, row_error(error, self._memory_bytes))
            self.met_memory_limit |= isinstance(error, MemoryError)
            self._failed += 1
            return True
        return False

    def _call(self, parts, rows):
        """What one call raised, or None: then every row has its result."""
        began = time.perf_counter_ns()
        self._progress.many([(ask.id, first, end - first) for ask, first, end in parts])
        called = began
        printing.calling(tuple(dict.fromkeys([ask for ask, _, _ in parts])))
        try:
            args, named = list_rows.arguments_of(parts, self._code)
            called = time.perf_counter_ns()
            result = self._code.call(*args, **named)
        except BaseException as error:  # SystemExit and the like too: one batch must not end the process
            return error
        finally:
            if self._link.is_child:
                os._exit(0)
            printing.idle()
            self._progress.none()
            self._replies.count(rows, 1, called - began + self._reading_ns, time.perf_counter_ns() - called)
            self._reading_ns = 0
        list_rows.share_out(parts, rows, result, self._code)
        return None

    def _cut(self, parts, rows):
        """Find the rows that raise in a batch that raised, and settle all of it."""
        if self._bisection.goes_by_singles(rows):
            for part in singles(parts):
                self._try(part, 1)
            return
        left, right = halves(parts)
        left_rows = rows // 2
        failed = self._failed
        if not self._try(left, left_rows):
            self._cut(left, left_rows)
            self._settle(right, rows - left_rows)
        elif self._failed == failed and rows - left_rows > 1:
            self._cut(right, rows - left_rows)  # what raised is in there: to call it whole again would say no more
        else:
            self._settle(right, rows - left_rows)

    def _settle(self, parts, rows):
        if not self._try(parts, rows):
            self._cut(parts, rows)
