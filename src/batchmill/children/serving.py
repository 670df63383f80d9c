"""The work of a child process, in the child: requests on stdin, replies on stdout. It needs no event loop."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from batchmill.children.bounds import ResourceLimits
from batchmill.errors import BatchmillError, to_storage_error
from batchmill.object_store.credentials import environment_with
from batchmill.wire.error_statuses import Raised

PROGRESS_S = 0.2
LENGTH_BYTES = 8  # before what is sent
NICE = 10  # programs of callers wait for everybody else
ANSWER, PROGRESS, ERROR, BEGUN, FULL = b"A", b"P", b"E", b"B", b"M"

Work = Callable[[bytes, Callable[[float], None]], bytes]


def serve(load: Callable[[str], Work]) -> None:
    """Serve requests on stdin with the functions that `load` finds, until end of file."""
    stdin = sys.stdin.buffer
    while (target := _read_part(stdin)) is not None:
        bounds, variables, order = _read_part(stdin), _read_part(stdin), _read_part(stdin)
        if bounds is None or variables is None or order is None:
            return
        with environment_with(msgspec.json.decode(variables, type=dict[str, str])):
            _answer(target.decode(), order, load, msgspec.json.decode(bounds, type=ResourceLimits) if bounds else None)


def _read_part(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    data = stream.read(length)
    return data if len(data) == length else None


def _answer(target: str, order: bytes, load: Callable[[str], Work], bounds: ResourceLimits | None) -> None:
    """Send the result of one piece of work to the parent."""
    sent = 0.0

    def progress(share: float) -> None:
        nonlocal sent
        if time.monotonic() - sent >= PROGRESS_S:
            sent = time.monotonic()
            _send(PROGRESS, msgspec.json.encode(share))

    try:
        work = load(target)
        if bounds is not None:
            _bind(bounds)
        data = work(order, progress)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except BatchmillError as error:
        _send(ERROR, msgspec.json.encode(Raised.of(error)))
    except OSError as error:
        failure = to_storage_error(error) or BatchmillError(f"{target}: {type(error).__name__}: {error}")
        _send(ERROR, msgspec.json.encode(Raised.of(failure)))
    except MemoryError:
        if bounds is None:
            raise
        _send(FULL, b"")
    except Exception as error:  # our own bug in a child: the parent must report it
        traceback.print_exc()
        message = f"{target}: {type(error).__name__}: {error}"
        _send(ERROR, msgspec.json.encode(Raised.of(BatchmillError(message))))
    else:
        _send(ANSWER, data)


def _bind(bounds: ResourceLimits) -> None:
    """Set the kernel's resource limits, and tell the parent that the work begins."""
    gc.disable()  # it takes most of the time of reading long JSON; a child that has grown is not kept
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (bounds.memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):  # it writes to its pipe, and to nothing else
        resource.setrlimit(what, (0, 0))
    _send(BEGUN, b"")
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)  # its signal ends the process


def _send(kind: bytes, data: bytes) -> None:
    out = sys.stdout.buffer
    out.write(kind + len(data).to_bytes(LENGTH_BYTES, "little"))
    out.write(data)
    out.flush()
