"""Captures what user code prints, line by line with the calls that it belongs to.

A line is a JSON object: `at`, `stream`, `text`; of calls `project` (null: of several) and `requests`; `stage` is
"start" until the function is ready. What belongs to no call is printed as it is too, into the worker's own log.
"""

from __future__ import annotations

import contextvars
import io
import json
import mmap
import os
import sys
import threading
import time
import weakref

ENTRIES_BYTES = 64 * 1024
ENTRIES_MAX = (ENTRIES_BYTES - 4) // 16
SLOTS_MAX = 8192  # words behind the entries, each with the request that has begun and was given this slot
BYTES = ENTRIES_BYTES + 4 * SLOTS_MAX
FIRST = 3  # the word that holds the first row of the first entry


class Progress:
    """What is running, and which requests have begun, in memory that the worker reads.

    `words` is the page as u32: for rows called one by one, only words[FIRST] changes from row to row.
    """

    def __init__(self, fd):
        self._page = mmap.mmap(fd, BYTES)
        os.close(fd)
        self.words = memoryview(self._page).cast("I")

    def begin(self, ask_id, slot):
        """Note that rows of a request with a slot have been called, also between two of its calls and after them."""
        if 0 <= slot < SLOTS_MAX:
            self.words[ENTRIES_BYTES // 4 + slot] = ask_id & 0xFFFFFFFF

    def one(self, ask_id, first, rows=1):
        """Note that the rows of one request are about to run."""
        words = self.words
        words[0] = 0
        words[1] = ask_id & 0xFFFFFFFF
        words[2] = ask_id >> 32
        words[FIRST] = first
        words[4] = rows
        words[0] = 1

    def many(self, entries):
        """Note that these (request id, first row, rows) are about to run, or continue."""
        self.words[0] = 0
        for place, entry in enumerate(entries[:ENTRIES_MAX]):
            self._write(place, *entry)
        self.words[0] = min(len(entries), ENTRIES_MAX)

    def add(self, place, ask_id, first, rows):
        """Add a running call, as number `place`."""
        if place < ENTRIES_MAX:
            self._write(place, ask_id, first, rows)
            self.words[0] = place + 1

    def take(self, place, count):
        """Remove number `place` of `count` running calls; the last one takes its number."""
        last = count - 1
        if last < ENTRIES_MAX:
            words = self.words
            words[1 + 4 * place : 5 + 4 * place] = words[1 + 4 * last : 5 + 4 * last]
            words[0] = last

    def _write(self, place, ask_id, first, rows):
        words, at = self.words, 1 + 4 * place
        words[at] = ask_id & 0xFFFFFFFF
        words[at + 1] = ask_id >> 32
        words[at + 2] = first
        words[at + 3] = rows

    def none(self):
        """Note that no user code is running."""
        self.words[0] = 0

    def forget(self):
        """Discard prints of a child of user code, without locks that another thread held at the fork."""
        self.words.release()
        self.words = memoryview(bytearray(BYTES)).cast("I")


TEXT_CHARS_MAX = 16 * 1024  # of one line; the rest is left out
BYTES_PER_S_MAX = 4 * 1024 * 1024  # of what is printed; lines beyond it are counted, not kept
REQUESTS_MAX = 16  # listed for a line that was printed in a call of many
START, CALL = "start", "call"

_NOBODY = ((), None)
# What is being called: asks, the row, and the task or thread that calls it.
_calls = contextvars.ContextVar("batchmill_calls", default=(*_NOBODY, None))
_projects = set()  # that this process has been called for


def calling(asks, row=None):
    """Attribute later prints in this context to these requests; each has `id` and `of`."""
    _projects.update([ask.of[0] for ask in asks if ask.of])
    _calls.set((asks, row, _caller()))


def idle():
    """Attribute later prints to no call."""
    _calls.set((*_NOBODY, None))


def _caller():
    """The task that runs, or the number of the thread."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return weakref.ref(task)
    return threading.get_ident()


def _origin():
    """The origin of a print, and whether it is ambiguous.

    What user code starts in one call has that call's context for as long as it lives, whatever calls it works for
    later: once there are several projects, only what the caller itself prints is known to be for its call.
    """
    asks, row, caller = _calls.get()
    if asks and len(_projects) > 1 and caller != _caller():
        return _NOBODY, True
    return (asks, row), False


class LogWriter:
    """Writes log lines. Safe for threads, and after a fork."""

    def __init__(self, fd, progress):
        self._fd, self._progress = fd, progress
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)
        self.stage = START
        self._second = self._bytes = self._left_out = 0

    def _forked(self):
        self.lock = threading.RLock()

    def write(self, stream, text, origin):
        """Append a line; a line without room is counted, and the next one reports it."""
        now = time.time()
        if int(now) != self._second:
            self._second, self._bytes = int(now), 0
        if self._bytes > BYTES_PER_S_MAX:
            self._left_out += 1
            return
        if self._left_out:
            text, self._left_out = f"({self._left_out} lines were left out)\n{text}", 0
        if len(text) > TEXT_CHARS_MAX:
            text = f"{text[:TEXT_CHARS_MAX]}… ({len(text) - TEXT_CHARS_MAX} more characters)"
        entry = {"at": round(now, 6), "stream": stream, "text": text, "stage": self.stage}
        entry["project"], entry["requests"] = self._requests_of(*origin)
        data = json.dumps(entry).encode() + b"\n"
        self._bytes += len(data)
        try:
            os.write(self._fd, data)
        except OSError:  # the disk is full: to raise here would fail calls for what they print
            self._left_out += 1

    def _requests_of(self, asks, row):
        """(project, requests) of asks; a project only where it is that of all."""
        projects = {ask.of[0] for ask in asks if ask.of}
        requests = [self._request(ask, row, len(asks)) for ask in asks[:REQUESTS_MAX] if ask.of]
        return (projects.pop() if len(projects) == 1 else None), requests

    def _request(self, ask, row, count):
        """The id of a request; for rows of a job, the job's id and the row's number if known."""
        if len(ask.of) < 3:
            return ask.of[1]
        words = self._progress.words
        if row is None and count == 1 and words[0] == 1 and words[4] == 1 and words[1] == ask.id & 0xFFFFFFFF:
            row = words[FIRST]
        return ask.of[1] if row is None else f"{ask.of[1]} row {ask.of[2] + row}"


class Printed(io.RawIOBase):
    """A standard stream whose lines go to the log; lines of no call go to `fd` too."""

    mode = "wb"

    def __init__(self, name, fd, lines):
        self.name, self._fd, self._lines = f"<{name}>", fd, lines
        self._stream = name
        self._begun, self._origin = bytearray(), _NOBODY  # a line that has not ended, and whose it is

    def writable(self):
        return True

    def fileno(self):
        return self._fd

    def write(self, data):
        data, (origin, is_anybodys) = bytes(data), _origin()
        if not origin[0] and not is_anybodys:
            os.write(self._fd, data)
        with self._lines.lock:
            if self._begun and origin != self._origin:
                self._end_line()
            self._origin = origin
            *whole, rest = data.split(b"\n")
            for line in whole:
                self._begun += line
                self._end_line(even_empty=True)
            self._begun += rest
            if len(self._begun) > 4 * TEXT_CHARS_MAX:
                self._end_line()
        return len(data)

    def flush(self):
        if not self.closed:
            with self._lines.lock:
                self._end_line()

    def _end_line(self, *, even_empty=False):
        if self._begun or even_empty:
            text, self._begun = self._begun.decode("utf-8", "backslashreplace"), bytearray()
            self._lines.write(self._stream, text, self._origin)


def begin(fd, progress):
    """Let what is printed from now on go to `fd` line by line; returns the Lines."""
    lines = LogWriter(fd, progress)
    for name, number in (("stdout", 1), ("stderr", 2)):
        printed = Printed(name, number, lines)
        stream = io.TextIOWrapper(printed, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
    return lines
