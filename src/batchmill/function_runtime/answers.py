"""The process that validates answers with a user's class: `python main.py validate PARENT`. It runs the user's code.

It reads frames from stdin and writes frames to stdout: u32 length and u8 kind, then the payload. What the code prints
goes nowhere. An answer that takes too long is stopped by an exception, or its worker kills this process.

`load` {source, folder} is answered with `loaded` {document, has_validators} or `refused` {message}; `check` (a u32
count, u32 lengths, the answers) with `checked` frames, lists of [problems, is_final], one of each answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time

from .class_schemas import NoSchema, checker_of, has_validators, schema_of
from .loading import LoadError, find_attribute, text_of

LOAD_FRAME, LOADED_FRAME, REFUSED_FRAME, CHECK_FRAME, CHECKED_FRAME = range(5)
FRAME = struct.Struct("<IB")
ANSWER_S = 1.0  # one answer may take so long
LOAD_BYTES = 2 * 1024 * 1024 * 1024  # of memory that loading the class may take
MEMORY_BYTES = 512 * 1024 * 1024  # beyond what the process has once the class is loaded
FLUSH_S = 0.05  # between two replies
PROBLEMS_MAX, PROBLEM_CHARS_MAX = 5, 300
MIB = 1024 * 1024
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _Stopped(BaseException):
    """The time of an answer is over. No handler of `Exception` holds it."""


def _load(source, folder):
    """What is said of a class, and what checks answers with it. Raises: LoadError, NoSchema."""
    found = find_attribute(source, folder)
    if not isinstance(found, type):
        raise LoadError(f"{source} is no class: name a pydantic model, a dataclass or a msgspec.Struct")
    try:
        document = json.dumps(schema_of(found), separators=(",", ":"), ensure_ascii=False)
        return {"document": document, "has_validators": has_validators(found)}, checker_of(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoSchema(f"{source} has no JSON Schema: {text_of(error)}") from None


def _confine(more):
    """Bound the memory of the code from now on: `more` bytes than now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more if most == resource.RLIM_INFINITY else min(used + more, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _called(check, text):
    """What a class says of an answer."""
    return check(text)


def _stop(number, found):
    while found is not None:
        if found.f_code is _called.__code__:  # else the code was about to end, or has ended
            raise _Stopped
        found = found.f_back


def _checked(check, text):
    """[problems, is_final] of one answer, whatever the code does."""
    mine = os.getpid()
    try:
        signal.setitimer(signal.ITIMER_REAL, ANSWER_S)
        try:
            problems = _called(check, text)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != mine:  # the code has forked, and this is the copy
                os._exit(0)
    except _Stopped:
        return [[f"the validator took more than {ANSWER_S:g} s and was stopped"], True]
    except MemoryError:
        return [[f"the validator took more than {MEMORY_BYTES // MIB} MiB of memory"], True]
    except BaseException as error:  # user code, SystemExit too
        return [[_cut(f"the validator raised {type(error).__name__}: {text_of(error)}")], False]
    return [[_cut(each) for each in problems[:PROBLEMS_MAX]], False]


def _cut(text):
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= PROBLEM_CHARS_MAX else text[: PROBLEM_CHARS_MAX - 1] + "…"


def _serve(orders, results):
    """Load the class of the first frame, and check the answers of every other one. Args: file descriptors."""
    signal.signal(signal.SIGALRM, _stop)
    check = None
    while len(head := _read_exactly(orders, FRAME.size)) == FRAME.size:
        size, kind = FRAME.unpack(head)
        payload = _read_exactly(orders, size)
        if len(payload) < size:
            return
        if kind == LOAD_FRAME:
            order = json.loads(payload)
            _confine(LOAD_BYTES)
            try:
                loaded, check = _load(order["source"], order["folder"])
            except (LoadError, NoSchema) as error:
                _write(results, REFUSED_FRAME, {"message": str(error)})
                continue
            _write(results, LOADED_FRAME, loaded)
            _confine(MEMORY_BYTES)
        elif kind == CHECK_FRAME and check is not None:
            _check_all(check, payload, results)


def _check_all(check, payload, results):
    (count,) = struct.unpack_from("<I", payload)
    sizes = struct.unpack_from(f"<{count}I", payload, 4)
    at, done, flushed = 4 + 4 * count, [], time.monotonic()
    for size in sizes:
        done.append(_checked(check, payload[at : at + size]))
        at += size
        if time.monotonic() - flushed >= FLUSH_S:
            _write(results, CHECKED_FRAME, done)
            done, flushed = [], time.monotonic()
    if done:
        _write(results, CHECKED_FRAME, done)


def _read_exactly(fd, size):
    """Read `size` bytes; fewer only if the other end was closed."""
    pieces = []
    while size > 0:
        piece = os.read(fd, size)
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write(fd, kind, message):
    payload = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode()
    view = memoryview(FRAME.pack(len(payload), kind) + payload)
    while view:
        view = view[os.write(fd, view) :]


def _forget(descriptors):
    """In a copy of this process, which user code has made: it may end when it likes, and answers for nobody."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _end_with(parent):
    """Ask the kernel to end this process with its parent: it has nothing to save."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had died before the kernel was asked
        os._exit(1)


def main(parent):
    """Serve on other descriptors than those that user code reads and prints to. Args: parent: 0: a sandbox ends it."""
    if parent:
        _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command; this process ends when its pipe does
    mine = os.dup(0), os.dup(1)
    os.register_at_fork(after_in_child=lambda: _forget(mine))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    with contextlib.suppress(BrokenPipeError):
        _serve(*mine)
    os._exit(0)  # at once, whatever its code has left to do
