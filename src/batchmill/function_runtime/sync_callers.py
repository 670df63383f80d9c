"""Calls of sync functions on this thread: row by row, or many rows at a time."""

from __future__ import annotations

import collections
import collections.abc
import itertools
import os
import time

from . import gpus, printing
from . import values as arrays
from .arguments import ONE, STAR, as_columns, as_dicts, column_of, read_rows, read_stages
from .arrow.rows import column_of_result, copied, frame_of, is_arrow, items_of, series_of
from .batch_window import BatchWindow
from .installed import loaded
from .kept_results import ResultSerializer
from .loading import row_error
from .printing import FIRST
from .requests import BatchQueue, Bisection, PendingRequest, StagedRequest, bad_return, halves, singles
from .row_lines import LAYOUTS
from .streams import collected
from .user_code import FRAME, OUTPUT
from .values import detached

TRACES_MAX = 4  # of the rows of a live ask that fail: its reply shows one at most
LOOK_NS = 500_000  # rows are called for this long, then the socket is looked at
STRIDE_MAX = 16  # rows between two looks at the clock, where they are quick
QUICK_NS = LOOK_NS // 8
_OBJECT_KINDS = frozenset("OSUmM")  # of numpy arrays whose items are written one by one


def read(meta, buffers, code, progress, *, as_columns=False):
    """The rows of an `ask`. Where user code makes objects of them, all of them count as being called."""
    if not code.parameters.models:
        return read_rows(meta, buffers, code.parameters, as_columns=as_columns)
    progress.one(meta["id"], 0, meta["rows"])
    try:
        return read_rows(meta, buffers, code.parameters, as_columns=as_columns)
    finally:
        progress.none()


class RowCaller:
    """
    Args:
        code: a user_code.UserCode of single rows; `code.call` returns the result itself.
        look: reads the socket and hands over what has come; returns whether something goes before rows of jobs.
    """

    def __init__(self, code, replies, progress, link, *, look, memory_bytes=None):
        self._code, self._replies, self._progress, self._link = code, replies, progress, link
        self._look, self._memory_bytes = look, memory_bytes
        self._call = collected(code) if code.streams else code.call
        self._result = None if code.streams else code.result
        self._serializer = ResultSerializer(self._error_of)
        self._live = collections.deque()
        self._batcher = collections.deque()
        self.met_memory_limit = False

    def add(self, meta, buffers):
        """Add a request."""
        began = time.perf_counter_ns()
        if meta["layout"] in LAYOUTS and not self._code.parameters.models:
            ask = StagedRequest(meta, read_stages(meta, buffers[0], self._code.parameters))
        else:
            ask = PendingRequest(meta, read(meta, buffers, self._code, self._progress))
        self._replies.count(1, 0, time.perf_counter_ns() - began, 0)
        (self._batcher if ask.from_job else self._live).append(ask)

    def abandon(self, ask_id):
        """Abandon a request: its waiting rows never run, and it gets no reply."""
        for ask in itertools.chain(self._live, self._batcher):
            if ask.id == ask_id:
                ask.is_abandoned = True

    @property
    def has_live(self):
        return bool(self._live)

    def wait_s(self):
        """Seconds to wait; None: until something arrives."""
        return 0 if self._live or self._batcher else None

    def turn(self):
        """Run what waits: all live calls, or rows of a job until something must run before them."""
        while self._live:
            ask = self._live[0]
            self._run(ask)
            self._live.popleft()
            self._replies.flush_in_time()
        if self._batcher and self._run(self._batcher[0]):
            self._batcher.popleft()

    def _run(self, ask):
        """Run the remaining rows of a request; False if something must run before them."""
        if ask.is_abandoned:
            return True
        ask.begin(self._progress)
        printing.calling((ask,))
        try:
            return self._run_calls(ask)
        finally:
            printing.idle()

    def _run_calls(self, ask):
        looked = time.perf_counter_ns()
        while not ask.is_abandoned and ask.has_runs():
            now = time.perf_counter_ns()
            if now - looked >= LOOK_NS:
                looked = now
                goes_first = self._look()
                self._replies.stage_in_time(ask, self._serializer, upto=ask.runs[-1][0])
                if goes_first and ask.from_job:
                    return False
            first, end = ask.runs.pop()
            at = self._call_some(ask, first, end)
            if at < end:
                ask.runs.append((at, end))
        self._replies.finish(ask)
        return True

    def _call_some(self, ask, first, end):
        """Run rows from `first` on for a moment; return the first that was not run."""
        values, words, clock = ask.values, self._progress.words, time.perf_counter_ns
        step, (fixed, write) = self._steps(ask.bound, first, end), self._serializer.how(ask, self._result)
        written = []
        self._progress.one(ask.id, first)
        began = last = clock()
        at, stride = first, 1
        while at < end and last - began < LOOK_NS:
            stop = min(at + stride, end)
            for row in range(at, stop):
                words[FIRST] = row  # in a child that user code has forked this raises: it calls no more rows
                try:
                    result = step()
                except BaseException as error:  # SystemExit and the like too: one row must not end the process
                    self._fail(ask, row, error)
                    continue
                if write is None or type(result) in fixed:
                    values[row] = result
                    continue
                try:
                    values[row] = write(result)
                    written.append(result)
                except BaseException as error:  # as above: the result's own code may run here
                    values[row] = self._serializer.rewrite(ask, row, result, error)
                    if values[row] is not None:
                        written.append(result)
            at, now = stop, clock()
            stride = min(2 * stride, STRIDE_MAX) if now - last < QUICK_NS else 1
            last = now
        if self._link.is_child:
            os._exit(0)
        self._serializer.end_run(ask, first, at, written if self._result is None else [])
        self._progress.none()
        self._replies.count(1, at - first, 0, last - began)
        return at

    def _steps(self, bound, first, end):
        """What calls the next row, each time it is called."""
        rows, call = itertools.islice(bound.calls, first - bound.first, end - bound.first), self._call
        if bound.how == ONE:
            return map(call, rows).__next__
        if bound.how == STAR:
            return itertools.starmap(call, rows).__next__
        return map(lambda named: call(**named), rows).__next__  # noqa: C417 (a generator ends with its first error)

    def _fail(self, ask, row, error):
        if self._link.is_child:
            os._exit(0)
        self._replies.end_if_lost(error, [ask.id])
        is_shown = ask.from_job or len(ask.errors) < TRACES_MAX
        ask.errors[row] = self._error_of(error, with_trace=is_shown)

    def _error_of(self, error, *, with_trace=True):
        self.met_memory_limit |= isinstance(error, MemoryError)
        return row_error(error, self._memory_bytes, with_trace=with_trace)


