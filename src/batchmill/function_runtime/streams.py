"""Streamed results: generators, and Inferless's stream handler. Events are made on request."""

from __future__ import annotations

import contextvars
import threading

from . import printing
from .arguments import NAMED, ONE, read_rows
from .loading import row_error

EVENTS_MAX = 100_000  # of a call that is answered in one piece


class StreamClosed(BaseException):
    """The caller has gone: raised where user code sends an event."""


class StreamCall:
    """What is being called when an event is made."""

    __slots__ = ("id", "of")

    def __init__(self, meta):
        self.id, self.of = meta["id"], meta.get("of") or ()


def call_with(call, bound, row=0):
    """Call with the arguments of one row."""
    arguments = bound.calls[row]
    if bound.how == ONE:
        return call(arguments)
    return call(**arguments) if bound.how == NAMED else call(*arguments)


class HandlerEvents:
    """The events of an `infer(inputs, stream_output_handler)`, as an iterator.

    User code runs on a thread of its own, but only while `__next__` waits for it: never two at once.
    """

    def __init__(self, call, arguments):
        self._call, self._arguments = call, arguments
        self._wanted, self._made = threading.Semaphore(0), threading.Semaphore(0)
        self._event, self._error = None, None
        self._is_over = self._is_closed = False
        self._thread = None

    def __iter__(self):
        return self

    def __next__(self):
        if not self._is_over:
            if self._thread is None:
                context = contextvars.copy_context()
                self._thread = threading.Thread(target=context.run, args=(self._run,), name="stream", daemon=True)
                self._thread.start()
            else:
                self._wanted.release()
            self._made.acquire()
        if self._is_over:
            error, self._error = self._error, None
            if error is not None:
                raise error
            raise StopIteration
        return self._event

    def close(self):
        """End user code where it sends its next event."""
        if self._thread is not None and not self._is_over:
            self._is_closed = True
            self._wanted.release()
            self._made.acquire()

    def _run(self):
        try:
            self._call(self._arguments, self)
        except StreamClosed:
            pass
        except BaseException as error:  # raised by __next__
            self._error = error
        self._is_over = True
        self._made.release()

    def send_streamed_output(self, event):
        """Inferless: one event."""
        if self._is_over:
            raise RuntimeError("the stream has been finalised")
        if self._is_closed:
            raise StreamClosed
        self._event = event
        self._made.release()
        self._wanted.acquire()
        if self._is_closed:
            raise StreamClosed

    def finalise_streamed_output(self):
        """Inferless: no more events. What runs after this is waited for with the next event that is wanted."""

    finalize_streamed_output = finalise_streamed_output


def events_of(code, bound):
    """An iterator of the events of one call."""
    if code.streams == "handler":
        return HandlerEvents(code.call, bound.calls[0])
    return iter(call_with(code.call, bound))


def collected(code):
    """The function of an answer in one piece: all events as a list."""

    def call(*args, **named):
        events = HandlerEvents(code.call, args[0]) if code.streams == "handler" else code.call(*args, **named)
        items = []
        for event in events:
            items.append(event)
            check_count(items)
        return items if code.result is None else [code.result(each) for each in items]

    return call


def check_count(items):
    """Raises: OverflowError for more events than an answer in one piece may have."""
    if len(items) > EVENTS_MAX:
        raise OverflowError(f"the function sent more than {EVENTS_MAX} events: ask for them as a stream")


class Streams:
    """The streams that are open, on this thread."""

    def __init__(self, code, replies, progress, *, memory_bytes=None):
        self._code, self._replies, self._progress, self._memory_bytes = code, replies, progress, memory_bytes
        self._open = {}  # id -> (iterator, whether it answers tensors, its StreamCall)
        self._wanted = []  # (what, id, …) that has come and is not done

    def add(self, meta, buffers):
        """Handle an `open`, `next` or `close` frame."""
        self._wanted.append((meta, buffers))

    @property
    def is_waiting(self):
        return bool(self._wanted)

    def turn(self):
        """Make the requested events."""
        while self._wanted:
            meta, buffers = self._wanted.pop(0)
            if meta["kind"] == "open":
                self._begin(meta, buffers)
            elif meta["kind"] == "next":
                self._next(meta["id"])
            else:
                self.close(meta["id"])
            self._replies.flush()

    def _begin(self, meta, buffers):
        bound = read_rows({**meta, "rows": 1, "from_job": False}, buffers, self._code.parameters)
        if bound.errors:
            self._replies.end_stream(meta["id"], bound.errors[0])
            return
        called = StreamCall(meta)
        self._progress.one(meta["id"], 0)
        printing.calling((called,))
        try:
            self._open[meta["id"]] = (events_of(self._code, bound), meta["exact"], called)
        except BaseException as error:  # user code
            self._replies.end_if_lost(error, [meta["id"]])
            self._replies.end_stream(meta["id"], row_error(error, self._memory_bytes))
        printing.idle()
        self._progress.none()

    def _next(self, stream_id):
        if stream_id not in self._open:
            return  # it has ended, and that was said
        events, exact, called = self._open[stream_id]
        self._progress.one(stream_id, 0)
        printing.calling((called,))
        try:
            event = next(events)
            if self._code.result is not None:
                event = self._code.result(event)
        except StopIteration:
            self._end(stream_id)
        except BaseException as error:  # user code
            self._replies.end_if_lost(error, [stream_id])
            self._end(stream_id, row_error(error, self._memory_bytes))
        else:
            if not self._replies.piece(stream_id, event, exact=exact):
                self.close(stream_id)
        printing.idle()
        self._progress.none()

    def _end(self, stream_id, error=None):
        self._open.pop(stream_id)
        self._replies.end_stream(stream_id, error)

    def close(self, stream_id):
        """End a stream whose caller has gone; does nothing if it has ended."""
        events, _, called = self._open.pop(stream_id, (None, False, None))
        if events is None or not hasattr(events, "close"):
            return
        self._progress.one(stream_id, 0)
        printing.calling((called,))
        try:
            events.close()
        except BaseException as error:  # user code, whose results are not read any more
            self._replies.note(error)
        printing.idle()
        self._progress.none()

    def close_all(self):
        """End all streams before the function ends."""
        for stream_id in list(self._open):
            self.close(stream_id)
