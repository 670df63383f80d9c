"""Frames to the worker: what became of rows, and what has been called since the last of them."""

from __future__ import annotations

import sys
import time

from . import json_text
from .asks import write_columns, write_values
from .frames import pack, pack_text
from .tracebacks import trace_of

STAGE_NS = 50_000_000  # results of a train leave this often
FLUSH_NS = 1_000_000  # results that wait for others of the same turn leave after this
BARE_NAMES = frozenset(["output"])  # a column of this name is the result itself, not a dict of one


class Replies:
    """Puts results on the link. Whoever calls user code says what it took with `count`."""

    def __init__(self, link):
        self._link = link
        self._ran = {}  # rows in a call -> [calls, input_ns, infer_ns, output_ns]
        self._flushed_ns = 0

    def count(self, size, calls, input_ns, infer_ns):
        """So many calls of user code with `size` rows each."""
        ran = self._ran.get(size)
        if ran is None:
            ran = self._ran[size] = [0, 0, 0, 0]
        ran[0] += calls
        ran[1] += input_ns
        ran[2] += infer_ns

    def _count_output(self, size, output_ns):
        ran = self._ran.get(size)
        if ran is not None:
            ran[3] += output_ns

    def finish(self, ask, size=1):
        """Everything of this ask that has not left."""
        if not ask.is_abandoned:
            self._results(ask, ask.sent, ask.rows, size)

    def stage(self, ask, upto, size=1):
        """The rows of a train up to here, if it is time for them."""
        now = time.perf_counter_ns()
        if ask.is_train and upto > ask.sent and now - ask.sent_ns >= STAGE_NS:
            ask.sent_ns = now
            self._results(ask, ask.sent, upto, size)
            ask.values[ask.sent : upto] = [None] * (upto - ask.sent)
            ask.sent = upto
            self.flush()

    def _results(self, ask, first, end, size):
        began = time.perf_counter_ns()
        layout, (values, buffers) = self._values(ask, first, end)
        errors = ask.errors
        if ask.sent or end < ask.rows:
            errors = {row: error for row, error in errors.items() if first <= row < end}
        self._count_output(size, time.perf_counter_ns() - began)
        ran = self._taken()
        if not errors:
            text = b'{"kind":"results","id":%d,"first":%d,"rows":%d,"layout":"%b","errors":{},"ran":%b,"queue_ns":%d}'
            text %= (ask.id, first, end - first, layout, ran, ask.queue_ns)
        else:
            text = b'{"kind":"results","id":%d,"first":%d,"rows":%d,"layout":"%b","errors":%b,"ran":%b,"queue_ns":%d}'
            told = json_text.dump({str(row): error for row, error in errors.items()})
            text %= (ask.id, first, end - first, layout, told, ran, ask.queue_ns)
        self._link.put(pack_text(text, [values, *buffers]))

    def _values(self, ask, first, end):
        if ask.pieces:
            pieces = sorted((piece for piece in ask.pieces if first <= piece[0] < end), key=_first_of)
            if ask.is_exact and not ask.errors and sum(rows for _, rows, _ in pieces) == end - first:
                written = write_columns(pieces)
                if written is not None:
                    return b"columns", written
            for piece in pieces:
                spread(ask, *piece)
            ask.pieces = [piece for piece in ask.pieces if piece[0] >= end]
        values = ask.values if end - first == ask.rows else ask.values[first:end]
        return b"rows", write_values(values, ask.errors, first, exact=ask.is_exact)

    def _taken(self):
        if not self._ran:
            return b"[]"
        told = b"[%b]" % b",".join([b"[%d,%d,%d,%d,%d]" % (size, *ran) for size, ran in self._ran.items()])
        self._ran.clear()
        return told

    def piece(self, stream_id, value, *, exact):
        """One event of a stream."""
        errors = {}
        text, buffers = write_values([value], errors, 0, exact=exact)
        if errors:
            self.end_stream(stream_id, errors[0])
            return False
        meta = {"kind": "piece", "id": stream_id, "ended": False, "error": None}
        self._link.put(pack(meta, [text[1:-1], *buffers]))
        return True

    def end_stream(self, stream_id, error=None):
        """No event comes any more."""
        self._link.put(pack({"kind": "piece", "id": stream_id, "ended": True, "error": error}))

    def note(self, error):
        """Write down what user code raised where nobody waits for it."""
        print(trace_of(error), file=sys.stderr)

    def flush(self):
        """Hand over what has been put."""
        self._flushed_ns = time.perf_counter_ns()
        self._link.flush()

    def flush_in_time(self):
        """Hand over what has been put, if it has waited long enough for more."""
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_NS:
            self.flush()


def _first_of(piece):
    return piece[0]


def spread(ask, first, rows, columns):
    """Results that are arrays as one result for each row: for JSON, or beside rows that failed."""
    lists = {name: list(each) if ask.is_exact else each.tolist() for name, each in columns.items()}
    if BARE_NAMES.issuperset(lists):
        [items] = lists.values()
    else:
        items = [dict(zip(lists, each)) for each in zip(*lists.values())]
    ask.values[first : first + rows] = items