def prepare(ask, code):
    """Turn rows into columns, and return their groups: (first, end, key) of each run."""
    parameters = code.parameters
    if ask.bound.columns is not None:
        ask.columns = ask.bound.columns
    elif code.takes_rows or code.calls == FRAME or (columns := as_columns(ask.bound, parameters)) is None:
        dicts = as_dicts(ask.bound, parameters)
        if code.takes_rows or code.calls == FRAME:
            ask.columns = {"": dicts}
        else:
            empty = dict.fromkeys(parameters.order)
            whole = [empty if row is None else row for row in dicts] if ask.errors else dicts
            ask.columns = {name: column_of(whole, name, parameters) for name in parameters.order}
    else:
        ask.columns = columns
    ask.keep_done()
    if parameters.takes_frame or parameters.series:
        key = _schema_of(ask.columns)
        return [(first, end, key) for first, end in reversed(ask.runs)]
    if not parameters.arrays:
        return [(first, end, None) for first, end in reversed(ask.runs)]
    return [run for first, end in reversed(ask.runs) for run in _groups(ask, first, end, parameters)]


def _schema_of(columns):
    """What rows must have in common to share a table, or columns of Arrow."""
    return tuple(str(each.schema if name == "" else each.type) for name, each in columns.items() if is_arrow(each))


def _groups(ask, first, end, parameters):
    """Runs of rows whose arrays are of the same shapes and types."""
    columns = [ask.columns[name] for name in parameters.arrays if name in ask.columns]
    numpy = loaded("numpy")
    if all(type(each) is numpy.ndarray for each in columns):
        return [(first, end, tuple((each.shape[1:], each.dtype.str) for each in columns))]
    keys = [
        tuple((getattr(item, "shape", None), getattr(getattr(item, "dtype", None), "str", None)) for item in items)
        for items in zip(*[each[first:end] for each in columns])
    ]
    runs, begin = [], 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[begin]:
            runs.append((first + begin, first + at, keys[begin]))
            begin = at
    return runs


def arguments_of(parts, code):
    """The arguments, by position and by name, of one call with the rows of all parts."""
    if code.calls == FRAME:
        return (_frame(parts, code),), {}
    parameters = code.parameters
    if parameters.takes_frame:
        return (frame_of(_pieces(parts, ""), parameters.takes_frame),), {}
    if code.takes_rows:
        return (_items(parts, ""),), {}
    return (), {name: _column(parts, name, parameters) for name in parameters.order}


def _column(parts, name, parameters):
    if name in parameters.series:
        return series_of(_pieces(parts, name), parameters.series[name])
    return _array(parts, name) if name in parameters.arrays else _items(parts, name)


def _pieces(parts, name):
    """What each part has of a column: Arrow's of one type, or lists."""
    columns = [(ask.columns[name], first, end) for ask, first, end in parts]
    if any(isinstance(each, list) for each, _, _ in columns):
        return [items_of(each.slice(a, b - a)) if is_arrow(each) else each[a:b] for each, a, b in columns]
    return [each.slice(first, end - first) for each, first, end in columns]


