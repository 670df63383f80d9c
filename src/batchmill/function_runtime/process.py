"""The function's process: loads what `start` names, then serves the worker until `stop` or the end.

Of `start`, `received_shapes` is heeded in the worker, by the form that reads a body. To the worker go `ready`
{interface, batch_size, batch_window_s, reads_arrow, shares_memory}; `failed` {message}, then the exit; `results` and
`piece` as `replies` has them.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
import traceback

from . import gpus, inferless_app, installed, marks, printing
from .arrow.rows import is_arrow, is_available, items_of
from .frames import BROKEN, WorkerSocket, end_with_worker, high, keep_freed_memory
from .kept_results import Unkept, text_of_result, texts_of
from .loading import LoadError, run_user_code, text_of, trace_of
from .printing import Progress
from .requests import RESULT_BYTES, STAGE_NS, StagedRequest, write_columns, write_exactly
from .shared_memory import MemoryPair
from .streams import Streams
from .sync_callers import ListCaller, RowCaller
from .user_code import ROW, load

FLUSH_NS = 1_000_000  # results that wait for others of the same turn leave after this
REFUSED = ["memory_limit", "the function's process was refused the memory to write the row's result", ""]
BARE_NAMES = frozenset(["output"])  # a column of this name is the result itself, not a dict of one


def _async_calls():
    """What calls async functions. asyncio takes a third of the start of a process, and most functions need none."""
    from . import async_caller

    return async_caller


class Replies:
    """Sends results to the worker. Callers of user code report calls with `count`."""

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
        """Send everything of this request that was not sent."""
        rows = () if ask.is_abandoned else ask.ended_rows(ask.rows)
        if rows or not (ask.is_abandoned or ask.is_staged):  # a batch of other rows may have let all of these leave
            self._results(ask, rows, size)

    def stage_in_time(self, ask, serializer, size=1, upto=None):
        """As `stage`, if the last time is long ago, or if what `serializer` has kept is large."""
        if serializer.size_bytes >= RESULT_BYTES or time.perf_counter_ns() - ask.sent_ns >= STAGE_NS:
            self.stage(ask, serializer, size, upto)

    def stage(self, ask, serializer, size=1, upto=None):
        """Send the rows of a batch that have ended.

        Args:
            upto: the first row that has not ended, if they end in order.
        """
        rows = ask.ended_rows(upto) if ask.is_staged else ()
        if rows:
            ask.sent_ns, serializer.size_bytes = time.perf_counter_ns(), 0
            self._results(ask, rows, size)
            ask.forget(rows)
            self.flush()

    def _results(self, ask, rows, size):
        began = time.perf_counter_ns()
        try:
            layout, (values, buffers) = self._values(ask, rows)
        except MemoryError:
            if len(rows) > 1:  # the process ends, and gets fewer rows at once
                raise
            ask.errors[rows[0]], ask.values[rows[0]], ask.pieces = REFUSED, None, []
            layout, (values, buffers) = self._values(ask, rows)
        errors = ask.errors
        if errors and len(rows) < ask.rows:
            some = rows if type(rows) is range else set(rows)
            errors = {row: error for row, error in errors.items() if row in some}
        self._count_output(size, time.perf_counter_ns() - began)
        failures = installed.dump({str(row): error for row, error in errors.items()}) if errors else b"{}"
        first, places = rows[0] if rows else 0, b""
        if type(rows) is not range:
            places = b',"places":[%b]' % b",".join([b"%d" % row for row in rows])
        text = b'{"kind":"results","id":%d,"first":%d,"rows":%d%b,"layout":"%b","errors":%b,"ran":%b,"queue_ns":%d}'
        text %= (ask.id, first, len(rows), places, layout, failures, self._taken(), ask.queue_ns)
        self._link.put_text(text, [values, *buffers])

    def _values(self, ask, rows):
        if isinstance(ask, StagedRequest):
            return b"lines", (ask.take_lines(rows.stop), [])
        if ask.pieces:
            written = self._pieces(ask, rows)
            if written is not None:
                return written
        values = ask.values
        if type(rows) is not range:
            values = [values[row] for row in rows]
        elif len(rows) < ask.rows:
            values = values[rows.start : rows.stop]
        if ask.bound.writer is not None:
            written = ask.bound.writer.write(values, ask.errors, rows)
            return b"arrow" if ask.leaves_as_arrow else b"lines", (written, [])
        if ask.is_exact:
            return b"rows", write_exactly(values, ask.errors, rows)
        kept, texts = texts_of(values, ask.errors, rows)
        if len(texts) < len(rows):
            found = dict(zip(kept, texts))
            texts = [found.get(row, b"null") for row in rows]
        return b"rows", (b"[" + b",".join(texts) + b"]", [])

    @staticmethod
    def _pieces(ask, rows):
        """(layout, (values, buffers)) of results that are arrays. None: they are now among `ask.values`."""
        some = rows if type(rows) is range else set(rows)
        pieces = sorted((piece for piece in ask.pieces if piece[0] in some), key=_first_of)
        if not pieces:
            return None
        left = [piece for piece in ask.pieces if piece[0] not in some]
        count = sum(rows for _, rows, _ in pieces)
        if ask.leaves_as_arrow and count + sum(row in some for row in ask.errors) == len(rows):
            written = ask.bound.writer.write_pieces(pieces)
            if written is not None:
                ask.pieces = left
                return b"arrow", (written, [])
        if ask.is_exact and not ask.errors and count == len(rows):
            is_numpy = not any(is_arrow(columns) for *_, columns in pieces)
            written = write_columns(pieces) if is_numpy else None
            if written is not None:
                return b"columns", written
        for piece in pieces:
            spread(ask, *piece)
        ask.pieces = left
        return None

    def _taken(self):
        if not self._ran:
            return b"[]"
        sizes = b"[%b]" % b",".join([b"[%d,%d,%d,%d,%d]" % (size, *ran) for size, ran in self._ran.items()])
        self._ran.clear()
        return sizes

    def piece(self, stream_id, value, *, exact):
        """One event of a stream."""
        errors, buffers = {}, []
        if exact:
            text, buffers = write_exactly([value], errors, range(1))
            text = text[1:-1]
        else:
            try:
                text = text_of_result(value)
            except Unkept as unkept:
                errors = [unkept.error]
        if errors:
            self.end_stream(stream_id, errors[0])
            return False
        meta = {"kind": "piece", "id": stream_id, "ended": False, "error": None}
        self._link.put(meta, [text, *buffers])
        return True

    def end_stream(self, stream_id, error=None):
        """End a stream."""
        self._link.put({"kind": "piece", "id": stream_id, "ended": True, "error": error})

    def end_if_lost(self, error, ids):
        """End the process if it has lost its GPU to this exception of user code: a new process can use it again.

        The caller has noted in `progress` which rows are running, and those are to blame.

        Args:
            ids: of the requests that shared the call. Only if it is one does the worker get the exception's message.
        """
        if self._link.is_child or not gpus.is_lost():
            return
        print(trace_of(error), file=sys.stderr, flush=True)
        first, *others = set(ids)
        text = f"{type(error).__name__}: {text_of(error)}"
        self._link.put({"kind": "lost"} | ({} if others else {"id": first, "message": text}))
        self._link.flush()
        os._exit(LOST)

    def note(self, error):
        """Log an exception of user code if no caller waits for it."""
        print(trace_of(error), file=sys.stderr)

    def flush(self):
        """Send the queued results."""
        self._flushed_ns = time.perf_counter_ns()
        self._link.flush()

    def flush_in_time(self):
        """Send the queued results if they have waited long enough."""
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_NS:
            self.flush()


def _first_of(piece):
    return piece[0]


def spread(ask, first, rows, columns):
    """Split array results into one for each row: for JSON, or beside failed rows."""
    if is_arrow(columns):
        ask.values[first : first + rows] = items_of(columns)
        return
    lists = {name: list(each) if ask.is_exact else each.tolist() for name, each in columns.items()}
    if BARE_NAMES.issuperset(lists):
        [items] = lists.values()
    else:
        items = [dict(zip(lists, each)) for each in zip(*lists.values())]
    ask.values[first : first + rows] = items


FAILED, MEMORY, LOST = 1, 71, 72  # exit codes
KEPT_BYTES = 16 * 1024 * 1024  # of freed memory
# Objects made between two collections: Python's own number is less than the rows of one body.
GC_OBJECTS_DEFAULT, GC_OBJECTS = gc.get_threshold()[0], 20_000
FULL_SHARE = 0.9  # of the memory it may have; a function that was refused more and still holds so much is replaced

try:
    import resource
except ImportError:
    resource = None


class FunctionProcess:
    """One process, one function, one worker."""

    def __init__(self, socket_fd, progress_fd, memory_fds):
        keep_freed_memory(KEPT_BYTES)
        self._memory = MemoryPair()
        self._memory.join(memory_fds, bytearray)  # which user code may write to
        self._link = WorkerSocket(socket_fd, self._memory)
        end_with_worker(self._link.fileno())
        self._progress = Progress(progress_fd)
        os.register_at_fork(after_in_child=self._progress.forget)
        self._replies = Replies(self._link)
        self._loop = None  # of a function that is async, or whose setup is
        self._memory_bytes = self._calls_max = None
        self._lines = None  # of what is printed, where the worker keeps that
        self._is_stopped = False
        self._code = self._caller = self._streams = None

    def run(self):
        """Serve until a `stop` frame; returns the exit code."""
        try:
            early = self._start()
        except LoadError as error:
            self._link.put({"kind": "failed", "message": str(error)})
            self._link.flush()
            return FAILED
        if self._code.is_async:
            parts = (self._loop, self._code, self._replies, self._progress, self._link)
            limits = {"memory_bytes": self._memory_bytes, "calls_max": self._calls_max}
            _async_calls().AsyncLoop(*parts, when_full=self._replace_when_full, **limits).run(early)
        else:
            self._make_caller()
            self._serve(early)
        self._finish()
        return 0

    def _start(self):
        frames = []
        while not frames:
            self._link.wait()
            frames = self._link.receive()
        start = frames[0][0]
        _catch_up(start)
        self._limit_memory(start.get("memory_bytes"))
        self._calls_max = start.get("in_flight_max")
        if start.get("log_fd") is not None:
            self._lines = printing.begin(high(start["log_fd"]), self._progress)
        marks.stand_in()
        inferless_app.stand_in()
        self._code = load(start)
        if self._code.setup is not None:
            run_user_code(lambda: self._call_or_await(self._code.setup), f"setting up {start['source']}")
        if self._code.is_async and self._loop is None:
            self._loop = _async_calls().new_loop()
        if self._link.is_child:
            os._exit(0)
        gc.freeze()  # what is there now stays: no collection needs to look at it
        if gc.get_threshold()[0] == GC_OBJECTS_DEFAULT:  # user code has not set another
            gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])
        if self._lines is not None:
            self._lines.stage = printing.CALL
        fields = {
            "batch_size": self._code.batch_size,
            "batch_window_s": self._code.batch_window_s,
            "reads_arrow": is_available(),
            "shares_memory": self._memory.reader is not None,
        }
        self._link.put({"kind": "ready", "interface": self._code.interface, **fields})
        self._link.flush()
        return frames[1:]

    def _limit_memory(self, memory_bytes):
        self._memory_bytes = memory_bytes
        if memory_bytes is not None and resource is not None:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            if most == resource.RLIM_INFINITY or memory_bytes <= most:
                resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))

    def _call_or_await(self, call):
        result = call()
        if inspect.isawaitable(result):
            if self._loop is None:
                self._loop = _async_calls().new_loop()
            self._loop.run_until_complete(_awaited(result))

    def _make_caller(self):
        code, parts = self._code, (self._replies, self._progress, self._link)
        if code.streams:
            self._streams = Streams(code, self._replies, self._progress, memory_bytes=self._memory_bytes)
        kind = RowCaller if code.calls == ROW else ListCaller
        self._caller = kind(code, *parts, look=self._look, memory_bytes=self._memory_bytes)

    def _serve(self, frames):
        caller, link = self._caller, self._link
        self._handle(frames)
        while not self._is_stopped:
            wait_s = caller.wait_s()
            if wait_s != 0:
                link.wait(wait_s)
            self._look()
            if self._streams is not None:
                self._streams.turn()
            caller.turn()
            link.flush()
            if caller.met_memory_limit:
                caller.met_memory_limit = False
                self._replace_when_full()

    def _look(self):
        """Read arrived frames; return whether something must run before a batch of rows."""
        frames = self._link.receive()
        if frames:
            self._handle(frames)
        return self._caller.has_live or self._is_stopped or (self._streams is not None and self._streams.is_waiting)

    def _handle(self, frames):
        for meta, buffers in frames:
            kind = meta["kind"]
            if kind == "ask":
                self._caller.add(meta, buffers)
            elif kind == "abandon":
                self._caller.abandon(meta["id"])
            elif kind == "stop":
                self._is_stopped = True
            elif self._streams is not None:
                self._streams.add(meta, buffers)
            elif kind == "open":
                message = "the function does not answer in events: ask without a stream"
                self._replies.end_stream(meta["id"], ["invalid_argument", message, ""])

    def _replace_when_full(self):
        """Exit to be restarted, if the function's memory leaves it no room."""
        gc.collect()
        if self._memory_bytes is not None and _data_bytes() > FULL_SHARE * self._memory_bytes:
            os._exit(MEMORY)

    def _finish(self):
        if self._streams is not None:
            self._streams.close_all()
        if self._code.finish is not None:
            try:
                self._call_or_await(self._code.finish)
            except BaseException as error:  # user code; it ends anyway
                print(trace_of(error), file=sys.stderr)


def _catch_up(start):
    """What a process that was started ahead could not know: the file it prints to, and changed variables."""
    os.environ.update(start.get("environ") or {})
    if start.get("output"):
        file = os.open(start["output"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


async def _awaited(result):
    return await result


def _data_bytes():
    """The bytes that RLIMIT_DATA counts; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line for line in file if line.startswith("VmData:")]
        return int(lines[0].split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def main(socket_fd, progress_fd, *memory_fds):
    """Run the program; never returns. An internal error ends it, and the worker starts a new process."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != 0:
        os.dup2(nothing, 0)
        os.close(nothing)
    sys.dont_write_bytecode = True
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        code = FunctionProcess(socket_fd, progress_fd, memory_fds).run()
    except BaseException:  # at the edge of the process: user code's signal handlers may raise anywhere
        traceback.print_exc()
        code = BROKEN
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or FAILED  # user code has closed it
    os._exit(code)
