"""Requests in the function process, and which of their rows share a call of user code."""

from __future__ import annotations

import collections
import time

from . import installed
from . import values as arrays
from .loading import text_of
from .values import Unserializable, Writer

STAGE_NS = 50_000_000  # results of a job's rows are sent this often
RESULT_BYTES = 4 * 1024 * 1024  # and whenever there are so many, that memory stays small
ENDED, SENT = 1, 2  # what is known of a row; 0: it has no result yet


class PendingRequest:
    """`values[row]` is the kept result of a row that has been called (see kept_results).

    Rows that failed have None there and an error.
    """

    __slots__ = (
        "id", "slot", "rows", "from_job", "is_staged", "is_exact", "arrived_ns", "begun_ns", "bound", "values",
        "errors", "done", "sent", "sent_ns", "left", "runs", "is_abandoned", "columns", "pieces", "of",
        "leaves_as_arrow",
    )  # fmt: skip

    def __init__(self, meta, bound):
        self.id, self.rows, self.from_job, self.is_exact = meta["id"], meta["rows"], meta["from_job"], meta["exact"]
        self.is_staged = meta["staged"]  # whether results leave as they come, or all at once
        self.slot = meta.get("slot", -1)  # where `progress` notes that it has begun; below 0: nowhere
        self.of = meta.get("of") or ()  # (project, request) or (project, job, number of the first row)
        self.arrived_ns, self.begun_ns, self.sent_ns = time.perf_counter_ns(), 0, 0
        self.bound = bound
        self.errors = bound.errors
        self.leaves_as_arrow = bound.writer is not None and bound.writer.is_arrow
        self.values = [None] * self.rows
        self.done = None  # of rows that end in any order: a byte for each, see ENDED and SENT
        self.sent = 0  # rows that have left, if they end in order
        self.left = self.rows - len(bound.errors)  # rows without a result or an error
        self.runs = good_runs(self.rows, bound.errors)  # (first, end) of rows that can be called, the last ones first
        self.is_abandoned = False
        self.columns = None  # of a function of many rows: by parameter, a list or an array
        self.pieces = []  # results that are arrays: (first, rows, {name: array})

    def keep_done(self):
        """Allow its rows to end in any order."""
        self.done = bytearray(self.rows)
        for row in self.errors:
            self.done[row] = ENDED

    def begin(self, progress):
        """Note that some of its rows are about to run."""
        if not self.begun_ns:
            progress.begin(self.id, self.slot)
            self.begun_ns = self.sent_ns = time.perf_counter_ns()

    def end_rows(self, first, end):
        """Store the results or errors of rows."""
        self.left -= end - first
        if self.done is not None:
            self.done[first:end] = bytes((ENDED,)) * (end - first)

    def ended_rows(self, upto):
        """The rows that have ended and not left: a range if they are consecutive.

        Args:
            upto: the first row that has not ended, if they end in order.
        """
        done = self.done
        if done is None:
            return range(self.sent, upto)
        first, last, count = done.find(ENDED), done.rfind(ENDED), done.count(ENDED)
        if last - first + 1 == count:
            return range(first, last + 1)
        return [row for row, state in enumerate(done) if state == ENDED]

    def forget(self, rows):
        """Note that these rows have left, and free their results."""
        if type(rows) is not range:
            for row in rows:
                self.done[row], self.values[row] = SENT, None
            return
        self.values[rows.start : rows.stop] = [None] * len(rows)
        if self.done is None:
            self.sent = rows.stop
        else:
            self.done[rows.start : rows.stop] = bytes((SENT,)) * len(rows)

    @property
    def queue_ns(self):
        return max(self.begun_ns - self.arrived_ns, 0)

    def has_runs(self):
        """Whether rows are left to be called."""
        return bool(self.runs)