def _items(parts, name):
    if len(parts) == 1:
        ask, first, end = parts[0]
        return list(ask.columns[name][first:end])
    return [item for ask, first, end in parts for item in ask.columns[name][first:end]]


def _array(parts, name):
    numpy = loaded("numpy")
    pieces = []
    for ask, first, end in parts:
        piece = ask.columns[name][first:end]
        if type(piece) is not numpy.ndarray:
            piece = numpy.stack(piece) if all(each is not None for each in piece) else piece
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0]
    return arrays.joined(pieces)


def _frame(parts, code):
    """A data frame of the rows; its index holds their ids if they have ids."""
    pandas = loaded("pandas")
    rows = [row for ask, first, end in parts for row in ask.columns[""][first:end]]
    index = None
    if all(ask.bound.ids is not None for ask, _, _ in parts):
        index = [each for ask, first, end in parts for each in ask.bound.ids[first:end]]
    data = {name: [row.get(name) for row in rows] for name in code.frame_columns}
    return pandas.DataFrame(data, index=index)


def share_out(parts, rows, result, code, serializer):
    """Give each row its result, or all rows the error of a result that does not fit. Code of the result may raise."""
    found = _arrays_of(result, rows)
    if found is None and any(ask.leaves_as_arrow for ask, _, _ in parts):
        found = column_of_result(result, rows)
    if found is not None:
        _share_arrays(parts, found, result)
        return
    items = _list_of(result)
    if items is None or len(items) != rows:
        _refuse(parts, rows, result, items)
        return
    at = 0
    for ask, first, end in parts:
        keep_items(ask, first, items[at : at + end - first], code, serializer)
        at += end - first
        ask.end_rows(first, end)


def _share_arrays(parts, found, result):
    """A function may write to one array again and again: what waits for other calls is copied."""
    ending = collections.Counter()
    for ask, first, end in parts:
        ending[ask] += end - first
    pieces = []
    for ask, first, end in parts:
        part, found = _cut(found, end - first)
        pieces.append(_owned(part, result) if ask.left > ending[ask] else part)
    for (ask, first, end), part in zip(parts, pieces):
        ask.pieces.append((first, end - first, part))
        ask.end_rows(first, end)


def _owned(part, result):
    if not is_arrow(part):
        return {name: each.copy() for name, each in part.items()}
    return part if type(result).__module__.partition(".")[0] == "pyarrow" else copied(part)


def keep_result(ask, row, value, code, serializer):
    """Keep the result of one row."""
    if code.result is not None and not code.streams:
        value = _settled(ask, row, value, code)
    [ask.values[row]] = serializer.keep_all(ask, row, [value])


def keep_items(ask, first, items, code, serializer):
    """Keep the results of consecutive rows; an exception among them is that row's error."""
    if code.result is not None or any(isinstance(each, BaseException) for each in items):
        items = [_settled(ask, row, value, code) for row, value in enumerate(items, first)]
    ask.values[first : first + len(items)] = serializer.keep_all(ask, first, items)


def _settled(ask, row, value, code):
    try:
        if isinstance(value, BaseException):
            ask.errors[row] = row_error(value)
        else:
            return value if code.result is None else code.result(value)
    except Exception as error:  # the result's own code may run here
        ask.errors[row] = bad_return(error)
    return None


def _arrays_of(result, rows):
    """The result as {name: array} where it is numpy's with the rows on its first axis, else None."""
    numpy = loaded("numpy")
    if numpy is None:
        return None
    if hasattr(result, "detach"):
        result = detached(result)
    if type(result) is dict:
        named = {name: detached(each) if hasattr(each, "detach") else each for name, each in result.items()}
    elif isinstance(result, numpy.ndarray):
        named = {OUTPUT: result}
    else:
        return None
    fits = all(
        isinstance(each, numpy.ndarray) and each.ndim and len(each) == rows and each.dtype.kind in "biuf"
        for each in named.values()
    )
    return named if named and fits else None


def _cut(named, rows):
    if is_arrow(named):
        return named.slice(0, rows), named.slice(rows)
    return {name: each[:rows] for name, each in named.items()}, {name: each[rows:] for name, each in named.items()}


def _list_of(result):
    """The result as a list of one for each row; None for what is none."""
    if type(result).__module__.partition(".")[0] in ("polars", "pyarrow"):
        found = column_of_result(result, len(result))
        return None if found is None else items_of(found)
    pandas = loaded("pandas")
    if pandas is not None and isinstance(result, pandas.DataFrame):
        return result.to_dict(orient="records")
    if hasattr(result, "tolist") and getattr(result, "shape", (1,)) != ():
        kind = getattr(getattr(result, "dtype", None), "kind", None)
        return list(result) if kind in _OBJECT_KINDS else result.tolist()
    if isinstance(result, collections.abc.Sequence) and not isinstance(result, (str, bytes)):
        return list(result)
    return None


