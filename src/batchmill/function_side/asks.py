"""An ask on its way through this process: rows to be called, and what has become of them."""

from __future__ import annotations

import time

from . import arrays, json_text
from .plain import SIMPLE, Unserializable, Writer
from .tracebacks import text_of


class Ask:
    """`values[row]` is the result of a row that has been called; rows that failed have None there and an error."""

    __slots__ = (
        "id", "rows", "is_train", "is_exact", "arrived_ns", "begun_ns", "bound", "values", "errors", "done", "sent",
        "sent_ns", "left", "runs", "is_abandoned", "columns", "pieces", "of",
    )  # fmt: skip

    def __init__(self, meta, bound):
        self.id, self.rows, self.is_train, self.is_exact = meta["id"], meta["rows"], meta["train"], meta["exact"]
        self.of = meta.get("of") or ()  # project, and request or job; of a train with the number of its first row too
        self.arrived_ns, self.begun_ns, self.sent_ns = time.perf_counter_ns(), 0, 0
        self.bound = bound
        self.errors = bound.errors
        self.values = [None] * self.rows
        self.done = None  # of rows that end in any order: a byte for each
        self.sent = 0  # rows whose results have left
        self.left = self.rows - len(bound.errors)  # rows without a result or an error
        self.runs = good_runs(self.rows, bound.errors)  # (first, end) of rows that can be called, the last ones first
        self.is_abandoned = False
        self.columns = None  # of a function of many rows: by parameter, a list or an array
        self.pieces = []  # results that are arrays: (first, rows, {name: array})

    def keep_done(self):
        """From now on its rows end in any order."""
        self.done = bytearray(self.rows)
        for row in self.errors:
            self.done[row] = 1

    def begin(self):
        """Some of its rows are about to be called."""
        if not self.begun_ns:
            self.begun_ns = self.sent_ns = time.perf_counter_ns()

    def end_rows(self, first, end):
        """These rows have their results or errors."""
        self.left -= end - first
        if self.done is not None:
            self.done[first:end] = b"\x01" * (end - first)

    @property
    def queue_ns(self):
        return max(self.begun_ns - self.arrived_ns, 0)


def good_runs(rows, errors):
    """(first, end) of the rows that can be called, the last ones first."""
    if not errors:
        return [(0, rows)] if rows else []
    runs, end = [], rows
    for bad in [*sorted(errors, reverse=True), -1]:
        if bad + 1 < end:
            runs.append((bad + 1, end))
        end = bad
    return runs


def write_values(values, errors, first, *, exact):
    """(JSON of the values, buffers). Rows whose result has no form get an error in `errors`, numbered from `first`."""
    if not exact and SIMPLE.issuperset(map(type, values)):
        try:
            return json_text.dump(values), []
        except (ValueError, TypeError, OverflowError):  # text that is not UTF-8: told row by row
            pass
    writer = Writer(exact=exact)
    plain = []
    for row, value in enumerate(values, first):
        try:
            plain.append(None if row in errors else writer.value(value))
        except (Exception, RecursionError) as error:  # what runs here may be the result's own code
            errors[row] = bad_return(error)
            plain.append(None)
    try:
        return json_text.dump(plain), writer.buffers
    except (ValueError, TypeError, OverflowError, RecursionError):
        parts = []
    for row, value in enumerate(plain, first):
        try:
            parts.append(json_text.dump(value))
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
    buffers, told = [], {}
    for name in pieces[0][2]:
        parts = [columns[name] for *_, columns in pieces]
        array = parts[0] if len(parts) == 1 else arrays.joined(parts)
        written = arrays.write(array, buffers)
        if written is None:
            return None
        told[name] = written
    return json_text.dump(told), buffers


def bad_return(error):
    """The error of a row whose result has no form."""
    if isinstance(error, Unserializable):
        return ["bad_return", str(error), ""]
    return ["bad_return", f"the result cannot be serialized\n{type(error).__name__}: {text_of(error)}", ""]