class StagedRequest(PendingRequest):
    """Rows that are read in stages. The results of one are written before the next is read: both are freed early.

    Args:
        stages: an iterator of Bounds that have a LineWriter, or errors only.
    """

    __slots__ = ("_stages", "_texts", "_written")

    def __init__(self, meta, stages):
        super().__init__(meta, next(stages))
        self._stages = stages
        self._texts = []  # the lines of results that have not left
        self._written = 0  # rows whose results are in `_texts`, or have left
        self._bind(self.bound)

    def _bind(self, bound):
        self.bound, end = bound, bound.first + len(bound.calls)
        self.runs = good_runs(end, bound.errors, bound.first)

    def has_runs(self):
        """As `PendingRequest.has_runs`; reads more rows if those before have been called."""
        while not self.runs:
            end = self.bound.first + len(self.bound.calls)
            if end == self.rows:
                return False
            self._write(end)
            bound = next(self._stages)
            self.errors.update(bound.errors)
            self._bind(bound)
        return True

    def _write(self, end):
        """Write the results of rows up to `end`, and free them."""
        first, self._written = self._written, end
        if first < end and self.bound.writer is not None:
            self._texts.append(self.bound.writer.write(self.values[first:end], self.errors, range(first, end)))
            self.values[first:end] = [None] * (end - first)

    def take_lines(self, end):
        """The lines of the results that have not left, up to row `end`."""
        self._write(end)
        texts, self._texts = self._texts, []
        return b"".join(texts)


def good_runs(end, errors, first=0):
    """(first, end) of valid rows, the last ones first."""
    if not errors:
        return [(first, end)] if end > first else []
    runs = []
    for bad in [*sorted(errors, reverse=True), first - 1]:
        if bad + 1 < end:
            runs.append((bad + 1, end))
        end = bad
    return runs


def write_exactly(values, errors, rows):
    """(JSON of the values of these rows, buffers). Rows whose result has no form get an error in `errors`."""
    writer = Writer(exact=True)
    plain = []
    for row, value in zip(rows, values):
        try:
            plain.append(None if row in errors else writer.value(value))
        except (Exception, RecursionError) as error:  # what runs here may be the result's own code
            errors[row] = bad_return(error)
            plain.append(None)
    try:
        return installed.dump(plain), writer.buffers
    except (ValueError, TypeError, OverflowError, RecursionError):
        parts = []
    for row, value in zip(rows, plain):
        try:
            parts.append(installed.dump(value))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            errors[row] = bad_return(error)
            parts.append(b"null")
    return b"[" + b",".join(parts) + b"]", writer.buffers


def write_columns(pieces):
    """(JSON, buffers) of results that are arrays, their parts joined.

    None where they are of different shapes, or of a type that has no datatype.
    """
    kinds = {tuple((name, each.dtype, each.shape[1:]) for name, each in columns.items()) for *_, columns in pieces}
    if len(kinds) > 1:
        return None
    buffers, described = [], {}
    for name in pieces[0][2]:
        parts = [columns[name] for *_, columns in pieces]
        array = parts[0] if len(parts) == 1 else arrays.joined(parts)
        written = arrays.write(array, buffers)
        if written is None:
            return None
        described[name] = written
    return installed.dump(described), buffers


def bad_return(error):
    """The error of a row whose result has no form."""
    if isinstance(error, Unserializable):
        return ["bad_return", str(error), ""]
    return ["bad_return", f"the result cannot be serialized\n{type(error).__name__}: {text_of(error)}", ""]


PARTS_MAX = 4000  # asks in one batch: what `progress` can hold


