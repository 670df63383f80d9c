"""The program that validates answers with a user's class: `python -P -m … PARENT`. It runs the user's code.

It reads frames from stdin and writes frames to stdout; what the code prints goes nowhere. An answer that takes too long
is stopped by an exception, or its worker kills this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from batchmill.children.child import die_with
from batchmill.children.frames import FRAME, frame, read_exactly, run, write_all
from batchmill.errors import BatchmillError
from batchmill.executors.validators.messages import (
    ANSWER_S,
    CHECK_FRAME,
    CHECKED_FRAME,
    FLUSH_S,
    LOAD_FRAME,
    LOADED_FRAME,
    MEMORY_BYTES,
    PROBLEM_CHARS_MAX,
    PROBLEMS_MAX,
    REFUSED_FRAME,
    Checked,
    Loaded,
    LoadOrder,
    Refused,
)
from batchmill.function_runtime.loading import LoadError, find_attribute, text_of
from batchmill.models import functions
from batchmill.wire.class_schemas import checker_of, has_validators, schema_of

Check = Callable[[bytes], list[str]]
MIB = 1024 * 1024


class _Stopped(BaseException):
    """The time of an answer is over. No handler of `Exception` holds it."""


def load(order: LoadOrder) -> tuple[Loaded, Check]:
    """Raises: LoadError, InvalidInput, ModelFailed, for a class that cannot be used."""
    if order.code and functions.digest(order.source) != order.code:
        raise LoadError(f"the file of {order.source} has changed since the job began: run it as a new job")
    found = find_attribute(order.source, "")
    if not isinstance(found, type):
        raise LoadError(f"{order.source} is no class: name a pydantic model, a dataclass or a msgspec.Struct")
    document = msgspec.json.encode(schema_of(found)).decode()
    return Loaded(document, has_validators(found)), checker_of(found)


def _confine() -> None:
    """Bound the memory of the code that is loaded now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _called(check: Check, text: bytes) -> Any:
    """What a class says of an answer."""
    return check(text)


def _stop(number: int, found: FrameType | None) -> None:
    while found is not None:
        if found.f_code is _called.__code__:  # else the code was about to end, or has ended
            raise _Stopped
        found = found.f_back


def checked(check: Check, text: bytes) -> Checked:
    """Check one answer, whatever the code does."""
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
        return Checked([f"the validator took more than {ANSWER_S:g} s and was stopped"], is_final=True)
    except MemoryError:
        return Checked([f"the validator took more than {MEMORY_BYTES // MIB} MiB of memory"], is_final=True)
    except BaseException as error:  # user code, SystemExit too
        return Checked([_cut(f"the validator raised {type(error).__name__}: {text_of(error)}")])
    return Checked([_cut(each) for each in problems[:PROBLEMS_MAX]])


def _cut(text: Any) -> str:
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= PROBLEM_CHARS_MAX else text[: PROBLEM_CHARS_MAX - 1] + "…"


def serve(orders: int, results: int) -> None:
    """Load the class of the first frame, and check the answers of every other one.

    Args: orders, results: file descriptors.
    """
    signal.signal(signal.SIGALRM, _stop)
    check: Check | None = None
    while len(head := read_exactly(orders, FRAME.size)) == FRAME.size:
        size, kind = FRAME.unpack(head)
        payload = read_exactly(orders, size)
        if len(payload) < size:
            return
        if kind == LOAD_FRAME:
            try:
                loaded, check = load(msgspec.msgpack.decode(payload, type=LoadOrder))
            except LoadError as error:
                write_all(results, frame(REFUSED_FRAME, Refused(str(error))))
                continue
            except BatchmillError as error:
                write_all(results, frame(REFUSED_FRAME, Refused(error.message)))
                continue
            write_all(results, frame(LOADED_FRAME, loaded))
            _confine()
        elif kind == CHECK_FRAME and check is not None:
            _check_all(check, msgspec.msgpack.decode(payload, type=list[bytes]), results)


def _check_all(check: Check, texts: list[bytes], results: int) -> None:
    done: list[Checked] = []
    flushed = time.monotonic()
    for text in texts:
        done.append(checked(check, text))
        if time.monotonic() - flushed >= FLUSH_S:
            write_all(results, frame(CHECKED_FRAME, done))
            done, flushed = [], time.monotonic()
    if done:
        write_all(results, frame(CHECKED_FRAME, done))


def _forget(descriptors: tuple[int, int]) -> None:
    """In a copy of this process, which user code has made: it may end when it likes, and answers for nobody."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _serve_apart(orders: int, results: int) -> None:
    """Serve on other descriptors than those that user code reads and prints to."""
    mine = os.dup(orders), os.dup(results)
    os.register_at_fork(after_in_child=lambda: _forget(mine))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    serve(*mine)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    run(_serve_apart)