def _refuse(parts, rows, result, items):
    kind = type(result).__name__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    if items is None:
        message = f"the function returned {article} {kind} for a list of {rows} rows, not a list"
    else:
        message = f"the function returned {len(items)} results for {rows} rows"
    fail(parts, ["bad_return", message, ""])


def fail(parts, error):
    """Store this error for all rows."""
    for ask, first, end in parts:
        for row in range(first, end):
            ask.errors[row] = error
        ask.end_rows(first, end)


class ListCaller:
    """
    Args:
        code: a user_code.UserCode of many rows.
        look: reads the socket and hands over what has come; returns whether something goes before rows of jobs.
    """

    def __init__(self, code, replies, progress, link, *, look, memory_bytes=None):
        self._code, self._replies, self._progress, self._link = code, replies, progress, link
        self._look, self._memory_bytes = look, memory_bytes
        self._batches = BatchQueue(code.batch_size, BatchWindow(int(code.batch_window_s * 1e9)))
        self._bisection = Bisection()
        self._asks = {}
        self._failed = 0  # rows whose own call raised, ever
        self._was_too_large = False  # the last call that raised
        self._reading_ns = 0  # of asks whose rows have not been called
        self._serializer = ResultSerializer(self._error_of)
        self.met_memory_limit = False

    def add(self, meta, buffers):
        """Take an ask over."""
        began = time.perf_counter_ns()
        ask = PendingRequest(meta, read(meta, buffers, self._code, self._progress, as_columns=True))
        if not ask.left:
            self._replies.finish(ask)
            return
        self._asks[ask.id] = ask
        for first, end, key in prepare(ask, self._code):
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
        began = time.perf_counter_ns()
        parts = self._batches.take(began, self._size())
        if not parts:
            return
        rows = sum(end - first for _, first, end in parts)
        for ask, _, _ in parts:
            ask.begin(self._progress)
        before = self._failed
        if not self._try(parts, rows):
            self._cut(parts, rows)
        self._bisection.learn(rows, self._failed - before)
        asks = list(dict.fromkeys(ask for ask, _, _ in parts))
        for ask in asks:
            self._reply(ask, rows)
        if not asks[0].from_job:
            ended = time.perf_counter_ns()
            self._replies.flush()
            self._look()  # what came during the call, before clients have these replies
            self._batches.window.called(asks, rows, began, ended, is_whole=self._failed == before)

    def _reply(self, ask, size):
        if ask.left == 0:
            self._asks.pop(ask.id, None)
            self._replies.finish(ask, size)
        else:
            self._replies.stage_in_time(ask, self._serializer, size)

    def _try(self, parts, rows):
        """Call with these rows; false where it raised, and then nothing is settled."""
        error = self._call(parts, rows)
        if error is None:
            return True
        if rows == 1:
            fail(parts, self._error_of(error))
            self._failed += 1
            return True
        self._was_too_large = gpus.is_out_of_memory(error)
        return False

    def _error_of(self, error):
        self.met_memory_limit |= isinstance(error, MemoryError)
        return row_error(error, self._memory_bytes)

    def _call(self, parts, rows):
        """Run one call; return its exception, or None if every row has its result."""
        began = time.perf_counter_ns()
        self._progress.many([(ask.id, first, end - first) for ask, first, end in parts])
        called = began
        printing.calling(tuple(dict.fromkeys([ask for ask, _, _ in parts])))
        try:
            args, named = arguments_of(parts, self._code)
            called = time.perf_counter_ns()
            result = self._code.call(*args, **named)
            if self._link.is_child:
                os._exit(0)
            share_out(parts, rows, result, self._code, self._serializer)
        except BaseException as error:  # SystemExit and the like too: one batch must not end the process
            self._replies.end_if_lost(error, [ask.id for ask, _, _ in parts])
            return error
        finally:
            if self._link.is_child:
                os._exit(0)
            printing.idle()
            self._progress.none()
            self._replies.count(rows, 1, called - began + self._reading_ns, time.perf_counter_ns() - called)
            self._reading_ns = 0
        return None

    def _cut(self, parts, rows):
        """Find the failing rows of a batch that raised, and store all results."""
        if self._was_too_large:
            failed = self._failed
            left, right = halves(parts)
            self._settle(left, rows // 2)
            self._settle(right, rows - rows // 2)
            if self._failed == failed:  # otherwise a row is too large by itself, which says nothing of other batches
                self._bisection.did_not_fit(rows)
            return
        if self._bisection.should_split_singly(rows):
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