class BatchQueue:
    """Waiting rows by group: only rows of one group share a call. Within a group, live calls are in order.

    Rows wait for others only while nothing else is to be done: no batch is full, and no other group or job waits.

    Args:
        size: rows in one batch, at most.
        window: a batch_window.BatchWindow, which decides how long live requests wait and how many share a batch.
    """

    def __init__(self, size, window):
        self.size, self.window = size, window
        self._latest = None  # the live request that was added last
        self._live = {}  # key -> deque of (ask, first, end)
        self._batcher = {}
        self._rows = collections.Counter()  # key -> rows that wait

    def __bool__(self):
        return bool(self._live or self._batcher)

    @property
    def has_live(self):
        return bool(self._live)

    def add(self, ask, first, end, key=None):
        """Add rows."""
        groups = self._batcher if ask.from_job else self._live
        groups.setdefault(key, collections.deque()).append((ask, first, end))
        self._count(key, end - first)
        if not ask.from_job and ask is not self._latest:  # a request with bad rows has several runs
            self._latest = ask
            self.window.arrived(ask.arrived_ns)

    def drop(self, ask):
        """Drop the waiting rows of this request."""
        for groups in (self._live, self._batcher):
            for key, runs in list(groups.items()):
                kept = collections.deque(run for run in runs if run[0] is not ask)
                self._count(key, _rows_of(kept) - _rows_of(runs))
                groups[key] = kept
                if not kept:
                    del groups[key]

    def due_ns(self, now_ns, size=None):
        """Nanoseconds until `take` has a batch; None: for ever."""
        key, wait_ns = self._choose(now_ns, size or self.size)
        return None if key is _NOTHING else wait_ns

    def take(self, now_ns, size=None):
        """The next batch, as (request, first, end); empty if none is due."""
        size = size or self.size
        key, wait_ns = self._choose(now_ns, size)
        if key is _NOTHING or wait_ns > 0:
            return []
        parts, parts_max = [], PARTS_MAX
        if not self._batcher:
            parts_max = min(parts_max, self.window.requests_max(len(self._live[key]), self._rows[key]))
        if key in self._live:
            self.window.begun()
        for groups in (self._live, self._batcher):
            if key in groups:
                size -= self._take_of(groups[key], size, parts, parts_max)
                if not groups[key]:
                    del groups[key]
        self._count(key, -_rows_of(parts))
        return parts

    @staticmethod
    def _take_of(runs, size, parts, parts_max):
        """Move up to `size` rows from what waits to `parts`; returns how many."""
        left = size
        while runs and left and len(parts) < parts_max:
            ask, first, end = runs[0]
            stop = min(end, first + left)
            parts.append((ask, first, stop))
            left -= stop - first
            if stop == end:
                runs.popleft()
            else:
                runs[0] = (ask, stop, end)
        return size - left

    def _choose(self, now_ns, size):
        """The key of the next batch, that of the oldest rows, and its remaining wait."""
        groups = self._live or self._batcher
        best, best_ns = _NOTHING, 0
        for key, runs in groups.items():
            if best is _NOTHING or runs[0][0].arrived_ns < best_ns:
                best, best_ns = key, runs[0][0].arrived_ns
        if len(groups) != 1 or self._batcher or self._rows[best] >= size:
            return best, 0
        return best, self.window.wait_ns(now_ns, len(groups[best]), self._rows[best])

    def _count(self, key, rows):
        self._rows[key] += rows
        if not self._rows[key]:
            del self._rows[key]


class Bisection:
    """Decides how to split a batch that raised, from the results of earlier rows.

    `share` is the estimated share of rows that raise.
    """

    SINGLES_ROWS = 4  # up to here, one by one is no dearer than halves
    MEMORY_ROWS = 256  # rows after which an estimate has mostly gone
    RAISING_MAX = 2.0  # expected rows that raise in a batch, from which on halves would all raise too
    FULL_SHARE = 0.7  # expected rows that raise in a batch that is made
    FITTING = 64  # batches of the most rows that fit in memory, after which a quarter more is tried

    def __init__(self):
        self.share = 0.0
        self._rows_max = None  # that fit in memory; None: no batch was too large
        self._fitted = 0  # full batches since that changed

    def learn(self, rows, raised):
        """Learn how many of these rows raised."""
        self.share += (raised / rows - self.share) * rows / (rows + self.MEMORY_ROWS)
        if self._rows_max is None or rows < self._rows_max:
            return
        self._fitted += 1
        if self._fitted > self.FITTING:
            self._rows_max, self._fitted = self._rows_max + max(1, self._rows_max // 4), 0

    def did_not_fit(self, rows):
        """Learn that memory did not suffice for a call of so many rows, each of which fits alone."""
        half = max(1, rows // 2)
        self._rows_max, self._fitted = half if self._rows_max is None else min(half, self._rows_max), 0

    def size(self, size):
        """The rows of a batch that is likely to succeed."""
        size = size if self._rows_max is None else min(size, self._rows_max)
        if self.share * size <= self.FULL_SHARE:
            return size
        return max(1, int(self.FULL_SHARE / self.share))

    def should_split_singly(self, rows):
        """Whether to run the rows of a failed batch one by one instead of in halves."""
        return rows <= self.SINGLES_ROWS or self.share * rows >= self.RAISING_MAX


_NOTHING = object()


def _rows_of(parts):
    return sum(end - first for _, first, end in parts)


def halves(parts):
    """The parts of a batch in two, as even as can be."""
    left, right, half = [], [], _rows_of(parts) // 2
    for ask, first, end in parts:
        count = min(end - first, half)
        if count:
            left.append((ask, first, first + count))
            half -= count
        if first + count < end:
            right.append((ask, first + count, end))
    return left, right


def singles(parts):
    """Each row of a batch as its own batch."""
    return [[(ask, row, row + 1)] for ask, first, end in parts for row in range(first, end)]
