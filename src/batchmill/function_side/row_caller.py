"""Calls a function row by row on this thread: live asks at once, rows of jobs between them."""

from __future__ import annotations

import collections
import itertools
import os
import time

from . import printing
from .arguments import ONE, STAR, read_rows
from .asks import Ask, bad_return
from .progress import FIRST
from .streams import collected
from .tracebacks import row_error

TRACES_MAX = 4  # of the rows of a live ask that fail: its reply shows one at most
LOOK_NS = 500_000  # rows are called for this long, then the socket is looked at
STRIDE_MAX = 16  # rows between two looks at the clock, where they are quick
QUICK_NS = LOOK_NS // 8


class RowCaller:
    """
    Args:
        code: a user_code.UserCode of single rows; `code.call` returns the result itself.
        look: reads the socket and hands over what has come; returns whether something goes before a train.
    """

    def __init__(self, code, replies, progress, link, *, look, memory_bytes=None):
        self._code, self._replies, self._progress, self._link = code, replies, progress, link
        self._look, self._memory_bytes = look, memory_bytes
        self._call = collected(code) if code.streams else code.call
        self._result = None if code.streams else code.result
        self._live = collections.deque()
        self._trains = collections.deque()
        self.met_memory_limit = False

    def add(self, meta, buffers):
        """Take an ask over."""
        began = time.perf_counter_ns()
        ask = Ask(meta, read_rows(meta, buffers, self._code.parameters))
        self._replies.count(1, 0, time.perf_counter_ns() - began, 0)
        (self._trains if ask.is_train else self._live).append(ask)

    def abandon(self, ask_id):
        """Rows of this ask that have not begun never run; nothing is said of it any more."""
        for ask in itertools.chain(self._live, self._trains):
            if ask.id == ask_id:
                ask.is_abandoned = True

    @property
    def has_live(self):
        return bool(self._live)

    def wait_s(self):
        """How long nothing is to be done; None: until something comes."""
        return 0 if self._live or self._trains else None

    def turn(self):
        """Call what waits: every live ask, or a train for as long as nothing goes before it."""
        while self._live:
            ask = self._live[0]
            self._run(ask)
            self._live.popleft()
            self._replies.flush_in_time()
        if self._trains and self._run(self._trains[0]):
            self._trains.popleft()

    def _run(self, ask):
        """Call the rows of an ask that are left; false where something goes before them."""
        ask.begin()
        printing.calling((ask,))
        try:
            return self._run_calls(ask)
        finally:
            printing.idle()

    def _run_calls(self, ask):
        runs = ask.runs
        while runs and not ask.is_abandoned:
            first, end = runs.pop()
            at = self._call_some(ask, first, end)
            if at < end:
                runs.append((at, end))
            if runs:
                goes_first = self._look()
                self._replies.stage(ask, at)
                if goes_first and ask.is_train:
                    return False
        self._replies.finish(ask)
        return True

    def _call_some(self, ask, first, end):
        """Call rows from `first` on, for a moment; returns the first that was not called."""
        values, words, clock = ask.values, self._progress.words, time.perf_counter_ns
        step = self._steps(ask.bound, first, end)
        self._progress.one(ask.id, first)
        began = last = clock()
        at, stride = first, 1
        while at < end and last - began < LOOK_NS:
            stop = min(at + stride, end)
            for row in range(at, stop):
                words[FIRST] = row  # in a child that user code has forked this raises: it calls no more rows
                try:
                    values[row] = step()
                except BaseException as error:  # SystemExit and the like too: one row must not end the process
                    self._fail(ask, row, error)
            at, now = stop, clock()
            stride = min(2 * stride, STRIDE_MAX) if now - last < QUICK_NS else 1
            last = now
        if self._link.is_child:
            os._exit(0)
        self._progress.none()
        self._replies.count(1, at - first, 0, last - began)
        if self._result is not None:
            self._check(ask, first, at)
        return at

    def _steps(self, bound, first, end):
        """What calls the next row, each time it is called."""
        rows, call = itertools.islice(bound.calls, first, end), self._call
        if bound.how == ONE:
            return map(call, rows).__next__
        if bound.how == STAR:
            return itertools.starmap(call, rows).__next__
        return map(lambda named: call(**named), rows).__next__  # noqa: C417 (a generator ends with its first error)

    def _fail(self, ask, row, error):
        if self._link.is_child:
            os._exit(0)
        is_shown = ask.is_train or len(ask.errors) < TRACES_MAX
        ask.errors[row] = row_error(error, self._memory_bytes, with_trace=is_shown)
        self.met_memory_limit |= isinstance(error, MemoryError)

    def _check(self, ask, first, end):
        """See to it that results are what the app may return."""
        for row in range(first, end):
            if row not in ask.errors:
                try:
                    ask.values[row] = self._result(ask.values[row])
                except Exception as error:  # the result's own code may run here
                    ask.errors[row] = bad_return(error)
                    ask.values[row] = None
